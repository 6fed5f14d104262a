"""The words for a failed build and for a misspelt name, and the tables that loader prints.

Doors: `BuildError`, `CacheError`, `joined` and `no_attribute` of this file, `diagnose` (what a
build's output comes down to), `problem` (one cause as plain data), `symbols` (what linkers say),
`literal` (where a string stands in the user's file), `cxx` (a lexer of C++), `table`.

Imports no other room.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .problem import Problem


class BuildError(RuntimeError):
    """An operator or extension that could not be built or loaded; the message says why and how on.

    Attributes:
        unit: name of the operator or extension, or None where the cause concerns them all.
        log: path of the compiler's whole output, or None where no compiler ran.
        kind: what it failed of, one of the names in `loader.jit.errors.problem.KINDS`.
        problems: the errors one by one, each with file, line, column and source.
        tried: the ways in which each source was compiled, one after another.
        mends: what was changed for the compiler, of sources that are for an older torch or CUDA.
    """

    def __init__(
        self,
        message: str,
        unit: str | None = None,
        log: str | None = None,
        kind: str = "",
        problems: "Sequence[Problem]" = (),
        tried: Sequence[dict] = (),
        mends: Sequence[dict] = (),
    ):
        super().__init__(message)
        self.unit = unit
        self.log = log
        self.kind = kind or (problems[0].kind if problems else "other")
        self.problems = [*problems]
        self.tried, self.mends = [*tried], [*mends]

    def as_dict(self) -> dict:
        """Return the error as plain data, fit for JSON.

        Returns: `error` (the class), `unit`, `kind`, `message` (as people read it), `log`,
            `messages`, `tried` and `mends`. Each of the messages has `kind`, `message`, `file`,
            `line`, `column`, `source`, `advice` and `cause`, None for what is not known; there is
            one at least.
        """
        messages = [problem.as_dict() for problem in self.problems]
        if not messages:
            names = ("file", "line", "column", "source", "advice", "cause")
            messages = [{"kind": self.kind, "message": str(self), **dict.fromkeys(names)}]
        return {
            "error": type(self).__name__,
            "unit": self.unit,
            "kind": self.kind,
            "message": str(self),
            "log": self.log,
            "messages": messages,
            "tried": self.tried,
            "mends": self.mends,
        }

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message says where the fault is, loader's calls not."""
        return [f"BuildError: {self}"]


def joined(errors: Sequence[BuildError]) -> BuildError:
    """Return several errors as one, that of the first's unit, kind and log; one as it is."""
    first, *others = errors
    if not others:
        return first
    return BuildError(
        "\n\n".join(map(str, errors)),
        first.unit,
        first.log,
        kind=first.kind,
        problems=[problem for error in errors for problem in error.problems],
        tried=[way for error in errors for way in error.tried],
        mends=[mend for error in errors for mend in error.mends],
    )


class CacheError(BuildError):
    """The build cache cannot be used; the message says why and what to do."""

    def __init__(self, message: str):
        super().__init__(message, kind="cache")


def no_attribute(where: str, name: str, known: Collection[str], owner: object) -> AttributeError:
    """The error of a name that is none of those `known`, with the nearest of them."""
    import difflib

    close = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"{where} has no attribute {name!r}{hint}", name=name, obj=owner)
