"""`python -m loader run`: a program as it stands, whose extensions are built by loader.

The program takes this process's place, so its arguments, `__main__`, streams, signals and exit
status are what `python script.py` gives. It inherits one more folder in PYTHONPATH, in which torch
finds an entry point when it is imported, there and in all Pythons that the program starts.
"""

import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from ..build.progress import say

_CHILDREN = Path(__file__).with_name("children")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class NoProgram(ValueError):
    """What is to be run is not there."""


def run(words: list[str]) -> NoReturn:
    """Become the program that `words` name, a script or `-m` and a module or a command.

    Raises: NoProgram with what is missing; this process goes on then.
    """
    if sys.flags.ignore_environment:
        raise NoProgram("run: Python's -E and -I hide PYTHONPATH, which run works by; leave it out")
    command = _command(words)
    if os.environ.get(_AUTOLOAD, "1") != "1":
        say(f"run: {_AUTOLOAD}={os.environ[_AUTOLOAD]} keeps it from torch; unset that")
    folders = [str(_CHILDREN), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, and the program would inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def _command(words: list[str]) -> list[str]:
    """Return the command line of the program."""
    if not words:
        raise NoProgram("run: expected a script, -m and a module, or a command, got nothing")
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    first, *rest = words
    if first == "-m" and rest:
        _check_module(rest[0])
        return [*python, *words]
    if first.startswith("-"):
        raise NoProgram(
            f"run: expected a script, -m and a module, or a command, got {first!r}; options of "
            "Python's go before: python -W error -m loader run script.py"
        )
    if os.path.isdir(first) and not os.path.exists(os.path.join(first, "__main__.py")):
        raise NoProgram(f"run: {first} is a folder without __main__.py; name a script in it")
    if os.path.exists(first):
        return [*python, *words]
    beside = shutil.which(first, path=os.path.dirname(sys.executable))
    if os.sep not in first and (found := beside or shutil.which(first)):
        return [found, *rest]
    raise NoProgram(f"run: there is no script and no command {first!r}")


def _check_module(name: str) -> None:
    """Raise NoProgram for a module that is not there; nothing of it is imported to find out."""
    folders, above = None, ""
    for part in name.split("."):
        whole = f"{above}{part}"
        try:
            spec = importlib.machinery.PathFinder.find_spec(whole, folders)
            spec = spec or (None if above else importlib.util.find_spec(part))
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise NoProgram(f"run: there is no module {name!r}")
        folders, above = spec.submodule_search_locations, f"{whole}."
        source = getattr(spec.loader, "get_source", str)(whole)
        if folders is None or "__path__" in (source or ""):
            return  # who makes modules known below it is not to be seen from here
