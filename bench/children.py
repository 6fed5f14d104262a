"""Forked processes that a benchmark measures in: what each gives comes back as JSON."""

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loader.jit.build.workshop import end_all


class Ended(BaseException):
    """The time of a child is over; no `except Exception` keeps it."""


@dataclass(frozen=True)
class Child:
    """A forked process at work, and the end of the pipe that its answer comes through."""

    process: int
    answer: int

    def result(self) -> dict:
        """Wait for its end; return its answer, an `error` where it was ended before it gave one."""
        with os.fdopen(self.answer) as pipe:
            said = pipe.read()
        os.waitpid(self.process, 0)
        return json.loads(said) if said else {"error": "it was ended"}


def forked(function: Callable[[], object], seconds: float, core: int | None = None) -> Child:
    """Run a function in a silent forked process, which is given a time, and maybe a core alone."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return Child(process, read)
    try:
        os.close(read)
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if core is not None:
            os.sched_setaffinity(0, {core})
            os.environ["MAX_JOBS"] = "1"
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(function(), default=str))
    finally:
        end_all()
        os._exit(0)


def _end(*signal_and_frame: object) -> None:
    """End what this process has started, as ninja does too when it is told to, and its work."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    time.sleep(0.5)
    raise Ended


def side_by_side(
    cases: dict[str, Callable[[], object]], jobs: int, limit: float, until: float
) -> Iterator[tuple[str, dict]]:
    """Yield each case's name and answer as they come, `jobs` at once, each on a core of its own.

    None takes longer than `limit` seconds; at `until`, by time.monotonic(), all are ended, and
    those that had not come to their end are not heard of.
    """
    free, left = sorted(os.sched_getaffinity(0))[:jobs], [*cases]
    if jobs > len(free):
        raise SystemExit(f"--jobs {jobs}: there are {len(free)} cores")
    at_work: dict[int, tuple[str, Child, int]] = {}
    try:
        while (left or at_work) and time.monotonic() < until:
            while left and free:
                name, core = left.pop(0), free.pop()
                child = forked(cases[name], limit, core)
                at_work[child.answer] = name, child, core
            rest = min(60.0, max(0.0, until - time.monotonic()))
            for answer in select.select([*at_work], [], [], rest)[0]:
                name, child, core = at_work.pop(answer)
                free.append(core)
                yield name, child.result()
    finally:
        for _, child, _ in at_work.values():
            os.kill(child.process, signal.SIGALRM)
        for _, child, _ in at_work.values():
            child.result()
