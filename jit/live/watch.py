"""`loader.watch()`: takes in edits while a script runs, as soon as a file is saved."""

import sys
import threading
from collections.abc import Callable

from ..operators.session import SESSIONS
from .reload import stand_by, take_in_edits
from .report import Report

_LOOK_AGAIN = 500  # milliseconds, for what was built behind


class Watch:
    """A thread that waits for the system to tell of a changed file; `stop()` or `with` ends it."""

    def __init__(self, tell: Callable[[Report | Exception], None], differing: bool) -> None:
        try:
            from watchfiles import watch as changes
        except ImportError:
            raise ImportError(
                "loader.watch() needs the package watchfiles: pip install watchfiles"
            ) from None
        rooms = [s.root / room for s in SESSIONS for room in ("ops", "kernels", "include")]
        self._tell, self._differing, self._stop = tell, differing, threading.Event()
        self._changes = changes(
            *(room for room in rooms if room.is_dir()),
            debounce=50,
            step=10,
            stop_event=self._stop,
            raise_interrupt=False,
            rust_timeout=_LOOK_AGAIN,
            yield_on_timeout=True,
        )
        self._thread = threading.Thread(target=self._run, name="loader.watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take in no more edits; one that is being built still is."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> "Watch":
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self.stop()

    def _run(self) -> None:
        for _ in self._changes:
            try:
                report = take_in_edits(self._differing)
            except (OSError, RuntimeError, ValueError) as error:  # the next edit may do better
                self._tell(error)
            else:
                if report:
                    self._tell(report)


def _print(report: Report | Exception) -> None:
    text = f"loader: {report}" if isinstance(report, Exception) else str(report)
    print(text, file=sys.stderr, flush=True)


def watch(tell: Callable[[Report | Exception], None] = _print, differing: bool = False) -> Watch:
    """Take in edits of operators from now on, as `loader.reload` does, when a file is saved.

    Needs the package watchfiles.

    Args:
        tell: called in a thread with each report, or with what kept an edit from being looked at;
            without it they go to stderr.
        differing: let in what runs, but differs from its reference, too.

    Returns: a handle, whose `stop()` ends it; it may stand in a `with` statement.

    Raises: ImportError where watchfiles is missing.
    """
    stand_by()
    return Watch(tell, differing)
