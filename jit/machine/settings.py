"""The environment variables that loader reads: one table, parsed strictly."""

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


# Each of these reads a text, and raises ValueError with the name of where it came from.
def folders(text: str, name: str) -> list[str]:
    """The folders that a text names."""
    named = [os.path.expanduser(folder) for folder in text.split(os.pathsep) if folder]
    if not named:
        raise ValueError(f"{name} must name a folder, got {text!r}")
    return named


def size(text: str, name: str) -> int:
    """Bytes, from a text such as `500MB` or `2GiB`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{name} must be a size such as 500MB or 2GiB, got {text!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def age(text: str, name: str) -> float:
    """Seconds, from a text such as `30d` or `12h`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([dhm])\s*", text)
    if not found:
        raise ValueError(f"{name} must be an age such as 30d, 12h or 5m, got {text!r}")
    return float(found[1]) * {"d": 86400, "h": 3600, "m": 60}[found[2]]


class Setting(NamedTuple):
    """One variable: its name, default, meaning, and the values it may have, or what they are."""

    name: str
    default: str
    meaning: str
    allowed: tuple[str, ...] = ()
    values: str = ""
    check: Callable[[str, str], object] | None = None  # of text and name


_DIR = """folder of the build cache, beside `loader.py`, or `~/.cache/octet` where loader is \
installed or that folder cannot be written; of several the last is written to"""
_LIMIT = "above this a build removes what was not used for longest"
PREBUILT = "prebuilt"  # the folder of loader's with the builds that a wheel brings along
_ERRORS = """how errors are printed on stderr: for people, or for programs, each as one line of \
JSON"""
_MENDS = """whether sources of extensions for an older torch or CUDA are changed for the compiler; \
`diff` shows each line"""
_VERBOSE = "print on stderr which way calls take, and why, when each choice is first made"
_MODES = ("background", "eager", "lazy", "never")

SETTINGS = (
    Setting("LOADER_BUILD", "background", "when to compile what the cache lacks", _MODES),
    Setting(
        "LOADER_CACHE_DIR", "tmp_build", _DIR, (), "a folder, or several joined by `:`", folders
    ),
    Setting("LOADER_CACHE_LIMIT", "2GiB", _LIMIT, (), "a size: `500MB`, `2GiB`", size),
    Setting("LOADER_ERRORS", "text", _ERRORS, ("text", "json")),
    Setting("LOADER_MENDS", "on", _MENDS, ("on", "diff", "off")),
    Setting("LOADER_NATIVE", "1", "compile for this CPU (`-march=native`)", ("0", "1")),
    Setting("LOADER_VERBOSE", "0", _VERBOSE, ("0", "1")),
)


def value(name: str) -> str:
    """The value of a setting; ValueError where it is not one of those allowed."""
    setting = next(s for s in SETTINGS if s.name == name)
    text = os.environ.get(name) or setting.default
    if setting.allowed and text not in setting.allowed:
        raise ValueError(f"{name} must be one of {', '.join(setting.allowed)}, got {text!r}")
    if setting.check:
        setting.check(text, name)
    return text


def choose(name: str, text: str, unless_set: bool = False) -> None:
    """Give a setting a value for this process and those that it starts."""
    if not (unless_set and os.environ.get(name)):
        os.environ[name] = text


def cache_dirs(root: Path) -> tuple[Path, ...]:
    """The folders of the build cache, absolute; the last one is written to and need not exist.

    Below all others are the builds that a wheel brings along, where there are such. Without
    LOADER_CACHE_DIR it is a folder beside `loader.py` in a checkout that can be written, else the
    user's own: nothing is ever built into site-packages. Builds that a checkout holds already are
    read.
    """
    brought = root / PREBUILT
    return (*([brought] if os.path.isdir(brought) else []), *_cache_dirs(root))


def _cache_dirs(root: Path) -> tuple[Path, ...]:
    name = "LOADER_CACHE_DIR"
    text = value(name)
    beside = tuple(Path(os.path.abspath(root / folder)) for folder in folders(text, name))
    if os.environ.get(name):
        return beside
    store = beside[-1] / "store"
    if is_checkout(root) and _can_write(store) and (_is_ours(store) or not os.path.lexists(store)):
        return beside
    return (*beside, _own_cache()) if _is_trusted(store) else (_own_cache(),)


def is_checkout(root: Path) -> bool:
    """True for loader's folder as it is developed, False for a copy in site-packages."""
    return os.path.exists(root / "loader.py")


def _own_cache() -> Path:
    """`octet` in the user's cache folder; in the system's for passing files, without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    home = named if os.path.isabs(named) else os.path.expanduser("~/.cache")
    own = Path(home, "octet")
    if not _can_write(own / "store"):
        import tempfile  # torch has imported it, a command without torch need not

        passing = Path(tempfile.gettempdir(), f"octet-{os.geteuid()}")
        if not os.path.lexists(passing) or (_is_trusted(passing) and _can_write(passing)):
            return passing
    return own


def _can_write(folder: Path) -> bool:
    """True if files can be made in a folder, or it can be made."""
    while not os.path.lexists(folder):
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _is_ours(folder: Path) -> bool:
    """True for a folder, and no link, of this user's or of root's."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0)


def _is_trusted(folder: Path) -> bool:
    """True if it can be read and nobody else can write there: what lies there gets executed."""
    can_read = os.access(folder, os.R_OK | os.X_OK, effective_ids=True)
    return can_read and _is_ours(folder) and not os.lstat(folder).st_mode & 0o022


def cache_limit() -> int:
    """The most bytes that the cache may take."""
    return size(value("LOADER_CACHE_LIMIT"), "LOADER_CACHE_LIMIT")
