"""Where the literal of a source string stands, so that errors in it can be shown there."""

import ast
import linecache
import re
import sys
import textwrap
from collections.abc import Callable

_PLACE = re.compile(r"(?P<file>[\w.]+):(?P<line>\d+)")
_GUTTER = re.compile(r" *(?P<line>\d+) \|")


def with_places(text: str, place: Callable[[str, int], tuple[str, int] | None]) -> str:
    """Return a message in which `place` tells of a file's line which it is; None if it is that.

    The lines that are quoted below are numbered likewise.
    """
    shown, shift = [], 0
    for printed in text.split("\n"):
        line, head, quoted = printed, _PLACE.match(printed), _GUTTER.match(printed)
        if head and (found := place(head["file"], int(head["line"]))):
            shift = found[1] - int(head["line"])
            line = f"{found[0]}:{found[1]}{line[head.end() :]}"
        elif shift and quoted:
            line = f"{int(quoted['line']) + shift:>5}{line[quoted.end('line') :]}"
        elif not line.startswith(" "):
            shift = 0
        shown.append(line)
    return "\n".join(shown)


def locate_in(source: str, file: str) -> tuple[str, int] | None:
    """File (or notebook cell) and number of the line that the string's first line stands on.

    `file` has the literal; of a cell it is IPython's name. None where none in it is this string
    line by line.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (ValueError, SyntaxError, RecursionError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines = node.value.count("\n")
            same = source in (node.value, textwrap.dedent(node.value), node.value.strip())
            if same and lines and lines == (node.end_lineno or 0) - node.lineno:
                stripped = source == node.value.strip() and source != node.value
                skipped = len(node.value) - len(node.value.lstrip()) if stripped else 0
                return label(file), node.lineno + node.value[:skipped].count("\n")
    return None


def label(file: str) -> str:
    """A file's name, and of a notebook's cell what stands beside it: In[3]."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    with_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = with_name(file) if with_name else None
    return named[-1] if named else file
