"""One thing that a build failed of, as plain data for programs; `text` has it for people."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from . import BuildError
from .literal import with_places

# What programs may rely on, in `kind`, beside what each means; docs/build.md has it as a table.
KINDS = {
    "compile_error": "a compiler refuses a source",
    "link_error": "the linker, or the loading of the library, lacks a symbol or a library",
    "load_error": "the library was built and cannot be loaded",
    "machine": "the machine is at fault: memory, disk, or a part of a toolkit",
    "missing_compiler": "there is no C++ compiler, or no nvcc for CUDA sources",
    "refused": "loader refuses to build or load it: LOADER_BUILD=never, sources without a module",
    "damaged": "a build in the cache is damaged, or was removed, again after each new build",
    "cache": "the build cache cannot be used",
    "interrupted": "the build was ended",
    "changed": "sources kept changing while they were compiled",
    "other": "anything else; `message` says it",
}

Place = Callable[[str, int], tuple[str, int] | None]


@dataclass(frozen=True)
class Problem:
    """An error of a compiler or linker, or of the machine; None for what nobody knows.

    `cause` is the line of the user's own source that led to an error in a header: file, line,
    column and source.
    """

    kind: str
    message: str
    text: str  # as people read it, the source line with a caret below it
    file: str | None = None
    line: int | None = None
    column: int | None = None
    source: str | None = None
    advice: str | None = None
    cause: dict | None = None

    def as_dict(self) -> dict:
        """Return all but `text`, which the whole error's message has."""
        return {name: value for name, value in asdict(self).items() if name != "text"}

    def placed(self, place: Place) -> "Problem":
        """Return it with the places that `place` tells of a file's lines; see literal."""

        def there(at: dict) -> dict:
            known = at["file"] is not None and at["line"] is not None
            found = place(at["file"], at["line"]) if known else None
            return at | {"file": found[0], "line": found[1]} if found else at

        at = there({"file": self.file, "line": self.line})
        cause = self.cause and there(self.cause)
        return replace(self, text=with_places(self.text, place), cause=cause, **at)


def as_text(problems: Sequence[Problem], total: int, most: int = 3) -> str:
    """Return the first `most` problems as people read them, and how many there are in all."""
    shown = [problem.text for problem in problems[:most]]
    counted = [f"({most} of {total} errors; the others are in the log)"] if total > most else []
    return "\n".join([*shown, *counted])


def error_of(noted: dict, unit: str) -> BuildError:
    """Return the error whose `as_dict` another process noted, as that of `unit`."""
    problems = [Problem(text="", **message) for message in noted["messages"]]
    facts = {name: noted[name] for name in ("log", "kind", "tried", "mends")}
    return BuildError(noted["message"], unit, problems=problems, **facts)
