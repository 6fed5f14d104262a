"""Operators to build: each operator X is the row of files named X, found by looking."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parents[2]  # loader's own folder, whose headers serve any other one too
# How the names of its own Python files begin; `loader.py` is `__init__.py` where it is installed.
OURS = tuple(f"{HOME}/{name}" for name in ("jit/", "ops/", "loader.py", "__init__.py"))
REST = ".rest"  # in the name of a source that few calls need, and of the library made of those


class Unit(NamedTuple):
    """The compiled sources of an operator: `ops/X.cpp`, `kernels/X_cpu.cpp` and `kernels/X.cu`.

    Of a CUDA part that takes long, `kernels/X.<anything>.cu` is compiled beside it. Where an
    operator has more files, every `.cpp` and `.cu` of a folder `kernels/X/` is. Those
    named `*.rest.cpp` and `*.rest.cu` are a library of their own, built behind all others and
    loaded when a call needs it (include/torch/rest.h).
    """

    name: str
    root: Path
    sources: tuple[str, ...]  # relative to root; the .cu files last

    @property
    def libraries(self) -> tuple[str, ...]:
        """The names of what it is built to: its own, and that of the rest if there is one."""
        return (self.name, self.name + REST) if any(map(is_rest, self.sources)) else (self.name,)


def with_loops(sources: Sequence[str]) -> list[str]:
    """Those of an operator's sources that have its loops on the CPU, and are compiled for that.

    They are in `kernels/`; what is in `ops/` checks and allocates, unless it is all there is.
    """
    found = [source for source in sources if source.startswith("kernels/")]
    found = found or [source for source in sources[:1] if source.startswith("ops/")]
    return [source for source in found if source.endswith(".cpp")]


def is_rest(name: str) -> bool:
    """True for a source that few calls need, and for the library made of such."""
    return REST in name


def unit_of(library: str) -> str:
    """The name of the unit that a library belongs to."""
    return library.removesuffix(REST)


def discover(root: Path) -> dict[str, Unit]:
    """All operators below `root`, by name in alphabetical order."""
    kernels = listed(root / "kernels")
    parts: dict[str, list[str]] = {}  # `X.<anything>.cu` by X
    for file in kernels:
        if file.count(".") == 2:
            parts.setdefault(file.partition(".")[0], []).append(file)
    there, units = {*kernels}, {}
    for file in sorted(os.listdir(root / "ops")):
        if file.endswith(".cpp"):
            name = file[: -len(".cpp")]
            rest = [f for f in (f"{name}_cpu.cpp", f"{name}.cu") if f in there]
            rest += parts.get(name, [])
            if name in there:
                rest += [f"{name}/{f}" for f in listed(root / "kernels" / name)]
            rest = [f"kernels/{f}" for f in rest if f.endswith((".cpp", ".cu"))]
            rest.sort(key=lambda f: f.endswith(".cu"))
            units[name] = Unit(name, root, (f"ops/{file}", *rest))
    return units


def source_folders(root: str | Path) -> list[str]:
    """Every folder in which an operator below `root` has sources, headers or its Python side."""
    rooms = [os.path.join(root, room) for room in ("kernels", *include_folders(root))]
    below = [os.path.join(room, name) for room in rooms for name in listed(room) if "." not in name]
    return [os.path.join(root, "ops"), *rooms, *filter(os.path.isdir, below)]


def listed(folder: str | Path) -> list[str]:
    """The names in a folder, in alphabetical order; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def include_folders(root: str | Path) -> tuple[str, ...]:
    """Where a unit's headers are looked for: below its root, and in loader's own `include/`."""
    return ("include",) if str(root) == str(HOME) else ("include", str(HOME / "include"))


@cache
def _directives() -> re.Pattern:
    """`#include "x.h"`, `# import <x.h>`, `%:include X_HEADER`, read as compilers do.

    Comments and continued lines may stand in between, and a byte order mark begin a file. The
    groups are the name, quoted or bracketed, of a macro none.
    """
    gap = rb"(?:[ \t]|\\\r?\n|/\*.*?\*/)*"
    return re.compile(
        rb"^(?:\xef\xbb\xbf)?%b(?:#|%%:|\?\?=)%b(?:include|import|include_next|embed)\b%b"
        % (gap, gap, gap)
        + rb'(?:"([^"\n]+)"|<([^>\n]+)>|[^\n]*)',
        re.MULTILINE | re.DOTALL,
    )


def included(content: bytes) -> tuple[str | None, ...]:
    """The names that a source includes, an assembler's too; None for each that a macro gives."""
    if content.startswith((b"!<arch>\n", b"\x7fELF")):
        return ()  # a static library or an object, which a linker reads
    if not any(word in content for word in (b"include", b"import", b"embed", b".incbin")):
        return ()  # its pattern takes a millisecond to compile
    found = _directives().findall(content)
    names = [os.fsdecode(quoted or bracketed) or None for quoted, bracketed in found]
    if b".incbin" in content:
        names += map(os.fsdecode, re.findall(rb'\.incbin\s+\\?"([^"\\\n]+)', content))
    return tuple(names)


class Sources:
    """Digests of source files and of the headers they can reach, each file read once.

    Headers are looked for beside the file that includes them, in `include_folders`, and in
    `folders`, the absolute ones that the user's flags and environment name. `texts` are sources
    that are in no file, by the path that they would have. `named` are files that each source
    reaches, by flags.
    """

    def __init__(
        self,
        root: Path,
        folders: tuple[str, ...] = (),
        texts: Mapping[str, bytes] | None = None,
        named: tuple[str, ...] = (),
    ):
        self._root, self._given, self._named = str(root), texts or {}, named
        self._folders = (*include_folders(root), *folders)
        self._read, self._reached = cache(self._read_file), cache(self._reach)

    def closure(self, source: str) -> dict[str, str]:
        """SHA-256 of `source` and of every header that it reaches, by path below the root.

        An include that a condition leaves out counts as reached, and one by a macro reaches every
        header there is: one miss too many is harmless.
        """
        return {**self._reached(source)[0]}

    def foreign(self, source: str) -> set[str | None]:
        """The headers that `source` reaches of the toolchain's, torch's say; None: by a macro."""
        return self._reached(source)[1]

    def _reach(self, source: str) -> tuple[dict[str, str], set[str | None]]:
        found: dict[str, str] = {}
        foreign: set[str | None] = set()
        pending = [source, *self._named]
        while pending:
            path = pending.pop()
            digest, includes = self._read(path)
            if digest is None or path in found:
                continue
            found[path] = digest
            places = (os.path.dirname(path), *self._folders)
            for name in includes:
                if name is None:
                    there = self._all_headers()
                else:
                    there = [os.path.normpath(os.path.join(at, name)) for at in places]
                pending += there
                if name is None or all(self._read(path)[0] is None for path in there):
                    foreign.add(name)
        return found, foreign

    def _all_headers(self) -> list[str]:
        """Every file below `include_folders`, `kernels/` and `ops/` that may be a header."""
        return [
            os.path.join(os.path.normpath(folder.removeprefix(f"{self._root}/")), file)
            for room in (*include_folders(self._root), "kernels", "ops")
            for folder, _, files in os.walk(os.path.join(self._root, room))
            for file in files
            if not file.endswith((".py", ".pyc"))
        ]

    def _read_file(self, path: str) -> tuple[str | None, tuple[str | None, ...]]:
        try:
            if (content := self._given.get(path)) is None:
                with open(os.path.join(self._root, path), "rb") as file:
                    content = file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None, ()
        return hashlib.sha256(content).hexdigest(), included(content)
