"""Locks that a forked child finds open: no thread of its own holds them."""

import os
import threading


class Lock:
    """A reentrant lock for as long as the process lives; a forked child finds it open.

    A thread of the parent that held it is not there in the child, which would wait for ever.
    """

    def __init__(self) -> None:
        self._open()
        os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for it and take it."""
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        """Give it back."""
        self._lock.release()
