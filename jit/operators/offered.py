"""Public names beside the operators: `ops/X_more.py` says in `__all__` what else `loader` has."""

import ast
import os
import re
from pathlib import Path

from ..machine.sources import listed

_ALL = re.compile(r"^__all__ = (\[.*?\])", re.MULTILINE | re.DOTALL)


def offered(root: Path) -> dict[str, str]:
    """The public names that files in `ops/` offer, and the module below `loader` that has each.

    Read from the text: to import one would load its operator. A file that is no operator belongs to
    the operator whose name its own begins with, and offers nothing without it.
    """
    files = listed(root / "ops")
    operators = tuple(file.removesuffix(".cpp") + "_" for file in files if file.endswith(".cpp"))
    names = {}
    for file in files:
        if file.endswith(".py") and file.startswith(operators) and file[:-3] + ".cpp" not in files:
            with open(os.path.join(root, "ops", file), encoding="utf-8") as text:
                if found := _ALL.search(text.read()):
                    names |= dict.fromkeys(ast.literal_eval(found[1]), f"ops.{file[:-3]}")
    return names
