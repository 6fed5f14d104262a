"""Edits of operators in a living process: found, built, tried, put in place; or refused.

    loader.reload()

An edit goes through four steps, and whatever fails leaves the last good build at work: compile what
changed (rebuild.py), try the library in another process against the reference (trial.py), put it in
the place of the one in use (swap.py), and keep it in the store, where the next `import loader`
finds it. `ops/X.py` is run again in its module, so that the functions that others hold change too.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

from ..build.slots import cores
from ..cache.key import manifest
from ..errors import BuildError
from ..machine import toolchain
from ..machine.sources import Sources, listed, source_folders
from ..operators.session import SESSIONS, Session
from .rebuild import Rebuilt, Resources, rebuild, swap_object
from .report import Report, headline
from .swap import Swap
from .trial import Trial, Trials, Verdict, guard_library

TIME_LIMIT = 5.0  # seconds for a call in a trial


@dataclass
class Version:
    """One state of an operator in this process.

    Attributes:
        key: of the build; empty where there is none.
        made_of: the digests of the files that were compiled, by path.
        python: the stamps of the Python files that were run.
        files: the text of all of them.
        swap: the library in place; None for the one that was loaded first.
        difference: the largest from the reference, by dtype, where it was tried.
    """

    key: str
    made_of: dict[str, str]
    python: dict[str, tuple | None] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    swap: Swap | None = None
    resources: dict[str, Resources] = field(default_factory=dict)
    microseconds: float | None = None
    difference: dict[str, float] = field(default_factory=dict)


@dataclass
class Edit:
    """What became of one edit of one operator.

    Attributes:
        outcome: `live`, `refused` (tried, and wrong), `failed` (did not build) or `reverted`.
        files: those that changed.
        text: the error, or what was wrong.
        seconds: from when the edit was found until the new code was in place.
    """

    unit: str
    files: list[str]
    outcome: str = "live"
    text: str = ""
    seconds: float = 0.0
    rebuilt: Rebuilt | None = None
    verdict: Verdict | None = None
    before: Version | None = None
    when: float = field(default_factory=time.time)

    def __str__(self) -> str:
        """What became of it, and its first error, in lines."""
        return "\n".join([headline(self, unit=False), *self.text.split("\n")[:3]]).strip()


class Task(NamedTuple):
    """An operator and what differs of it: files to compile, Python files to run."""

    operator: "Operator"
    compile: list[str]
    run: list[str]
    new: bool  # not seen before
    seen: tuple[dict, dict]


class Operator:
    """One operator of a session, as far as edits go."""

    def __init__(self, session: Session, name: str):
        self.session, self.name = session, name
        key = session.loaded.get(name) or session.keys.get(name, "")
        if recorded := session.store.manifest(name, key):
            made_of = recorded["inputs"]["files"]
        elif name in session.errors:
            made_of = {}  # whatever mends it is an edit
        else:
            made_of = _sources_now(session, name)
        self.versions = [Version(key, made_of)]
        self.seen: tuple[dict, dict] = made_of, self.versions[-1].python

    def look(self, sources: Sources) -> Task | None:
        """What differs from the code in use, if that or all is new since the last task taken.

        An edit that was refused goes on to differ until it is mended.
        """
        live = self.versions[-1]
        unit, toolchain = self.session.units[self.name], self.session.toolchain
        compiled = manifest(unit, toolchain, sources)["files"]
        since = self.session.imported.get(self.name, 0.0)
        python = _python_files(self.session, self.name)
        for path, stamp in python.items():  # imported meanwhile, before or after an edit
            if path not in live.python:
                live.python[path] = stamp if stamp and stamp[0] / 1e9 < since else None
        differ = [p for p, digest in compiled.items() if live.made_of.get(p) != digest]
        again = [p for p, stamp in python.items() if live.python[p] != stamp]
        new = any(self.seen[0].get(p) != digest for p, digest in compiled.items())
        new |= any(self.seen[1].get(p, live.python[p]) != stamp for p, stamp in python.items())
        if not differ and not again and not live.files:
            live.files = _texts(self.session, self.name, compiled)
        return (
            Task(self, differ, again, new, (compiled, python)) if new or differ or again else None
        )


class Reloader:
    """All operators of this process: what changed since they were loaded, and what they were."""

    def __init__(self):
        self._lock = threading.RLock()
        self._operators: dict[tuple[int, str], Operator] = {}
        self._seen: dict[str, tuple | None] = {}
        self._sessions: list[Session] = []
        self._keeping: list[threading.Thread] = []
        self.history: list[Edit] = []

    def stand_by(self) -> None:
        """Get ready for edits: note what there is, and start the process that tries them."""
        with self._lock:
            if self._look():
                self._sessions = []  # edited already: look again before the next cell
            self._trials.start()
            with contextlib.suppress(BuildError, OSError):  # the first edit will tell
                swap_object(SESSIONS[0])

    def is_unchanged(self) -> bool:
        """Whether no source file was touched since they were last looked at; well below 1 ms."""
        return len(self._sessions) == len(SESSIONS) and all(
            _stamp(path) == seen for path, seen in self._seen.items()
        )

    def reload(self, names: Iterable[str] = (), force: bool = False, limit: float = TIME_LIMIT):
        """Take in the edits of the operators named, or of all; a Report of them."""
        with self._lock:
            begun = time.perf_counter()
            tasks = self._look()
            chosen = [t for t in tasks if not names or t.operator.name in names]
            work = [task for task in chosen if task.new or force]
            if len(chosen) < len(tasks):
                self._sessions = []  # there is more to do
            for task in work:
                task.operator.seen = task.seen
            if not work:
                return Report([])
            jobs = max(1, -(-cores() // len(work)))

            def take_in(task):
                return self._take_in(task, force, limit, jobs, begun)

            if len(work) == 1:  # in this thread, where Ctrl-C ends it
                edits = [take_in(work[0])]
            else:
                with ThreadPoolExecutor(len(work)) as pool:
                    edits = [*pool.map(take_in, work)]
            self.history += edits
            return Report(edits)

    def revert(self, name: str) -> Edit:
        """Put the state of an operator before its last edit in place again."""
        with self._lock:
            operator = next((o for o in self._operators.values() if o.name == name), None)
            if operator is None or len(operator.versions) == 1:
                raise ValueError(f"revert: there is no edit of {name!r} in this process to go back")
            begun = time.perf_counter()
            newer, older = operator.versions[-1], operator.versions[-2]
            if any(p not in older.files for p in newer.files if p.endswith(".py")):
                raise ValueError(
                    f"revert: the Python side of {name!r} was edited before loader looked at it, "
                    "so what it was is not known; `%load_ext loader` or `loader.reload()` before "
                    "the first edit lets it be kept"
                )
            operator.versions.pop()
            if older.swap is not newer.swap:
                if older.swap:
                    older.swap.commit()
                newer.swap.withdraw()
            session = operator.session
            session.keys[name] = session.loaded[name] = older.key
            texts = {p: t for p, t in older.files.items() if p.endswith(".py")}
            changed = {p: t for p, t in texts.items() if newer.files.get(p) != t}
            _run_again(session, name, changed)
            differ = [p for p, t in older.files.items() if newer.files.get(p) != t]
            older.python |= dict.fromkeys(changed)  # the files have what was taken back
            edit = Edit(name, differ, "reverted", seconds=time.perf_counter() - begun)
            self.history.append(edit)
            return edit

    def _look(self) -> list[Task]:
        """What is to do, after a look at every file; those are what `is_unchanged` compares with.

        The files are looked at before they are read: an edit in between is found the next time.
        """
        stamps, work = {}, []
        for session in SESSIONS:
            for folder in source_folders(session.root):
                stamps[folder] = _stamp(folder)
                for file in listed(folder):
                    path = os.path.join(folder, file)
                    stamps[path] = _stamp(path)
        self._seen, self._sessions = stamps, [*SESSIONS]
        for session in self._sessions:
            session.discover()
            sources = Sources(session.root, session.toolchain.header_folders)
            for name in [*session.units]:
                if not (session.root / session.units[name].sources[0]).exists():
                    continue
                operator = self._operators.get((id(session), name))
                if operator is None:
                    operator = self._operators[id(session), name] = Operator(session, name)
                if task := operator.look(sources):
                    work.append(task)
        return work

    @cached_property
    def _trials(self) -> Trials:
        return Trials(guard_library(SESSIONS[0].caches[-1]))

    def _take_in(self, task: Task, force: bool, limit: float, jobs: int, begun: float) -> Edit:
        """Build, try and put in place one operator's edit."""
        operator = task.operator
        session, name = operator.session, operator.name
        edit = Edit(name, [*task.compile, *task.run], before=operator.versions[-1])
        devices = _devices(session, edit.files)
        trial = self._trials.prepare(name, session.root, "cuda" in devices)
        rebuilt, timing = None, self._try_before(operator, devices) if task.compile else None
        try:
            if session.is_foreign(name):
                raise BuildError(
                    f"{name} comes from a library that was loaded before loader; load that anew, "
                    "in a new process",
                    name,
                )
            if not edit.files:
                edit.text = "the sources are again those of the code in use"
                return edit
            if task.compile:
                rebuilt = edit.rebuilt = rebuild(session, name)
                session.errors.pop(name, None)
            self._decide(operator, edit, trial, devices, limit, force)
        except BuildError as error:
            edit.outcome, edit.text = "failed", str(error)
        finally:
            trial.cancel()
            if rebuilt and edit.outcome == "live":
                self._keep(session, edit)
            elif rebuilt:
                rebuilt.discard()
        edit.seconds = time.perf_counter() - begun
        if timing:
            timing.join()
        return edit

    def _try_before(self, operator: Operator, devices: list[str]) -> threading.Thread | None:
        """Have the code in use tried while the compiler runs, and timed on a GPU, if it was not."""
        version, timed = operator.versions[-1], "cuda" in devices
        if version.swap or (version.difference and (version.microseconds or not timed)):
            return None

        def measure():
            session, name = operator.session, operator.name
            with contextlib.suppress(BuildError, KeyError):  # not built before: nothing to time
                library = _library_in_use(operator)
                trial = self._trials.prepare(name, session.root, timed)
                verdict = trial.run(library, False, devices, TIME_LIMIT, timed=timed)
                version.microseconds = verdict.microseconds
                version.difference = verdict.difference
                trial.cancel()

        thread = threading.Thread(target=measure, name=f"loader tries {operator.name}")
        thread.start()
        return thread

    def _decide(
        self,
        operator: Operator,
        edit: Edit,
        trial: Trial,
        devices: list[str],
        limit: float,
        force: bool,
    ) -> None:
        """Try what was built, and put it in place if it is right."""
        session, name, rebuilt = operator.session, operator.name, edit.rebuilt
        if not rebuilt:
            self.settle()  # the edit before this one may still be on its way into the store
        library = rebuilt.swap if rebuilt else _library_in_use(operator)
        edit.verdict = trial.run(library, bool(rebuilt), devices, limit, timed="cuda" in devices)
        if edit.verdict.outcome not in ("right", "untried") and not force:
            edit.outcome, edit.text = "refused", edit.verdict.text
            return
        before = operator.versions[-1]
        texts = _texts(session, name, rebuilt.inputs["files"] if rebuilt else ())
        after = Version(
            rebuilt.key if rebuilt else before.key,
            rebuilt.inputs["files"] if rebuilt else before.made_of,
            _python_files(session, name),
            before.files | {p: text for p, text in texts.items() if before.files.get(p) != text},
            before.swap,
            {**before.resources, **(rebuilt.resources if rebuilt else {})},
            edit.verdict.microseconds or before.microseconds,
            edit.verdict.difference,
        )
        if rebuilt and name in session.loaded:
            after.swap = Swap(name, rebuilt.swap)
        changed = {p: after.files[p] for p in edit.files if p.endswith(".py") and p in after.files}
        if changed:
            _run_again(session, name, changed)
        if after.swap is not before.swap:
            after.swap.commit()
            if before.swap:
                before.swap.withdraw()
        if rebuilt:
            session.keys[name] = rebuilt.key
            if name in session.loaded:
                session.loaded[name] = rebuilt.key
        operator.versions.append(after)

    def _keep(self, session: Session, edit: Edit) -> None:
        """Put what is in use into the store, at leisure; at once where it is not loaded yet."""

        def keep():
            facts = {"why": [f"{path} edited" for path in edit.files], "root": str(session.root)}
            facts["seconds"] = {"compile": edit.rebuilt.seconds}
            try:
                edit.rebuilt.keep(session.store, **facts)
            except (BuildError, OSError) as error:
                print(
                    f"loader: the edit of {edit.unit} is in use, but could not be put into the "
                    f"cache, so the next process builds it again: {error}",
                    file=sys.stderr,
                )

        thread = threading.Thread(target=keep, name=f"loader keeps {edit.unit}")
        thread.start()
        self._keeping = [*filter(threading.Thread.is_alive, self._keeping), thread]
        if edit.unit not in session.loaded:
            thread.join()

    def settle(self) -> None:
        """Wait until the store has all that is in use."""
        for thread in self._keeping:
            thread.join()


_reloader = Reloader()


def reload(*names: str, force: bool = False, time_limit: float = TIME_LIMIT):
    """Take in the edits of the operators named (of all, without a name), and go on working.

    What changed is compiled and tried in another process against `X_reference`, on the arguments of
    `samples(device)` in `ops/X.py`, with two derivatives. If it compiles and is right, every holder
    of the operator runs the new code from the next call on: functions, modules, `torch.compile`
    graphs. GPU work under way ends with the old. Otherwise the old code stays.

    Args:
        names: operators, of `loader` or of a `loader.Library`.
        force: put it in place although the trial failed, also what was refused before.
        time_limit: seconds that a call of the operator may take in the trial.

    Returns: an object that prints as a table for each operator, here and in a notebook; `ok` says
        whether all that changed is in use, `edits` holds them one by one.

    Raises: ValueError for a name that is no operator.
    """
    known = {name for session in SESSIONS for name in session.units}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no operator; there are {', '.join(sorted(known))}")
    return _reloader.reload(names, force, time_limit)


def stand_by() -> None:
    """Get ready for edits, so that the first is taken in as quickly as those after it."""
    _reloader.stand_by()


def take_in_edits() -> Report | None:
    """What is done before each cell: a report where there were edits, else None."""
    if _reloader.is_unchanged():
        return None
    report = _reloader.reload()
    return report if report.edits else None


def history() -> list[Edit]:
    """The edits of this process, in their order; the store has those that are in use."""
    _reloader.settle()
    return [*_reloader.history]


def revert(name: str):
    """Go back one edit of an operator: the code that was in use before it is in use again.

    The files stay as they are, and the operator as it is now until they are edited again.

    Returns: a report, as `loader.reload` does.

    Raises: ValueError where this process has taken in no edit of it.
    """
    return Report([_reloader.revert(name)])


def _stamp(path: str) -> tuple | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _sources_now(session: Session, name: str) -> dict[str, str]:
    sources = Sources(session.root, session.toolchain.header_folders)
    return manifest(session.units[name], session.toolchain, sources)["files"]


def _devices(session: Session, files: list[str]) -> list[str]:
    """Where an edit of these files is to be tried."""
    if not (toolchain.has_gpu() and session.toolchain.architectures):
        return ["cpu"]
    if files and all(file.endswith("_cpu.cpp") for file in files):
        return ["cpu"]
    return ["cuda"] if all(file.endswith((".cu", ".cuh")) for file in files) else ["cpu", "cuda"]


def _library_in_use(operator: Operator) -> Path:
    session, name = operator.session, operator.name
    library = session.store.verified(name, session.loaded.get(name) or session.keys[name])
    if library is None:
        raise BuildError(f"{name}: the build that is in use is no longer in the cache", name)
    return library


def _texts(session: Session, name: str, compiled: Iterable[str]) -> dict[str, bytes]:
    """The content of the files named, and of the Python files of a unit."""
    paths = [*compiled, *_python_files(session, name)]
    return {path: (session.root / path).read_bytes() for path in paths}


def _python_files(session: Session, name: str) -> dict[str, tuple]:
    """`ops/X.py` and the modules beside it that it uses, with their stamps; none before its use."""
    module = sys.modules.get(f"{session.package}.{name}")
    files: dict[str, tuple] = {}
    pending = [module] if module else []
    while pending:
        module = pending.pop(0)
        path = os.path.relpath(module.__file__, session.root)
        if path in files:
            continue
        files[path] = _stamp(module.__file__)
        pending += _used(session, module)
    return files


def _used(session: Session, module: ModuleType) -> list[ModuleType]:
    """The modules of the session's package whose things a module has."""
    names = set()
    for value in vars(module).values():
        of = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        names.update(found for found in (of, type(value).__module__) if isinstance(found, str))
    prefix = f"{session.package}."
    return [
        sys.modules[found]
        for found in sorted(names)
        if found.startswith(prefix) and found in sys.modules and found != module.__name__
    ]


def _run_again(session: Session, name: str, texts: dict[str, bytes]) -> None:
    """Run changed Python files again in their modules, the ones that others use first.

    Functions that somebody holds get the code of those that replaced them. A file that raises
    leaves its module as it was.
    """
    if not texts:
        return
    for path in reversed([*_python_files(session, name)]):
        if path not in texts and Path(path).stem != name:
            continue
        module = sys.modules[f"{session.package}.{Path(path).stem}"]
        text = texts.get(path) or (session.root / path).read_bytes()
        before = {**vars(module)}
        try:
            exec(compile(text, module.__file__, "exec"), vars(module))
        except Exception as error:
            vars(module).clear()
            vars(module).update(before)
            raise BuildError(f"{name}: {path}: {type(error).__name__}: {error}", name) from error
        for key, old in before.items():
            new = vars(module).get(key)
            if _is_own(old, module) and _is_own(new, module) and old is not new:
                old.__code__, old.__defaults__ = new.__code__, new.__defaults__
                old.__kwdefaults__, old.__doc__ = new.__kwdefaults__, new.__doc__
                old.__dict__.update(new.__dict__)
                vars(module)[key] = old
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # graphs have the old formulas in them


def _is_own(value, module: ModuleType) -> bool:
    """Whether this is a plain function that a module defines."""
    return (
        isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and not value.__closure__
    )
