"""Locks and forks: a forked child has none of the threads that held its parent's locks."""

import os
import threading


class Lock:
    """A reentrant lock for as long as the process lives; a forked child finds it open.

    A thread of the parent that held it is not there in the child, which would wait for ever. With
    `delays_forks`, a thread that forks waits for it first, for what a child must not get half done.
    """

    def __init__(self, delays_forks: bool = False) -> None:
        self._open()
        os.register_at_fork(after_in_child=self._open)
        if delays_forks:
            os.register_at_fork(before=self.__enter__, after_in_parent=self.__exit__)

    def _open(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for it and take it."""
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        """Give it back."""
        self._lock.release()
