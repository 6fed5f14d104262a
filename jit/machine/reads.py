"""What the words of a command have compilers and the linker read beside sources."""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

# Options with a path, which torch's compilers read from the folder that the objects go to.
PATH = (
    r"(-I|-isystem|-iquote|-idirafter|--include-path|-include|--pre-include|-imacros|-B|--sysroot|-L)"
    r"(=?)(.*)"
)
_FOLDERS = ("-I", "-isystem", "-iquote", "-idirafter", "--include-path")
_FORCED = ("-include", "--pre-include", "-imacros")
_SHARED = re.compile(r"\.so(?:\.\d+)*$")  # read by what is linked only when that is loaded
_HEADER = re.compile(r"\.(?:h|hh|hpp|hxx|cuh|inc|inl|ipp|tpp|tcc|def|cu|c|cc|cpp|cxx)$|^[^.]+$")


def headers(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the folders of headers in a command, and the headers that it includes by itself."""
    found = _paths(command)
    folders = [path for option in _FOLDERS for path in found.get(option, [])]
    named = [path for option in _FORCED for path in found.get(option, [])]
    return folders, [os.path.join(at, name) for name in named for at in ("/", *folders)]


def headers_below(folders: Sequence[str]) -> Iterator[str]:
    """Yield every file below these folders that may be a header: what a macro's name may be."""
    for top in dict.fromkeys(folders):
        for folder, rooms, files in os.walk(top):
            rooms[:] = [room for room in rooms if not room.startswith(".")]
            yield from (os.path.join(folder, file) for file in files if _HEADER.search(file))


def files(words: Sequence[str]) -> Iterator[str]:
    """Yield the files that words name by whole paths, as `@/x`, `-Wl,--version-script=/x` and an
    archive do, but for shared libraries.
    """
    for word in words:
        for piece in re.split(r"[=,@]", word) if "/" in word else ():
            if piece.startswith("/") and not _SHARED.search(piece) and os.path.isfile(piece):
                yield piece


def archives(command: Sequence[str], environment: str = "") -> Iterator[str]:
    """Yield the static libraries that `-l` names, in the folders of `-L` and of LIBRARY_PATH."""
    folders = [*_paths(command).get("-L", []), *environment.split(os.pathsep)]
    for word, after in pairwise([*command, ""]):
        if not word.startswith("-l"):
            continue
        name = word[2:] or after
        names = [name[1:]] if name.startswith(":") else [f"lib{name}.so", f"lib{name}.a"]
        there = (os.path.join(at, file) for at in folders if at for file in names)
        if (found := next(filter(os.path.isfile, there), "")) and not _SHARED.search(found):
            yield found


def _paths(command: Sequence[str]) -> dict[str, list[str]]:
    """The paths in a command, by the option that each is of."""
    found: dict[str, list[str]] = {}
    for word, after in pairwise([*command, ""]):
        if option := re.fullmatch(PATH, word):
            found.setdefault(option[1], []).append(option[3] or after)
    return found
