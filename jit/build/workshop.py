"""The folder in which a unit's objects are made, by compilers that are run by their arguments.

No shell reads a flag or a path. An object's name holds a digest of all that went into it, and one
of its content: it is used again only where both hold, so neither a date nor a damaged file can pass
for a fresh one. It appears in one step; a compiler that outlives a kill writes to a draft that
nobody reads.
"""

import _thread
import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..cache.lock import lock_of
from ..cache.store import file_digest, remove
from ..errors import BuildError
from ..machine.child import start
from .slots import SLOTS, is_urgent

_KEPT = 3  # objects of each source that stay for edits to come back to
_NICE = 10  # of compilers that nobody waits for, beyond this process's own
# What Ctrl-C in a terminal does not reach. In this process's session, where Python can: Linux may
# share cores out by sessions first, and niceness would count within each alone.
_APART: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)
_TURN = 0.5  # seconds
_OLD = 3600  # seconds after which a draft is certainly nobody's
_KILLED = re.compile(r"\bKilled\b.*\bprogram\b|died due to signal 9\b|was ended by signal 9\b")
_MEMORY = "it was killed twice; where memory is short, set MAX_JOBS=1"


class CompileError(Exception):
    """A compiler or linker failed; the text is all that it printed."""


def _set_niceness(process: subprocess.Popen, beyond: int) -> None:
    """Set that of a tool and what it started; less than before where this process may do so."""
    with contextlib.suppress(OSError):
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PGRP, process.pid, min(ours + beyond, 19))


@dataclass(frozen=True)
class Compile:
    """One run of a compiler; `made_of` digests what it reads, by path, when it is called."""

    source: str  # that people know, relative to the unit's root; names the object too
    command: tuple[str, ...]  # all arguments but `-c FILE -o OBJECT`
    file: str
    made_of: Callable[[], dict[str, str]]
    variant: str = ""  # which of several ways it is compiled in; names the object too


@dataclass(frozen=True)
class Object:
    """A finished object; with `seconds`, and `said` by the compiler, only if it was made now."""

    source: str
    path: Path
    seconds: float | None = None
    said: str = ""
    variant: str = ""


class Ran(NamedTuple):
    """A tool that has run here: its exit status, all that it printed, how long it took."""

    status: int
    said: str
    seconds: float  # without those in which it waited for a core


class Workshop:
    """A work folder whose lock the caller holds."""

    def __init__(self, folder: Path, rank: Callable[[], tuple] = tuple):
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder, self._rank = folder, rank
        self.at_once = False  # so that compilers start here without waiting for a core
        self.began: Callable[[str], None] = lambda stage: None  # is told of each tool that starts
        self.said: list[str] = []  # every command that ran, and what it printed
        self.seconds: dict[str, float] = {}  # of compilers, `compile`, and linkers, `link`
        self.seconds_by_variant: dict[str, float] = {}  # of compilers
        self.ended = False  # by `end`, which is why anything fails from then on
        self._running: set[subprocess.Popen] = set()
        self._guard = threading.Lock()
        _open.add(self)

    def __enter__(self) -> "Workshop":
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End what still runs; a failure in one source must not leave others compiling."""
        self.end()
        _open.discard(self)

    def compile(self, jobs: Iterable[Compile]) -> list[Object]:
        """Make the objects of these sources side by side, or find them here; begun in their order.

        Raises: CompileError with the output of all that failed. A crash leaves objects and drafts.
        """
        results = in_threads(lambda job: self._compile(*job), enumerate(jobs))
        made = [result for result in results if isinstance(result, Object)]
        if len(made) < len(results):
            raise CompileError("\n".join(str(r) for r in results if isinstance(r, CompileError)))
        self._forget_old({each.path for each in made})
        return made

    def link(self, command: list[str], name: str, stage: str = "link") -> Path:
        """Run a linker or compiler (`command` lacks `-o`); the caller removes its product."""
        draft = self._draft(name)
        ran = self.run([*command, "-o", draft.name], stage)
        if ran.status:
            draft.unlink(missing_ok=True)
            raise CompileError(ran.said or f"{command[0]} ended with status {ran.status}")
        return draft

    def run(
        self,
        command: list[str],
        stage: str = "compile",
        note: bool = True,
        turn: int = 0,
        variant: str = "",
    ) -> Ran:
        """Run a tool here when a core is free for it.

        That is not kept in `said` without `note`. Links go before compilers of the same urgency:
        each ends somebody's wait; the compilers of a workshop go in their `turn`. The time counts
        to a stage, and to a `variant` of those that are compiled.
        Raises: CompileError once this workshop has been ended.
        """
        first = (float("-inf"),) if stage == "link" else ()

        def rank() -> tuple:
            urgency, *rest = self._rank() or (-1,)  # without a rank: before all
            return (urgency, *first, *rest, turn)

        slot = SLOTS.take(rank)
        with contextlib.nullcontext(True) if self.at_once else slot as urgent:
            begun = time.perf_counter()
            with self._guard:
                if self.ended:
                    raise CompileError("the build was ended")
                process = start(
                    command,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    **_APART,
                    env={**os.environ, "LC_ALL": "C.UTF-8"},
                )
                self._running.add(process)
                # The machine is for those who work on it, and wait.
                if not urgent and not is_urgent(self._rank()):
                    _set_niceness(process, _NICE)
            self.began(stage)
            try:
                out = process.communicate()[0].decode(errors="replace")
            finally:
                with self._guard:
                    self._running.discard(process)
                    took = time.perf_counter() - begun
                    self.seconds[stage] = self.seconds.get(stage, 0.0) + took
                    if stage == "compile":
                        of_variant = self.seconds_by_variant.get(variant, 0.0)
                        self.seconds_by_variant[variant] = of_variant + took
        if process.returncode < 0:
            out += f"{command[0]} was ended by signal {-process.returncode}\n"
        if note:
            self.said.append(f"{shlex.join(command)}\n{out}")
        return Ran(process.returncode, out, took)

    def hurry(self) -> None:
        """Have the tools that run be as nice as this process: somebody waits for them now."""
        with self._guard:
            for process in self._running:
                _set_niceness(process, 0)

    def end(self) -> None:
        """End the tools that are running, and what they started."""
        with self._guard:
            self.ended = True
            for process in self._running:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _draft(self, name: str) -> Path:
        return self.folder / f".{os.getpid()}-{os.urandom(4).hex()}-{name}"

    def failure(self, name: str, causes: str, log: str, **facts: Any) -> BuildError:
        """Return the error of a build, with where all that was printed lies: in a file `log`.

        `facts` are BuildError's: its kind, problems and the like.
        """
        file = self.folder.parent / log
        try:
            file.write_text("\n".join(self.said), errors="surrogateescape")
        except OSError:
            return BuildError(f"{name} could not be built:\n{causes}", name, **facts)
        text = f"{name} could not be built:\n{causes}\nThe whole output is in {file}"
        return BuildError(text, name, str(file), **facts)

    def _compile(self, turn: int, job: Compile) -> Object | CompileError:
        """Make or find one object, the `turn`th that is asked for.

        Its sources are digested before and after: one that was edited under the compiler's hands
        must not get the name of what was there before.
        """
        stem = re.sub(r"[^\w.]", "_", os.path.basename(job.source), flags=re.ASCII)
        stem += f".{job.variant}" * bool(job.variant)
        for _ in range(5):
            made_of = job.made_of()
            went_in = json.dumps([job.command, job.file, sorted(made_of.items())])
            digest = hashlib.sha256(went_in.encode(errors="surrogateescape")).hexdigest()[:24]
            name = f"{stem}.{digest}"
            if found := self._found(name):
                return Object(job.source, found, variant=job.variant)
            draft = self._draft(f"{name}.o")
            try:
                said, seconds, error = self._run_compiler(job, draft, turn)
                if not self.ended and job.made_of() != made_of:
                    continue
                if error:
                    return error
                final = self.folder / f"{name}-{file_digest(draft)[:32]}.o"
                os.replace(draft, final)
                return Object(job.source, final, seconds, said, variant=job.variant)
            finally:
                draft.unlink(missing_ok=True)
        return CompileError(f"{job.source} kept changing while it was compiled")

    def _run_compiler(
        self, job: Compile, draft: Path, turn: int
    ) -> tuple[str, float, CompileError | None]:
        """Compile to `draft`; what the compiler said, its seconds, the error where it failed."""
        ran = Ran(0, "", 0.0)
        try:
            for _ in range(2):  # once more, as when memory was short for a moment
                command = [*job.command, "-c", job.file, "-o", draft.name]
                ran = self.run(command, turn=turn, variant=job.variant)
                if ran.status == 0:
                    return ran.said, ran.seconds, None
                if self.ended or not _KILLED.search(ran.said):
                    break
        except CompileError as error:
            return "", 0.0, error
        cure = f"\n{_MEMORY}" if _KILLED.search(ran.said) else ""
        text = ran.said + cure or f"{job.command[0]} ended with status {ran.status}"
        return ran.said, ran.seconds, CompileError(text)

    def _found(self, name: str) -> Path | None:
        """The object of this name, its content checked against the digest that it carries."""
        for path in self.folder.glob(f"{name}-*.o"):
            with contextlib.suppress(OSError):
                if path.name == f"{name}-{file_digest(path)[:32]}.o":
                    os.utime(path)
                    return path
            remove(path)
        return None

    def _forget_old(self, wanted: set[Path]) -> None:
        """Keep the last few objects of each source, and no drafts of the dead."""
        by_source: dict[str, list[tuple[float, Path]]] = {}
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                used = path.stat().st_mtime
                if path.name.startswith("."):
                    if used < time.time() - _OLD:
                        path.unlink()
                elif path.suffix == ".o":
                    by_source.setdefault(path.name.rsplit(".", 2)[0], []).append((used, path))
        for found in by_source.values():
            for _, path in sorted(found, reverse=True)[_KEPT:]:
                if path not in wanted:
                    with contextlib.suppress(OSError):
                        path.unlink()


_open: set[Workshop] = set()  # of this process, for its end
os.register_at_fork(after_in_child=_open.clear)  # a parent's compilers are not its child's to end


def end_all() -> None:
    """End every compiler that this process has started."""
    for workshop in [*_open]:
        workshop.end()


@contextlib.contextmanager
def locked_workshop(folder: Path) -> Iterator[Workshop]:
    """A work folder for this process alone, as soon as nobody else builds there."""
    with lock_of(folder) as lock:
        lock.note()
        with Workshop(folder) as shop:
            yield shop


def behind(function: Callable, *arguments: object) -> Future:
    """Have something done in a thread that an interpreter's end does not wait for."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_turns(*futures: Future) -> None:
    """Wait for futures. A Ctrl-C, whichever thread gets it, is raised here within a turn.

    It is another thread that waits: `concurrent.futures.wait`, interrupted as it begins, leaves
    futures locked for good now and then, and who is to set one's result then waits for ever.
    """
    ended = _thread.allocate_lock()
    ended.acquire()

    def wait() -> None:
        concurrent.futures.wait(futures)
        ended.release()

    _thread.start_new_thread(wait, ())
    while not ended.acquire(timeout=_TURN):
        pass


def in_threads(function: Callable, items: Iterable) -> list:
    """Return `function` of each item, each in a thread, or the first exception, at their end."""
    futures = [behind(function, item) for item in items]
    concurrent.futures.wait(futures)
    return [future.result() for future in futures]
