"""What is judged, loaded in the process that runs it: KernelBench's form, a function, an operator.

KernelBench's (https://github.com/ScalingIntelligence/KernelBench) is a file with a class `Model`
(the candidate's `ModelNew`), whose instances are called, `get_inputs()` and `get_init_inputs()`.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch


class Unusable(Exception):
    """A file has not what is needed to judge it: the user's mistake, no verdict."""


class Source(NamedTuple):
    """Where code comes from, as plain data: a file, a name in it, or an operator of loader's."""

    path: str = ""
    name: str = ""  # a function's; KernelBench's class without one
    operator: str = ""

    def label(self) -> str:
        """Return how a report calls it."""
        if self.operator:
            return f"loader.{self.operator}"
        return f"{self.path}:{self.name}" if self.name else self.path


class Form:
    """Code that was loaded; `make(seed)` is to be called before `function`."""

    def __init__(self, source: Source, classes: tuple[str, ...], path: Path | None = None):
        """Load it; `path` is where a copy of its file lies."""
        self.function: Callable | None = None
        self._class: Callable | None = None
        self.samples: Callable | None = None  # of an operator, its own arguments
        self.module: ModuleType | Any = None
        if source.operator:
            self._operator(source)
            return
        self.module = _execute(path or Path(source.path))
        if source.name:
            self.function = _attribute(self.module, source.name, source.path)
            return
        self._class = next(filter(None, (getattr(self.module, c, None) for c in classes)), None)
        if self._class is None:
            wanted = " or ".join(f"`{name}`" for name in classes)
            raise Unusable(
                f"{source.path} has no class {wanted}; KernelBench's form needs one, and a "
                f"function is named as {Path(source.path).name}:NAME"
            )

    def _operator(self, source: Source) -> None:
        import loader

        side = loader._session.module(loader._session.named((source.operator,))[0])
        name = source.name or source.operator
        self.module, self.function = side, _attribute(side, name, side.__file__)
        self.samples = getattr(side, "samples", None)

    def init_inputs(self) -> Any:
        """Return what the class is made with."""
        return getattr(self.module, "get_init_inputs", list)() if self._class else []

    def make(self, arguments: Any, seed: int) -> None:
        """Make the model, its weights drawn with this seed."""
        if self._class is None:
            return
        torch.manual_seed(seed)
        if isinstance(arguments, dict):
            model = self._class(**arguments)
        elif len(arguments) == 2 and isinstance(arguments[1], dict):
            model = self._class(*arguments[0], **arguments[1])
        else:
            model = self._class(*arguments)
        self.function = model

    def inputs(self, name: str, seed: int) -> Any:
        """Return arguments drawn with this seed, by `get_inputs` or a function of another name."""
        torch.manual_seed(seed)
        if self.samples and not hasattr(self.module, name):
            found = list(self.samples("cpu"))
            return found[seed % len(found)]
        make = _attribute(self.module, name, getattr(self.module, "__file__", ""))
        return make(seed) if inspect.signature(make).parameters else make()


def _attribute(module: Any, name: str, path: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise Unusable(f"{path} has no function {name!r}")
    return found


def _execute(path: Path) -> ModuleType:
    # A file may be called numpy.py, and means no harm.
    spec = importlib.util.spec_from_file_location(f"judged_{path.stem.replace('.', '_')}", path)
    if spec is None or spec.loader is None:
        raise Unusable(f"{path} is no Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
