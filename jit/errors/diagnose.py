"""A failed build's output in short: the few lines that a person can act on.

Looked at in this order: the machine (disk, memory, toolkit), since it makes all else fail; what
compilers say; what linkers and dlopen say (symbols.py); at last, the last lines.
"""

import os
import re
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path

from . import BuildError
from .advice import ERRORS, MACHINE, advice
from .cxx import demangled
from .problem import Problem, as_text
from .symbols import explain_symbols, source_text

_WINDOW = 500_000  # characters looked at, from the first sign of an error on
_SIGNS = (
    *(": error", "): error", "fatal", "rror  ", "ndefined ", "illed", "No space left"),
    *("not found", "cannot ", "unable to", "collect2", "compiler error"),
)

# `file:12:5: error: text` of g++ and clang, `file(12): error #20-D: text` of nvcc.
_DIAGNOSTIC = re.compile(
    r"(?P<file>[^\s|].*?)(?::(?P<line>\d{1,7})(?::(?P<column>\d{1,7}))?|\((?P<at>\d{1,7})\)): "
    r"(?P<kind>(?:catastrophic |fatal |internal compiler )?[Ee]rror|warning|note|remark)"
    r"(?: #[\d-]+(?:-D)?)?: *(?P<text>.*)"
)
# An error that has no place: `cc1plus: error: text`, `ptxas error   : text`.
_TOOL = re.compile(
    r"(?!(?:\S*ld(?:\.\w+)?|mold|collect2|ninja|nvlink|fatal)[ :])[^\s:]+(?: [^\s:,]+, line \d+;)?"
    r"(?:: (?:fatal |internal compiler )?error| (?:error|fatal) *): (?!Ptx assembly|Unresolved)"
)
# Steps on the way from the user's line to an error in a template: g++'s, nvcc's, clang's.
_STEPS = [
    r"(?P<file>\S.*?):(?P<line>\d{1,7}):(?P<column>\d{1,7}): +(?:recursively )?required ",
    r" *(?:detected during )?instantiation of (?P<what>\".*\") at line (?P<line>\d{1,7})"
    r"(?: of \"?(?P<file>[^\"]+?)\"?)?$",
    r"(?P<file>\S.*?):(?P<line>\d{1,7}):(?P<column>\d{1,7}): note: in inst.* requested here$",
]
_CONTEXT = re.compile(r"In file included|  +from |.*: (?:In|At) |.*:\d+: +(?:\[ skipping|in |req)")
_CURING_NOTE = re.compile(
    r"did you |suggested alternative|comparison reduces to|perhaps you|forgot"
)
_ASSERT = re.compile(r"static.assert")
_GUTTER = re.compile(r" *\d* \|")
_CARET = re.compile(r"[ ~]*\^[ ~]*$")
_FRAME = re.compile(
    r"\[\d+/\d+\] |FAILED: |ninja: (?:build stopped|Entering|no work)|Error building extension"
    r"|collect2: error: ld returned|Command '\[|Traceback |  +File \"|    |.{400}"
)


@dataclass
class _Error:
    """One error of a compiler with the lines about it, before and after."""

    match: re.Match
    before: list[str]
    after: list[str] = field(default_factory=list)

    def cause(self) -> re.Match | None:
        """The line of the user's sources that led to an error elsewhere, where there is one."""
        file, notes = self.match["file"], self.notes()
        uses = [note for note in notes if "in expansion of macro" in note["text"]][-1:]
        if uses and "in definition of macro" in notes[0]["text"]:
            uses = []  # the fault is in an argument, which is shown at the user's line anyhow
        steps = [] if _is_source(file) else self.steps()
        return next((s for s in (*uses, *steps) if _is_source(s["file"] or file)), None)

    def notes(self) -> list[re.Match]:
        return [*filter(None, map(_DIAGNOSTIC.match, self.after))]

    def steps(self) -> list[re.Match]:
        """The lines on the way from the user's line to this error."""
        around = ((step, line) for line in (*self.before, *self.after) for step in _STEPS)
        return [match for step, line in around if (match := re.match(step, line))]

    def key(self) -> tuple:
        """What makes two errors the same: a use of a template is shown with its first only."""
        match, step = self.match, self.cause()
        at = step.groupdict() if step else match.groupdict()
        return at["file"], at["line"] or at.get("at"), None if step else match["text"]


def explain_failure(output: str, root: Path, sources: tuple[str, ...] = (), most: int = 3) -> str:
    """The cause of a failed build as a person wants to read it, in `most` errors or fewer.

    Its arguments are those of `find_problems`.
    """
    return as_text(*find_problems(output, root, sources, most), most)


def find_problems(
    output: str, root: Path, sources: tuple[str, ...] = (), most: int = 20
) -> tuple[list[Problem], int]:
    """Return the causes of a failed build, `most` or fewer, and how many there are.

    `output` is all that the build printed, or the text of the exception at the library's loading;
    `root` the checkout and `sources` the unit's own files below it. Whatever the text says, nothing
    is raised, and nothing run that it names.
    """
    root, lines = Path(root), _lines(output)
    for line in lines:
        if _tells_of_the_machine(line) and (cure := advice(MACHINE, line)):
            said = _shortened(line)
            return [Problem("machine", said, f"{cure}\n{said}", advice=cure)], 1
    errors, tools = _compile_errors(lines)
    if errors:
        return [_problem(error, root) for error in errors[:most]], len(errors)
    if tools:
        return [_problem_of_tool(line) for line in tools[:most]], len(tools)
    shown, total = explain_symbols(lines, root, sources, most)
    if shown:
        return [Problem("link_error", text.partition("\n")[0], text) for text in shown], total
    last = [line for line in lines if line.strip() and not _FRAME.match(line)]
    text = "\n".join(last[-12:]) or "the build printed nothing that says why it failed"
    return [Problem("other", text, text)], 1


def load_error(
    what: str,
    unit: str,
    failure: str,
    root: Path,
    sources: tuple[str, ...] = (),
    hint: str = "",
) -> BuildError:
    """Return the error of a library that was built and cannot be loaded; dlopen's is `failure`."""
    problems, total = find_problems(failure, root, sources)
    text = f"{what}:\n{as_text(problems, total)}{hint}"
    return BuildError(text, unit, kind="load_error", problems=problems)


def _problem_of_tool(line: str) -> Problem:
    said, cure = _shortened(demangled(line)), advice(ERRORS, line)
    text = "\n".join(filter(None, [said, cure]))
    return Problem("compile_error", said, text, advice=cure)


def _lines(output: str) -> list[str]:
    """The part of the output worth a look, without colours, in lines of bearable length."""
    found = [at for sign in _SIGNS if (at := output.find(sign)) >= 0]
    start = output.rfind("\n", 0, max(0, min(found, default=len(output)) - 20_000)) + 1
    end = start + _WINDOW
    text = output[start:end]
    if len(output) > end:
        text += "\n" + output[max(end, len(output) - _WINDOW // 2) :]
    text = re.sub(r"\x1b(?:\[[0-9;]*[A-Za-z]|\]8;[^\x07\x1b]{0,999}(?:\x07|\x1b\\))", "", text)
    text = re.sub(r"^Error building extension '[^'\n]*': ", "", text)
    return [line.rstrip("\r")[:8000] for line in text.split("\n")]


def _tells_of_the_machine(line: str) -> bool:
    """True if this is no quotation, nor an error that concerns a source alone."""
    if line.startswith((" ", "\t", "[")):
        return False
    match = _DIAGNOSTIC.match(line)
    return not match or "fatal" in match["kind"] or "#error" in line or "internal" in match["kind"]


def _compile_errors(lines: list[str]) -> tuple[list[_Error], list[str]]:
    """The compilers' errors, each once, failed static_asserts first; those that have no place."""
    errors: list[_Error] = []
    tools: dict[str, None] = {}
    current: _Error | None = None
    before: list[str] = []
    for line in lines:
        match = _DIAGNOSTIC.match(line) if ": " in line else None
        if match and "rror" in match["kind"]:
            current, before = _Error(match, before), []
            errors.append(current)
        elif match and match["kind"] == "note" and current:
            current.after += [*before, line]
            before = []
        elif match or line.startswith(("[", "FAILED: ", "ninja: ")):
            current, before = None, []
        elif _CONTEXT.match(line) or (before and _GUTTER.match(line)):
            before.append(line)
        elif _TOOL.match(line):
            tools[line] = None
            current, before = None, []
        elif current:
            current.after.append(line)
    errors.sort(key=lambda error: not _ASSERT.search(error.match["text"]))
    once: dict[tuple, _Error] = {}
    for error in errors:
        once.setdefault(error.key(), error)
    return [*once.values()], [*tools]


def _is_source(file: str) -> bool:
    """A file that is compiled itself, so the user's: all others are headers."""
    return file.endswith((".cu", ".cpp", ".cc", ".cxx", ".c")) and "tmpxft_" not in file


def _problem(error: _Error, root: Path) -> Problem:
    """The user's line, where the error lies elsewhere; the error; notes that cure it."""
    match, step, kind = error.match, error.cause(), error.match["kind"]
    cause, shown = _cause(step, match["file"], root) if step else (None, [])
    own = [*takewhile(lambda line: not _DIAGNOSTIC.match(line), error.after)]
    marks = [*takewhile(_GUTTER.match, own)]
    caret = next((i for i, line in enumerate(own[:9]) if i and _CARET.match(line)), None)
    text, line, column = match["text"], int(match["line"] or match["at"]), match["column"]
    source = _source_line(match["file"], line, root)
    if match["at"]:
        if caret is not None:  # nvcc indents what it quotes by two
            printed, at = own[caret - 1][2:], own[caret].index("^") - 2
            source = source or printed
            column = _nvcc_column(source, printed, at)
            text = "; ".join([text, *map(str.strip, own[: caret - 1])])
        marks = _quoted(source, line, column, tab=1)
    elif not marks and caret is not None:  # clang has no gutter
        fix = [*takewhile(lambda line: line.startswith(" "), own[caret + 1 : caret + 2])]
        marks = [f"{line:>5} | {own[caret - 1]}"]
        marks += [f"      | {mark}" for mark in [own[caret], *fix]]
    marks = marks or _quoted(source, line, column, tab=8)
    place = ":".join(map(str, filter(None, [match["file"], line, column])))
    kind = kind.replace("catastrophic", "fatal").lower()
    shown += [f"{place}: {kind}: {_shortened(text)}", *marks]
    notes = (note for note in error.notes() if _CURING_NOTE.search(note["text"]))
    cures = [*islice(notes, 2)]
    shown += [_shortened(note[0]) for note in cures]
    cure = advice(ERRORS, match[0])
    shown += filter(None, [cure])
    if error.steps():
        around = filter(str.strip, [*error.before, *error.after])
        count = max(1, len([*around]) - len(marks))
        lines = "1 line" if count == 1 else f"{count} lines"
        shown.append(f"({lines} of template context in the log)")
    return Problem(
        "compile_error",
        _shortened(text),
        "\n".join(shown),
        file=match["file"],
        line=line,
        column=int(column) if column else None,
        source=source or None,
        advice=cure or "; ".join(_shortened(note["text"]) for note in cures) or None,
        cause=cause,
    )


def _cause(step: re.Match, header: str, root: Path) -> tuple[dict, list[str]]:
    """The user's line that led to an error elsewhere, as data and as it is shown."""
    found = step.groupdict()
    file, line, tab = found["file"] or header, int(found["line"]), 8
    source = _source_line(file, line, root)
    if "what" in found:  # nvcc tells no column: where the line names what it instantiates
        what = _folded(re.sub(r"\[with .*", "", found["what"]), 0)
        name = re.search(r"(\w+)(?:<…>)?\(", what) or re.search(r"(\w+)\W*$", what)
        at = name and re.search(rf"\b{name[1]}\b", source)
        column, tab = at.start() + 1 if at else len(source) - len(source.lstrip()) + 1, 1
    else:
        column = found["column"] or 1
    label = "error in a template that this line instantiates"
    if "macro" in found.get("text", ""):
        label = f"error in {found['text'].removeprefix('in expansion of ')}, which is used here"
    shown = [f"{file}:{line}:{column}: {label}:", *_quoted(source, line, column, tab)]
    return {"file": file, "line": line, "column": int(column), "source": source}, shown


def _source_line(file: str, line: int, root: Path) -> str:
    """A line of a source; "" where it cannot be had."""
    lines = source_text(os.path.join(root, file)).split("\n", line)
    return lines[line - 1].rstrip() if 0 < line <= len(lines) else ""


def _quoted(source: str, line: int, column: str | int | None, tab: int) -> list[str]:
    """A source line and a caret below it, as g++ shows them.

    In `column` a tab counts as far as the next multiple of `tab`: 8 with g++, which counts columns
    of the screen, 1 with the others.
    """
    if not source:
        return []
    before = int(column or 1) - 1
    before = len(source[:before].expandtabs(8)) if tab == 1 else min(before, 8 * len(source))
    caret = [f"      | {' ' * before}^"] if column else []
    return [f"{line:>5} | {source.expandtabs(8)}", *caret]


def _nvcc_column(real: str, printed: str, caret: int) -> int:
    """The column in the file of what nvcc's caret marks in its own, preprocessed, form of the line.

    Where it lies in what a macro became: the column of the macro.
    """
    real = real.replace("\t", " ")
    same = len(os.path.commonprefix([real, printed]))
    same_end = len(os.path.commonprefix([real[::-1], printed[::-1]]))
    if caret < same:
        return max(caret, 0) + 1
    if caret >= len(printed) - same_end:
        return len(real) - len(printed) + caret + 1
    return len(re.sub(r"\w+$", "", real[:same])) + 1


def _shortened(text: str) -> str:
    """A message with its types in short; a failed static_assert's stays whole."""
    if _ASSERT.search(text):
        return text
    text = text.replace("std::__cxx11::", "std::").replace("std::__1::", "std::")
    text = re.sub(r"\bstd::basic_string<char(?:, [^<>]*<char> ?){0,2}>", "std::string", text)
    text = re.sub(r", std::(?:allocator|less|default_delete|char_traits)<[^<>]*> ?(?=>)", "", text)
    if len(text) > 240:
        text = re.sub(r"\[with .*\]", "[with …]", text)
    for depth in (2, 1):
        text = _folded(text, depth) if len(text) > 240 else text
    return text if len(text) <= 400 else text[:400] + " …"


def _folded(text: str, deepest: int) -> str:
    """`text` without the template arguments that lie deeper than `deepest`."""
    kept, depth = [], 0
    for i, character in enumerate(text):
        opens = character == "<" and text[i - 1 : i].isidentifier()
        if opens and text[max(i - 8, 0) : i] != "operator":
            depth += 1
            if depth == deepest + 1:
                kept.append("<…>")
        if depth <= deepest:
            kept.append(character)
        if character == ">" and depth and text[i - 1] not in "-=":
            depth -= 1
    return "".join(kept)
