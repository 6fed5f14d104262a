"""Tables that read well in a terminal and in a notebook."""

import html
from collections.abc import Sequence


class Table:
    """Rows of text under a title; `right` names the columns of numbers."""

    def __init__(self, title: str, columns: Sequence[str], right: Sequence[str] = ()):
        self.title, self.columns, self.right = title, columns, right
        self.rows: list[Sequence[str]] = []

    def __repr__(self) -> str:
        """Return the text that a terminal shows."""
        lines = []
        for name, *cells in zip(self.columns, *self.rows, strict=True):
            width = max(map(len, [name, *cells]))
            side = ">" if name in self.right else "<"
            lines.append([f"{cell:{side}{width}}" for cell in (name, *cells)])
        rows = zip(*lines, strict=True)
        return "\n".join([self.title, *("  ".join(row).rstrip() for row in rows)])

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""

        def row(tag: str, cells: Sequence[str]) -> str:
            shown = ""
            for cell, name in zip(cells, self.columns, strict=True):
                side = "right" if name in self.right else "left"
                style = f"text-align:{side};white-space:pre-line"
                shown += f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
            return f"<tr>{shown}</tr>"

        body = "".join(row("td", cells) for cells in self.rows)
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead>{row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
        )


def duration(seconds: float) -> str:
    """A span of time in its largest unit, such as `3 min`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def bytes_text(count: float) -> str:
    """A size, such as `1.5 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
