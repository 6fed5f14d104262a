"""How an operator is made: its sources compiled side by side, one link."""

import os
from functools import partial
from pathlib import Path

from ..build import flags
from ..build.workshop import Compile, Object, Workshop
from ..cache.explain import why_built
from ..cache.key import built_sources, keeps_to_stable_abi, manifest
from ..cache.store import Store
from ..errors import BuildError
from ..errors.diagnose import explain_failure
from ..machine.sources import HOME, Sources, Unit, is_rest
from ..machine.toolchain import NATIVE, ON_STABLE_ABI, Toolchain

# Has ptxas tell registers and spills of each kernel, which `loader.reload()` shows.
_TELL_RESOURCES = ["-Xptxas", "-v"]
# libstdc++'s <cmath> without C++17's Bessel functions and their like, which nvcc would read three
# times for each source, but with the <limits> that they bring along.
_NO_SPECIAL_FUNCTIONS = ["-include", "limits", "-D_GLIBCXX_BITS_SPECFUN_H"]
# Where an operator has files in kernels/, its loops are there, and ops/X.cpp checks and allocates:
# without -march=native, with which torch's headers have those of all vector instructions, and with
# this it takes little more than half as long.
_GLUE = "-O1"


class OperatorRecipe:
    """A library of a unit for a toolchain, built into `store`; see engine.Recipe.

    Without the library's name it is all of the unit in one. The libraries of a unit are made of the
    same inputs, in one work folder.
    """

    def __init__(self, unit: Unit, toolchain: Toolchain, store: Store, library: str | None = None):
        self.unit = self.label = library or unit.name
        self.folder = unit.name
        self._unit, self._toolchain, self._store = unit, toolchain, store
        self._all = built_sources(unit, toolchain)
        apart = library if len(unit.libraries) > 1 else None
        self.sources = tuple(s for s in self._all if apart is None or is_rest(s) == is_rest(apart))
        self._with_cuda = any(source.endswith(".cu") for source in self._all)
        self._flags = partial(flags.of, toolchain, store.path.parent / "work")

    def inputs(self) -> dict:
        """Return the manifest of the unit's sources as they are now."""
        return manifest(self._unit, self._toolchain, self._read()) | {"unit": self.unit}

    def maker(self, inputs: dict) -> dict:
        """Return toolchain and checkout: the work folder outlives an edit.

        Not what C++ alone is compiled with: builds for several CPUs share the objects of CUDA.
        """
        toolchain = {k: v for k, v in inputs["toolchain"].items() if k not in ("cflags", "cpu")}
        return {"toolchain": toolchain, "root": str(self._unit.root)}

    def check_machine(self) -> None:
        """Raise BuildError without a C++ compiler."""
        flags.check_compiler(self._toolchain)

    def make(self, workshop: Workshop, inputs: dict) -> tuple[Path, dict]:
        """Compile what is not there yet and link the library."""
        facts = {"why": why_built(self._store, self._unit, inputs), "root": str(self._unit.root)}
        return self.link(workshop, self.objects(workshop)), facts

    def objects(self, workshop: Workshop) -> list[Object]:
        """Compile what is not there yet; all objects, in the order of the sources."""
        costs = self._costs()
        longest_first = sorted(costs, key=costs.__getitem__, reverse=True)
        stable = keeps_to_stable_abi(self._unit, self._toolchain, self._read())
        define = [*["-DOCTET_CUDA"] * self._with_cuda, *[ON_STABLE_ABI] * stable]
        return workshop.compile(self._compile(source, define) for source in longest_first)

    def link(self, workshop: Workshop, objects: list[Object], *more: str) -> Path:
        """Link those of these objects that it is made of, and `more`, to a library."""
        found, toolchain = self._flags(), self._toolchain
        extra = [*found.linker, *toolchain.ldflags]
        if self._with_cuda:
            extra += flags.cuda_runtime(workshop.folder, toolchain)
        order = {source: i for i, source in enumerate(self.sources)}
        own = [o for o in objects if o.source in order]
        names = [o.path.name for o in sorted(own, key=lambda o: order[o.source])]
        last = found.link(extra, self._with_cuda)
        return workshop.link([*toolchain.command("CXX"), *names, *more, *last], "library.so")

    def explain(self, output: str, workshop: Workshop) -> BuildError:
        """Return the first errors, where they are, and where the whole output lies."""
        causes = explain_failure(output, self._unit.root, self.sources)
        return workshop.failure(self.label, causes, f"{self.label}.log")

    def cost(self) -> int:
        """Return a guess at the work; less than any for what few calls need, which comes last."""
        return -1 if is_rest(self.unit) else sum(self._costs().values())

    def _costs(self) -> dict[str, int]:
        """By the size of what each source reaches of ours; those in ops/ take half as long."""
        costs, sources = {}, self._read()
        for source in self.sources:
            reached = sources.closure(source)
            size = sum((self._unit.root / path).stat().st_size for path in reached)
            costs[source] = size // 2 if source.startswith("ops/") else size
        return costs

    def _compile(self, source: str, define: list[str]) -> Compile:
        toolchain, found, root = self._toolchain, self._flags(), self._unit.root
        includes = [str(at / "include") for at in dict.fromkeys((root, HOME))]
        if source.endswith(".cu"):
            own = [*toolchain.cuda_flags, *_TELL_RESOURCES, *_NO_SPECIAL_FUNCTIONS, *define]
            command = toolchain.command("PYTORCH_NVCC")
            if host := os.environ.get("CC"):
                command += ["-ccbin", host]
            command += found.cuda(self.unit, includes, own)
        else:
            cflags = toolchain.cflags
            if source.startswith("ops/") and len(self._all) > 1:
                cflags = (*(flag for flag in cflags if flag != NATIVE), _GLUE)
            own = [*cflags, *found.quicker, *define]
            command = toolchain.command("CXX")
            command += found.cxx(self.unit, includes, own, self._with_cuda)
        return Compile(
            source, tuple(command), str(root / source), lambda: self._read().closure(source)
        )

    def _read(self) -> Sources:
        return Sources(self._unit.root, self._toolchain.header_folders)
