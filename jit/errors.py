"""What goes wrong with a build, as a person wants to read it."""

import re

# g++ and clang: `file:12:5: error: text`; nvcc: `file(12): error: text`; the linker has no line.
_ERROR = re.compile(
    r"^(?P<file>[^\s:(][^:(]*)(?::(?P<line>\d+)(?::(?P<column>\d+))?:|\((?P<nvcc_line>\d+)\):)"
    r" (?:fatal )?error:? (?P<text>.*)$"
)
_LINKER = re.compile(
    r"undefined reference to|cannot find -l|undefined symbol|multiple definition of"
    r"|\bld\.?\w*: error:"
)


# What ninja and torch say around the compilers' own words: progress and whole command lines.
_NINJA = re.compile(r"\[\d+/\d+\] |FAILED: |ninja: |Error building extension|.{400}")


class BuildError(RuntimeError):
    """An operator that could not be built or loaded; the message says why and what to do.

    Attributes:
        unit: name of the operator, or None where the cause concerns them all.
        log: path of the compiler's whole output, or None where no compiler ran.
    """

    def __init__(self, message: str, unit: str | None = None, log: str | None = None):
        super().__init__(message)
        self.unit = unit
        self.log = log


def first_errors(output: str, most: int = 3) -> str:
    """The first compile or link errors in a build's output, each with its source line and caret.

    Falls back on the last lines of the output where it holds no error in a known form.
    """
    lines = output.splitlines()
    shown = []
    for i, line in enumerate(lines):
        if _ERROR.match(line):
            context = [
                text for text in lines[i + 1 : i + 4] if re.match(r"^(\s+\d* ?\||\s{2,}\S)", text)
            ]
            shown.append("\n".join([line, *context]))
        elif _LINKER.search(line):
            shown.append(line)
        if len(shown) == most:
            break
    said = [line for line in lines if line.strip() and not _NINJA.match(line)]
    return "\n".join(shown or said[-12:])


def explain_failure(output, root, sources=(), most=3):
    """Stand-in."""
    return first_errors(output, most)
