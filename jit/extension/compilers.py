"""The compilers, told how to see one extension: commands, headers that stand before a source, link.

Whatever a command reads of ours lies in the work folder under a digest of its content, and is
written anew where it differs.
"""

import contextlib
import hashlib
import os
from functools import cache, partial
from pathlib import Path

import loader

from ..build import flags
from ..build.workshop import Compile, CompileError, Workshop
from ..errors.cxx import directives
from ..machine import files
from ..machine.toolchain import Toolchain
from .arguments import Extension, Source
from .flags import argv
from .inputs import headers
from .levels import UMBRELLAS, Level
from .names import Names, macros_of, names_of
from .precompiled import Precompiled

_HERE = "@extra@"  # where the caller's flags for the linker belong
_BINDING = Path(loader.__path__[0]) / "include" / "inline_binding.h"


class Compilers:
    """The commands for one extension, run in a workshop; at the context's end locks are freed."""

    def __init__(self, extension: Extension, toolchain: Toolchain, shop: Workshop):
        self._extension, self._toolchain, self._shop = extension, toolchain, shop
        self._work = shop.folder.parent
        self._flags = flags.of(toolchain, self._work)
        self._closing = contextlib.ExitStack()
        self._macros = cache(self._ask_macros)

    def __enter__(self) -> "Compilers":
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Let others remove the precompiled headers."""
        self._closing.close()

    def cpp(
        self, source: Source, way: Level, text: str, given: list[str]
    ) -> tuple[Path | None, str]:
        """Compile C++; the object or None, and what the compiler said."""
        command, name = self._cxx(source, way, given), f"{_stem(source)}.{way.name}.cpp"
        if way.shared:
            header = self._precompiled(way, given)
            for _ in range(2):  # once more with a header made anew, where it proves damaged
                if not (header and header.made()):
                    break
                done, said, sound = header.checked(
                    partial(self._compile, [*command, *header.use], text, name)
                )
                if sound and (done or not header.complains(said)):
                    return done, said
                if sound:
                    break  # flags that it was not made for: without it, then
                if done:
                    done.unlink(missing_ok=True)
                header.discard()
        return self._compile([*command, *self._before(way)], _with_prelude(way, text), name)

    def cuda(
        self, source: Source, way: Level, text: str, more: tuple[str, ...] = ()
    ) -> tuple[Path | None, str]:
        """Compile CUDA; the object or None, and what nvcc said."""
        command = [*self._nvcc(source, way, more), *self._before(way)]
        name = f"{_stem(source)}.{way.name}.cu"
        return self._compile(command, _with_prelude(way, text), name)

    def link(self, objects: list[Path], with_torch: bool) -> Path:
        """Link the library or program; `with_torch` where an object needs torch's libraries."""
        extension, given = self._extension, argv(self._extension.ldflags)
        linker = [flag for flag in self._flags.linker if not flag.startswith("-Wl,--as")]
        extra = [*linker, *given]
        if with_torch:
            own_order = given or extension.is_standalone  # of libraries, which the caller relies on
            extra += [] if own_order else ["-Wl,--as-needed"]
        runtime = []
        if extension.with_cuda:
            runtime = flags.cuda_runtime(self._shop.folder, self._toolchain)
        found = self._flags.link([_HERE], extension.with_cuda, extension.is_standalone)
        at = found.index(_HERE)
        before, behind = found[:at], found[at + 1 :]
        if not with_torch:
            behind = [word for word in behind if not _of_torch(word)]
        found = [*before, *extra, *runtime, *behind]
        names = [path.name for path in objects]
        return self._shop.link([*self._toolchain.command("CXX"), *names, *found], "library.so")

    def defines_of_nvcc(self) -> list[str]:
        """Return the macros that torch defines for nvcc alone."""
        line = self._flags.lines.get("cuda+cuda", [])
        return [word for word in line if word.startswith("-D__CUDA")]

    def undefined(self, made: Path) -> list[str]:
        """Return the symbols that an object lacks; none where `nm` is not there to tell."""
        try:
            status, said = self._shop.run(["nm", "-u", "--format=posix", made.name], note=False)
        except OSError:
            return []
        return [line.split()[0] for line in said.splitlines() if line] if status == 0 else []

    def wide(self, cuda: bool, includes: list[str], given: list[str]) -> Names:
        """Return the names that torch's umbrella header brings, and the headers of a source.

        Raises: LookupError where the preprocessor cannot tell.
        """
        own = [name for name in includes if name not in UMBRELLAS]
        lines = ["torch/types.h", "cuda.h", "cuda_runtime.h"] if cuda else []
        lines += ["torch/extension.h", "math.h", *own]
        text = "".join(f"#include <{name}>\n" for name in lines)
        full, source = Level("full", ""), self._extension.sources[0]
        command = self._nvcc(source, full) if cuda else self._cxx(source, full, given)
        made_of = [self._toolchain.identity, command, text]
        place = self._work / f"inline.names-{_digest(repr(made_of))}.json"
        if kept := files.read_record(place):
            return Names(frozenset(kept[0]), frozenset(kept[1]))
        names = names_of(self._preprocessed(command, text, cuda))
        files.write_record(place, [sorted(names.macros), sorted(names.declared)])
        return names

    def macros(
        self, source: Source, way: Level, cuda: bool, given: list[str], text: str
    ) -> frozenset[str]:
        """Return the macros that a text of a source has, its own and those of its headers.

        Raises: LookupError where the preprocessor cannot tell.
        """
        command = self._nvcc(source, way) if cuda else self._cxx(source, way, given)
        lines = [d for d in directives(text) if d.name in ("include", "define")]
        kept = "".join(f"#{line.name} {line.rest}\n" for line in lines)
        return self._macros((*command, *self._before(way)), cuda, kept)

    def _ask_macros(self, command: tuple[str, ...], cuda: bool, text: str) -> frozenset[str]:
        return macros_of(self._preprocessed([*command], text, cuda))

    def _preprocessed(self, command: list[str], text: str, cuda: bool) -> str:
        """A text's preprocessed form with its macros; LookupError where that fails."""
        name = self._put(f"names-{_digest(text)}.{'cu' if cuda else 'cpp'}", text)
        more = ["-E", "-Xcompiler", "-dD,-P"] if cuda else ["-E", "-P", "-dD"]
        kept = [word for word in command if not word.startswith("-gencode")]
        status, said = self._shop.run([*kept, *more, name], note=False)  # tens of megabytes
        if status:
            raise LookupError("the preprocessor failed")
        return said

    def _compile(self, command: list[str], text: str, name: str) -> tuple[Path | None, str]:
        """Run a compiler on a text, unless its object is there; the object, what was printed."""
        stem, _, suffix = name.rpartition(".")
        digest = _digest(text)
        file = self._put(f"{stem}.{digest}.{suffix}", text)
        job = Compile(name, tuple(command), file, partial(self._made_of, digest))
        try:
            made = self._shop.compile([job])[0]
        except CompileError as error:
            if self._shop.ended:
                raise
            return None, str(error)
        return made.path, made.said

    def _made_of(self, text_digest: str) -> dict[str, str]:
        found = headers(self._extension, self._toolchain)
        own = {os.path.join("/", source.name) for source in self._extension.sources}
        made_of = {path: digest for path, digest in found.items() if path not in own}
        return made_of | {"": text_digest}

    def _cxx(self, source: Source, way: Level, given: list[str]) -> list[str]:
        extension = self._extension
        line = self._flags.cxx(
            extension.name, [*extension.include_paths], given, extension.with_cuda
        )
        beside = ["-iquote", source.folder] if source.folder else []
        return [*self._toolchain.command("CXX"), *self._hidden(way), *beside, *self._own(line)]

    def _nvcc(self, source: Source, way: Level, more: tuple[str, ...] = ()) -> list[str]:
        extension, given = self._extension, argv(self._extension.cuda_cflags)
        line = self._flags.cuda(extension.name, [*extension.include_paths], given)
        named = any("arch" in flag for flag in given)
        if named or not self._toolchain.architectures:
            # Without a GPU or a list nvcc takes its oldest, and PTX for all later ones.
            line = [word for word in line if not word.startswith("-gencode=") or word in given]
        command = self._toolchain.command("PYTORCH_NVCC")
        if host := os.environ.get("CC"):
            command += ["-ccbin", host]
        beside = [f"-I{source.folder}"] if source.folder else []
        return [*command, *self._hidden(way), *beside, *self._own(line), *more]

    def _own(self, line: list[str]) -> list[str]:
        """A command line of torch's for this kind of extension: a program has no module's name."""
        return [w for w in line if not self._extension.is_standalone or not _of_module(w)]

    def _hidden(self, way: Level) -> list[str]:
        """The folder in which the headers to be left out are empty."""
        if not way.hidden:
            return []
        folder = f"hidden-{_digest(''.join(way.hidden))}"
        for name in way.hidden:
            (self._shop.folder / folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._put(f"{folder}/{name}", "#pragma once\n")
        return [f"-I{self._shop.folder / folder}"]

    def _before(self, way: Level) -> list[str]:
        if not way.prelude or way.is_torchs_own:
            return []
        text = way.prelude.replace('"inline_binding.h"', f'"{_BINDING}"')
        return ["-include", self._put(f"{way.name}-{_digest(text)}.h", text)]

    def _put(self, name: str, text: str) -> str:
        """Give a file of the work folder its content, unless it has it; its name."""
        path, content = self._shop.folder / name, text.encode(errors="surrogateescape")
        try:
            same = path.read_bytes() == content
        except OSError:
            same = False
        if not same:
            files.write(path, content)
        return name

    def _precompiled(self, way: Level, given: list[str]) -> Precompiled:
        kept = [flag for flag in given if not flag.startswith(("-D", "-U", "-I", "-W", "-l"))]
        line = self._flags.cxx("", [], kept, False)
        made_by = [*self._toolchain.command("CXX"), *(w for w in line if "_NAME=" not in w)]
        facts = [self._toolchain.cxx, self._toolchain.torch]
        header = Precompiled(self._shop, made_by, facts, way.prelude)
        self._closing.callback(header.close)
        return header


def _with_prelude(way: Level, text: str) -> str:
    return way.prelude + text if way.is_torchs_own else text


def _of_torch(word: str) -> bool:
    return word.startswith(("-lc10", "-ltorch", "-Wl,-rpath")) or word.endswith("torch/lib")


def _of_module(word: str) -> bool:
    return word.startswith("-DTORCH_EXTENSION_NAME=") or word == "-DTORCH_API_INCLUDE_EXTENSION_H"


def _stem(source: Source) -> str:
    """A name for what is made of a source: sources of one name in two folders have two."""
    stem = Path(source.name).stem
    return f"{stem}.{_digest(source.folder)}" if source.folder else stem


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
