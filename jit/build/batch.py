"""Builds that were started together: behind, or waited for."""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Collection
from typing import Any

from ..cache.lock import FileLock, gate
from ..cache.store import Store, cannot_write, check_writable, make_private
from ..errors import BuildError
from ..machine import settings
from .engine import Job, Recipe, work_folder
from .locks import close_lock, open_lock
from .say import Silent, say
from .workshop import end_all

_LAST_MOMENT = 2.0  # seconds that the end of a process waits for its builds to end


class Batch:
    """Jobs that were started together; `report` hears of them."""

    def __init__(self, jobs: Collection[Job], store: Store, report: Any):
        self.jobs, self._store, self._report = [*jobs], store, report
        self._began = time.perf_counter()
        self._left = len(self.jobs)
        self._guard = threading.Lock()
        self._done = threading.Event()

    def start(self) -> "Batch":
        """Begin, in daemon threads; an error that concerns all ends every job with it."""
        locks: dict[int, FileLock] = {}
        try:
            for job in self.jobs:
                job.recipe.check_machine()
            work = self._store.path.parent / "work"
            for folder in (self._store.path, work):
                make_private(folder)
            check_writable(work)
            with gate(work):  # one process gets all that nobody builds yet
                for job in self.jobs:
                    lock = open_lock(work_folder(job.recipe, job.store, job.inputs))
                    if lock.take():
                        lock.note(pid=os.getpid())
                        locks[id(job)] = lock
                    else:
                        close_lock(lock)
        except (BuildError, OSError) as error:
            for lock in locks.values():
                close_lock(lock)
            text = error if isinstance(error, BuildError) else cannot_write(work.parent, error)
            for job in self.jobs:
                job.end(text)
            self._left = 0
            self._end()
            return self
        _batches.add(self)
        for job in self.jobs:
            arguments = (job, locks.get(id(job)))
            threading.Thread(target=self._run, args=arguments, daemon=True).start()
        return self

    def wait(self) -> None:
        """Wait for all, in front of all others; an interrupt ends the builds too."""
        try:
            for job in self.jobs:
                job.hurry()
            for job in self.jobs:
                job.wait()
            self._done.wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the compilers of these jobs."""
        for job in self.jobs:
            job.stop()

    def abandon(self) -> list[str]:
        """End it without a word, as this process ends; the names of what is not built then.

        Waits a moment for the threads: one that the interpreter's end catches while it prints would
        bring that down.
        """
        left = [job.recipe.label for job in self.jobs if not (job.ended or job.stopped)]
        self._report = Silent()
        self.stop()
        self._done.wait(_LAST_MOMENT)
        return left

    def _run(self, job: Job, lock: FileLock | None) -> None:
        job.run(lock, self._report.show)
        with self._guard:
            self._left -= 1
            if self._left:
                return
        self._end()

    def _end(self) -> None:
        _batches.discard(self)
        keys = [job.key for job in self.jobs if job.result == "built"]
        removed: tuple = ()
        if keys:
            with contextlib.suppress(OSError, ValueError):
                removed = make_room(self._store, keys)
        self._report.end(self.jobs, time.perf_counter() - self._began, removed)
        self._done.set()


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


def build(recipe: Recipe, store: Store, report: Any, why: str = "") -> Job:
    """Build one recipe here and now; its job, which has ended.

    Raises: BuildError.
    """
    job = Job(recipe, store, why)
    Batch([job], store, report).start().wait()
    if job.error:
        raise job.error
    return job


def make_room(store: Store, keep: Collection[str]) -> tuple[int, int]:
    """Keep the cache within LOADER_CACHE_LIMIT; how many builds were removed, and their bytes."""
    from ..cache.prune import prune

    removed, freed, _ = prune(store, settings.cache_limit(), keep=keep)
    return removed, freed
