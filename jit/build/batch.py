"""Builds that were started together: behind, or waited for."""

import atexit
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Collection

from ..cache.lock import gate
from ..cache.store import Store, cannot_write, make_private
from ..errors import BuildError
from ..machine import settings
from .engine import Job, Recipe
from .progress import Quiet, Silent, say
from .workshop import behind, end_all, in_threads, in_turns

_LAST_MOMENT = 2.0  # seconds that the end of a process waits for its builds to end


class Batch:
    """Jobs that were started together; `report` hears of them."""

    def __init__(self, jobs: Collection[Job], store: Store, report: Quiet):
        self.jobs, self._store, self._report = [*jobs], store, report
        self._begun: list[concurrent.futures.Future] = []  # none, where an interpreter ends before

    def start(self) -> "Batch":
        """Begin, in daemon threads; an error that concerns all ends every job with it."""
        work = self._store.path.parent / "work"
        try:
            for job in self.jobs:
                job.check_machine()
            for folder in (self._store.path, work):
                make_private(folder)
            with gate(work):  # one process gets all that nobody builds yet
                for job in self.jobs:
                    job.claim()
        except (BuildError, OSError) as error:
            text = error if isinstance(error, BuildError) else cannot_write(work.parent, error)
            for job in self.jobs:
                job.end(text)
        _batches.add(self)
        self._begun.append(behind(self._run))
        return self

    def wait(self) -> None:
        """Wait for all, in front of all others; an interrupt ends the builds too."""
        try:
            for job in self.jobs:
                job.hurry()
            in_turns(*self._begun)
            for done in self._begun:
                done.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the compilers of these jobs."""
        for job in self.jobs:
            job.stop()

    def abandon(self) -> list[str]:
        """End it as this process ends; the names of what is not built then.

        Without a word, unless all is built and that is still to be said. Waits for its threads: one
        that is caught printing would bring the interpreter's end down.
        """
        missed = [] if isinstance(self._report, Silent) else self.jobs
        left = [job.recipe.label for job in missed if not (job.ended or job.stopped)]
        if not all(job.ended for job in self.jobs):
            self._report.hush()
            self.stop()
        concurrent.futures.wait(self._begun, _LAST_MOMENT)
        return left

    def _run(self) -> None:
        begun, show = time.perf_counter(), self._report.show
        in_threads(lambda job: job.run(show), [job for job in self.jobs if not job.ended])
        keys = [job.key for job in self.jobs if job.result == "built"]
        removed = (0, 0)
        if keys:
            with contextlib.suppress(OSError, ValueError):
                removed = make_room(self._store, keys)
        self._report.end(self.jobs, time.perf_counter() - begun, removed)
        _batches.discard(self)


_batches: set[Batch] = set()  # those under way
os.register_at_fork(after_in_child=_batches.clear)


def _at_exit() -> None:
    """End what is still being built: nobody would take the objects in."""
    left = [name for batch in [*_batches] for name in batch.abandon()]
    end_all()
    if left:
        say(
            f"this process ends while {', '.join(left)} "
            f"{'is' if len(left) == 1 else 'are'} being built; what is compiled is kept, "
            "`python -m loader build` builds the rest"
        )


atexit.register(_at_exit)


def build(recipe: Recipe, store: Store, report: Quiet) -> Job:
    """Build one recipe here and now; its job, which has ended, or BuildError."""
    job = Job(recipe, store)
    Batch([job], store, report).start().wait()
    if job.error:
        raise job.error
    return job


def make_room(store: Store, keep: Collection[str]) -> tuple[int, int]:
    """Keep the cache within LOADER_CACHE_LIMIT; how many builds were removed, and their bytes."""
    from ..cache.prune import prune

    removed, freed, _ = prune(store, settings.cache_limit(), keep=keep)
    return removed, freed
