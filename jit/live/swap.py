"""Putting a new build of an operator in the place of the one that a process has loaded.

The new library registers its kernels with torch's dispatcher ahead of the old ones (swap.cpp), so
that functions, modules and compiled graphs call the new code from then on. The old one stays
mapped, for calls and GPU work that are still in it, and is called again once that is withdrawn.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import BuildError
from ..errors.diagnose import load_error
from ..machine.sources import HOME

_WITHOUT_SWAP = b"_ZN5torch7Library"  # what torch/library.h calls, which cannot be held back

# Called once other kernels are in use: what holds on to more of a library than its operators.
FOLLOWERS: list[Callable[[], None]] = []
LIBRARIES: list[ctypes.CDLL] = []  # that were put in another one's place


class Swap:
    """A library that can take another one's place, loaded and not yet in use."""

    def __init__(self, unit: str, library: Path):
        """Load `library`; BuildError where it cannot take a place."""
        if _WITHOUT_SWAP in library.read_bytes():
            raise BuildError(
                f"{unit} registers operators through torch/library.h, which a running process "
                "cannot do twice; use torch/csrc/stable/library.h, or start the process again",
                unit,
            )
        try:
            self.unit, self._library = unit, ctypes.CDLL(str(library))
        except OSError as error:
            what = f"{unit}: the new library does not load"
            raise load_error(what, unit, str(error), HOME) from None
        self._new = self._schemas()

    def commit(self) -> None:
        """Have every call from now on come to this library."""
        if error := self._library.octet_swap_commit(self._new.encode()):
            self._library.octet_swap_withdraw()  # what was registered so far
            raise BuildError(f"{self.unit}: torch refused the new kernels ({error})", self.unit)
        self._new = "0" * len(self._new)
        LIBRARIES.append(self._library)
        if choices := sys.modules.get("loader.jit.operators.choices"):
            choices.LISTENERS.joins(self._library)
        _follow()

    def withdraw(self) -> None:
        """Let what was there before be called again, unless something newer is."""
        self._library.octet_swap_withdraw()
        _follow()

    def _schemas(self) -> str:
        """Return a 1 for each schema that torch does not know yet, a 0 for all else."""
        new, texts = "", [ctypes.c_char_p() for _ in range(3)]
        while self._library.octet_swap_entry(ctypes.c_size_t(len(new)), *map(ctypes.byref, texts)):
            namespace, key, text = ((text.value or b"").decode() for text in texts)
            new += "1" if not key and self._is_new(f"{namespace}::{text}") else "0"
        return new

    def _is_new(self, text: str) -> bool:
        schema = torch._C.parse_schema(text)
        try:
            known = torch._C._get_schema(schema.name, schema.overload_name)
        except RuntimeError:
            return True
        if str(known) != str(schema):
            raise BuildError(
                f"{self.unit}: its arguments changed, from {known} to {schema}; what holds the "
                "operator relies on them, so that takes a new process",
                self.unit,
            )
        return False


def _follow() -> None:
    for follow in FOLLOWERS:
        follow()
