"""What torch imports in every Python below `python -m loader run`: extensions go to loader.

`run` puts the folder above into PYTHONPATH, and torch imports what a distribution there names as
entry point of the group `torch.backends` (entry_points.txt, beside this). It has `loader`'s modules
under a name of its own, since a program may have a module `loader` that is another.
"""

import importlib
import sys
from pathlib import Path

__path__ = [str(Path(__file__).parents[4])]


def begin() -> None:
    """Do as `loader.accelerate_extensions()`; raises nothing, since torch would not import."""
    try:
        importlib.import_module("octet_run.jit.extension.torchs").accelerate_extensions()
        settings = importlib.import_module("octet_run.jit.machine.settings")
        if settings.value("LOADER_ERRORS") == "json":
            importlib.import_module("octet_run.jit.machine.told").print_as_json()
    except Exception as error:
        print(f"loader: run: extensions are left to torch: {error!r}", file=sys.stderr)
