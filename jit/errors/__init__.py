"""The words for a failed build and for a misspelt name, and the tables that loader prints.

Doors: `BuildError`, `CacheError` and `no_attribute` of this file, `diagnose` (what a build's output
comes down to), `symbols` (what linkers say), `literal` (where a string stands in the user's file),
`cxx` (a lexer of C++), `table`.

Imports no other room.
"""

from collections.abc import Collection


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

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message says where the fault is, loader's calls not."""
        return [f"BuildError: {self}"]


class CacheError(BuildError):
    """The build cache cannot be used; the message says why and what to do."""


def no_attribute(where: str, name: str, known: Collection[str], owner: object) -> AttributeError:
    """The error of a name that is none of those `known`, with the nearest of them."""
    import difflib

    close = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"{where} has no attribute {name!r}{hint}", name=name, obj=owner)
