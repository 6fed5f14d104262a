"""Public names beside the operators: `ops/X_more.py` says in `__all__` what else `loader` has."""

import ast
import os
from pathlib import Path

from ..machine.sources import listed


def offered(root: Path) -> dict[str, str]:
    """The public names that files in `ops/` offer, and the module below `loader` that has each.

    Read from the text: to import one would load its operator. A file that is no operator belongs to
    the operator whose name its own begins with, and offers nothing without it.
    """
    files = listed(root / "ops")
    operators = tuple(file.removesuffix(".cpp") + "_" for file in files if file.endswith(".cpp"))
    names: dict[str, str] = {}
    for file in files:
        if file.endswith(".py") and file.startswith(operators) and file[:-3] + ".cpp" not in files:
            with open(os.path.join(root, "ops", file), encoding="utf-8") as text:
                _, listed_here, rest = text.read().partition("\n__all__ = ")
                if listed_here:
                    found = ast.literal_eval(rest.partition("]")[0] + "]")
                    names |= dict.fromkeys(found, f"ops.{file[:-3]}")
    return names
