"""One engine for all that is built: a recipe becomes an artifact in the store.

Of any number of processes that want one unit, one holds the lock of its work folder and builds; the
others wait, say for whom, and take over should it die. Whoever is killed when, the store holds
whole entries or none, and finished objects are there for the next build.
"""

import errno
import os
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..cache.key import key
from ..cache.lock import FileLock, lock_of
from ..cache.store import DISK, Store, cannot_write
from ..errors import BuildError
from ..errors.problem import error_of
from ..machine import settings
from . import others
from .slots import SLOTS
from .workshop import CompileError, Workshop

_LOOK_AGAIN = 0.05  # seconds between two looks at what another process builds
_SAY_AFTER = 1.0  # seconds of waiting for another process that need no word
_DOING = {"compile": "compiling", "link": "linking"}  # by stage of a workshop
_LITTLE = 4 << 20  # bytes free, of which a build takes some


class Recipe(Protocol):
    """The questions that the engine has to all that is built: an operator, an extension."""

    unit: str  # what its entries in the store are called
    folder: str  # what its work folder is called, which recipes may share
    label: str  # what people call it

    def inputs(self) -> dict:
        """Return all that the product depends on, as it is now; the key is its digest."""

    def maker(self, inputs: dict) -> dict:
        """Return what the work folder depends on: it stays the same over an edit."""

    def check_machine(self) -> None:
        """Raise BuildError where something to build with is missing."""

    def make(self, workshop: Workshop, inputs: dict) -> tuple[dict[int, Path], dict]:
        """Return the product, which the engine removes, and facts beside it, or CompileError.

        It is a library for each level of CPU that it is made for; in most cases for 1 alone.
        """

    def explain(self, output: str, workshop: Workshop) -> BuildError:
        """Return the error for what a compiler printed."""


def find(recipe: Recipe, store: Store, inputs: dict) -> Path | None:
    """Return the product made of `inputs`, verified; None where the store has none."""
    return store.verified(recipe.unit, key(inputs))


def refuse_if_never(
    what: str,
    store: Store,
    unit: str | None = None,
    cure: str = ", or run `python -m loader build`",
) -> None:
    """Raise BuildError where LOADER_BUILD=never forbids to build; `cure` beside unsetting that."""
    if settings.value("LOADER_BUILD") == "never":
        raise BuildError(
            f"{what}: there is no build of these sources for this machine in "
            f"{os.pathsep.join(str(layer.parent) for layer in store.layers)}, and "
            f"LOADER_BUILD=never forbids to compile it; unset that{cure}",
            unit,
            kind="refused",
        )


class Job:
    """One recipe being built by this process, or waited for; `error` says what went wrong.

    `result` is `built` by this process, `waited` for another one that did, or `failed`; `seconds`
    has the stages `compile`, `link` and `wait`; `key` is the product's.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: Store,
        why: str = "",
        cost: int = 0,
        then: Callable[["Job"], None] = lambda job: None,
    ):
        """`why` is the reason where that is not an edit; `then` is called when it has ended."""
        self.recipe, self.store = recipe, store
        self.error: BuildError | None = None
        self.result, self.key = "", ""
        self.seconds: dict[str, float] = {}
        self.inputs = recipe.inputs()
        self.stopped = False
        self._why, self._then = why, then
        self._rank = (1, -cost)
        self._ended = threading.Event()
        self._workshop: Workshop | None = None
        self._lock: FileLock | None = None
        self._held = False
        self._lacking: BuildError | None = None  # what this machine cannot build for
        # Of recipes whose product another compiler's will do for: what that is made of, if there.
        self._served: Callable[[], dict | None] | None = getattr(recipe, "served", None)
        self._began: Callable[[str], None] = lambda stage: None

    @property
    def ended(self) -> bool:
        """True once there is a result."""
        return self._ended.is_set()

    def hurry(self) -> None:
        """Go to the front of the queue: somebody waits for it."""
        self._rank = (0, self._rank[1])
        SLOTS.again()
        if workshop := self._workshop:
            workshop.hurry()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._ended.wait()

    def stop(self) -> None:
        """End its compilers; it ends with an error."""
        self.stopped = True
        if workshop := self._workshop:
            workshop.end()

    def end(self, error: BuildError | None) -> None:
        """Note the result, and let go who waits."""
        self.error = error
        if error:
            self.result = "failed"
        if self._lock:
            self._lock.close()
        try:
            self._then(self)
        finally:
            self._ended.set()

    def check_machine(self) -> None:
        """Raise BuildError where something to build with is missing, and nobody else may build."""
        try:
            self.recipe.check_machine()
        except BuildError as error:
            if error.kind != "missing_compiler" or self._served is None:
                raise
            if not others.expected() and others.holder(*self._place) is None:
                raise
            self._lacking = error

    @property
    def _place(self) -> tuple[Path, str]:
        return self.store.path.parent / "work", self.recipe.folder

    def claim(self) -> None:
        """Take the lock of its work folder, if nobody has it and it can build."""
        if self._lacking:
            return
        self._lock = lock_of(work_folder(self.recipe, self.store, self.inputs))
        self._held = self._lock.take()
        if self._held:
            self._lock.note()

    def run(self, show: Callable[[dict], None]) -> None:
        """Build, or wait for who does; raises nothing."""
        name, error = self.recipe.label, None
        try:
            show({"unit": name, "state": "queued"})
            self._began = lambda stage: show({"unit": name, "state": _DOING[stage]})
            if self._lacking:
                self._wait_for_others(self._lacking, show)
            else:
                assert self._lock, "claimed"
                if self._held or self._take_turn(self._lock, show):
                    self._build(self._lock)
        except CompileError:
            error = BuildError(f"{name}: its build was interrupted", name, kind="interrupted")
        except Exception as failure:
            error = _told(failure, name, self.store)
        show({"unit": name, "state": "failed" if error else "done"})
        self.end(error)

    def _take_turn(self, lock: FileLock, show: Callable[[dict], None]) -> bool:
        """Wait for who builds this, or what shares its folder; False once it is there.

        Raises: BuildError of who built it, if that failed on these inputs.
        """
        since, said = time.time(), False
        while not lock.take():
            if self.store.has(self.recipe.unit, key(self.inputs)) and self._is_there():
                return False
            waited, holder = time.time() - since, lock.read()
            if not said and waited > _SAY_AFTER and holder.get("pid") != os.getpid():
                said = True
                show({"unit": self.recipe.label, "state": "waiting", "holder": holder})
            if self.stopped:
                raise CompileError("the build was ended")
            time.sleep(_LOOK_AGAIN)
            self.seconds["wait"] = time.time() - since
        noted = lock.read()
        same = noted.get("key") == self._name() and noted.get("since", 0) > since
        if same and "failed" in noted:
            raise error_of(noted["failed"], self.recipe.label)
        lock.note()
        self.inputs = self.recipe.inputs()
        return True

    def _wait_for_others(self, lacking: BuildError, show: Callable[[dict], None]) -> None:
        """Wait for a build of another process that serves this one, whatever its compiler.

        Raises: `lacking` once nobody has been at it for so long that nobody will be.
        """
        assert self._served, "or it would not wait"
        since = last = time.time()
        said = False
        while (found := self._served()) is None:
            holder, now = others.holder(*self._place), time.time()
            last = now if holder else last
            if not said and now - since > _SAY_AFTER:
                said = True
                show(
                    {"unit": self.recipe.label, "state": "waiting", "holder": holder or {"pid": ""}}
                )
            if self.stopped:
                raise CompileError("the build was ended")
            if now - last > others.PATIENCE:
                waited = f"no other rank built {self.recipe.label} in {others.PATIENCE:.0f} s"
                lacking.args = (f"{lacking}; {waited}",)
                raise lacking
            time.sleep(_LOOK_AGAIN)
            self.seconds["wait"] = time.time() - since
        self.key, self.result = key(found), "waited"

    def _is_there(self) -> bool:
        """True if the store has the product by now."""
        self.key = key(self.inputs)
        if find(self.recipe, self.store, self.inputs):
            self.result = "waited"
        return self.result == "waited"

    def _build(self, lock: FileLock) -> None:
        """Make and publish, unless another process has meanwhile.

        What goes in is digested before and after: an edit in between may be in it or not.
        """
        recipe, store = self.recipe, self.store
        for _ in range(5):
            if self._is_there():
                return
            products, facts = self._make(lock)
            try:
                inputs, self.inputs = self.inputs, recipe.inputs()
                if self.inputs == inputs:
                    if self._why:
                        facts["why"] = [self._why]
                    store.publish(products, inputs, seconds=self.seconds, **facts)
                    self.result = "built"
                    return
            finally:
                for product in products.values():
                    product.unlink(missing_ok=True)
        name, fault = recipe.label, "its sources kept changing while they were compiled; try again"
        raise BuildError(f"{name}: {fault}", name, kind="changed")

    def _name(self) -> str:
        """The name of the entry that it is to make."""
        return f"{self.recipe.unit}-{key(self.inputs)}"

    def _make(self, lock: FileLock) -> tuple[dict[int, Path], dict]:
        """Run the recipe; an error is noted in the lock, for those who wait."""
        recipe, store = self.recipe, self.store
        with Workshop(work_folder(recipe, store, self.inputs), lambda: self._rank) as shop:
            self._workshop, shop.began = shop, self._began
            try:
                if self.stopped:
                    raise CompileError("the build was ended")
                return recipe.make(shop, self.inputs)
            except CompileError as error:
                if shop.ended or self.stopped:
                    raise
                failed = _failed(recipe, str(error), shop, store)
                lock.note(key=self._name(), failed=failed.as_dict())
                raise failed from None
            finally:
                self.seconds |= shop.seconds


def _told(error: Exception, name: str, store: Store) -> BuildError:
    """Any error as the one that a build raises."""
    if isinstance(error, BuildError):
        return error
    if isinstance(error, OSError) and error.errno in DISK:
        return cannot_write(store.path.parent, error)
    known = isinstance(error, (RuntimeError, OSError, ValueError))
    text = str(error) if known else "".join(traceback.format_exception(error)).strip()
    return BuildError(f"{name}: {text}", name)


def _failed(recipe: Recipe, output: str, shop: Workshop, store: Store) -> BuildError:
    """The error for what compilers said; of a full disk where that was the cause."""
    full = "No space left on device" in output
    if re.search(r"Bus error|signal 7\b", output):  # as a linker's map meets it
        full |= shutil.disk_usage(shop.folder).free < _LITTLE
    if full:
        return cannot_write(store.path.parent, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    return recipe.explain(output, shop)


def work_folder(recipe: Recipe, store: Store, inputs: dict) -> Path:
    """Return the folder in which a recipe is made; its lock lies beside it."""
    work = store.path.parent / "work"
    return work / f"{recipe.folder}-{key(recipe.maker(inputs))[:12]}"
