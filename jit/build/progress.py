"""Builds as a person sees them: a live line each on a terminal, elsewhere a line of news."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors.table import bytes_text, duration
from ..machine import settings
from ..machine.sources import unit_of
from .steps import Steps

if TYPE_CHECKING:
    from .engine import Job


def say(text: str) -> None:
    """Tell the user something, on stderr, where there is one that still takes it."""
    with contextlib.suppress(Exception):  # a notebook's kernel that is shutting down, say
        print(f"loader: {text}\n", end="", file=sys.stderr, flush=True)  # whole, beside others'


class Quiet:
    """Says only for whom this process waits."""

    def show(self, event: dict) -> None:
        """Take in a unit's new state."""
        if event["state"] == "waiting":
            say(f"waiting for {describe(event['holder'])}, which is building {event['unit']}")

    def end(self, jobs: list["Job"], seconds: float, removed: tuple[int, int]) -> None:
        """Take in the end of all; how many old builds were removed, and their bytes."""

    def hush(self) -> None:
        """Leave the terminal as it was, and say nothing from now on."""


class Silent(Quiet):
    """Says nothing: of builds that nobody would miss."""

    def show(self, event: dict) -> None:
        """Take in a unit's new state."""


class Progress(Quiet):
    """Says what is built, where and why, how far that is and what time is left.

    On a terminal there is a live line for each unit, with rich, or one for all. `behind` is for
    builds that nobody waits for yet: they get a line at once, and no live ones, which would stand
    in a prompt's way.
    """

    def __init__(self, costs: Mapping[str, float], cache: Path, behind: str = ""):
        """`costs` has the work of each unit, as `OperatorRecipe.cost`."""
        names = [*costs]
        self._count, self._named, self._cache = len(names), f"({', '.join(names)})", cache
        self._guard, self._hushed = threading.Lock(), False
        self._waiting: dict[str, list[str]] = {}
        self._live, self._steps = None, Steps("building", costs)
        if behind:
            units = [name for name in names if name == unit_of(name) or unit_of(name) not in names]
            named = f"{len(units)} operator{'s' * (len(units) != 1)} ({', '.join(units)})"
            say(f"building {named} behind into {cache}: {behind}")
            return
        if self._steps.is_live:
            self._live = _live(names)
        if not self._live:
            self._steps.start()

    def show(self, event: dict) -> None:
        """Take in a unit's new state."""
        if self._hushed:
            return
        text = event["state"]
        if text in ("done", "failed"):
            self._steps.end(event["unit"])
        elif text != "waiting":
            self._steps.show(event["unit"], text)
        if self._live:
            display, tasks = self._live
            if text == "waiting":
                text = f"waiting for {describe(event['holder'])}, which is building it"
            display.start_task(tasks[event["unit"]])
            display.update(tasks[event["unit"]], description=text)
            if text in ("done", "failed"):
                display.stop_task(tasks[event["unit"]])
                display.update(tasks[""], description=self._steps.how_far())
        elif text == "waiting":
            self._say_waiting(event)

    def _say_waiting(self, event: dict) -> None:
        """One line for all that one process is waited for; the units tell within a moment."""
        holder = describe(event["holder"])
        with self._guard:
            first = holder not in self._waiting
            self._waiting.setdefault(holder, []).append(event["unit"])
        if first:
            time.sleep(0.2)
            with self._guard:
                names = sorted(self._waiting.pop(holder))
            say(f"waiting for {holder}, which is building {', '.join(names)}")

    def end(self, jobs: list["Job"], seconds: float, removed: tuple[int, int]) -> None:
        """Say once what was done; nothing where all was ended before anything was."""
        self._clear()
        results, of = [job.result for job in jobs], f"{self._count} {self._named}"
        built = results.count("built")
        if self._hushed or (not built and any(job.stopped for job in jobs)):
            return
        if built or "failed" in results:
            say(f"built {built} of {of} in {seconds:.1f} s into {self._cache}")
        else:
            say(f"waited {seconds:.1f} s for {of}, which another process built")
        count, size = removed
        if count:
            limit = bytes_text(settings.cache_limit())
            say(
                f"removed {count} old builds ({bytes_text(size)}) from {self._cache}, "
                f"which may take {limit} (LOADER_CACHE_LIMIT)"
            )

    def hush(self) -> None:
        """Leave the terminal as it was, and say nothing from now on."""
        self._hushed = True
        self._clear()

    def _clear(self) -> None:
        """Take live lines away."""
        if self._live:
            self._live[0].stop()
        self._steps.stop()


def _live(names: list[str]) -> Any:
    """A running display of rich's, and its tasks by unit; None without rich."""
    try:
        from rich.console import Console
        from rich.progress import Progress as Display
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = SpinnerColumn(), TextColumn("{task.fields[unit]:<28}{task.description}")
    display = Display(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    tasks = {name: display.add_task("queued", unit=name, start=False) for name in names}
    tasks[""] = display.add_task(f"0 of {len(names)} done", unit="all")
    display.start()
    return display, tasks


def describe(holder: dict) -> str:
    """Return `process 123 (12 s)`, and on which machine where that is another one."""
    if holder.get("pid") == "":
        return "a rank that has a compiler"
    host = holder.get("host", "")
    where = f" on {host}" if host and host != socket.gethostname() else ""
    age = duration(time.time() - holder["since"]) if "since" in holder else "just begun"
    return f"process {holder.get('pid', '?')}{where} ({age})"
