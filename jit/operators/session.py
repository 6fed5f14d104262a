"""The operators below one folder, as one process knows them: found, keyed, built, loaded."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..build.receipt import Receipt
from ..cache import index
from ..errors import BuildError, joined
from ..machine import settings, toolchain
from ..machine import sources as units
from ..machine.forks import cached_property
from . import rest, schemas

if TYPE_CHECKING:  # which a warm import does without
    from ..build.batch import Batch
    from ..build.engine import Job
    from ..cache.store import Store

SESSIONS: list["Session"] = []  # of this process: loader's own, and one for each `loader.Library`
OPENED: list[Callable[[Path], None]] = []  # told of each library that is loaded


class Session:
    """The operators below `root`, and their builds in `caches`, the last of which is written to.

    One thread at a time finds, builds and loads. An operator's name is taken once a process, since
    all are registered in one place, `torch.ops.octet`.

    Attributes:
        package: where the operators' Python sides are imported from, `<package>.<unit>`.
        units: what there is to build, by name.
        keys: the key of each library that was looked for; a unit's own has its name.
        errors: of libraries that could not be built.
        loaded: the keys of those that this process has loaded.
        imported: when the Python side of a unit was first imported, in seconds since the epoch.
    """

    def __init__(self, root: Path, caches: tuple[Path, ...], package: str = "loader.ops"):
        self.root, self.caches, self.package = root, caches, package
        self.units: dict[str, units.Unit] = {}
        self.discover()
        self.keys: dict[str, str] = {}
        self.errors: dict[str, BuildError] = {}
        self.loaded: dict[str, str] = {}
        self.imported: dict[str, float] = {}
        self.receipt = Receipt()
        self._unlock()
        SESSIONS.append(self)
        os.register_at_fork(after_in_child=self._unlock)  # a thread that held it is not there

    def _unlock(self) -> None:
        self._lock = threading.RLock()
        # By library what is being built, or was last; a child builds for itself.
        self._jobs: dict[str, Job] = {}

    def discover(self) -> None:
        """Look for operators; ValueError where one has the name of another session's."""
        found = units.discover(self.root)
        for other in SESSIONS:
            if other.root != self.root and (taken := sorted(found.keys() & other.units)):
                raise ValueError(
                    f"{self.root}: there is an operator {taken[0]!r} in {other.root}/ops already, "
                    "and all share torch.ops.octet; give this one another name"
                )
        self.units.update(found)

    @cached_property
    def store(self) -> "Store":
        """Where the builds are."""
        from ..cache.store import Store

        return Store(self.caches)

    @property
    def toolchain(self) -> toolchain.Toolchain:
        """As it was when first asked for."""
        return toolchain.current(self.caches[-1])

    def named(self, names: tuple[str, ...]) -> list[str]:
        """The names given, or all, after a look at what there is now; ValueError if one is none."""
        self.discover()
        for name in names:
            if name not in self.units:
                raise ValueError(f"{name!r} is no operator; there are {', '.join(self.units)}")
        return [*(names or self.units)]

    def find_quickly(self) -> bool:
        """True if nothing has changed since all units were last found in the store."""
        begun = time.perf_counter()
        keys = index.Index(self.caches, self.root, self.toolchain).keys()
        if keys is None:
            return False
        self.keys.update(keys)
        for name in keys:
            self.receipt.result(name, "hit")
        self.receipt.index = (time.perf_counter() - begun) * 1e3
        return True

    def find(self, names: list[str]) -> dict[str, dict]:
        """Work out the keys of these units' libraries; the manifests of those the store lacks."""
        from ..cache import key

        tools = self.toolchain
        sources = units.Sources(self.root, tools.header_folders, named=tools.named_files)
        missing, paths = {}, set()
        for name in names:
            with self.receipt.time(name, "hash"):
                inputs = key.manifest(self.units[name], self.toolchain, sources)
            paths.update(inputs["files"])
            with self.receipt.time(name, "lookup"):
                found = self.store.serving(self.units[name], inputs, self.toolchain, sources)
                inputs = found or inputs
            for library in self.units[name].libraries:
                made_of = inputs | {"unit": library}
                self.keys[library] = key.key(made_of)
                if not found or not self.store.has(library, self.keys[library]):
                    missing[library] = made_of
                elif self.receipt.units.get(library, {}).get("result", "missing") == "missing":
                    self.receipt.result(library, "hit")
        if not missing and set(names) == set(self.units):
            now = index.Index(self.caches, self.root, self.toolchain)
            now.remember(self.keys, sorted(paths))
        return missing

    def begin(
        self, names: list[str], why: dict[str, str] | None = None, behind: bool = False
    ) -> "Batch | None":
        """Start to build the libraries of these units that the store lacks; the running or finished
        batch, or None.

        `why` has a reason for those that are built although their sources are not new. What is
        being built already is left to that.
        """
        from ..build import compile_commands

        with self._lock:
            libraries = [library for name in names for library in self.units[name].libraries]
            idle = [name for name in libraries if name not in self._jobs or self._jobs[name].ended]
            for name in idle:
                self.errors.pop(name, None)
            found, why = self.find([*dict.fromkeys(map(units.unit_of, idle))]), why or {}
            wanted = [name for name in idle if name in found or name in why]
            missing = [name for name in wanted if not self.is_foreign(name)]
            if not missing:
                compile_commands.write(self.root, self.toolchain)
                return None
            from ..build.batch import Batch
            from ..build.engine import Job
            from ..build.progress import Progress
            from .recipe import OperatorRecipe

            costs = {}
            for name in missing:
                unit = self.units[units.unit_of(name)]
                recipe = OperatorRecipe(unit, self.toolchain, self.store, name)
                reason, cost = why.get(name, ""), recipe.cost()
                self._jobs[name] = Job(recipe, self.store, reason, cost, self._finished)
                costs[name] = max(cost, 1)
            reasons = self._reasons({n: found[n] for n in missing if n in found}) if behind else ""
            report = Progress(costs, self.caches[-1], reasons)
            batch = Batch([self._jobs[name] for name in missing], self.store, report).start()
            compile_commands.write(self.root, self.toolchain)  # while compilers run
            return batch

    def build(self, names: list[str]) -> dict[str, BuildError]:
        """Build those that the store lacks, and wait for all; the errors."""
        if batch := self.begin(names):
            batch.wait()
        libraries = [library for name in names for library in self.units[name].libraries]
        for library in libraries:
            self._await(library)
        return {name: self.errors[name] for name in libraries if name in self.errors}

    def _finished(self, job: "Job") -> None:
        """Take in the end of a job, in its thread."""
        name = job.recipe.unit
        for stage, seconds in job.seconds.items():
            self.receipt.add(name, stage, seconds)
        self.receipt.result(name, job.result)
        if job.error:
            self.errors[name] = job.error
        else:
            self.keys[name] = job.key

    def _reasons(self, manifests: dict[str, dict]) -> str:
        """Why units are built that are made of these, in a line."""
        from ..cache.explain import why_built

        names: dict[str, list[str]] = {}  # by reason
        for name, inputs in manifests.items():
            first, *rest = why_built(self.store, self.units[units.unit_of(name)], inputs)
            names.setdefault(f"{first}{', ...' if rest else ''}", []).append(name)
        if len(names) == 1:
            return next(iter(names))
        return "; ".join(f"{', '.join(units)}: {why}" for why, units in names.items())

    def is_foreign(self, name: str) -> bool:
        """True if a library that somebody else loaded, a wheel's say, has what this one has."""
        if name in self.loaded or schemas.is_declared(name):
            return False
        if not torch._C._dispatch_has_kernel(f"octet::{rest.representative(name)}"):
            return False
        self.receipt.result(name, "foreign")
        return True

    def owner(self, name: str) -> str | None:
        """The operator that a public name such as `square_bw` belongs to."""
        owners = [unit for unit in self.units if name == unit or name.startswith(unit + "_")]
        return max(owners, key=len, default=None)

    def module(self, name: str) -> ModuleType:
        """The Python side of an operator.

        Built and loaded first: a child that is forked while a thread imports could never import
        again.
        """
        import importlib

        self.load(name)
        self.imported.setdefault(name, time.time())
        return importlib.import_module(f"{self.package}.{name}")

    def attribute(self, name: str) -> Any:
        """`X`, `X_fw` and what else the Python side of operator X has; None where there is none."""
        unit = None if name.startswith("_") else self.owner(name)
        return getattr(self.module(unit), name, None) if unit else None

    def start(self) -> None:
        """Build what the store lacks, as LOADER_BUILD says; errors are only printed."""
        mode, errors = settings.value("LOADER_BUILD"), {}
        if not self.find_quickly():
            if mode == "background":
                self.begin([*self.units], behind=True)
            elif mode == "eager":
                errors = self.build([*self.units])
            elif mode == "never":
                self.find([*self.units])
        if self.package == "loader.ops":
            self._declare()
        if errors:
            from ..machine.told import tell_each

            tell_each(errors.values())

    def _declare(self) -> None:
        """Tell torch the schemas of what was loaded before and is in the store as it was."""
        noted = schemas.recorded([cache / "store" for cache in self.caches])
        if unknown := [unit for unit in noted if unit in self.units and unit not in self.keys]:
            self.find(unknown)
        known = {unit: noted[unit].get(key) for unit, key in self.keys.items() if unit in noted}
        schemas.declare({unit: found for unit, found in known.items() if found}, self.module)

    def build_named(self, names: tuple[str, ...]) -> None:
        """Do what `loader.build(*names)` says."""
        if errors := self.build(self.named(names)):
            raise joined([*errors.values()])

    def public(self) -> list[str]:
        """The names of the operators in all their forms."""
        return [unit + form for unit in self.units for form in ("", "_fw", "_bw", "_reference")]

    def load(self, name: str) -> None:
        """Load a library, verified; build it first where that is still to do.

        Waits for this library alone, which goes to the front of the queue.
        """
        failure, unit = None, units.unit_of(name)
        for _ in range(4):
            self._await(name)
            with self._lock:
                if name in self.loaded or self.is_foreign(name):
                    return
                if name in self.errors:
                    raise self.errors[name]
                if name not in self.keys:
                    self.find([unit])
                if units.is_rest(name):
                    rest.settle(name, self.store, self.loaded, self.keys)
                if library := self._held(name):
                    before, failure = failure, self._open(name, library)
                    if not failure:
                        return
                    self.store.discard(self.store.path / library.parent.name)
                    if before or library.exists():  # the latter in a folder only read
                        break
                self._build_again(name, failure)
        if not failure:
            what = f"{name}: its library is damaged again after each build in {self.caches[-1]}"
            raise BuildError(what, name, kind="damaged")
        from ..errors.diagnose import load_error

        what = f"{name}: its library does not load, built anew too"
        raise load_error(what, name, failure, self.root, self.units[unit].sources)

    def _await(self, name: str) -> None:
        """Wait for the build of a library where one is under way, in front of all others."""
        if job := self._jobs.get(name):
            job.hurry()
            job.wait()

    def _open(self, name: str, library: Path) -> str | None:
        """Load a library, whose schemas later processes then know before; why that failed."""
        try:
            with self.receipt.time(name, "dlopen"):
                schemas.withdraw(name)
                torch.ops.load_library(str(library))
                for other in self.units[units.unit_of(name)].libraries:
                    rest.declare(other, self.load)
        except OSError as error:
            return str(error.__cause__ or error)  # torch says which library, dlopen says why
        for told in OPENED:
            told(library)
        key = self.loaded[name] = self.keys[name]
        if self.package == "loader.ops" and not units.is_rest(name):
            schemas.note(self.store.path, name, key, lambda public: self.owner(public) == name)
        return None

    def _held(self, name: str) -> Path | None:
        """The library of a unit, verified and marked as in use; None where it has to be built."""
        with self.receipt.time(name, "verify"):
            library = self.store.verified(name, self.keys[name])
            if library and self.store.hold(library) is not None:
                return library
            return None

    def _build_again(self, name: str, failure: str | None) -> None:
        """Start to build a unit that is missing, damaged, or does not load, which is `failure`."""
        from ..build.engine import refuse_if_never

        refuse_if_never(name, self.store, name)
        why = {name: f"it did not load: {failure}"} if failure else {}
        if self.store.has(name, self.keys[name]):
            why.setdefault(name, "it was damaged")
            self.store.discard(self.store.path / f"{name}-{self.keys[name]}")
        self.begin([units.unit_of(name)], why)


def owner(name: str) -> tuple[Session, str] | None:
    """The session and operator that a name in `torch.ops.octet` belongs to."""
    owners = [(unit, session) for session in SESSIONS if (unit := session.owner(name))]
    unit, session = max(owners, key=lambda found: len(found[0]), default=("", None))
    return (session, unit) if session else None
