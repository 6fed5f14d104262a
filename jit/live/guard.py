"""Tensors on the CPU between pages that may not be touched (guard.cpp), where that is preloaded."""

import contextlib
import ctypes
from collections.abc import Iterator

import torch


class Guard:
    """Within it every new tensor is guarded, and filled with NaN until it is written."""

    def __init__(self, wanted: bool):
        process = ctypes.CDLL(None)
        self._process = process if wanted and hasattr(process, "octet_guard") else None

    def __enter__(self) -> "Guard":
        """Guard what is allocated from now on."""
        self._arm(True)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave alone what is allocated from now on."""
        self._arm(False)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Not for what runs here: it is trusted, and quicker so; in one thread too."""
        threads = torch.get_num_threads()
        self._arm(False)
        torch.set_num_threads(1)  # the tensors are small, and cores may be busy
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            self._arm(True)

    def outside(self) -> str:
        """Return what was written beside a tensor, "" if nothing was."""
        if not self._process:
            return ""
        self._process.octet_guard_check.restype = ctypes.c_char_p
        return self._process.octet_guard_check().decode()

    def _arm(self, on: bool) -> None:
        if self._process:
            self._process.octet_guard(int(on))
