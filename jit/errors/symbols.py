"""The words of linkers and dlopen, told in terms of the checkout: which symbol, and whose it is."""

import os
import re
from itertools import takewhile
from pathlib import Path

from .advice import LIBRARIES, OWNERS, advice
from .cxx import STATEMENTS, demangled

_UNDEFINED = re.compile(
    r".*?(?:undefined reference to |hidden symbol (?=.*(?:isn't|not) defined)"
    r"|against undefined (?:\w+ )?symbol |undefined (?:\w+ )?symbol: |Unresolved extern \w+ )"
    r"(?:[`'‘](?P<quoted>.+?)['’]|(?P<bare>[^\s`'‘].*?)(?:,? version \S+)?$)",
    re.IGNORECASE,
)
_TWICE = re.compile(
    r".*?(?:multiple definition of [`'](?P<quoted>.+?)'|duplicate symbol: (?P<bare>.+))",
    re.IGNORECASE,
)
_STATEMENT = f"(?:{'|'.join(sorted(STATEMENTS))})"
_ANOTHER = """with other arguments or another linkage: include there the header that declares it \
(an extern "C" counts only where it is seen), or leave out `static`"""
_ELSEWHERE = """is not compiled into this operator: move it to a file that is, or make it `inline` \
in a header"""
_MORE = re.compile(r">>> |.*: previous definition here")  # of the same error


def explain_symbols(
    lines: list[str], root: Path, sources: tuple[str, ...], most: int
) -> tuple[list[str], int]:
    """Return the first `most` errors of a linker or dlopen with their cures; how many there are."""
    undefined: dict[str, list[str]] = {}  # symbols with what the linker says of each
    twice: dict[str, list[str]] = {}
    told: dict[str, str] = {}  # advice with the line it is for
    for i, line in enumerate(lines):
        words = [line, *takewhile(_MORE.match, lines[i + 1 : i + 5])]
        for pattern, found in ((_UNDEFINED, undefined), (_TWICE, twice)):
            if match := pattern.match(line):
                found.setdefault(match["quoted"] or match["bare"], words)
                break
        else:
            if cure := advice(LIBRARIES, line):
                told.setdefault(cure, f"{cure}\n{line.strip()[:400]}")
    plain = demangled("\n".join([*undefined, *twice])).split("\n")
    names = dict(zip([*undefined, *twice], plain, strict=False))
    of_the_unit = [root / source for source in sources]
    shown = []
    for explain, found in ((_explain_undefined, undefined), (_explain_twice, twice)):
        for symbol in [*found][:most]:
            shown.append(explain(names.get(symbol, symbol), found[symbol], root, of_the_unit))
    return [*shown, *told.values()][:most], len(undefined) + len(twice) + len(told)


def source_text(file: str | Path) -> str:
    """Return a source's text; "" for what is none: an output may name a device or a pipe."""
    try:
        if os.path.isfile(file) and 0 < os.path.getsize(file) < 5_000_000:
            with open(file, encoding="utf-8", errors="replace") as source:
                return source.read()
    except (OSError, ValueError):
        pass
    return ""


def _explain_undefined(symbol: str, words: list[str], root: Path, of_the_unit: list[Path]) -> str:
    """Say who uses an undefined symbol, who declares it, and which file should define it."""
    name = _identifier(symbol)
    used = [f"used in {place}" for place in _find(name, "use", of_the_unit)[:1]]
    shown = [f"undefined symbol: {symbol}", *(f"  {said}" for said in used or words)]
    declared = _find(name, "declaration", _files(root, "include"))[:1]
    shown += [f"  declared in {place}" for place in declared]
    sources = [*of_the_unit, *_files(root, "kernels"), *_files(root, "ops")]
    defined = _find(name, "definition", sources)[:1]
    home = _home(name, declared[0] if declared else "", root, of_the_unit)
    owner = advice(OWNERS, symbol.split("(", maxsplit=1)[0])
    if owner and not declared:
        cure = owner
    elif defined:
        inside = any(defined[0].startswith(f"{path}:") for path in of_the_unit)
        fault = _ANOTHER if inside or not of_the_unit else _ELSEWHERE
        cure = f"{defined[0]} defines that name, but {fault}"
    elif home:
        fault = "does not define it" if home.exists() else "does not exist"
        cure = f"should be defined in {home}, which {fault}"
    else:
        cure = "none of the operator's files defines it: write it, or link the library that has it"
    return "\n".join([*shown, f"  {cure}"])


def _explain_twice(symbol: str, words: list[str], root: Path, of_the_unit: list[Path]) -> str:
    """Say which files define a symbol that only one may define."""
    files = [*of_the_unit, *_files(root, "include")]
    found = _find(_identifier(symbol), "definition", files)
    places = ["in " + " and in ".join(found)] if len(found) > 1 else words
    cure = "keep one of them; in a header make it `inline`, in a single file `static`"
    return "\n  ".join([f"defined twice: {symbol}", *places, cure])


def _home(name: str, declared: str, root: Path, of_the_unit: list[Path]) -> Path | None:
    """Return the file where a launcher belongs: of the unit's kernels the one that is named most
    like it, of these the one with the fewest other words, then the one that defines what has the
    nearest name; else None.
    """
    ending = {"cuda": ".cu", "cpu": ".cpp"}.get(name.rpartition("_")[2])
    kernels = [file for file in of_the_unit if root / "kernels" in file.parents]
    beside = re.findall(r"\b(\w+_(?:cuda|cpu))\(", source_text(declared.rsplit(":", 1)[0]))
    words = {*name.split("_")}

    def likeness(file: Path) -> tuple[float, ...]:
        called = {*re.split(r"[\W_]", str(file.relative_to(root / "kernels").with_suffix("")))}
        defined = [{*other.split("_")} for other in beside if _find(other, "definition", [file])]
        near = max((len(words & other) / len(words | other) for other in defined), default=0)
        return len(words & called), -len(called), near

    return max((f for f in kernels if f.suffix == ending), key=likeness, default=None)


def _files(root: Path, folder: str) -> list[Path]:
    """Return the sources and headers below a folder of the checkout."""
    return sorted((root / folder).rglob("*.[hc]*"))


def _identifier(symbol: str) -> str:
    """Return a symbol's name in the sources, e.g. `launch` of `void n::launch<float>(int)`."""
    found = re.search(r"([A-Za-z_]\w*)(?:<[^()]*>)?\(", symbol) or re.search(r"(\w+)\W*$", symbol)
    return found[1] if found else symbol


def _find(name: str, kind: str, files: list[Path]) -> list[str]:
    """Return where files use, declare or define a name, as `file:line`; told by looks alone."""
    found: dict[str, None] = {}
    for file in files:
        text = source_text(file)
        for match in re.finditer(rf"\b{re.escape(name)}\b", text):
            start = text.rfind("\n", 0, match.start()) + 1
            before = re.sub(r"__attribute__ *\(\(.*?\){2,}", "", text[start : match.start()])
            if "//" in before or re.match(r"\s*[*#]", before):
                continue
            typed = re.match(rf"\s*(?!{_STATEMENT} )[A-Za-z_][^=;()]*[\s*&>:]$", before)
            follows = text[match.end() : match.end() + 2000]
            body = re.match(r"\s*\([^;{}]*\)[^;{}()]*\{", follows)
            looks = "definition" if body else "declaration"
            if kind == (looks if typed and re.match(r"\s*\(", follows) else "use"):
                found[f"{file}:{text.count(chr(10), 0, start) + 1}"] = None
    return [*found]
