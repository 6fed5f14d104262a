"""As many compilers at once as this process has cores, the most urgent first.

What somebody waits for does not stand behind what nobody does: it has places of its own.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

SETTLE = 0.1  # seconds in which somebody may come to wait, before anything is begun for nobody


def cores() -> int:
    """Return how many cores this process may use; MAX_JOBS bounds them."""
    there, most = len(os.sched_getaffinity(0)), os.environ.get("MAX_JOBS", "")
    return min(there, int(most)) if most.isdigit() and int(most) > 0 else there


def is_urgent(rank: tuple) -> bool:
    """Return True if somebody waits for what has this rank."""
    return rank[:1] < (1,)


class Slots:
    """A semaphore of `cores()` places; of those who wait the one with the least rank is next.

    A rank is asked for anew whenever a place becomes free, so it may change while one waits. Where
    MAX_JOBS does not bound them, the urgent have as many places beside those who are not.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget who holds and who waits, as a forked child has to."""
        self._change = threading.Condition()
        self._taken = self._taken_urgently = 0
        self._waiting: list[Callable[[], tuple]] = []

    @contextlib.contextmanager
    def take(self, rank: Callable[[], tuple]) -> Iterator[bool]:
        """Hold a place inside, True if an urgent one; waits for it. `rank` is this call's own."""
        with self._change:
            self._change.wait_for(lambda: is_urgent(rank()), SETTLE)
            self._waiting.append(rank)
            try:
                self._change.wait_for(lambda: self._is_room(rank) and self._next() is rank)
            finally:
                self._waiting.remove(rank)
            urgent = is_urgent(rank())
            self._taken += 1
            self._taken_urgently += urgent
            self._change.notify_all()  # there may be another place
        try:
            yield urgent
        finally:
            with self._change:
                self._taken -= 1
                self._taken_urgently -= urgent
                self._change.notify_all()

    def again(self) -> None:
        """Have those who wait looked at anew: a rank has changed."""
        with self._change:
            self._change.notify_all()

    def _is_room(self, rank: Callable[[], tuple]) -> bool:
        apart = is_urgent(rank()) and "MAX_JOBS" not in os.environ
        return (self._taken_urgently if apart else self._taken) < cores()

    def _next(self) -> Callable[[], tuple]:
        return min(self._waiting, key=lambda rank: rank())


SLOTS = Slots()
os.register_at_fork(after_in_child=SLOTS.reset)
