"""Locks of work folders: whoever holds one may build there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..cache.lock import FileLock
from .workshop import Workshop

_held: set[int] = set()  # descriptors of locks, which a forked child must not keep


def _forget_locks() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def open_lock(folder: Path) -> FileLock:
    """Return the lock of a work folder, not taken yet; `close_lock` ends it."""
    lock = FileLock(Path(f"{folder}.lock"))
    _held.add(lock.descriptor)
    return lock


def close_lock(lock: FileLock) -> None:
    """Free a lock and forget it."""
    if lock.descriptor in _held:  # else this is a fork's copy, which was closed
        _held.discard(lock.descriptor)
        lock.close()


@contextlib.contextmanager
def locked_workshop(folder: Path) -> Iterator[Workshop]:
    """A work folder for this process alone, as soon as nobody else builds there.

    What still runs at the end is ended; finished objects stay.
    """
    lock = open_lock(folder)
    try:
        lock.take(wait=True)
        lock.note(pid=os.getpid())
        with Workshop(folder) as shop:
            yield shop
    finally:
        close_lock(lock)
