"""Building what the store lacks: who builds and who waits, a worker that compiles, progress."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from ..cache.explain import FOR_EDIT
from ..cache.key import built_sources, key
from ..cache.lock import FileLock, gate
from ..cache.store import Store, cannot_write, check_writable, make_private
from ..errors import BuildError
from ..errors.table import bytes_text, duration
from ..machine import settings
from ..machine.sources import HOME, Unit
from ..machine.toolchain import Toolchain
from .receipt import Receipt

# The worker gets the package `loader` without its body, which would build in turn.
_START = (
    "import sys, types; package = types.ModuleType('loader'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['loader'] = package; from loader.jit.build.worker import main; main()"
)
# Neither the environment nor the current folder may change what it imports before its sys.path is
# set; -I does not know PYTHONDONTWRITEBYTECODE.
_FLAGS = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
_LOOK_AGAIN = 0.1  # seconds between two looks at what others build
_SAY_AGAIN = 60.0  # seconds between two messages that this process waits

# A child forked meanwhile must not keep the locks of a build that is not its own.
_held: set[int] = set()
os.register_at_fork(after_in_child=lambda: [os.close(descriptor) for descriptor in _held])


class Builder:
    """Builds units into the last of `caches`; reusable, and safe in any number of processes.

    A process takes the locks of all units that nobody else is building, and hands them down to a
    worker that compiles these side by side. It waits for the others: until each is in the store,
    has failed, or its builder is dead, in which case it takes over.
    """

    def __init__(
        self, toolchain: Toolchain, root: Path, caches: tuple[Path, ...], receipt: Receipt
    ):
        self._toolchain, self._root, self._caches = toolchain, root, caches
        self._receipt = receipt
        self._store = Store(caches)
        self._work = caches[-1] / "work"
        self._sources: dict[str, tuple[str, ...]] = {}  # of each unit

    def build(
        self, units: list[Unit], manifests: dict[str, dict], why: dict[str, str]
    ) -> dict[str, BuildError]:
        """Build `units`, whose `manifests` are given; the errors of those that failed, by name.

        `why` has a reason for those that are built although their sources are not new.
        """
        try:
            self._check_machine()
            with _Progress([unit.name for unit in units], self._caches[-1]) as self._progress:
                return self._build(units, manifests, why)
        except BuildError as error:
            return {unit.name: error for unit in units}
        except OSError as error:
            text = cannot_write(self._caches[-1], error)
            return {unit.name: text for unit in units}

    def _check_machine(self) -> None:
        if self._toolchain.cxx is None:
            command = os.environ.get("CXX") or "c++"
            raise BuildError(
                f"no C++ compiler: `{command}` is not on PATH; install one "
                "(Debian, Ubuntu: apt install g++) or set CXX to one that supports C++17"
            )
        for folder in (self._store.path, self._work):
            make_private(folder)

    def _build(
        self, units: list[Unit], manifests: dict[str, dict], why: dict[str, str]
    ) -> dict[str, BuildError]:
        # The longest first, so that no core idles at the end.
        pending = {unit.name: unit for unit in sorted(units, key=self._work_in, reverse=True)}
        self._sources = {unit.name: unit.sources for unit in units}
        keys = {name: key(manifests[name]) for name in pending}
        folders = {n: work_folder(self._work, pending[n], manifests[n]) for n in pending}
        errors: dict[str, BuildError] = {}
        waiting: dict[str, float] = {}  # since when this process waits for a unit
        attempts = dict.fromkeys(pending, 0)
        started, said, built = time.perf_counter(), 0.0, 0
        locks = self._open_locks(folders)
        try:
            while pending:
                with gate(self._work):
                    mine = [name for name in pending if locks[name].take()]
                for name in [*mine]:
                    if name in waiting:
                        self._receipt.add(name, "wait", time.time() - waiting[name])
                    failed = self._failed_meanwhile(
                        locks[name], waiting.pop(name, None), keys[name]
                    )
                    if failed:
                        errors[name] = failed
                    elif not self._is_there(name, keys[name], why.get(name)):
                        continue
                    self._receipt.result(name, "failed" if failed else "waited")
                    self._progress.show({"unit": name, "state": "failed" if failed else "done"})
                    mine.remove(name)
                    del pending[name]
                    self._forget(locks.pop(name), release=True)
                if mine:
                    orders = [
                        {
                            "name": name,
                            "sources": pending[name].sources,
                            "folder": str(folders[name]),
                            "lock": locks[name].descriptor,
                            "why": [why[name]] if name in why else [],
                        }
                        for name in mine
                    ]
                    ended = self._run_worker(orders, {name: locks.pop(name) for name in mine})
                    for name in mine:
                        attempts[name] += 1
                        if name in ended or attempts[name] == 2:
                            del pending[name]
                            failed = ended.get(name, _killed(name))
                            self._receipt.result(name, "failed" if failed else "built")
                            if failed:
                                errors[name] = failed
                            else:
                                built += 1
                    locks |= self._open_locks({n: folders[n] for n in mine if n in pending})
                elif pending:
                    holders = {name: locks[name].read() for name in pending}
                    for name, holder in holders.items():
                        waiting.setdefault(name, time.time())
                        self._progress.show({"unit": name, "state": "waiting", "holder": holder})
                    if time.perf_counter() - started > said:
                        self._progress.say_waiting(holders)
                        said += _SAY_AGAIN
                    self._wait_for(locks[next(iter(pending))], _SAY_AGAIN)
        finally:
            for lock in locks.values():
                self._forget(lock)
        self._progress.end(built, len(errors), time.perf_counter() - started)
        if built:
            self._make_room(keys.values())
        return errors

    def _is_there(self, name: str, key: str, why: str | None) -> bool:
        """Whether somebody built a unit meanwhile; an old one, with a `why`, is not trusted."""
        if why == FOR_EDIT:
            return False
        if why:
            return self._store.verified(name, key) is not None
        return self._store.has(name, key)

    def _wait_for(self, lock: FileLock, most: float) -> None:
        """Until nobody holds the lock, for `most` seconds; costs next to nothing meanwhile."""
        end = time.perf_counter() + most
        while time.perf_counter() < end:
            time.sleep(_LOOK_AGAIN)
            if lock.take():
                lock.unlock()
                return

    def _open_locks(self, folders: dict[str, Path]) -> dict[str, FileLock]:
        locks = {name: FileLock(Path(f"{folder}.lock")) for name, folder in folders.items()}
        _held.update(lock.descriptor for lock in locks.values())
        return locks

    def _forget(self, lock: FileLock, release: bool = False) -> None:
        _held.discard(lock.descriptor)
        lock.release() if release else lock.close()

    def _work_in(self, unit: Unit) -> int:
        """A guess at the work in a unit, by the size of its sources: nvcc takes longest."""
        return sum(
            (unit.root / source).stat().st_size + (100_000 if source.endswith(".cu") else 0)
            for source in built_sources(unit, self._toolchain)
        )

    def _failed_meanwhile(self, lock: FileLock, since: float | None, key: str) -> BuildError | None:
        """The error of the build that this process waited for, if that was of these sources."""
        noted = lock.read()
        if since is None or noted.get("key") != key or noted.get("since", 0) < since:
            return None
        return self._error({"unit": lock.path.name.rpartition("-")[0], **noted["failed"]})

    def _run_worker(
        self, tasks: list[dict], locks: dict[str, FileLock]
    ) -> dict[str, BuildError | None]:
        """Compile what `tasks` say; the error, or None, of each that came to an end.

        The worker has the locks from here on, and this process no longer: should the worker be
        killed, the locks are free.
        """
        at_once = cores()
        order = {
            "units": tasks,
            "toolchain": asdict(self._toolchain),
            "root": str(self._root),
            "caches": [str(cache) for cache in self._caches],
            "sys_path": sys.path,
            "side_by_side": min(at_once, len(tasks)),
            "jobs": max(1, -(-at_once // len(tasks))),
        }
        ended: dict[str, BuildError | None] = {}
        with tempfile.TemporaryFile() as complaints:
            try:
                for folder in (self._store.path, self._work):
                    check_writable(folder)
                for lock in locks.values():
                    lock.note(pid=os.getpid())
                worker = subprocess.Popen(
                    [sys.executable, *_FLAGS, "-c", _START, str(HOME)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                    text=True,
                    pass_fds=[task["lock"] for task in tasks],
                    start_new_session=True,  # so that all it started can be ended with it
                )
                for lock in locks.values():
                    lock.note(pid=worker.pid)
            finally:
                for lock in locks.values():
                    self._forget(lock)
            with worker:
                try:
                    with contextlib.suppress(BrokenPipeError):  # it died; what follows notices
                        worker.stdin.write(json.dumps(order) + "\n")
                        worker.stdin.flush()
                    for line in worker.stdout:
                        self._note(json.loads(line), ended)
                except BaseException:
                    end(worker)
                    raise
            complaints.seek(0)
            last = complaints.read().decode(errors="replace").strip().splitlines()[-5:]
        if worker.returncode > 0:  # it failed by itself, and would again
            for task in tasks:
                text = "\n".join([f"{task['name']}: the build process ended early:", *last])
                ended.setdefault(task["name"], BuildError(text, task["name"]))
        return ended

    def _note(self, event: dict, ended: dict[str, BuildError | None]) -> None:
        """Take in what the worker reports."""
        self._progress.show(event)
        if event["state"] == "done":
            ended[event["unit"]] = None
            for stage, seconds in event["seconds"].items():
                self._receipt.add(event["unit"], stage, seconds)
        if event["state"] == "failed":
            ended[event["unit"]] = self._error(event)

    def _error(self, event: dict) -> BuildError:
        """What a person wants to read of a failed build."""
        from ..errors.diagnose import explain_failure

        unit, log, text = event["unit"], event["log"], event["error"]
        if log:
            try:
                text = Path(log).read_text(errors="replace")
            except OSError:
                log = None
        causes = explain_failure(text, self._root, self._sources[unit])
        where = f"\nThe whole output is in {log}" if log else ""
        return BuildError(f"{unit} could not be built:\n{causes}{where}", unit, log)

    def _make_room(self, keep: Collection[str]) -> None:
        from ..cache.prune import prune

        limit = settings.cache_limit()
        removed, freed, _ = prune(self._store, limit, keep=keep)
        if removed:
            _say(
                f"removed {removed} old builds ({bytes_text(freed)}) from {self._caches[-1]}, "
                f"which may take {bytes_text(limit)} (LOADER_CACHE_LIMIT)"
            )


def work_folder(work: Path, unit: Unit, inputs: dict) -> Path:
    """The unit's own below `work`: it changes with toolchain and checkout, not with an edit."""
    maker = {"toolchain": inputs["toolchain"], "root": str(unit.root)}
    return work / f"{unit.name}-{key(maker)[:12]}"


def end(worker: subprocess.Popen) -> None:
    """End a worker and all that it started: its session, as ninja gives each compiler a group."""
    for _ in range(2):  # again, for those that were born meanwhile
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                if os.getsid(pid) == worker.pid:
                    os.kill(pid, signal.SIGKILL)


def cores() -> int:
    """Cores this process may use; MAX_JOBS bounds them."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    most = os.environ.get("MAX_JOBS", "")
    return min(cores, int(most)) if most.isdigit() and int(most) > 0 else cores


def _killed(unit: str) -> BuildError:
    return BuildError(
        f"{unit}: its build was killed twice; where memory is short, set MAX_JOBS=1", unit
    )


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"loader: {text}", file=sys.stderr, flush=True)


def _describe(holder: dict) -> str:
    """`process 123 (12 s)`, and on which machine where that is another one."""
    host = holder.get("host", "")
    where = f" on {host}" if host and host != socket.gethostname() else ""
    age = duration(time.time() - holder["since"]) if "since" in holder else "just begun"
    return f"process {holder.get('pid', '?')}{where} ({age})"


class _Progress:
    """On a terminal a live line for each unit, on stderr; elsewhere a line when there is news."""

    def __init__(self, names: list[str], cache: Path):
        self._names, self._cache, self._live = names, cache, None
        if sys.stderr is not None and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
            except ImportError:
                return
            columns = SpinnerColumn(), TextColumn("{task.fields[unit]:<28}{task.description}")
            self._live = Progress(
                *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
            )
            self._tasks = {
                name: self._live.add_task("queued", unit=name, start=False) for name in names
            }

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def show(self, event: dict) -> None:
        """A unit's new state."""
        if not self._live:
            return
        text = event["state"]
        if text == "waiting":
            text = f"waiting for {_describe(event['holder'])}, which is building it"
        task = self._tasks[event["unit"]]
        self._live.start_task(task)
        self._live.update(task, description=text)
        if event["state"] in ("done", "failed"):
            self._live.stop_task(task)

    def say_waiting(self, holders: dict[str, dict]) -> None:
        """Say for whom this process waits, where no live line does."""
        if not self._live:
            by_holder: dict[str, list[str]] = {}
            for name, holder in holders.items():
                by_holder.setdefault(_describe(holder), []).append(name)
            for holder, names in by_holder.items():
                _say(f"waiting for {holder}, which is building {', '.join(names)}")

    def end(self, built: int, failed: int, seconds: float) -> None:
        """Say once what was done."""
        if self._live:
            self._live.stop()
        of = f"{len(self._names)} ({', '.join(self._names)})"
        if built or failed:
            _say(f"built {built} of {of} in {seconds:.1f} s into {self._cache}")
        else:
            _say(f"waited {seconds:.1f} s for {of}, which another process built")

    def __exit__(self, *exception) -> None:
        if self._live:
            self._live.stop()
