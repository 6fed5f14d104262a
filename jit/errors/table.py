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
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

        def line(cells: Sequence[str]) -> str:
            padded = (
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for cell, width, name in zip(cells, widths, self.columns, strict=True)
            )
            return "  ".join(padded).rstrip()

        return "\n".join([self.title, *map(line, lines)])

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""

        def row(tag: str, cells: Sequence[str]) -> str:
            return (
                "<tr>"
                + "".join(
                    f'<{tag} style="text-align:{"right" if name in self.right else "left"};'
                    f'white-space:pre-line">{html.escape(cell)}</{tag}>'
                    for cell, name in zip(cells, self.columns, strict=True)
                )
                + "</tr>"
            )

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
