"""Locks and forks: a forked child has none of the threads that held its parent's locks."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from .sources import OURS

_T = TypeVar("_T")
_LONGEST = 10.0  # seconds that a fork waits for what other threads import
_LOOK_AGAIN = 0.001  # seconds


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


class cached_property(Generic[_T]):
    """That of functools as it is from Python 3.12 on: no lock is held while `get` runs.

    Before, all instances share one, and a child forked meanwhile could never get the value.
    """

    def __init__(self, get: Callable[[Any], _T]):
        self._get, self.__doc__ = get, get.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Note under which name an instance keeps it."""
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Work it out once; an instance that has it does not ask again."""
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._get(instance)
        return value


def _imports_for_us(frame: FrameType | None) -> bool:
    """True if a thread, which is at `frame`, imports something for one of our functions."""
    importing = False
    while frame:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            importing = True
        elif importing and file.startswith(OURS):
            return True
        frame = frame.f_back
    return False


_in_vain: set[int] = set()  # threads at whose imports a fork has waited _LONGEST


def _let_imports_end() -> None:
    """Wait until no other thread imports anything for us; once for what takes longer.

    A child finds a module that was being imported locked by a thread that it has not, and would
    wait for ever. Modules come in at first use here, so any thread may be importing.
    """
    end = time.monotonic() + _LONGEST
    while len(sys._current_frames()) > 1:
        time.sleep(0)  # from here on nobody else runs for some milliseconds
        frames = sys._current_frames()
        del frames[threading.get_ident()]
        importing = {thread for thread, frame in frames.items() if _imports_for_us(frame)}
        _in_vain.intersection_update(importing)
        if time.monotonic() > end:
            _in_vain.update(importing)
        if importing <= _in_vain:
            return
        time.sleep(_LOOK_AGAIN)


os.register_at_fork(before=_let_imports_end, after_in_child=_in_vain.clear)
