"""How an extension is made: each source with as few of torch's headers as will do, then one link.

See levels.py for the ways to compile a source, halves.py for CUDA sources in two, retry.py for
which errors lead to the next way.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..build import flags
from ..build.workshop import CompileError, Workshop, in_threads
from ..errors import BuildError, cxx
from ..machine.toolchain import Toolchain
from .arguments import Extension, Source
from .compilers import Compilers, Task
from .failure import could_not_be_built
from .flags import argv, host_flags
from .halves import LINKED_STUBS, halves
from .inputs import Find, manifest, quoted_headers, with_headers
from .levels import Level, conditions, include_lines, levels
from .mending import Mending
from .names import Names, names_of
from .retry import BINDING, may_need_more

_WITHOUT_TORCH = {"plain", "kernels"}


@dataclass(frozen=True)
class Part:
    """A finished object, and the way in which it was compiled."""

    path: Path
    level: str


class _OfHalf(CompileError):
    """An error of the half of a source that the whole, which nvcc sees, might do without."""


class ExtensionRecipe:
    """An extension for a toolchain; see engine.Recipe. Not `narrow`, it is made in torch's way."""

    def __init__(self, extension: Extension, toolchain: Toolchain, narrow: bool = True):
        self.unit = self.folder = extension.unit
        self.label = extension.name
        self._extension, self._toolchain = extension, toolchain
        self._narrow = narrow
        self._tried: list[dict] = []
        self._mends: list[dict] = []

    def inputs(self) -> dict:
        """Return the manifest of sources, headers, flags and tools as they are now."""
        return manifest(self._extension, self._toolchain)

    def maker(self, inputs: dict) -> dict:
        """Return toolchain and Python: the work folder outlives an edit."""
        return {"toolchain": inputs["toolchain"], "python": inputs["python"]}

    def check_machine(self) -> None:
        """Raise BuildError without a C++ compiler, or without nvcc where there is CUDA."""
        flags.check_compiler(self._toolchain)
        if self._extension.with_cuda and self._toolchain.nvcc is None:
            version, name = torch.version.cuda, self.label
            cure = (
                f"install the CUDA toolkit {version} or pip install 'nvidia-cuda-nvcc=={version}.*'"
                ", or set CUDA_HOME to where it is"
                if version
                else "this torch is for the CPU only"
            )
            text = f"{name}: CUDA sources need nvcc: {cure}"
            raise BuildError(text, name, kind="missing_compiler")

    def make(self, workshop: Workshop, inputs: dict) -> tuple[dict[int, Path], dict]:
        """Compile what is not there yet and link the library or program."""
        for source in self._extension.sources:
            if not source.folder:  # so that compilers can quote its lines
                (workshop.folder / source.name).write_bytes(source.content)
        mending = Mending(self._extension, self._toolchain, workshop.folder)
        try:
            while True:
                attempt = ExtensionRecipe(mending.extension, mending.toolchain, self._narrow)
                attempt._tried = self._tried
                try:
                    library, names = attempt._attempt(workshop)
                    return {1: library}, {"why": [], "levels": names, "mends": mending.rows()}
                except CompileError as error:
                    if workshop.ended or not mending.take(str(error)):
                        raise
        finally:
            self._mends = mending.rows()
            if self._extension.verbose:
                print("\n".join(workshop.said), flush=True)

    def explain(self, output: str, workshop: Workshop) -> BuildError:
        """Return the first errors at the caller's lines, and where the whole output lies."""
        return could_not_be_built(self._extension, output, workshop, self._tried, self._mends)

    def _attempt(self, workshop: Workshop) -> tuple[Path, list[str]]:
        """Compile and link; the library, and the way of each part. Raises: CompileError."""
        self._compilers = Compilers(self._extension, self._toolchain, workshop)
        results = in_threads(self._parts, [*enumerate(self._extension.sources)])
        failed = [str(result) for result in results if isinstance(result, CompileError)]
        if failed:
            raise CompileError("\n".join(failed))
        parts = [part for found in results for part in found]
        names = [part.level for part in parts]
        with_torch = not {*names} <= _WITHOUT_TORCH
        return self._compilers.link([part.path for part in parts], with_torch), names

    def _parts(self, numbered: tuple[int, Source]) -> list[Part] | CompileError:
        """Return the objects of a source, or the error that it ends with."""
        number, source = numbered
        extension, cuda = self._extension, source.cuda and self._extension.with_cuda
        functions = extension.functions if number == 0 and not cuda else None
        try:
            if cuda and self._narrow and (found := self._halves(source)):
                return found
            reached = replace(source, text=with_headers(source, self._find(source)))
            ways = self._levels(reached, functions is not None, cuda)
            if not extension.error_handling or extension.is_standalone:
                ways = [way for way in ways if not way.own_binding]
            given = argv(extension.cuda_cflags if cuda else extension.cflags)
            text = f"#line 1 {cxx.literal(source.name)}\n{source.text}\n"
            task = Task(reached, cuda, given, text, functions)
            return [self._made(task, ways, "cuda " if cuda else "")]
        except CompileError as error:
            return error

    def _halves(self, source: Source) -> list[Part] | None:
        """The objects of kernels and host; None where the source has to stay whole.

        Both are compiled at once, unless the host's object has to tell which instances of kernel
        templates it needs. Raises: CompileError where the whole could not be compiled either.
        """
        own = argv(self._extension.cuda_cflags)
        given, split = host_flags(own), halves(source.text, source.name, self._find(source))
        if given is None or split is None:
            return None
        if split.templates and sum(s.cuda for s in self._extension.sources) > 1:
            return None  # whose templates of one name may differ
        given = [*self._compilers.defines_of_nvcc(), *given]
        source = replace(source, text=split.whole)
        host = Task(source, False, given, split.host, beside=split.device)
        device = Task(source, True, own, split.device, beside=split.host)

        def half(task: Task) -> Part | CompileError:
            ways = [Level("kernels", "")] if task.cuda else self._levels(source, False)
            try:
                return self._made(task, ways, "" if task.cuda else "host ")
            except CompileError as error:
                return error

        if not split.for_nvcc:
            made = [half(host)]
        elif not split.templates:
            made = in_threads(half, [device, host])
        else:
            made = [half(host)]
            if isinstance(made[0], Part) and (lacking := self._compilers.undefined(made[0].path)):
                symbols = cxx.demangled("\n".join(lacking)).split("\n")
                if text := split.with_instances(symbols):
                    made = [half(replace(device, given=[*own, *LINKED_STUBS], text=text)), *made]
        if hopeless := [str(e) for e in made if type(e) is CompileError]:
            raise CompileError("\n".join(hopeless))
        parts = [part for part in made if isinstance(part, Part)]
        return parts if len(parts) == 1 + split.for_nvcc else None

    def _made(self, task: Task, ways: list[Level], label: str) -> Part:
        """The object made in the first way that compiles. Raises: CompileError."""
        half, said = task.beside is not None, "conditions of the preprocessor differ"
        for way in ways:
            if (way is not ways[-1] or half) and not self._same_conditions(task, way):
                continue
            done, said = self._compilers.compile(task, way)
            tried = {"source": task.source.name, "way": f"{label}{way.name}", "ok": bool(done)}
            self._tried.append(tried)
            if done:
                return Part(done, f"{label}{way.name}")
            if (way is ways[-1] and not half) or not self._may_need_more(task, way, said):
                raise CompileError(said)
        raise _OfHalf(said)

    def _find(self, source: Source) -> Find:
        folders = (*self._extension.include_paths, *self._toolchain.header_folders)
        return quoted_headers(source, folders)

    def _levels(self, source: Source, functions: bool, cuda: bool = False) -> list[Level]:
        implicit = self._extension.implicit_headers
        ways = levels(source.text, functions, implicit, cuda)
        return ways if self._narrow else ways[-1:]

    def _same_conditions(self, task: Task, way: Level) -> bool:
        """True if the preprocessor's conditions come out in this way as in torch's own."""
        asked = conditions(task.source.text if task.beside is None else task.text)
        asked -= {"__cplusplus", "__CUDA_ARCH__", "CUDA_VERSION", "CUDART_VERSION"}
        if not asked:
            return True
        text = include_lines(h.name for h in cxx.includes(task.text) if not h.quoted)
        try:
            wide = self._compilers.wide(task).macros
            return asked & wide == asked & self._compilers.macros(task, way, text)
        except LookupError:
            return False

    def _may_need_more(self, task: Task, way: Level, said: str) -> bool:
        """True if what a compiler said may be mended by a wider way, as far as can be told.

        What it said of one half may be mended by nvcc, which sees both.
        """
        text = task.source.text if task.beside is None else task.text
        beside = names_of(cxx.blanked(task.beside or "")).declared

        def wide() -> Names:
            found = self._compilers.wide(task)
            return Names(found.macros, found.declared | beside)

        def macros() -> Collection[str]:
            return self._compilers.macros(task, way, text)

        words = cxx.identifiers(cxx.blanked(text))
        try:
            return may_need_more(said, (task.source.name, BINDING), words, wide, macros)
        except LookupError:
            return True
