"""What there is to build: each operator X is the row of files named X, found by looking."""

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """What is compiled of an operator: `ops/X.cpp`, `kernels/X_cpu.cpp` and `kernels/X.cu`."""

    name: str
    root: Path
    sources: tuple[str, ...]  # relative to root; the .cu last

    def for_cpu(self) -> "Unit":
        """The same operator without its CUDA part."""
        return Unit(self.name, self.root, tuple(s for s in self.sources if not s.endswith(".cu")))


def discover(root: Path) -> dict[str, Unit]:
    """All operators below `root`, by name in alphabetical order."""
    kernels = set(os.listdir(root / "kernels"))
    units = {}
    for file in sorted(os.listdir(root / "ops")):
        if file.endswith(".cpp"):
            name = file[: -len(".cpp")]
            rest = [f"kernels/{f}" for f in (f"{name}_cpu.cpp", f"{name}.cu") if f in kernels]
            units[name] = Unit(name, root, (f"ops/{file}", *rest))
    return units


class Sources:
    """Digests of source files and of the headers they can reach, each file read once."""

    def __init__(self, root: Path):
        self._root = str(root)
        self._read = cache(self._read_file)

    def closure(self, source: str) -> dict[str, str]:
        """SHA-256 of `source` and of every header of ours that it reaches, by path below the root.

        An include that a condition leaves out counts as reached: one miss too many is harmless.
        """
        found: dict[str, str] = {}
        pending = [source]
        while pending:
            path = pending.pop()
            if path in found:
                continue
            digest, includes = self._read(path)
            if digest is None:
                continue  # a header of torch, CUDA or the system: part of the toolchain
            found[path] = digest
            folder = os.path.dirname(path)
            for name in includes:
                pending += [os.path.normpath(os.path.join(at, name)) for at in (folder, "include")]
        return found

    def _read_file(self, path: str) -> tuple[str | None, tuple[str, ...]]:
        try:
            with open(os.path.join(self._root, path), "rb") as file:
                content = file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None, ()
        names = tuple(name.decode() for name in _INCLUDE.findall(content))
        return hashlib.sha256(content).hexdigest(), names
