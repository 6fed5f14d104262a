"""How an operator is made: its sources compiled side by side, one link.

A build for any x86-64 has its loops compiled once for each of several levels, all else once, and a
link for each level; the store picks the one to open.
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from ..build import flags
from ..build.workshop import Compile, Object, Workshop
from ..cache.explain import why_built
from ..cache.key import built_sources, keeps_to_stable_abi, key, levels_of, manifest
from ..cache.store import Store
from ..errors import BuildError
from ..errors.diagnose import find_problems
from ..errors.problem import as_text
from ..machine import levels
from ..machine.forks import cached_property
from ..machine.sources import HOME, Sources, Unit, is_rest, with_loops
from ..machine.toolchain import NATIVE, ON_STABLE_ABI, Toolchain

# Has ptxas tell registers and spills of each kernel, which `loader.reload()` shows.
_TELL_RESOURCES = ["-Xptxas", "-v"]
# libstdc++'s <cmath> without C++17's Bessel functions and their like, which nvcc would read three
# times for each source, but with the <limits> that they bring along.
_NO_SPECIAL_FUNCTIONS = ["-include", "limits", "-D_GLIBCXX_BITS_SPECFUN_H"]
# Where an operator has files in kernels/, its loops are there, and ops/X.cpp checks and allocates:
# without -march=native, with which torch's headers have those of all vector instructions, and with
# this it takes little more than half as long. Nor are there loops in node.cpp.
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
        of_cpu = "cflags", "cpu", "levels"
        toolchain = {k: v for k, v in inputs["toolchain"].items() if k not in of_cpu}
        return {"toolchain": toolchain, "root": str(self._unit.root)}

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """What there is a library for: 1, which is what the flags ask for, and higher levels."""
        loops = {*with_loops(self._all)} & {*self.sources}
        return (1, *(levels_of(self._unit, self._toolchain) if loops else ()))

    @property
    def level_here(self) -> int:
        """The level that this machine opens."""
        return max(level for level in self.levels if level == 1 or level <= levels.here())

    def check_machine(self) -> None:
        """Raise BuildError without a C++ compiler."""
        flags.check_compiler(self._toolchain)

    def served(self) -> dict | None:
        """Return what an entry of the store was made of that will do here, by whom ever made."""
        sources = self._read()
        inputs = manifest(self._unit, self._toolchain, sources)
        found = self._store.serving(self._unit, inputs, self._toolchain, sources)
        made = found | {"unit": self.unit} if found else None
        return made if made and self._store.has(self.unit, key(made)) else None

    def make(self, workshop: Workshop, inputs: dict) -> tuple[dict[int, Path], dict]:
        """Compile what is not there yet and link the library, for each level."""
        why = why_built(self._store, self._unit, inputs)
        facts: dict = {"why": why, "root": str(self._unit.root)}
        objects = self.objects(workshop, self.levels)
        if len(self.levels) > 1:
            facts["seconds_by_level"] = workshop.seconds_by_variant
        return self.links(workshop, objects), facts

    def objects(self, workshop: Workshop, wanted: Iterable[int]) -> list[Object]:
        """Compile what is not there yet of these levels; all objects, in no order."""
        costs, loops = self._costs(), with_loops(self._all)
        longest_first = sorted(costs, key=costs.__getitem__, reverse=True)
        stable = keeps_to_stable_abi(self._unit, self._toolchain, self._read())
        define = [*["-DOCTET_CUDA"] * self._with_cuda, *[ON_STABLE_ABI] * stable]
        return workshop.compile(
            self._compile(source, define, level)
            for source in longest_first
            for level in (wanted if source in loops else (1,))
        )

    def links(self, workshop: Workshop, objects: list[Object]) -> dict[int, Path]:
        """Link the libraries of all levels."""
        return {level: self.link(workshop, objects, level) for level in self.levels}

    def link(self, workshop: Workshop, objects: list[Object], level: int, *more: str) -> Path:
        """Link those of these objects that it is made of for a level, and `more`, to a library."""
        found, toolchain = self._flags(), self._toolchain
        extra = [*found.linker, *toolchain.ldflags]
        if self._with_cuda:
            extra += flags.cuda_runtime(workshop.folder, toolchain)
        loops = with_loops(self._all)
        variant = {source: _variant(level) if source in loops else "" for source in self.sources}
        own = {o.source: o.path.name for o in objects if variant.get(o.source) == o.variant}
        names = [own[source] for source in self.sources]
        last = found.link(extra, self._with_cuda)
        return workshop.link([*toolchain.command("CXX"), *names, *more, *last], "library.so")

    def explain(self, output: str, workshop: Workshop) -> BuildError:
        """Return the first errors, where they are, and where the whole output lies."""
        problems, total = find_problems(output, self._unit.root, self.sources)
        causes, log = as_text(problems, total), f"{self.label}.log"
        return workshop.failure(self.label, causes, log, problems=problems)

    def cost(self) -> int:
        """Return a guess at the work; less than any for what few calls need, which comes last."""
        loops, costs = with_loops(self._all), self._costs().items()
        work = sum(cost * (len(self.levels) if s in loops else 1) for s, cost in costs)
        return -1 if is_rest(self.unit) else work

    def _costs(self) -> dict[str, int]:
        """By the size of what each source reaches of ours; those in ops/ take half as long."""
        costs, sources = {}, self._read()
        for source in self.sources:
            reached = sources.closure(source)
            size = sum((self._unit.root / path).stat().st_size for path in reached)
            costs[source] = size // 2 if source.startswith("ops/") else size
        return costs

    def _compile(self, source: str, define: list[str], level: int) -> Compile:
        toolchain, found, root = self._toolchain, self._flags(), self._unit.root
        includes = [str(at / "include") for at in dict.fromkeys((root, HOME))]
        if source.endswith(".cu"):
            own = [*toolchain.cuda_flags, *found.together, *_TELL_RESOURCES]
            own += [*_NO_SPECIAL_FUNCTIONS, *define]
            command = toolchain.command("PYTORCH_NVCC")
            if host := os.environ.get("CC"):
                command += ["-ccbin", host]
            command += found.cuda(self.unit, includes, own)
        else:
            cflags = toolchain.cflags
            if source.startswith("jit/") or (source.startswith("ops/") and len(self._all) > 1):
                cflags = (*(flag for flag in cflags if flag != NATIVE), _GLUE)
            own = [*cflags, *levels.flags(level), *found.quicker, *define]
            command = toolchain.command("CXX")
            command += found.cxx(self.unit, includes, own, self._with_cuda)
        return Compile(
            source,
            tuple(command),
            str(root / source),
            lambda: self._read().closure(source),
            _variant(level),
        )

    def _read(self) -> Sources:
        tools = self._toolchain
        return Sources(self._unit.root, tools.header_folders, named=tools.named_files)


def _variant(level: int) -> str:
    return levels.name(level) if level > 1 else ""
