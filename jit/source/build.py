"""A source and its constants as a recipe of the engine's, and the builds that come of it.

Found in this process or in the store, or made: by NVRTC in this process, or by g++. That waits for
no operator's compilers; where the cache cannot be written it goes to a folder for the moment.
"""

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache.key import key as key_of
from ..cache.store import Store
from ..errors import BuildError, CacheError
from ..machine import reads, settings, toolchain
from ..machine.forks import Lock
from ..machine.sources import HOME, Sources
from . import constants, nvrtc
from .signature import Kernel, split_symbol

if TYPE_CHECKING:  # which a build in the store does without
    from ..build.workshop import Workshop

_FORMAT = 2  # raise when what is stored, or the way it is made, changes
_lock = Lock()
_builds: dict[str, "Build"] = {}  # by key: nothing is compiled twice in a process


class Build:
    """The product of a recipe, from its file and what was recorded of it.

    Attributes:
        code: CUDA's machine code; of a build for the CPU there is `run` instead.
        kernels: those that it has.
        templates: names of the source's templates of kernels.
    """

    def __init__(self, made: Path, facts: dict):
        self.templates = facts["templates"]
        if facts["inputs"]["target"] == "cpu":
            from . import emulate

            library = emulate.Library(made, facts["kernels"])
            self.run, self.kernels = library.run, library.kernels
        else:
            self.code = made.read_bytes()
            self.kernels = [Kernel(*row) for row in facts["kernels"]]
        self._modules: dict[int, c_void_p] = {}

    def handle(self, kernel: Kernel, device: int) -> c_void_p:
        """Return the driver's handle of a kernel on a device, which has to be the current one.

        What is loaded there stays until the process ends: work in flight may use it.
        """
        from .driver import ask

        with _lock:
            if device not in self._modules:
                self._modules[device] = ask("source_module: load", "cuModuleLoadData", self.code)
        module, name = self._modules[device], kernel.symbol
        return ask(f"source_module: {name}", "cuModuleGetFunction", module, name.encode())


@dataclass(eq=False, repr=False)
class SourceRecipe:
    """One source for one architecture, or for the CPU; see engine.Recipe."""

    source: str
    macros: dict[str, str]  # constants, as C++ spells them
    options: list[str]  # the user's own for NVRTC
    folders: list[str]  # the user's own, of headers
    place: Callable[[], tuple[str, int] | None]  # tells where the source's first line stands
    arch: str  # such as "90a"; "" on the CPU
    names: tuple[str, ...] = ()  # instances of templates that are wanted
    # Builds of this and its like, by architecture and names: each is the same for ever.
    made: dict[tuple, Build] = field(default_factory=dict)
    unit = folder = label = "source_module"

    def build(self) -> Build:
        """Return what is made of it, from this process, the store, or the compiler.

        Raises: BuildError.
        """
        if built := self.made.get((self.arch, self.names)):
            return built
        key, store = key_of(self.inputs()), Store(settings.cache_dirs(HOME))
        with _lock:
            if key not in _builds:
                _builds[key] = _opened(self, store, key) or _built(self, store)
            self.made[self.arch, self.names] = _builds[key]
        return _builds[key]

    def inputs(self) -> dict:
        """Return all that a build depends on, as plain data."""
        tools, cpu = _tools(), not self.arch
        if cpu:
            from . import emulate

            options, own = emulate.OPTIONS, [*emulate.OWN]
            compiler = [str(tools.cxx), *tools.environment, *toolchain.words(toolchain.FLAGS)]
        else:
            compiler = nvrtc.identity(nvrtc.header_folders(tools.cuda_home))
            options, own = [*nvrtc.OPTIONS, *self.options], [nvrtc.PRELUDE]
        texts = {nvrtc.FILE: self.source.encode(errors="surrogatepass")}
        named, forced = reads.headers([] if cpu else self.options)
        folders = *self.folders, *named, *(tools.header_folders if cpu else ())
        files, digests = Sources(HOME, folders, texts), dict[str, str]()
        for path in (nvrtc.FILE, *forced, *own):
            digests |= files.closure(path)
        if None in files.foreign(nvrtc.FILE):  # by a macro, which may name any
            for path in reads.headers_below([*self.folders, *named]):
                digests |= files.closure(path)
        return {
            "unit": self.unit,
            "format": _FORMAT,
            "constants": self.macros,
            "names": [*self.names],
            "options": options,
            "target": "cpu" if cpu else f"sm_{self.arch}",
            "compiler": compiler,
            "folders": self.folders,
            "files": dict(sorted(digests.items())),
        }

    def maker(self, inputs: dict) -> dict:
        """Return which of 256 work folders it is."""
        return {"folder": key_of(inputs)[:2]}

    def check_machine(self) -> None:
        """Raise BuildError without a C++ compiler for the CPU."""
        from ..build import flags

        if not self.arch:
            flags.check_compiler(_tools())

    def make(self, workshop: "Workshop", inputs: dict) -> tuple[dict[int, Path], dict]:
        """Compile the source; NeedsGpu for what cannot run on the CPU."""
        from . import emulate, text

        workshop.at_once = True
        shutil.rmtree(workshop.folder)  # what killed processes left
        workshop.folder.mkdir(mode=0o700)
        there = text.kernels(self.source)
        facts = {
            "templates": [kernel.name for kernel in there if kernel.template],
            "why": [f"{', '.join(kernel.name for kernel in there)} for {inputs['target']}"],
        }
        prologue = constants.prologue(self.macros, nvrtc.FILE)
        folders = [*self.folders, str(HOME / "include")]
        if not self.arch:
            made, kernels = emulate.compile(
                workshop, self.source, self.names, prologue, folders, self.at
            )
            return {1: made}, {**facts, "kernels": kernels}
        folders += nvrtc.header_folders(_tools().cuda_home)
        options = [*(f"-I{path}" for path in folders), *self.options]
        source = prologue + text.with_cxx_names(self.source)
        code, sizes, instances = nvrtc.compile(source, self.arch, options, self.names)
        found = []
        for symbol in sizes:
            name, types = split_symbol(symbol)
            names = text.parameters(name, there)
            found.append(Kernel(instances.get(symbol, name), types, sizes[symbol], names, symbol))
        made = workshop.folder / "kernels.cubin"
        made.write_bytes(code)
        return {1: made}, {**facts, "kernels": found}

    def explain(self, output: str, workshop: "Workshop") -> BuildError:
        """Return the first errors of a compiler, at the lines of the string."""
        from ..errors.diagnose import find_problems

        (workshop.folder / nvrtc.FILE).write_text(self.source, errors="replace")
        from ..errors.problem import as_text

        problems, total = find_problems(output, workshop.folder, (nvrtc.FILE,))
        file, first = self.place() or ("source", 1)

        def place(name: str, line: int) -> tuple[str, int] | None:
            return (file, first + line - 1) if name == nvrtc.FILE else None

        problems = [problem.placed(place) for problem in problems]
        causes = as_text(problems, total).replace("; the others are in the log)", ")")
        text = f"source_module: the source does not compile:\n{causes}"
        return BuildError(text, problems=problems)

    def at(self, file: str, line: int) -> str:
        """Return where a line of a file is, the source's as the user finds it."""
        if file != nvrtc.FILE:
            return f"{file}:{line}"
        place = self.place()
        return f"{place[0]}:{place[1] + line - 1}" if place else f"line {line} of the source"


def _opened(recipe: SourceRecipe, store: Store, key: str) -> Build | None:
    """The build that the store has; None where it has none, or one that is damaged."""
    made = store.verified(recipe.unit, key)
    facts = made and store.manifest(recipe.unit, key)
    if not made or not facts or (not recipe.arch and store.hold(made) is None):
        return None
    try:
        return Build(made, facts)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):  # damaged facts
        store.discard(store.path / made.parent.name)
        return None


def _built(recipe: SourceRecipe, store: Store) -> Build:
    """A new build, of this process or of the one that was about to make the same."""
    if settings.value("LOADER_BUILD") == "never":
        raise BuildError(
            "source_module: there is no build of this source with these constants in the cache "
            "and LOADER_BUILD=never; run it once where LOADER_BUILD is eager or lazy",
            kind="refused",
        )
    from ..build import batch
    from ..build.progress import Quiet

    with contextlib.ExitStack() as stack:
        try:
            job = batch.build(recipe, store, Quiet())
        except CacheError as error:
            warnings.warn(
                f"kernels from a string are compiled anew in each process: {error}", stacklevel=2
            )
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="octet-"))
            store = Store([Path(folder)])
            job = batch.build(recipe, store, Quiet())
        if built := _opened(recipe, store, job.key):
            return built
    raise BuildError("source_module: its build was removed at once; try again", kind="damaged")


def _tools() -> toolchain.Toolchain:
    return toolchain.current(settings.cache_dirs(HOME)[-1])
