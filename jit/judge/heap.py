"""Blocks of memory that malloc keeps: to get large ones anew takes longer than to fill them."""

import contextlib
import ctypes
from collections.abc import Iterator

_TRIM, _MMAP = -1, -3  # mallopt's parameters, see mallopt(3)
_USUAL = 32 << 20  # what glibc's own threshold comes to, once blocks as large were freed
_ALL = (1 << 31) - 1


def keep() -> None:
    """Have this process keep what it frees, from now on; nothing where malloc is not glibc's."""
    with contextlib.suppress(AttributeError):
        _set(1 << 30, _ALL)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Have it do so for a while, and give all back: what is timed later gets memory as usual."""
    keep()
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):
            _set(_USUAL, 2 * _USUAL)
            ctypes.CDLL(None).malloc_trim(0)


def _set(mmap: int, trim: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP, mmap)
    libc.mallopt(_TRIM, trim)
