"""The report of `loader.reload()`: for each edit a table of what it did."""

import html
import sys

from ..errors.cxx import demangled
from ..errors.table import Table

_WORKED = ("live", "refused", "failed", "reverted")
_NOTHING = "nothing changed"
_MOST = 12  # rows of kernels; of the others is said how many there are


class Report:
    """The edits that were taken in or refused; prints as a table for each.

    `behind` names the operators whose edits are being built while the process goes on.
    """

    def __init__(self, edits: list):
        self.edits = edits
        self.behind: list[str] = []

    @property
    def ok(self) -> bool:
        """True if every edit is in use."""
        return not self.behind and all(e.outcome in ("live", "reverted") for e in self.edits)

    def __repr__(self) -> str:
        """Return what a terminal shows."""
        red = "\x1b[31m{}\x1b[0m" if sys.stdout.isatty() else "{}"
        parts = ["\n".join(_shown(p, red, False) for p in _parts(edit)) for edit in self.edits]
        return "\n\n".join(parts + self._last()) or _NOTHING

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        red = '<span style="color:red">{}</span>'
        parts = [p for edit in self.edits for p in _parts(edit)] + [[x] for x in self._last()]
        return "".join(_shown(part, red, True) for part in parts) or f"<p>{_NOTHING}</p>"

    def _last(self) -> list[str]:
        """Return a line on what is built behind, or none."""
        if not self.behind:
            return []
        return [
            f"{', '.join(self.behind)}: built behind; the next reload or cell that finds it ready "
            "takes it in, loader.reload(name) waits for it; until then the code before stays in use"
        ]


class Alarm(str):
    """A line to be shown in red."""


def _shown(part: Table | list[str], red: str, in_html: bool) -> str:
    if isinstance(part, Table):
        return part._repr_html_() if in_html else str(part)
    escape = html.escape if in_html else str
    lines = [(red if isinstance(x, Alarm) else "{}").format(escape(x)) for x in part]
    text = "\n".join(lines)
    return f"<pre>{text}</pre>" if in_html else text


def _parts(edit) -> list[Table | list[str]]:
    """Return headline and details of an edit, and the table of the kernels that were compiled."""
    kernels = [_kernels(edit)] if edit.rebuilt and edit.rebuilt.resources else []
    return [[headline(edit), *details(edit)], *kernels]


def headline(edit, unit: bool = True) -> str:
    """Return one line: the operator, what became of the edit, how long it took."""
    operator = f"{edit.unit}: " if unit else ""
    if not edit.files:
        return f"{operator}the sources are again those of the code in use"
    what = {
        "live": "in use",
        "refused": "refused, the code before it stays in use",
        "failed": "does not build, the code before it stays in use",
        "reverted": "gone back to the code before",
        "gone": "the code before stays in use in this process",
        "uncompiled": "not taken in",
        "interrupted": "interrupted, the edit is still to come with the next reload or cell; "
        "until then the code before stays in use",
    }[edit.outcome]
    forced = edit.outcome == "live" and edit.verdict and edit.verdict.outcome
    if forced and forced not in ("right", "untried"):
        what = "in use, forced"
    took = f" ({edit.seconds:.2f} s)" if edit.outcome in _WORKED else ""
    return f"{operator}{', '.join(edit.files)}: {what}{took}"


def details(edit) -> list[str]:
    """Return what is wrong, or how right and how fast it is, in lines."""
    lines = [edit.text] if edit.text else []
    lines += edit.notes
    verdict, rebuilt = edit.verdict, edit.rebuilt
    if edit.outcome == "live" and verdict:
        if verdict.outcome not in ("right", "untried"):
            lines.append(f"the trial failed: {verdict.text}")
        elif verdict.outcome == "untried":
            lines.append(verdict.text)
        else:
            by = ", ".join(f"{share:.1e} ({dtype})" for dtype, share in verdict.difference.items())
            lines.append(f"largest difference from the reference, as a share of it: {by}")
        lines += map(Alarm, verdict.alarms(edit.before.difference if edit.before else {}))
        lines += verdict.notes
        if verdict.microseconds:
            before = edit.before.microseconds
            was = f"{before:.1f} -> " if before else ""
            lines.append(f"benchmark on the GPU: {was}{verdict.microseconds:.1f} us")
    if rebuilt and rebuilt.compiled:
        times = ", ".join(f"{file} {seconds:.2f} s" for file, seconds in rebuilt.compiled.items())
        lines.append(f"compiled: {times}")
    return lines


def _kernels(edit) -> Table:
    """Return registers, spills and shared memory of the kernels, the changed ones first."""
    before = edit.before.resources if edit.before else {}
    now = edit.rebuilt.resources

    def weight(kernel):
        old, new = before.get(kernel), now[kernel]
        return (old is not None and old == new, -new.spills, -new.registers, kernel)

    kernels = sorted(now, key=weight)
    shown = kernels[:_MOST]
    names = demangled("\n".join(shown)).split("\n")
    columns = ("kernel", "registers", "spills (bytes)", "shared (bytes)")
    table = Table("", columns, columns[1:])
    for kernel, name in zip(shown, names, strict=True):
        old, new = before.get(kernel), now[kernel]

        def change(what, old=old, new=new):
            was, is_now = getattr(old, what, None), getattr(new, what)
            return f"{was} -> {is_now}" if was not in (None, is_now) else str(is_now)

        short = name.removeprefix("void ").split("(")[0]
        table.rows.append((short, change("registers"), change("spills"), change("shared")))
    if len(kernels) > _MOST:
        table.rows.append((f"and {len(kernels) - _MOST} more", "", "", ""))
    return table
