"""Builds as a person sees them: a live line each on a terminal, elsewhere a line of news."""

import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ..errors.table import bytes_text, duration
from ..machine import settings
from .engine import Job
from .say import Silent, say


class Quiet(Silent):
    """Says only for whom this process waits."""

    def show(self, event: dict) -> None:
        """Take in a unit's new state."""
        if event["state"] == "waiting":
            say(f"waiting for {describe(event['holder'])}, which is building {event['unit']}")


class Progress(Quiet):
    """Says what is built, where and why; on a terminal with a live line for each unit.

    `behind` is for builds that nobody waits for yet: they get a line at once, and no live ones,
    which would stand in a prompt's way.
    """

    def __init__(self, names: list[str], cache: Path, behind: str = ""):
        self._names, self._cache, self._live = names, cache, None
        self._guard = threading.Lock()
        self._waiting: dict = {}
        if behind:
            say(f"building {_counted(names)} behind into {cache}: {behind}")
        elif sys.stderr is not None and sys.stderr.isatty():
            self._live = _live(names)

    def show(self, event: dict) -> None:
        """Take in a unit's new state."""
        if not self._live:
            if event["state"] == "waiting":
                self._say_waiting(event)
            return
        text, (progress, tasks) = event["state"], self._live
        if text == "waiting":
            text = f"waiting for {describe(event['holder'])}, which is building it"
        progress.start_task(tasks[event["unit"]])
        progress.update(tasks[event["unit"]], description=text)
        if event["state"] in ("done", "failed"):
            progress.stop_task(tasks[event["unit"]])

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

    def end(self, jobs: list[Job], seconds: float, removed: tuple) -> None:
        """Say once what was done."""
        if self._live:
            self._live[0].stop()
        built = sum(job.result == "built" for job in jobs)
        failed = sum(job.result == "failed" for job in jobs)
        if built or failed:
            of = f"{len(self._names)} ({', '.join(self._names)})"
            say(f"built {built} of {of} in {seconds:.1f} s into {self._cache}")
        else:
            said = f"{len(self._names)} ({', '.join(self._names)})"
            say(f"waited {seconds:.1f} s for {said}, which another process built")
        if removed and removed[0]:
            limit = bytes_text(settings.cache_limit())
            say(
                f"removed {removed[0]} old builds ({bytes_text(removed[1])}) from {self._cache}, "
                f"which may take {limit} (LOADER_CACHE_LIMIT)"
            )


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
    display.start()
    return display, tasks


def _counted(names: list[str]) -> str:
    return f"{len(names)} operator{'s' * (len(names) != 1)} ({', '.join(names)})"


def describe(holder: dict) -> str:
    """Return `process 123 (12 s)`, and on which machine where that is another one."""
    host = holder.get("host", "")
    where = f" on {host}" if host and host != socket.gethostname() else ""
    age = duration(time.time() - holder["since"]) if "since" in holder else "just begun"
    return f"process {holder.get('pid', '?')}{where} ({age})"
