"""How far a long work is: one line that changes on a terminal, plain lines elsewhere."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping

from ..errors.table import duration

_WAITS = "queued"
_TICK = 0.2  # seconds between two looks of a terminal's line


class Steps:
    """Says on stderr how many steps of a work are done, which run since when, what time is left.

    Goes inside a `with`, whose end takes the terminal's line away; steps may run side by side, in
    any threads.

    Attributes:
        is_live: whether there is a terminal.
        plain: seconds between two lines where there is none; None, as in an import, for no lines.
    """

    plain: float | None = None

    def __init__(self, what: str, costs: Mapping[str, float]):
        """`what` is done in steps of these names and costs, in any unit; 0 where nobody knows."""
        self._what, self._costs = what, costs
        self._done: set[str] = set()
        self._running: dict[str, str] = {}  # by step, what it is at
        self._begun = self._said = time.monotonic()
        self._guard, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self.is_live = getattr(sys.stderr, "isatty", bool)()  # a logger's may have `write` alone

    def __enter__(self) -> "Steps":
        """Begin to tell."""
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the line away."""
        self.stop()

    def start(self) -> None:
        """Begin to tell, in a thread."""
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take the line away, and tell no more."""
        self._over.set()
        if self._thread:
            self._thread.join()

    def show(self, step: str, at: str = "") -> None:
        """Take in that a step runs, and what it is at."""
        with self._guard:
            self._running[step] = at

    def end(self, step: str) -> None:
        """Take in that a step is done."""
        with self._guard:
            self._running.pop(step, None)
            self._done.add(step)

    def how_far(self) -> str:
        """Return `3 of 8 done, some 30 s left`; the latter where costs let it be guessed."""
        with self._guard:
            done, spent = len(self._done), sum(self._costs[step] for step in self._done)
        taken = time.monotonic() - self._begun
        left = taken * (sum(self._costs.values()) / spent - 1) if spent else 0
        about = f", some {duration(left)} left" * (left >= 1)
        return f"{done} of {len(self._costs)} done{about}"

    def text(self) -> str:
        """Return all, as `building 12 s: 3 of 8 done, some 30 s left; grid_sample compiling`."""
        with self._guard:
            running = [f"{step} {at}".strip() for step, at in self._running.items() if at != _WAITS]
        taken = duration(time.monotonic() - self._begun)
        parts = [f"{self._what} {taken}: {self.how_far()}", ", ".join(running)]
        return "; ".join(filter(None, parts))

    def _tell(self) -> None:
        while not self._over.wait(_TICK):
            if self.is_live:
                self._write(f"\r\x1b[K{self._cut('loader: ' + self.text())}")
            elif self.plain is not None and time.monotonic() - self._said > self.plain:
                self._said = time.monotonic()
                self._write(f"loader: {self.text()}\n")
        if self.is_live:
            self._write("\r\x1b[K")

    def _cut(self, line: str) -> str:
        """As much of a line as the terminal has room for, so that it can be overwritten."""
        with contextlib.suppress(OSError, ValueError):
            room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            return line if len(line) <= room else f"{line[: max(room - 3, 0)]}..."
        return line

    def _write(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a stream that nobody reads any more
            sys.stderr.write(text)
            sys.stderr.flush()
