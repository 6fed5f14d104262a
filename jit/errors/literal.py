"""Where the literal of a source string stands, so that errors in it can be shown there."""

import ast
import linecache
import sys
import textwrap


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
