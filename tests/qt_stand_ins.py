"""Stand-ins for the libraries of the system that Qt is linked with, where a machine has none.

Qt's wheels bring all but a dozen of them (EGL, X11, fontconfig ...), which desktops have and bare
machines and containers lack. What a window in memory (`offscreen`) draws with is Qt's own, so each
that is missing is replaced by one with the same name and functions, compiled here, that do nothing
and find nothing: no font above all, so letters are boxes. Windows, layouts, clicks, keys, threads
and pictures are those that users have.
"""

import ctypes
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

# What the functions of each begin with.
_PREFIXES = {
    "libEGL.so.1": "egl",
    "libGL.so.1": "gl",
    "libX11.so.6": "X",
    "libxkbcommon.so.0": "xkb_",
    "libdbus-1.so.3": "dbus_",
    "libglib-2.0.so.0": "g_",
    "libgthread-2.0.so.0": "g_thread",
    "libfreetype.so.6": "FT_",
    "libfontconfig.so.1": "Fc",
    "libzstd.so.1": "ZSTD_",
}
_LINKED = ("Core", "Gui", "Widgets", "Test", "DBus")
# A set of no fonts; "no match"; an error.
_RESULTS = {
    r"FcFontList|FcFontSetCreate": "static long nothing[4]; return nothing;",
    r"FcPatternGet\w*|FT_\w+": "return (void*)1;",
}
_loaded: list[ctypes.CDLL] = []


def missing() -> list[str]:
    """Return those that this machine lacks."""
    return [name for name in _PREFIXES if not _loads(name)]


def provide() -> list[str]:
    """Load a stand-in for each that is missing; before PySide6 is imported. Return their names.

    Raises: CalledProcessError with the compiler's words.
    """
    lacking = missing()
    if lacking:
        os.environ["QT_NO_GLIB"] = "1"  # its event loop; Qt has one of its own
        folder = Path(tempfile.mkdtemp(prefix="qt-stand-ins-"))
        wanted = _undefined()
        for name in lacking:
            functions = {f: v for f, v in wanted.items() if f.startswith(_PREFIXES[name])}
            _loaded.append(ctypes.CDLL(str(_made(folder, name, functions)), ctypes.RTLD_GLOBAL))
    return lacking


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _undefined() -> dict[str, str]:
    """Return the functions that Qt's libraries expect of others, and of which version, if any."""
    package = importlib.util.find_spec("PySide6").submodule_search_locations[0]
    files = [f"{package}/Qt/lib/libQt6{name}.so.6" for name in _LINKED]
    files += [f"{package}/Qt/plugins/platforms/libqoffscreen.so"]
    nm = ["nm", "-D", "--undefined-only", *files]
    said = subprocess.run(nm, capture_output=True, text=True, check=True).stdout
    return dict(sorted(re.findall(r"^\s+U (\w+)(?:@+(\S+))?", said, re.MULTILINE)))


def _made(folder: Path, name: str, functions: dict[str, str]) -> Path:
    """Compile a library of this name whose functions do nothing."""
    lines = []
    for function in functions:
        found = (body for form, body in _RESULTS.items() if re.fullmatch(form, function))
        lines.append(f"void* {function}(void) {{ {next(found, 'return 0;')} }}")
    source, library, script = (folder / f"{name}{end}" for end in (".c", "", ".versions"))
    source.write_text("\n".join(lines) + "\n")
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
    if versions := sorted({*functions.values()} - {""}):
        of = {v: " ".join(f"{f};" for f in functions if functions[f] == v) for v in versions}
        script.write_text("\n".join(f"{v} {{ global: {of[v]} }};" for v in versions) + "\n")
        flags.append(f"-Wl,--version-script={script}")
    compiler = [os.environ.get("CC", "cc"), *flags, "-o", library, source]
    subprocess.run(compiler, check=True, capture_output=True, text=True)
    return library
