"""The error of an extension that could not be built or loaded, and what it tells us."""

import contextlib
import ctypes
import difflib
import linecache
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from ..build.workshop import Workshop
from ..errors import BuildError, cxx
from ..errors.diagnose import find_problems, load_error
from ..errors.literal import label
from ..errors.problem import Problem, as_text
from .arguments import Extension
from .levels import torch_include
from .mending import left_after

# A text with one of these may define a module's entry in a way that is not written out.
_ENTRY = re.compile(r"PyInit|MODULE|TORCH_EXTENSION_NAME|##", re.IGNORECASE)
_UNDEFINED = re.compile(r"undefined symbol: (\w+)")
# What GCC and Clang say of a name that is of several functions.
_SEVERAL = re.compile(
    r"^functions\.cpp:(\d+):\d+: error: (?:.*<unresolved overloaded function type>"
    r"|no matching (?:member )?function for call to '(?:wrap_pybind_function|def|(entry))')",
    re.MULTILINE,
)
_OF_TORCH = re.compile(r"(?:[\w:<>*& ]+ )?(?:at|c10|torch|caffe2|pybind11)::")


def could_not_be_built(
    extension: Extension,
    output: str,
    workshop: Workshop,
    tried: Sequence[dict],
    mends: Sequence[dict],
) -> BuildError:
    """Return the first errors, told of the caller's own lines, and where the whole output lies.

    `tried` are the ways in which the sources were compiled, `mends` what was changed for that.
    """
    problems = _unknown_functions(extension)
    total = len(problems)
    if not problems:
        problems, total = find_problems(output, workshop.folder, _names(extension))
    problems = _in_callers_words(extension, problems)
    causes, log = as_text(problems, total), f"{extension.unit}.log"
    causes += left_after(mends)
    facts = {"problems": problems, "tried": tried, "mends": mends}
    return workshop.failure(extension.name, causes, log, **facts)


def does_not_load(extension: Extension, failure: str) -> BuildError:
    """Return the error of a library that was built and cannot be loaded."""
    name, what = extension.name, f"{extension.name}: it compiles, but does not load"
    hint = f"\n{_cure(extension)}" if extension.is_python_module and _no_entry(failure) else ""
    return load_error(what, name, failure, Path("/"), _names(extension), hint)


def no_module(extension: Extension, files: dict[str, str]) -> BuildError | None:
    """Return the error of sources that define no module, as far as their text shows; else None.

    `files` are all that an extension is made of: where one is a header of the caller's, it counts
    too. A library on the linker's command line may hold the entry, and is not looked into.
    """
    if not extension.is_python_module or extension.functions is not None or extension.ldflags:
        return None
    texts = [*extension.cflags, *extension.cuda_cflags, *(s.text for s in extension.sources)]
    for file in files:
        with contextlib.suppress(OSError):
            texts.append(Path("/", file).read_text(errors="replace"))
    if any(map(_ENTRY.search, texts)):
        return None
    return BuildError(
        f"{extension.name}: nothing in its sources makes it a Python module:\n{_cure(extension)}\n"
        "To load it as a library (TORCH_LIBRARY) set is_python_module=False",
        extension.name,
        kind="refused",
    )


def _cure(extension: Extension) -> str:
    if not extension.callers:  # `load`, which has no `functions`
        return "Write PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)"
    return (
        "Name the functions to bind in `functions`, or write "
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)"
    )


def _no_entry(failure: str) -> bool:
    return "init function" in failure.replace("export", "init")


def torch_may_have(failure: str, extension: Extension, levels: list[str]) -> bool:
    """True if what a library lacks when it is loaded may be there when it is made in torch's way.

    So it is for a symbol of torch's, and for a kernel whose stub the host's half did not find.
    """
    if _no_entry(failure):
        return False
    narrow = {level.rpartition(" ")[2] for level in levels} - {"full"}
    missing = _UNDEFINED.search(failure)
    if not missing or not narrow:
        return bool(narrow)
    name = cxx.demangled(missing[1])
    kernels = {
        match[1]
        for source in extension.sources
        for match in re.finditer(r"\b__global__[^;{(]*?(\w+)\s*\(", cxx.blanked(source.text))
    }
    if kernels & cxx.identifiers(name) or _OF_TORCH.match(name):
        return True
    return any(_has(library, missing[1]) for library in torch_include().parent.glob("lib/*.so"))


def _has(library: Path, symbol: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(str(library)), symbol)
    except OSError:
        return False


def _names(extension: Extension) -> tuple[str, ...]:
    return tuple(source.name for source in extension.sources)


def _unknown_functions(extension: Extension) -> list[Problem]:
    """Tell which names in `functions` the C++ source does not have."""
    source, *cuda = [cxx.blanked(source.text) for source in extension.sources]
    if "##" in source:
        return []  # a macro may make any name
    there, said = {*re.findall(r"\w+", source)}, []
    for name in extension.functions or ():
        if name.rpartition("::")[2] in there:
            continue
        declared = re.search(rf"^[^\n;{{}}#]*\b{name}\s*\([^)]*\)", "\n".join(cuda), re.M)
        close = difflib.get_close_matches(name, re.findall(r"(\w+)\s*\(", source), 1)
        cure = f"; did you mean {close[0]!r}?" if close else ""
        if declared:
            cure = f": declare it there: {' '.join(declared[0].split())};"
        text = f"functions: {name!r} is not in cpp_sources{cure}"
        said.append(Problem("compile_error", text, text))
    return said


def _in_callers_words(extension: Extension, problems: list[Problem]) -> list[Problem]:
    """Return problems with the places in the caller's file or cell, not in the strings."""
    strings = {s.name: s.text.split("\n") for s in extension.sources if not s.folder}

    def place(name: str, number: int) -> tuple[str, int] | None:
        if name not in strings:
            return None
        return _found(strings[name], number, extension.callers) or (name.partition(".")[0], number)

    def bound(text: str) -> str:
        """Of what is wrong with a line of the binding; it has one for each function."""
        several, names = _SEVERAL.search(text), list(extension.functions or ())
        at = int(several[1]) - (3 if several[2] else 2) if several else -1  # behind its first lines
        if 0 <= at < len(names):
            return (
                f"functions: {names[at]!r} is a template or has overloads, of which its name "
                "chooses none: name a function that calls the one that is meant"
            )
        return re.sub(r"(?m)^functions\.cpp:\d+(?::\d+)?:", "functions:", text)

    placed = [problem.placed(place) for problem in problems]
    return [replace(p, text=bound(p.text)) for p in placed]


def _found(string: list[str], number: int, callers: tuple[str, ...]) -> tuple[str, int] | None:
    """The file or cell that has a line of a string, and its number there."""
    lines = [line.strip() for line in string]
    if not 0 < number <= len(lines) or not lines[number - 1]:
        return None
    *before, wanted = lines[:number]
    at_an_end = number in (1, len(lines))  # may stand beside quotation marks
    for caller in callers:
        there = [line.strip() for line in linecache.getlines(caller)]

        def agreeing(at: int, there: list[str] = there) -> int:
            pairs = zip(reversed(there[:at]), reversed(before), strict=False)
            return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])

        places = [
            at for at, line in enumerate(there) if line == wanted or (at_an_end and wanted in line)
        ]
        if places:
            return label(caller), max(places, key=agreeing) + 1
    return None
