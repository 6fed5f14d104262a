"""Sources for an older torch or CUDA, changed for the compiler until it takes them; see mends.py.

Nothing is changed in the caller's files, places stay those of the caller's lines, and whatever was
changed is told, each time the library is loaded.
"""

import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import cxx
from ..errors.diagnose import find_problems
from ..errors.problem import Problem
from ..machine import files, settings
from ..machine.told import is_ours
from ..machine.toolchain import Toolchain
from .arguments import Extension, Source
from .flags import argv
from .mends import MENDS, Change, Edit, Mend, Place

_MOST = 500  # errors of a compiler that are looked at


class MendWarning(UserWarning):
    """An extension was changed for the compiler, since its source is for an older torch or CUDA."""


class Mending:
    """The mends of one extension so far.

    Attributes:
        extension, toolchain: what is to be compiled, as mended so far.
    """

    def __init__(self, extension: Extension, toolchain: Toolchain, folder: Path):
        """`folder` is where the compilers run; headers of our own go there."""
        self.extension, self.toolchain = extension, toolchain
        self._folder, self._given = folder, extension
        self._texts = {source.name: source.text for source in extension.sources}
        self._headers: dict[str, list[str]] = {name: [] for name in self._texts}
        self._mends: dict[tuple[str, int], list[Mend]] = {}  # by line
        self._others: list[dict] = []  # flags and headers
        self._seen: set[str] = set()

    def take(self, output: str) -> bool:
        """Mend what a compiler complains of, as far as that is known; True if anything was."""
        if settings.value("LOADER_MENDS") == "off" or output in self._seen:
            return False
        self._seen.add(output)
        problems, _ = find_problems(output, self._folder, tuple(self._texts), _MOST)
        edits: dict[str, set[Edit]] = {name: set() for name in self._texts}
        before = self._state()
        for mend in MENDS:
            for problem in problems:
                if found := re.search(mend.said, f"{problem.message}{_warning(problem)}"):
                    self._apply(mend, found, problem, edits)
        for name, found_edits in edits.items():
            self._texts[name] = _edited(self._texts[name], found_edits)
        sources = tuple(map(self._source, self._given.sources))
        self.extension = replace(self.extension, sources=sources)
        return self._state() != before

    def rows(self) -> list[dict]:
        """Return what was changed: `mend`, `now`, `file`, `line`, `before` and `after` of each.

        For a flag or a header that was added, file or line are None.
        """
        found = []
        for source in self._given.sources:
            pairs = zip(source.text.split("\n"), self._texts[source.name].split("\n"), strict=True)
            for line, (before, after) in enumerate(pairs, 1):
                if before != after:
                    mends = [*dict.fromkeys(self._mends.get((source.name, line), []))]
                    what = ", ".join(mend.what for mend in mends)
                    now = ", ".join(mend.now for mend in mends)
                    found.append(_row(what, now, source.name, line, before, after))
        return [*found, *self._others]

    def _state(self) -> tuple:
        texts, headers = [*self._texts.values()], [*map(len, self._headers.values())]
        return texts, headers, len(self._others)

    def _apply(
        self, mend: Mend, found: re.Match, problem: Problem, edits: dict[str, set[Edit]]
    ) -> None:
        """Note the edits that a mend makes for one message, or change flags."""
        if mend.flags:
            self._change_flags(mend, found.groupdict().get("what") or "")
        if not mend.change:
            return
        if problem.file is None:
            for name in edits if mend.everywhere else ():
                self._change(mend, mend.change, name, None, edits)
            return
        at = {"file": problem.file, "line": problem.line}
        for place in filter(None, (problem.cause, at)):
            file, line = place["file"], place["line"]
            if file in edits and line and self._change(mend, mend.change, file, line, edits):
                return
        if problem.file not in edits:
            self._mend_header(mend)

    def _change(
        self,
        mend: Mend,
        change: Change,
        name: str,
        line: int | None,
        edits: dict[str, set[Edit]],
    ) -> bool:
        """Note the edits of a mend at a line of a source; False for none."""
        text = self._texts[name]
        made = {*change(Place(text, line))}
        for edit in made:
            at = text.count("\n", 0, edit.begin) + 1
            self._mends.setdefault((name, at), []).append(mend)
        edits[name] |= made
        if made and mend.include:
            self._include(mend, name)
        return bool(made)

    def _include(self, mend: Mend, name: str) -> None:
        if mend.include not in self._headers[name]:
            self._headers[name].append(mend.include)
            line = f"#include <{mend.include}>"
            self._others.append(_row(mend.what, mend.now, name, None, "", line))

    def _mend_header(self, mend: Mend) -> None:
        """Answer an error in a header of the caller's: by a macro, or a header of the old name."""
        more = [mend.define] if mend.define else []
        if mend.define and mend.include:
            more += ["-include", mend.include]
        if mend.shim:
            old, new = mend.shim
            file = self._folder / "mended" / old
            file.parent.mkdir(parents=True, exist_ok=True)
            files.write(file, f"#include <{new}>\n".encode())
            more = [f"-I{self._folder / 'mended'}"]
        if more and not any(row["mend"] == mend.what for row in self._others):
            own = self.extension
            flags = tuple(map(shlex.quote, more))
            self.extension = replace(
                own, cflags=(*own.cflags, *flags), cuda_cflags=(*own.cuda_cflags, *flags)
            )
            after = f"{mend.shim[0]}: #include <{mend.shim[1]}>" if mend.shim else " ".join(more)
            self._others.append(_row(mend.what, mend.now, None, None, "", after))

    def _change_flags(self, mend: Mend, what: str) -> None:
        assert mend.flags
        own = self.extension
        both = [argv(own.cflags), argv(own.cuda_cflags)]
        after = [mend.flags(flags, what) for flags in both]
        for old, new in zip(both, after, strict=True):
            if old != new:
                words = " ".join(old), " ".join(new)
                self._others.append(_row(mend.what, mend.now, None, None, *words))
        if after != both:
            cflags, cuda_cflags = (tuple(map(shlex.quote, flags)) for flags in after)
            self.extension = replace(own, cflags=cflags, cuda_cflags=cuda_cflags)
        listed = [a for a in re.split(r"[ ;]+", self.toolchain.architectures) if a]
        kept = [a for a in listed if re.sub(r"\D", "", a.partition("+")[0]) != what]
        if what.isdigit() and kept != listed:
            self.toolchain = self.toolchain._replace(architectures=";".join(kept))
            lists = (f"TORCH_CUDA_ARCH_LIST={';'.join(each)}" for each in (listed, kept))
            self._others.append(_row(mend.what, mend.now, None, None, *lists))

    def _source(self, source: Source) -> Source:
        """A source as the compiler gets it: mended, with the lines of the caller's."""
        text, headers = self._texts[source.name], self._headers[source.name]
        if headers:
            lines = "".join(f"#include <{header}>\n" for header in headers)
            text = f"{lines}#line 1 {cxx.literal(source.name)}\n{text}"
        return replace(source, text=text)


def mends_wanted() -> dict:
    """Return what the key of a build has of LOADER_MENDS: nothing, unless mends are forbidden."""
    return {"mends": "off"} if settings.value("LOADER_MENDS") == "off" else {}


def left_after(rows: Sequence[dict]) -> str:
    """Return the line of an error which says what was mended before; "" for nothing."""
    said = "That is what is left after mends for an older torch or CUDA:"
    return f"\n{said} {summary(rows)}" if rows else ""


def warn(name: str, rows: Sequence[dict]) -> None:
    """Say in one line what was mended of an extension; with LOADER_MENDS=diff also each change."""
    how = settings.value("LOADER_MENDS")
    more = "" if how == "diff" else "; LOADER_MENDS=diff shows the lines, off forbids it"
    text = f"{name} is for an older torch or CUDA, and was mended: {summary(rows)}{more}"
    if how == "diff":
        text += f"\n{diff(rows)}"
    level, frame = 2, sys._getframe(1)
    while frame.f_back and is_ours(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, MendWarning, stacklevel=level)


def summary(rows: Sequence[dict]) -> str:
    """Return the mends of an extension in a line: each with what stands there now, and where."""
    places: dict[str, list[str]] = {}
    for row in rows:
        lines = places.setdefault(f"{row['mend']} -> {row['now']}", [])
        if row["line"]:
            lines.append(f"{Path(row['file']).name}:{row['line']}")
    shown = [
        f"{what} ({', '.join([*lines[:3], *(['...'] if len(lines) > 3 else [])])})"
        if lines
        else what
        for what, lines in places.items()
    ]
    return "; ".join(shown)


def diff(rows: Sequence[dict]) -> str:
    """Return each change as its place, the line before and the line that the compiler gets."""
    lines = []
    for row in rows:
        place = ":".join(str(row[k]) for k in ("file", "line") if row[k] is not None)
        marked = [f"{m}{row[k]}" for m, k in (("-", "before"), ("+", "after")) if row[k]]
        lines += [f"@@ {place or 'flags'}", *marked]
    return "\n".join(lines)


def _row(mend: str, now: str, file: str | None, line: int | None, before: str, after: str) -> dict:
    return {
        "mend": mend,
        "now": now,
        "file": file,
        "line": line,
        "before": before,
        "after": after,
    }


def _warning(problem: Problem) -> str:
    """The [-Werror=...] of a message, where shortening took it away."""
    found = re.search(r"\[-Werror=[^\]]*\]", problem.text)
    return found[0] if found and found[0] not in problem.message else ""


def _edited(text: str, edits: set[Edit]) -> str:
    """A text with edits that do not overlap, the first of those that do; no line is lost."""
    pieces, at = [], 0
    for edit in sorted(edits):
        if edit.begin >= at:
            lost = text.count("\n", edit.begin, edit.end) - edit.text.count("\n")
            pieces += [text[at : edit.begin], edit.text, "\n" * lost]
            at = edit.end
    return "".join([*pieces, text[at:]])
