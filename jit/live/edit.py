"""One edit of one operator on its way: found, built and tried in a thread, put in place or dropped.

The thread changes nothing that calls of the operator could notice. Whoever takes the edit in does
so with `put_in_place`; until then, and if that never comes, the code before goes on working.
"""

import contextlib
import re
import sys
import threading
import time
from pathlib import Path

import torch

from ..build.engine import refuse_if_never
from ..errors import BuildError
from ..machine import gpus
from ..machine.sources import listed
from ..operators.rest import key_in_use
from .python_side import stamp, texts_of
from .rebuild import Rebuilt, rebuild
from .swap import Swap
from .trial import Trial, Trials, Verdict
from .versions import Operator, Version, differing

TIME_LIMIT = 5.0  # seconds for a call in a trial

_WORKED = ("live", "refused", "failed", "reverted")
_SAID = {
    "live": "in use",
    "refused": "refused, the code before it stays in use",
    "failed": "does not build, the code before it stays in use",
    "reverted": "gone back to the code before",
    "gone": "the code before stays in use in this process",
    "uncompiled": "not taken in",
    "interrupted": "interrupted, the edit is still to come with the next reload or cell; "
    "until then the code before stays in use",
}

# What a trial ends with where the code cannot even be loaded, so that nothing can force it in.
_DOES_NOT_LOAD = re.compile(
    r"^(\w+\.)*(OSError|SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError"
    r"|BuildError)\b",
    re.MULTILINE,
)


class Edit:
    """What differs of an operator from the version in use, and what became of it.

    Attributes:
        unit: the operator's name.
        files: those that changed.
        outcome: `live`, `refused` (tried, and not right), `failed` (did not build), `reverted`,
            `gone` (its files are), `uncompiled` (what changed is not compiled on this machine), or
            `interrupted` (still to come).
        text: the error, or what was wrong.
        notes: what else there is to know.
        seconds: of the work, from when the edit was found until the new code was in place.
        when: it was found, in seconds since the epoch.
        before, after: the versions without it and with it.
        new: True if it is not what was dealt with last.
        ended: True once it can be taken in; at once if there is nothing to build or try.
        behind: True if nobody waits for it.
        interrupted: True where a Ctrl-C came meanwhile, which may have ended the compiler too.
        keeping: the thread that puts the build into the store.
        error: what went wrong that is no matter of the edit.
    """

    def __init__(self, operator: Operator, after: Version):
        live, seen = operator.versions[-1], operator.seen
        self.operator, self.unit, self.before, self.after = operator, operator.name, live, after
        self.compile = [p for p, digest in after.made_of.items() if live.made_of.get(p) != digest]
        self.compile += [p for p in after.gone if p not in after.python]
        self.run = [p for p, found in after.python.items() if live.python[p] != found]
        was, now = ({**v.left_out, **v.made_of} for v in (seen, after))
        left_out = [p for p in differing(seen.left_out, after.left_out) if was.get(p) != now.get(p)]
        self.new = (
            any(seen.made_of.get(p) != digest for p, digest in after.made_of.items())
            or any(seen.python.get(p, live.python[p]) != s for p, s in after.python.items())
            or bool(left_out)
            or seen.gone != after.gone
        )
        changed = [*self.compile, *self.run]
        self.files = [f"{path} (gone)" if path in after.gone else path for path in changed]
        self.outcome, self.text, self.seconds, self.when = "live", "", 0.0, time.time()
        self.notes = [f"{', '.join(left_out)}: {_not_compiled(operator)}"] if left_out else []
        if operator.is_gone() or f"ops/{self.unit}.py" in after.gone:
            self.outcome, self.files = "gone", [f"{path} (gone)" for path in after.gone]
            self.notes = self._about_gone()
        elif left_out and not changed:
            self.outcome, self.files, self.notes = "uncompiled", left_out, [_not_compiled(operator)]
        self.rebuilt: Rebuilt | None = None
        self.verdict: Verdict | None = None
        self.ended = self.outcome != "live" or not changed
        self.behind = self.interrupted = self._stale = False
        self.force = self.differing = False
        self.keeping: threading.Thread | None = None
        self.error: Exception | None = None
        self._was_in_use, self._claim = operator.in_use, threading.Lock()

    def __str__(self) -> str:
        """Return what became of it, and its first error, in lines."""
        return "\n".join([self.headline(), *self.text.split("\n")[:3]]).strip()

    def headline(self) -> str:
        """Return what became of it and how long it took, in a line."""
        if not self.files:
            return "the sources are again those of the code in use"
        tried = self.verdict.outcome if self.verdict else "untried"
        forced = self.outcome == "live" and tried not in ("right", "untried")
        took = f" ({self.seconds:.2f} s)" if self.outcome in _WORKED else ""
        said = "in use, forced" if forced else _SAID[self.outcome]
        return f"{', '.join(self.files)}: {said}{took}"

    def work(self, trials: Trials, limit: float) -> None:
        """Build and try it, unless somebody does already."""
        if not self._claim.acquire(blocking=False):
            return
        begun = time.perf_counter()
        try:
            self._prepare(trials, limit)
        except Exception as error:
            self.error = error
        finally:
            self.seconds += time.perf_counter() - begun
            self.ended = True

    def put_in_place(self) -> None:
        """Put what was built and tried in use, or note that it is dealt with."""
        operator, after, begun = self.operator, self.after, time.perf_counter()
        if self.outcome == "live" and self.files:
            before = self.before = operator.versions[-1]
            run = {path: after.texts[path] for path in self.run if path in after.texts}
            after.texts = before.texts | after.texts
            after.swap = after.swap or before.swap
            if self.rebuilt:
                after.key = self.rebuilt.key
                after.resources = before.resources | self.rebuilt.resources
            else:
                after.key, after.made_of = before.key, before.made_of
                after.resources = before.resources
            if self.verdict:
                after.microseconds = self.verdict.microseconds or before.microseconds
                after.difference = self.verdict.difference
            try:
                operator.change_to(after, run)
                operator.versions.append(after)
                after.gone = tuple(path for path in after.gone if path in after.python)
            except BuildError as error:
                self.outcome, self.text = "failed", str(error)
        operator.seen = after
        self.seconds += time.perf_counter() - begun

    def serves(self, wanted: "Edit", force: bool) -> bool:
        """Return True if this has ended well enough to be the attempt at `wanted`."""
        cut_off = self.error or (self.interrupted and self.outcome == "failed")
        forced = self.force or not force or self.outcome == "live"
        return not cut_off and not self._stale and forced and self.after == wanted.after

    def _prepare(self, trials: Trials, limit: float) -> None:
        """Build and try; what is right goes into the store."""
        session, name = self.operator.session, self.unit
        devices = self._devices()
        trial = trials.prepare(session, name, devices)
        timing = self._try_before(trials, devices) if self.compile else None
        rebuilt = None
        try:
            self.after.texts = texts_of(session.root, self.after.python)
            if session.is_foreign(name):
                raise BuildError(
                    f"{name} comes from a library that was loaded before loader; load that anew, "
                    "in a new process",
                    name,
                )
            if self.compile:
                rebuilt = self.rebuilt = rebuild(session, name)
                self.after.made_of = rebuilt.inputs["files"]
            self._try(trial, limit, "cuda" in devices)
            self._check_fresh()
            if rebuilt and self.outcome == "live" and not self._stale:
                if self._was_in_use:
                    self.after.swap = Swap(name, rebuilt.swap)
                kept, rebuilt = rebuilt, None
                self._keep(kept)
        except BuildError as error:
            self.outcome, self.text = "failed", str(error)
            self._check_fresh()
        finally:
            trial.cancel()
            if rebuilt:
                rebuilt.discard()
            if timing:
                timing.join()
            if self.outcome != "live" or self._stale:
                self.notes += self._about_gone()

    def _try(self, trial: Trial, limit: float, timed: bool) -> None:
        rebuilt = self.rebuilt
        libraries = [rebuilt.swap] if rebuilt else _libraries_in_use(self.operator, build=True)
        verdict = self.verdict = trial.run(libraries, bool(rebuilt), limit, timed)
        let_in = self.force or (self.differing and verdict.outcome == "wrong")
        if verdict.outcome not in ("right", "untried") and not let_in:
            self.outcome, self.text = "refused", verdict.text
            loads = verdict.outcome == "raised" and not _DOES_NOT_LOAD.search(verdict.text)
            if verdict.outcome == "wrong" or loads:
                self.notes.append("loader.reload(force=True) puts it in use all the same")

    def _check_fresh(self) -> None:
        """Notice what changed since the edit was found, so that what was tried is what is used.

        The operator may have been used for the first time too.
        """
        root, known = self.operator.session.root, self.after.python
        self._stale = self.operator.in_use != self._was_in_use or any(
            stamp(root / path) != found for path, found in known.items()
        )

    def _keep(self, rebuilt: Rebuilt) -> None:
        """Put the build into the store: at leisure, or at once for an operator not in use yet.

        The first use of that one loads it from there.
        """
        session = self.operator.session

        def keep() -> None:
            facts = {"why": [f"{path} edited" for path in self.files], "root": str(session.root)}
            try:
                rebuilt.keep(session.store, seconds={"compile": rebuilt.seconds}, **facts)
            except (BuildError, OSError) as error:
                print(
                    f"loader: the edit of {self.unit} could not be put into the cache, so the next "
                    f"process builds it again: {error}",
                    file=sys.stderr,
                )

        self.keeping = threading.Thread(target=keep, name=f"loader keeps {self.unit}")
        self.keeping.start()
        if not self._was_in_use:
            self.keeping.join()

    def _try_before(self, trials: Trials, devices: list[str]) -> threading.Thread | None:
        """Have the code in use tried while the compiler runs, and timed on a GPU, if it was not."""
        operator, version, timed = self.operator, self.before, "cuda" in devices
        if version.swap or (version.difference and (version.microseconds or not timed)):
            return None

        def measure() -> None:
            with contextlib.suppress(BuildError, KeyError):  # not built before: nothing to time
                libraries = _libraries_in_use(operator)
                trial = trials.prepare(operator.session, operator.name, devices)
                verdict = trial.run(libraries, False, TIME_LIMIT, timed)
                version.microseconds = verdict.microseconds
                version.difference = verdict.difference
                trial.cancel()

        thread = threading.Thread(target=measure, name=f"loader tries {operator.name}")
        thread.start()
        return thread

    def _devices(self) -> list[str]:
        """Return where it is to be tried."""
        if not (gpus.devices() and self.operator.session.toolchain.architectures):
            return ["cpu"]
        if all(file.endswith("_cpu.cpp") for file in self.files):
            return ["cpu"]
        on_gpu = all(file.endswith((".cu", ".cuh")) for file in self.files)
        return ["cuda"] if on_gpu else ["cpu", "cuda"]

    def _about_gone(self) -> list[str]:
        """Return a line on the files that are gone, and where they may have gone to."""
        gone, session = ", ".join(self.after.gone), self.operator.session
        of_units = {source for unit in session.units.values() for source in unit.sources}
        kernels = [f"kernels/{file}" for file in listed(session.root / "kernels")]
        strays = [p for p in kernels if p.endswith((".cpp", ".cu")) and p not in of_units]
        where = f"; no operator has {', '.join(strays)}, since the files of X are named after it"
        return [f"{gone}: deleted or renamed{where if strays else ''}"] if gone else []


def _not_compiled(operator: Operator) -> str:
    """Return why CUDA sources are not compiled in this process, and what to do about it."""
    if not torch.version.cuda:
        return "CUDA is not compiled here: this torch is for the CPU only; install one with CUDA"
    toolchain, missing, cures = operator.session.toolchain, [], []
    if not toolchain.nvcc:
        missing.append("no nvcc")
        cures.append("install one, as `python -m loader doctor` says")
    if not toolchain.architectures:
        missing.append("no GPU to compile for")
        cures.append("name one in the environment, TORCH_CUDA_ARCH_LIST=9.0 say")
    return (
        f"CUDA is not compiled here, there is {' and '.join(missing)}; to have it compiled, "
        f"{' and '.join(cures)}, and start the process again"
    )


def _libraries_in_use(operator: Operator, build: bool = False) -> list[Path]:
    """Return what an operator is made of; with `build` what few calls need is built if need be."""
    session, name = operator.session, operator.name
    found = []
    for library in session.units[name].libraries:
        key = key_in_use(library, session.store, session.loaded, session.keys)
        if build and library != name and not session.store.has(library, key):
            refuse_if_never(library, session.store, library)
            session.build([name])
        path = session.store.verified(library, key)
        if path is None:
            raise BuildError(f"{library}: the build in use is no longer in the cache", name)
        found.append(path)
    return found
