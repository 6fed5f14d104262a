"""As many compilers at once as this process has cores, the most urgent first."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator


def cores() -> int:
    """Return how many cores this process may use; MAX_JOBS bounds them."""
    there, most = len(os.sched_getaffinity(0)), os.environ.get("MAX_JOBS", "")
    return min(there, int(most)) if most.isdigit() and int(most) > 0 else there


class Slots:
    """A semaphore of `cores()` places; of those who wait the one with the least rank is next.

    A rank is asked for anew whenever a place becomes free, so it may change while one waits.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget who holds and who waits, as a forked child has to."""
        self._change = threading.Condition()
        self._taken = 0
        self._waiting: list[Callable[[], tuple]] = []

    @contextlib.contextmanager
    def take(self, rank: Callable[[], tuple]) -> Iterator[None]:
        """Hold a place inside; waits for it. `rank` is a function of this call's own."""
        with self._change:
            self._waiting.append(rank)
            try:
                self._change.wait_for(lambda: self._taken < cores() and self._next() is rank)
            finally:
                self._waiting.remove(rank)
            self._taken += 1
            self._change.notify_all()  # there may be another place
        try:
            yield
        finally:
            with self._change:
                self._taken -= 1
                self._change.notify_all()

    def again(self) -> None:
        """Have those who wait looked at anew: a rank has changed."""
        with self._change:
            self._change.notify_all()

    def _next(self) -> Callable[[], tuple]:
        return min(self._waiting, key=lambda rank: rank())


SLOTS = Slots()
os.register_at_fork(after_in_child=SLOTS.reset)
