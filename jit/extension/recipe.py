"""How an extension is made: each source with as few of torch's headers as will do, then one link.

See levels.py for the ways to compile a source, halves.py for CUDA sources in two, retry.py for
which errors lead to the next way.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from ..build.workshop import CompileError, Workshop, in_threads
from ..errors import BuildError, cxx
from ..machine.toolchain import Toolchain
from .arguments import Extension, Source
from .binding import binding
from .compilers import Compilers
from .failure import could_not_be_built, no_module
from .flags import argv, host_flags
from .halves import LINKED_STUBS, Halves, halves
from .inputs import manifest
from .levels import Level, conditions, levels, torch_include
from .names import Names, names_of
from .retry import may_need_more

_WITHOUT_TORCH = {"plain", "kernels"}


@dataclass(frozen=True)
class Part:
    """A finished object, and the way in which it was compiled."""

    path: Path
    level: str


class ExtensionRecipe:
    """An extension for a toolchain; see engine.Recipe. Not `narrow`, it is made in torch's way."""

    def __init__(
        self, extension: Extension, toolchain: Toolchain, narrow: bool = True, verbose: bool = False
    ):
        self.unit, self.label = extension.unit, extension.name
        self._extension, self._toolchain = extension, toolchain
        self._narrow, self._verbose = narrow, verbose

    def inputs(self) -> dict:
        """Return the manifest of sources, headers, flags and tools as they are now."""
        return manifest(self._extension, self._toolchain)

    def maker(self, inputs: dict) -> dict:
        """Return toolchain and Python: the work folder outlives an edit."""
        return {"toolchain": inputs["toolchain"], "python": inputs["python"]}

    def check_machine(self) -> None:
        """Raise BuildError without a C++ compiler, or without nvcc where there is CUDA."""
        if self._toolchain.cxx is None:
            command = os.environ.get("CXX") or "c++"
            raise BuildError(
                f"no C++ compiler: `{command}` is not on PATH; install one "
                "(Debian, Ubuntu: apt install g++) or set CXX to one that supports C++17"
            )
        if self._extension.with_cuda and self._toolchain.nvcc is None:
            version, name = torch.version.cuda, self.label
            cure = (
                f"install the CUDA toolkit {version} or pip install 'nvidia-cuda-nvcc=={version}.*'"
                ", or set CUDA_HOME to where it is"
                if version
                else "this torch is for the CPU only"
            )
            raise BuildError(f"{name}: CUDA sources need nvcc: {cure}", name)

    def certain_failure(self, inputs: dict) -> BuildError | None:
        """Return the error of sources whose text shows that no compiler could help; else None."""
        return no_module(self._extension, inputs["files"])

    def make(self, workshop: Workshop, inputs: dict) -> tuple[Path, dict]:
        """Compile what is not there yet and link the library or program."""
        for source in self._extension.sources:
            if not source.folder:  # so that compilers can quote its lines
                (workshop.folder / source.name).write_bytes(source.content)
        try:
            with Compilers(self._extension, self._toolchain, workshop) as compilers:
                making = _Making(self._extension, compilers, self._narrow)
                results = in_threads(making.parts, [*enumerate(self._extension.sources)])
                failed = [str(result) for result in results if isinstance(result, CompileError)]
                if failed:
                    raise CompileError("\n".join(failed))
                parts = [part for found in results for part in found]
                names = [part.level for part in parts]
                library = compilers.link([p.path for p in parts], not {*names} <= _WITHOUT_TORCH)
                return library, {"why": [], "levels": names}
        finally:
            if self._verbose:
                print("\n".join(workshop.said), flush=True)

    def explain(self, output: str, workshop: Workshop) -> BuildError:
        """Return the first errors at the caller's lines, and where the whole output lies."""
        return could_not_be_built(self._extension, output, workshop)


class _Making:
    """The ways that are tried for each source of an extension."""

    def __init__(self, extension: Extension, compilers: Compilers, narrow: bool):
        self._extension, self._compilers, self._narrow = extension, compilers, narrow
        self._cflags, self._cuda_cflags = argv(extension.cflags), argv(extension.cuda_cflags)

    def parts(self, numbered: tuple[int, Source]) -> list[Part] | CompileError:
        """Return the objects of a source, or the error that it ends with."""
        number, source = numbered
        functions = self._extension.functions if number == 0 else None
        try:
            if source.cuda and self._extension.with_cuda:
                return self._cuda(source)
            return self._cpp(source, functions)
        except CompileError as error:
            return error

    def _cpp(self, source: Source, functions: dict[str, str] | None) -> list[Part]:
        extension = self._extension
        ways = self._levels(source, functions is not None)
        if not extension.error_handling or extension.is_standalone:
            ways = [way for way in ways if not way.own_binding]
        body = f'#line 1 "{source.name}"\n{source.text}\n'
        said = ""
        for way in self._allowed(source, ways, False, self._cflags):
            text = body
            if functions is not None:
                bound = binding(functions, extension.name, way, extension.error_handling)
                text += f'#line 1 "functions.cpp"\n{bound}'
            done, said = self._compilers.cpp(source, way, text, self._cflags)
            if done:
                return [Part(done, way.name)]
            if way is ways[-1] or not self._may_need_more(source, way, said, False, self._cflags):
                break
        raise CompileError(said)

    def _cuda(self, source: Source) -> list[Part]:
        """The objects of a CUDA source: of its two halves, or of the whole."""
        if self._narrow and (found := self._halves(source)):
            return found
        ways, said = self._levels(source, False, cuda=True), ""
        text = f'#line 1 "{source.name}"\n{source.text}\n'
        for way in self._allowed(source, ways, True, self._cuda_cflags):
            done, said = self._compilers.cuda(source, way, text)
            if done:
                return [Part(done, f"cuda {way.name}")]
            if way is ways[-1] or not self._may_need_more(
                source, way, said, True, self._cuda_cflags
            ):
                break
        raise CompileError(said)

    def _halves(self, source: Source) -> list[Part] | None:
        """The objects of kernels and host; None where the source has to stay whole.

        Both are compiled at once, unless the host's object has to tell which instances of kernel
        templates it needs. Raises: CompileError where the whole could not be compiled either.
        """
        given, split = host_flags(self._cuda_cflags), halves(source.text, source.name)
        if given is None or split is None:
            return None
        if split.templates and sum(s.cuda for s in self._extension.sources) > 1:
            return None  # whose templates of one name may differ
        given = self._compilers.defines_of_nvcc() + given
        if split.templates:
            host = self._host(source, split, given)
            device = self._device(source, split, host) if isinstance(host, Part) else None
        else:
            both = [lambda: self._device(source, split), lambda: self._host(source, split, given)]
            device, host = in_threads(lambda half: half(), both)
        if isinstance(host, Part) and isinstance(device, Part):
            return [device, host]
        hopeless = [str(made) for made in (device, host) if isinstance(made, CompileError)]
        if hopeless:
            raise CompileError("\n".join(hopeless))
        return None

    def _host(self, source: Source, split: Halves, given: list[str]) -> Part | CompileError | None:
        """The host's object; the error if the whole has it too, or None if it might do."""
        ways = self._levels(source, False)
        for way in self._allowed(source, ways, False, given):
            done, said = self._compilers.cpp(source, way, split.host, given)
            if done:
                return Part(done, f"host {way.name}")
            if not self._may_need_more(source, way, said, False, given, split.host, split.device):
                return CompileError(said)
        return None

    def _device(
        self, source: Source, split: Halves, host: Part | None = None
    ) -> Part | CompileError | None:
        """The kernels' object; the error if the whole has it too, or None if it might do."""
        text, more = split.device, ()
        if host:
            lacking = self._compilers.undefined(host.path)
            text = split.with_instances(cxx.demangled("\n".join(lacking)).split("\n"))
            more = tuple(LINKED_STUBS)
            if text is None or not lacking:
                return None
        way = Level("kernels", "")
        done, said = self._compilers.cuda(source, way, text, more)
        if done:
            return Part(done, way.name)
        flags = self._cuda_cflags
        if self._may_need_more(source, way, said, True, flags, split.device, split.host):
            return None
        return CompileError(said)

    def _levels(self, source: Source, functions: bool, cuda: bool = False) -> list[Level]:
        implicit = self._extension.implicit_headers
        ways = levels(source.text, functions, implicit, torch_include(), cuda)
        return ways if self._narrow else ways[-1:]

    def _allowed(self, source: Source, ways: list[Level], cuda: bool, given: list[str]):
        """Yield the ways in which the preprocessor's conditions come out as in the last."""
        asked = conditions(source.text)
        for way in ways:
            if way is ways[-1] or not asked or self._same(asked, source, way, cuda, given):
                yield way

    def _same(self, asked: set[str], source, way, cuda: bool, given: list[str]) -> bool:
        try:
            headers = _bracketed(source)
            text = "".join(f"#include <{name}>\n" for name in headers)
            wide = self._compilers.wide(cuda, headers, given).macros
            here = self._compilers.macros(source, way, cuda, given, text)
            return asked & wide == asked & here
        except LookupError:
            return False

    def _may_need_more(
        self, source: Source, way: Level, said: str, cuda: bool, given: list[str],
        half: str = "", other_half: str = "",
    ) -> bool:  # fmt: skip
        """True if what a compiler said may be mended by a wider way, as far as can be told.

        What it said of one half may be mended by nvcc, which sees both.
        """
        whole, text = cuda or bool(half), half or source.text
        flags = self._cuda_cflags if whole else given
        beside = names_of(cxx.blanked(other_half)).declared

        def wide() -> Names:
            found = self._compilers.wide(whole, _bracketed(source), flags)
            return Names(found.macros, found.declared | beside)

        def macros() -> Collection[str]:
            return self._compilers.macros(source, way, cuda, given, text)

        words = cxx.identifiers(cxx.blanked(text))
        try:
            return may_need_more(said, (source.name, "functions.cpp"), words, wide, macros)
        except LookupError:
            return True


def _bracketed(source: Source) -> list[str]:
    """The headers that a source includes as <name>."""
    return [header.name for header in cxx.includes(source.text) if not header.quoted]
