"""Why calls go the way they go: what operators tell of their choices between kernels and layouts.

A library tells only while somebody asks (include/choices.h): `loader.explain(function, ...)` for
one call, LOADER_VERBOSE=1 for the life of a process. Otherwise nothing here is even imported.
"""

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors.table import Table
from ..machine.forks import Lock
from . import session

_TAKES = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_SYMBOL = "octet_tell_choices"


class Choice(NamedTuple):
    """What an operator chose, of which ways, in the microseconds that its model says (or NaN)."""

    operator: str
    what: str
    taken: str
    why: str
    ways: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """Return it in one line."""
        costs = [f"{name} {us_text(us)}" for name, us in self.ways if not math.isnan(us)]
        model = f" [by the model: {', '.join(costs)}]" if costs else ""
        return f"{self.operator}: {self.what}: {self.taken}: {self.why}{model}"


def us_text(us: float) -> str:
    """Return a time as people read it; nothing where no model has one."""
    return "" if math.isnan(us) else f"{us:.3g} us" if us < 1000 else f"{us / 1000:.3g} ms"


def _parsed(line: bytes) -> Choice:
    operator, what, taken, why, *rest = line.decode(errors="replace").split("\t")
    ways = zip(rest[::2], map(float, rest[1::2]), strict=False)
    return Choice(operator, what, taken, why, tuple(ways))


class Listeners:
    """Who hears what libraries tell, and the libraries that there are."""

    def __init__(self) -> None:
        self._hear: list[Callable[[Choice], None]] = []
        self._callback = _TAKES(self._tell)  # libraries hold on to it
        self._lock = Lock()
        self._said: set[tuple[str, str, str]] = set()

    def _tell(self, line: bytes) -> None:
        choice = _parsed(line)
        for hear in [*self._hear]:
            hear(choice)

    def verbose(self) -> None:
        """From now on print each choice on stderr when it is first made."""
        self._watch()
        self._hear.append(self._print)

    def _watch(self) -> None:
        """Hear of libraries that are loaded from now on: calls load what they alone need."""
        if self._opened not in session.OPENED:
            session.OPENED.append(self._opened)

    def _opened(self, library: Path) -> None:
        self.joins(ctypes.CDLL(str(library)))

    def _print(self, choice: Choice) -> None:
        key = choice[:3]
        with self._lock:
            if key in self._said:
                return
            self._said.add(key)
        print(f"loader: {choice}", file=sys.stderr, flush=True)

    def joins(self, library: ctypes.CDLL) -> None:
        """Ask a library that was just loaded, where somebody hears."""
        if self._hear:
            self._ask([library])

    @contextlib.contextmanager
    def heard(self) -> Iterator[list[Choice]]:
        """Collect what is chosen meanwhile, in all threads."""
        found: list[Choice] = []
        with self._lock:
            self._watch()
            self._hear.append(found.append)
            self._ask(libraries())
        try:
            yield found
        finally:
            with self._lock:
                self._hear.remove(found.append)
                if not self._hear:
                    self._ask(libraries(), False)

    def _ask(self, those: list[ctypes.CDLL], wanted: bool = True) -> None:
        for library in those:
            if hasattr(library, _SYMBOL):
                getattr(library, _SYMBOL)(self._callback if wanted else None)


def libraries() -> list[ctypes.CDLL]:
    """Return all libraries of operators that this process has loaded."""
    swapped = sys.modules.get("loader.jit.live.swap")  # not imported by who edits nothing
    found = [*(swapped.LIBRARIES if swapped else ())]
    for path in torch.ops.loaded_libraries:
        with contextlib.suppress(OSError):  # which another package may have unloaded
            found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD))
    return found


LISTENERS = Listeners()


def explained(function: Callable, args: tuple[Any, ...], named: dict[str, Any]) -> Table:
    """Call a function, and the gradients that its arguments ask for; what was chosen on the way.

    Arguments' own `.grad` stay as they are.
    """
    with LISTENERS.heard() as found:
        out = function(*args, **named)
        outs = [x for x in _tensors(out) if x.requires_grad]
        wanted = [x for x in _tensors([*args, *named.values()]) if x.requires_grad]
        if outs and wanted:
            ones = [torch.ones_like(x) for x in outs]
            torch.autograd.grad(outs, wanted, ones, allow_unused=True)
        if any(x.is_cuda for x in outs):
            torch.cuda.synchronize()
    table = Table("Which way a call takes", ("operator", "choice", "way", "model", "why"))
    for choice in dict.fromkeys(found):
        head = choice.operator, choice.what
        costs = dict(choice.ways)
        model = us_text(costs.get(choice.taken, math.nan))
        table.rows.append((*head, choice.taken, model, choice.why))
        # Where a way's cost goes by what a look finds, none has the name of the one taken.
        beside = "not" if choice.taken in costs else "model:"
        for name, us in choice.ways:
            if name != choice.taken and not math.isnan(us):
                table.rows.append(("", "", f"{beside} {name}", us_text(us), ""))
    if not found:
        table.rows.append((getattr(function, "__name__", "?"), "none", "", "", _NONE))
    return table


_NONE = "one way for all calls, or not one of loader's operators"


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among values, as far as lists and tuples go."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [x for value in values for x in _tensors(value)]
    return []
