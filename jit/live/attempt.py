"""One edit of one operator on its way: built and tried in a thread, then put in place or dropped.

The thread changes nothing that calls of the operator could notice. Whoever takes the edit in does
so with `put_in_place`; until then, and if that never comes, the code before goes on working.
"""

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import BuildError
from ..machine import gpus
from ..machine.sources import listed
from ..operators.session import Session
from .python_side import stamp, texts_of
from .rebuild import Rebuilt, rebuild
from .swap import Swap
from .trial import Trial, Trials
from .versions import Edit, Operator, Task, Version

TIME_LIMIT = 5.0  # seconds for a call in a trial

# What a trial ends with where the code cannot even be loaded, so that nothing can force it in.
_DOES_NOT_LOAD = re.compile(
    r"^(\w+\.)*(OSError|SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError"
    r"|BuildError)\b",
    re.MULTILINE,
)


class Attempt:
    """A task being done, of which nobody waits for one `behind`; `ended` once it can be taken in.

    Attributes:
        edit: what became of it so far.
        state: of the files that were built and tried.
        interrupted: True where a Ctrl-C came meanwhile, which may have ended the compiler too.
        stale: True where the files changed meanwhile, or the operator was first used.
        keeping: the thread that puts the build into the store.
        error: what went wrong that is no matter of the edit.
    """

    def __init__(self, task: Task, trials: Trials, force: bool, limit: float, behind: bool):
        self.task, self.state = task, task.state
        self.operator: Operator = task.operator
        self.edit = Edit(self.operator.name, named(task), before=self.operator.versions[-1])
        self.ended = self.interrupted = self.stale = False
        self.behind = behind
        self.error: Exception | None = None
        self._trials, self._force, self._limit = trials, force, limit
        self._claim = threading.Lock()
        self._texts: dict[str, bytes] = {}
        self._swap: Swap | None = None
        self._was_in_use = self.operator.in_use
        self.keeping: threading.Thread | None = None

    def run(self, then: Callable[[], None]) -> None:
        """Do it, unless somebody does already; `then` is called at the end."""
        if not self._claim.acquire(blocking=False):
            return
        begun = time.perf_counter()
        try:
            self._prepare()
        except Exception as error:
            self.error = error
        finally:
            self.edit.seconds += time.perf_counter() - begun
            self.ended = True
            then()

    def put_in_place(self) -> Edit:
        """Put what was built and tried in use; the edit, with what became of it."""
        edit, operator, begun = self.edit, self.operator, time.perf_counter()
        if edit.outcome == "live" and edit.files:
            before = edit.before = operator.versions[-1]
            rebuilt = edit.rebuilt
            after = Version(
                rebuilt.key if rebuilt else before.key,
                rebuilt.inputs["files"] if rebuilt else before.made_of,
                self.state.python,
                before.texts | self._texts,
                self._swap or before.swap,
                {**before.resources, **(rebuilt.resources if rebuilt else {})},
                edit.verdict.microseconds or before.microseconds,
                edit.verdict.difference,
            )
            texts = {p: self._texts[p] for p in self.task.run if p in self._texts}
            try:
                operator.put_in_place(after, texts)
            except BuildError as error:
                edit.outcome, edit.text = "failed", str(error)
        operator.seen = self.state
        edit.seconds += time.perf_counter() - begun
        return edit

    def serves(self, task: Task, force: bool) -> bool:
        """Return True if this has ended well enough to be the attempt at `task`."""
        cut_off = self.error or (self.interrupted and self.edit.outcome == "failed")
        forced = self._force or not force or self.edit.outcome == "live"
        return not cut_off and not self.stale and forced and self.state == task.state

    def _prepare(self) -> None:
        """Build and try; what is right goes into the store."""
        operator, edit, task = self.operator, self.edit, self.task
        session, name = operator.session, operator.name
        if not edit.files:
            return
        if task.left_out:
            edit.notes.append(f"{', '.join(task.left_out)}: {how_to_compile(session)}")
        devices = _devices(session, edit.files)
        trial = self._trials.prepare(session, name, devices)
        timing, rebuilt = self._try_before(devices) if task.compile else None, None
        try:
            self._texts = texts_of(session.root, task.state.python)
            if session.is_foreign(name):
                raise BuildError(
                    f"{name} comes from a library that was loaded before loader; load that anew, "
                    "in a new process",
                    name,
                )
            if task.compile:
                rebuilt = edit.rebuilt = rebuild(session, name)
                self.state = task.state._replace(compiled=rebuilt.inputs["files"])
            self._try(trial, devices)
            self._check_fresh()
            if rebuilt and edit.outcome == "live" and not self.stale:
                if self._was_in_use:
                    self._swap = Swap(name, rebuilt.swap)
                kept, rebuilt = rebuilt, None
                self._keep(kept)
        except BuildError as error:
            edit.outcome, edit.text = "failed", str(error)
            self._check_fresh()
        finally:
            trial.cancel()
            if rebuilt:
                rebuilt.discard()
            if timing:
                timing.join()
            if edit.outcome != "live" or self.stale:
                edit.notes += _about_gone(operator, task)

    def _try(self, trial: Trial, devices: list[str]) -> None:
        edit, rebuilt = self.edit, self.edit.rebuilt
        library = rebuilt.swap if rebuilt else _library_in_use(self.operator)
        verdict = trial.run(library, bool(rebuilt), self._limit, timed="cuda" in devices)
        edit.verdict = verdict
        if verdict.outcome not in ("right", "untried") and not self._force:
            edit.outcome, edit.text = "refused", verdict.text
            loads = verdict.outcome == "raised" and not _DOES_NOT_LOAD.search(verdict.text)
            if verdict.outcome == "wrong" or loads:
                edit.notes.append("loader.reload(force=True) puts it in use all the same")

    def _check_fresh(self) -> None:
        """Notice what changed since the attempt began, so that what was tried is what is used."""
        root, known = self.operator.session.root, self.task.state.python
        self.stale = self.operator.in_use != self._was_in_use or any(
            stamp(root / path) != found for path, found in known.items()
        )

    def _keep(self, rebuilt: Rebuilt) -> None:
        """Put the build into the store: at leisure, or at once for an operator not in use yet.

        The first use of that one loads it from there.
        """
        session, edit = self.operator.session, self.edit

        def keep() -> None:
            facts = {"why": [f"{path} edited" for path in edit.files], "root": str(session.root)}
            try:
                rebuilt.keep(session.store, seconds={"compile": rebuilt.seconds}, **facts)
            except (BuildError, OSError) as error:
                print(
                    f"loader: the edit of {edit.unit} could not be put into the cache, so the next "
                    f"process builds it again: {error}",
                    file=sys.stderr,
                )

        self.keeping = threading.Thread(target=keep, name=f"loader keeps {edit.unit}")
        self.keeping.start()
        if not self._was_in_use:
            self.keeping.join()

    def _try_before(self, devices: list[str]) -> threading.Thread | None:
        """Have the code in use tried while the compiler runs, and timed on a GPU, if it was not."""
        operator, version = self.operator, self.operator.versions[-1]
        timed = "cuda" in devices
        if version.swap or (version.difference and (version.microseconds or not timed)):
            return None

        def measure():
            with contextlib.suppress(BuildError, KeyError):  # not built before: nothing to time
                library = _library_in_use(operator)
                trial = self._trials.prepare(operator.session, operator.name, devices)
                verdict = trial.run(library, False, TIME_LIMIT, timed=timed)
                version.microseconds = verdict.microseconds
                version.difference = verdict.difference
                trial.cancel()

        thread = threading.Thread(target=measure, name=f"loader tries {operator.name}")
        thread.start()
        return thread


def named(task: Task) -> list[str]:
    """Return the files of a task for people to read."""
    gone = set(task.state.gone)
    return [f"{path} (gone)" if path in gone else path for path in task.files]


def not_built(task: Task) -> Edit | None:
    """Return what is to be said of a task that nothing can be built of; None if it can be."""
    operator = task.operator
    session, name = operator.session, operator.name
    if operator.is_gone() or f"ops/{name}.py" in task.state.gone:
        edit = Edit(name, [f"{path} (gone)" for path in task.state.gone], "gone")
        edit.notes = _about_gone(operator, task)
        return edit
    if task.left_out and not task.files:
        return Edit(name, task.left_out, "uncompiled", notes=[how_to_compile(session)])
    return None


def how_to_compile(session: Session) -> str:
    """Return why CUDA sources are not compiled in this process, and what to do about it."""
    if not torch.version.cuda:
        return "CUDA is not compiled here: this torch is for the CPU only; install one with CUDA"
    missing, cures = [], []
    if not session.toolchain.nvcc:
        missing.append("no nvcc")
        cures.append("install one, as `python -m loader doctor` says")
    if not session.toolchain.architectures:
        missing.append("no GPU to compile for")
        cures.append("name one in the environment, TORCH_CUDA_ARCH_LIST=9.0 say")
    return (
        f"CUDA is not compiled here, there is {' and '.join(missing)}; to have it compiled, "
        f"{' and '.join(cures)}, and start the process again"
    )


def _about_gone(operator: Operator, task: Task) -> list[str]:
    """Return a line on the files that are gone, and where they may have gone to."""
    if not task.state.gone:
        return []
    session = operator.session
    line = f"{', '.join(task.state.gone)}: deleted or renamed"
    of_units = {source for unit in session.units.values() for source in unit.sources}
    kernels = [f"kernels/{file}" for file in listed(session.root / "kernels")]
    strays = [p for p in kernels if p.endswith((".cpp", ".cu")) and p not in of_units]
    if strays:
        line += f"; no operator has {', '.join(strays)}, since the files of X are named after it"
    return [line]


def _devices(session: Session, files: list[str]) -> list[str]:
    """Return where an edit of these files is to be tried."""
    if not (gpus.devices() and session.toolchain.architectures):
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
