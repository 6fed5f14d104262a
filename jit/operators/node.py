"""A quicker way into operators: arguments unpacked, and one autograd node, in C++ (node.cpp).

Its library is for one torch and one Python, and takes some fifteen seconds to compile. It is looked
for when an operator is first used. Where there is none Python serves, and once operators were
called a few hundred times it is built, behind all other builds; from its end on it is used.
Nothing that goes wrong with it is an error: Python goes on serving.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.compiler import is_dynamo_compiling

from ..cache import key
from ..errors import BuildError
from ..machine import files, settings
from ..machine.sources import HOME, Sources, Unit
from ..machine.toolchain import Toolchain
from . import session

if TYPE_CHECKING:
    from ..build.engine import Job

UNIT = Unit(f"node.{sys.implementation.cache_tag}", HOME, ("jit/operators/node.cpp",))
_OFTEN = 300  # calls after which it is worth its compiler's time
_MODULE = "octet_node"


class Node:
    """What there is of it in this process.

    Attributes:
        module: None where Python serves.
        begun: whether a build was thought of, or asked for.
    """

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self._switches: list[Callable[[ModuleType | None], None]] = []
        self._looked = self.begun = False
        self._wanted = True
        self._calls = 0

    def quickly(self, slow: Callable, name: str, **how: Any) -> Callable:
        """What calls the operator `name` in the quickest way there is; `slow` is its Python side.

        Args:
            kept: flags, for each tensor: whether the gradients need it.
            options: `(*tensors, *given)` -> what the registered operator takes behind its tensors;
                None where there are no options.
            gradients: `(grad_out, tensors, options, need)` -> a gradient or None for each tensor,
                of which those that are not kept are None. Where there is an operator
                `<name>_backward` that is called instead, but for gradients of gradients.
            spared: whether the first tensor is kept for the gradient to the second alone.
        """
        if not self._looked:
            self._looked = True
            self.take(_found())
        if self.module:
            now = self.module.Call(name, slow=slow, **how)
            now.wanted = self._wanted
            self._switches.append(lambda module: setattr(now, "wanted", module is not None))
            return now

        def counted(*args: Any) -> Any:
            self._calls += 1
            if self._calls >= _OFTEN and not self.begun:
                self._begin()
            return slow(*args)

        way: Callable = slow if self.begun else counted
        quick: Callable | None = None

        def switch(module: ModuleType | None) -> None:
            nonlocal way, quick
            if module and quick is None:
                quick = module.Call(name, slow=slow, **how)
            way = quick if module and quick else slow

        def call(*args: Any) -> Any:
            if is_dynamo_compiling():
                return slow(*args)
            return way(*args)

        self._switches.append(switch)
        return call

    def take(self, library: Path | None) -> None:
        """Load the library, and have all operators use it from now on."""
        if library:
            loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(library))
            spec = importlib.util.spec_from_file_location(_MODULE, library, loader=loader)
            with contextlib.suppress(ImportError):  # as where this torch is another one after all
                assert spec
                module = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
                module.follow(_followed)
                self.module = module
                self.use(True)

    def use(self, wanted: bool) -> None:
        """Have operators called by it, or by Python alone."""
        self._wanted = wanted
        for switch in self._switches:
            switch(self.module if wanted else None)

    def build(self, behind: bool = False) -> BuildError | None:
        """Build it unless it is there, and use it; why that failed. Waits unless it is `behind`."""
        from ..build.batch import Batch
        from ..build.engine import Job
        from ..build.progress import Progress, Silent

        self.begun = True
        if self.module:
            return None
        if library := _held(key.key(_recipe().inputs())):
            self.take(library)
            return None
        ours = session.SESSIONS[0]
        report = Silent() if behind else Progress({"node": 1}, ours.caches[-1])
        job = Job(_recipe(), ours.store, cost=-1, then=self._built)  # behind all that have a cost
        batch = Batch([job], ours.store, report).start()
        if not behind:
            batch.wait()
        return job.error

    def _begin(self) -> None:
        """Build it behind; what goes wrong there is nobody's concern."""
        from ..build.workshop import behind

        self.begun = True
        self.use(True)  # from here on without counting
        with contextlib.suppress(RuntimeError):  # as at the interpreter's end: no new threads
            behind(self._try)

    def _try(self) -> None:
        """Build it, unless that is forbidden, or has failed before."""
        if _is_possible() and settings.value("LOADER_BUILD") != "never" and not _failure().exists():
            self.build(behind=True)

    def _built(self, job: "Job") -> None:
        if job.error:
            with contextlib.suppress(OSError):
                if job.key and not job.stopped:
                    files.write_record(_failure(), str(job.error))
        elif not self.module:
            self.take(_held(job.key))


def _followed(self: Any, *args: Any) -> Any:
    """What torch.compile follows in place of a call, since it cannot look into C++."""
    return self.slow(*args)


def _is_possible() -> bool:
    """True where there is a compiler, and a Python with the lock that the library relies on."""
    import sysconfig

    without_lock = sysconfig.get_config_var("Py_GIL_DISABLED")
    return session.SESSIONS[0].toolchain.cxx is not None and not without_lock


def _toolchain() -> Toolchain:
    """Without GPUs: there is nothing for them in it."""
    return session.SESSIONS[0].toolchain._replace(architectures="")


def _recipe() -> Any:
    from .recipe import OperatorRecipe

    return OperatorRecipe(UNIT, _toolchain(), session.SESSIONS[0].store)


def _failure() -> Path:
    """What a build that failed leaves, so that later processes do not try again."""
    name = f"{UNIT.name}-{key.key(_recipe().inputs())}.failed.json"
    return session.SESSIONS[0].store.path.parent / "work" / name


def _found() -> Path | None:
    """The library in the store for this torch, Python and machine; None where there is none."""
    tools = _toolchain()
    with contextlib.suppress(OSError, BuildError):
        sources = Sources(HOME, tools.header_folders, named=tools.named_files)
        inputs = key.manifest(UNIT, tools, sources)
        made = session.SESSIONS[0].store.serving(UNIT, inputs, tools, sources)
        return _held(key.key(made)) if made else None
    return None


def _held(made: str) -> Path | None:
    """The library under a key, verified and marked as in use."""
    store = session.SESSIONS[0].store
    library = store.verified(UNIT.name, made)
    return library if library and store.hold(library) is not None else None


NODE = Node()
quickly = NODE.quickly
