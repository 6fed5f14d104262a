"""Locks that a forked child finds open: no thread of its own holds them."""

import os
import threading
import weakref


class Lock:
    """A reentrant lock of one process; a forked child finds it open.

    A thread of the parent that held it is not there in the child, which would wait for ever.
    """

    _all: "weakref.WeakSet[Lock]" = weakref.WeakSet()

    def __init__(self) -> None:
        self._open()
        Lock._all.add(self)

    def _open(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for it and take it."""
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        """Give it back."""
        self._lock.release()

    @classmethod
    def open_all(cls) -> None:
        """Open every lock, as a forked child does first."""
        for lock in cls._all:
            lock._open()


os.register_at_fork(after_in_child=Lock.open_all)
