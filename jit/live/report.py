"""The report of `loader.reload()`: for each edit a table of what it did."""

import html
import sys

from ..errors.cxx import demangled
from ..errors.table import Table
from .edit import Edit
from .rebuild import Resources

_NOTHING = "nothing changed"
_BEHIND = (
    "built behind; the next reload or cell that finds it ready takes it in, loader.reload(name) "
    "waits for it; until then the code before stays in use"
)
_RED, _END = "\x1b[31m", "\x1b[0m"  # alarms
_MOST = 12  # rows of kernels; of the others is said how many there are


class Report:
    """The edits that were taken in or refused; prints as a table for each.

    `behind` names the operators whose edits are being built while the process goes on.
    """

    def __init__(self, edits: list[Edit]):
        self.edits = edits
        self.behind: list[str] = []

    @property
    def ok(self) -> bool:
        """True if every edit is in use."""
        return not self.behind and all(e.outcome in ("live", "reverted") for e in self.edits)

    def __repr__(self) -> str:
        """Return what a terminal shows."""
        text = "\n\n".join("\n".join(map(str, parts)) for parts in self._parts()) or _NOTHING
        is_terminal = getattr(sys.stdout, "isatty", bool)()
        return text if is_terminal else text.replace(_RED, "").replace(_END, "")

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        red, end = '<span style="color:red">', "</span>"
        shown = [
            part._repr_html_()
            if isinstance(part, Table)
            else f"<pre>{html.escape(part).replace(_RED, red).replace(_END, end)}</pre>"
            for parts in self._parts()
            for part in parts
        ]
        return "".join(shown) or f"<p>{_NOTHING}</p>"

    def _parts(self) -> list[list[str | Table]]:
        """Return text and the table of the kernels for each edit, and what is built behind."""
        parts: list[list[str | Table]] = []
        for edit in self.edits:
            parts.append(["\n".join([f"{edit.unit}: {edit.headline()}", *_details(edit)])])
            if edit.rebuilt and edit.rebuilt.resources:
                parts[-1].append(_kernels(edit.before.resources, edit.rebuilt.resources))
        if self.behind:
            parts.append([f"{', '.join(self.behind)}: {_BEHIND}"])
        return parts


def _details(edit: Edit) -> list[str]:
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
        lines += [f"{_RED}{line}{_END}" for line in verdict.alarms(edit.before.difference)]
        lines += verdict.notes
        if verdict.microseconds:
            before = edit.before.microseconds
            was = f"{before:.1f} -> " if before else ""
            lines.append(f"benchmark on the GPU: {was}{verdict.microseconds:.1f} us")
    if rebuilt and rebuilt.compiled:
        times = ", ".join(f"{file} {seconds:.2f} s" for file, seconds in rebuilt.compiled.items())
        lines.append(f"compiled: {times}")
    return lines


def _kernels(before: dict[str, Resources], now: dict[str, Resources]) -> Table:
    """Return registers, spills and shared memory of the kernels, the changed ones first."""

    def weight(kernel: str) -> tuple:
        old, new = before.get(kernel), now[kernel]
        return (old is not None and old == new, -new.spills, -new.registers, kernel)

    kernels = sorted(now, key=weight)
    shown = kernels[:_MOST]
    names = demangled("\n".join(shown)).split("\n")
    columns = ("kernel", "registers", "spills (bytes)", "shared (bytes)")
    table = Table("", columns, columns[1:])
    for kernel, name in zip(shown, names, strict=True):
        old, new = before.get(kernel, now[kernel]), now[kernel]
        changes = zip(vars(old).values(), vars(new).values(), strict=True)
        cells = (f"{was} -> {is_now}" if was != is_now else str(is_now) for was, is_now in changes)
        table.rows.append((name.removeprefix("void ").split("(")[0], *cells))
    if len(kernels) > _MOST:
        table.rows.append((f"and {len(kernels) - _MOST} more", "", "", ""))
    return table
