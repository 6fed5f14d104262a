"""Starting another Python that imports what this one would, and calls one function of loader's."""

import json
import os
import sys

from .sources import HOME

_START = """
import importlib, json, sys
path, home, module, function, arguments = json.loads(sys.argv[1])
sys.path[:] = path
if home:
    sys.modules["loader"] = type(sys)("loader")
    sys.modules["loader"].__path__ = [home]
getattr(importlib.import_module(module), function)(*arguments)
"""


def command(function: str, *arguments: object, body: bool = True) -> list[str]:
    """Return the words that start a Python which calls `function`, such as "live.trial.stand_by".

    It has this process's `sys.path`; neither the environment nor the current folder changes what it
    imports before that is set. JSON carries the arguments. Without `body` it has the package
    `loader` without its body, which imports torch, looks for operators and builds them.
    """
    # An installed loader is the folder HOME itself, a checkout has loader.py in it.
    place = HOME if (HOME / "loader.py").exists() else HOME.parent
    module, _, name = f"loader.jit.{function}".rpartition(".")
    path = [str(place), *map(os.fspath, sys.path)]
    order = [path, None if body else str(HOME), module, name, arguments]
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, "-c", _START, json.dumps(order)]
