"""The compilers, told how to see one extension: commands, headers that stand before a source, link.

Whatever a command reads of ours lies in the work folder under a digest of its content, and is
written anew where it differs.
"""

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from ..build import flags
from ..build.workshop import Compile, CompileError, Workshop
from ..errors import cxx
from ..machine import files
from ..machine.sources import HOME
from ..machine.toolchain import Toolchain
from .arguments import Extension, Source
from .flags import argv, beside
from .inputs import headers
from .levels import CUDA_HEADERS, UMBRELLAS, Level, binding, include_lines
from .names import Names, macros_of, names_of
from .precompiled import Precompiled
from .retry import BINDING

_HERE = "@extra@"  # where the caller's flags for the linker belong
_BINDING = HOME / "include" / "inline_binding.h"


@dataclass(frozen=True)
class Task:
    """A text for one compiler: a source, or the half of one that nvcc or the C++ compiler gets."""

    source: Source
    cuda: bool
    given: list[str]  # the caller's flags for this compiler
    text: str
    functions: dict[str, str] | None = None  # to bind behind the text
    beside: str | None = None  # the other half, whose names the whole has too; of a whole None

    @property
    def bracketed(self) -> list[str]:
        """The headers that the source includes as <name>."""
        return [header.name for header in cxx.includes(self.source.text) if not header.quoted]


class Compilers:
    """The commands for one extension, run in a workshop."""

    def __init__(self, extension: Extension, toolchain: Toolchain, shop: Workshop):
        self._extension, self._toolchain, self._shop = extension, toolchain, shop
        self._work = shop.folder.parent
        self._flags = flags.of(toolchain, self._work)
        self._macros = cache(lambda *asked: macros_of(self._preprocessed(*asked)))
        self._guard = threading.Lock()

    def compile(self, task: Task, way: Level) -> tuple[Path | None, str]:
        """Return the object, or None, and what the compiler said."""
        text = task.text
        if task.functions is not None:
            bound = binding(task.functions, self._extension, way)
            text += f'#line 1 "{BINDING}"\n{bound}'
        command = self._command(task, way)
        source = Path(task.source.name).stem
        if task.source.folder:  # sources of one name in two folders have two
            source += f".{_digest(task.source.folder)}"
        name = f"{source}.{way.name}.{'cu' if task.cuda else 'cpp'}"
        if way.shared:
            header = self._precompiled(way, task.given)
            if found := header.used(lambda use: self._compile([*command, *use], text, name)):
                return found
            header.make_behind()  # for the next one
        if way.is_torchs_own:
            text = way.prelude + text
        return self._compile([*command, *self._before(way)], text, name)

    def link(self, objects: list[Path], with_torch: bool) -> Path:
        """Link the library or program; `with_torch` where an object needs torch's libraries."""
        extension, own = self._extension, argv(self._extension.ldflags)
        extra = [flag for flag in self._flags.linker if not flag.startswith("-Wl,--as")] + own
        if with_torch and not (own or extension.is_standalone):
            extra += ["-Wl,--as-needed"]  # else the caller may rely on the order of libraries
        if extension.with_cuda:
            extra += flags.cuda_runtime(self._shop.folder, self._toolchain)
        found = self._flags.link([_HERE], extension.with_cuda, extension.is_standalone)
        found = [word for word in found if with_torch or not _of_torch(word)]
        at = found.index(_HERE)
        found[at : at + 1] = extra
        names = [path.name for path in objects]
        return self._shop.link([*self._toolchain.command("CXX"), *names, *found], "library.so")

    def defines_of_nvcc(self) -> list[str]:
        """Return the macros that torch defines for nvcc alone."""
        line = self._flags.lines.get("cuda+cuda", [])
        return [word for word in line if word.startswith("-D__CUDA")]

    def undefined(self, made: Path) -> list[str]:
        """Return the symbols that an object lacks; none where `nm` is not there to tell."""
        try:
            ran = self._shop.run(["nm", "-u", "--format=posix", made.name], note=False)
        except OSError:
            return []
        return [line.split()[0] for line in ran.said.splitlines() if line and not ran.status]

    def wide(self, task: Task) -> Names:
        """Return the names that torch's umbrella header brings, and the headers of the source.

        Raises: LookupError where the preprocessor cannot tell.
        """
        if task.beside is not None:  # nvcc would see the whole
            task = replace(task, cuda=True, given=argv(self._extension.cuda_cflags))
        lines = ["torch/types.h", *CUDA_HEADERS] if task.cuda else []
        lines += ["torch/extension.h", "math.h"]
        lines += [name for name in task.bracketed if name not in UMBRELLAS]
        text = include_lines(lines)
        command = self._command(replace(task, source=self._extension.sources[0]), Level("full", ""))
        # The same for all extensions and all GPUs.
        command = [word for word in _for_any_gpu(command) if not _of_module(word)]
        made_of = [self._toolchain.identity, command, text]
        place = self._work / f"inline.names-{_digest(repr(made_of))}.json"
        with self._guard:  # both halves of a source may ask
            if kept := files.read_record(place):
                return Names(frozenset(kept[0]), frozenset(kept[1]))
            names = names_of(self._preprocessed(tuple(command), text, task.cuda))
            files.write_record(place, [sorted(names.macros), sorted(names.declared)])
            return names

    def macros(self, task: Task, way: Level, text: str) -> frozenset[str]:
        """Return the macros that a text has in this way, its own and those of its headers.

        Raises: LookupError where the preprocessor cannot tell.
        """
        lines = [d for d in cxx.directives(text) if d.name in ("include", "define")]
        kept = "".join(f"#{line.name} {line.rest}\n" for line in lines)
        command = (*self._command(task, way), *self._before(way))
        return self._macros(command, kept, task.cuda)

    def _preprocessed(self, command: tuple[str, ...], text: str, cuda: bool) -> str:
        """A text's preprocessed form with its macros; LookupError where that fails."""
        name = self._put(f"names-{_digest(text)}.{'cu' if cuda else 'cpp'}", text)
        more = ["-E", "-Xcompiler", "-dD,-P"] if cuda else ["-E", "-P", "-dD"]
        ran = self._shop.run([*_for_any_gpu(command), *more, name], note=False)  # tens of megabytes
        if ran.status:
            raise LookupError("the preprocessor failed")
        return ran.said

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

    def _command(self, task: Task, way: Level) -> list[str]:
        """The compiler and its arguments, without what stands before the text."""
        extension, folder, given = self._extension, task.source.folder, task.given
        includes = [*extension.include_paths]
        if task.cuda:
            line = self._flags.cuda(extension.name, includes, given)
            if not self._toolchain.architectures or any("arch" in flag for flag in given):
                # Without a GPU or a list nvcc takes its oldest, and PTX for all later ones.
                line = [word for word in line if not word.startswith("-gencode=") or word in given]
            command = self._toolchain.command("PYTORCH_NVCC")
            if host := os.environ.get("CC"):
                command += ["-ccbin", host]
        else:
            line = self._flags.cxx(extension.name, includes, given, extension.with_cuda)
            command = self._toolchain.command("CXX")
        if extension.is_standalone:  # a program has no module's name
            line = [word for word in line if not _of_module(word)]
        return [*command, *self._hidden(way), *(beside(folder, task.cuda) if folder else []), *line]

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
        return Precompiled(self._work, made_by, facts, way.prelude)


def _of_torch(word: str) -> bool:
    return word.startswith(("-lc10", "-ltorch", "-Wl,-rpath")) or word.endswith("torch/lib")


def _for_any_gpu(command: Sequence[str]) -> list[str]:
    """A command without `-gencode`, of one word or two."""
    words = zip(["", *command], command, strict=False)
    return [w for before, w in words if "-gencode" not in (before, w.partition("=")[0])]


def _of_module(word: str) -> bool:
    return word.startswith("-DTORCH_EXTENSION_NAME=") or word == "-DTORCH_API_INCLUDE_EXTENSION_H"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
