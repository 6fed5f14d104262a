"""What became of an edit of a kernel, in the few words that a window has room for."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACE = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+)(?::\d+)?: (?:fatal )?(?:error: )?(?P<text>.+)$", re.M
)


@dataclass(frozen=True)
class Notice:
    """One edit, told.

    Attributes:
        kind: "live" (in use, and as the reference), "differs" (in use, and not as the reference),
            "failed" (not in use: the code before is).
        operator: whose edit it is.
        title: what happened, in a line; with the place, `file:line`, where there is one.
        text: the compiler's first message, or what is wrong.
        file, line: the place of the error.
        seconds: from when the edit was found until it was in use.
    """

    kind: str
    operator: str
    title: str
    text: str = ""
    file: Path | None = None
    line: int = 0
    seconds: float = 0.0


def notices(report: Any) -> list[Notice]:
    """Return what there is to tell of a `loader.reload()` report, an edit each."""
    return [_notice(edit) for edit in report.edits if edit.files]


def _notice(edit: Any) -> Notice:
    files = ", ".join(edit.files)
    if edit.outcome in ("live", "reverted"):
        wrong = edit.verdict and edit.verdict.outcome == "wrong"
        if edit.outcome == "live" and wrong:
            text = _first_line(edit.verdict.text)
            title = f"{edit.unit}: in use, and it differs from its reference"
            return Notice("differs", edit.unit, title, text, seconds=edit.seconds)
        return Notice("live", edit.unit, f"{files}: in use", seconds=edit.seconds)
    found = _PLACE.search(edit.text)
    if edit.outcome == "failed" and found:
        file, line = Path(found["file"]), int(found["line"])
        title = f"{_short(file)}:{line}"
        return Notice("failed", edit.unit, title, found["text"], file, line, edit.seconds)
    said = {
        "failed": "does not build",
        "refused": "was tried and refused",
        "gone": "is gone",
        "uncompiled": "is not compiled on this machine",
        "interrupted": "was interrupted",
    }
    text = _first_line(edit.text) or "; ".join(edit.notes)
    return Notice("failed", edit.unit, f"{files} {said[edit.outcome]}", text, seconds=edit.seconds)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _short(file: Path) -> str:
    """Return a file's path from its room on: `kernels/square_cpu.cpp`."""
    for room in ("kernels", "ops", "include"):
        if room in file.parts[:-1]:
            at = len(file.parts) - 1 - file.parts[::-1].index(room)
            return "/".join(file.parts[at:])
    return file.name
