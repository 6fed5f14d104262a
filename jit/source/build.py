"""A source and its constants as a recipe of the engine's, and the builds that come of it.

Found in this process or in the store, or made: by NVRTC in this process, or by g++. That waits for
no operator's compilers; where the cache cannot be written it goes to a folder for the moment.
"""

import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import NamedTuple

from ..cache.key import key as key_of
from ..cache.store import Store
from ..errors import BuildError, CacheError
from ..machine import settings, toolchain
from ..machine.forks import Lock
from ..machine.sources import HOME, Sources
from . import constants, nvrtc
from .signature import Kernel, split_symbol

_FORMAT = 2  # raise when what is stored, or the way it is made, changes
_lock = Lock()
_builds: dict[str, "Build"] = {}  # by key: nothing is compiled twice in a process


class Build:
    """The product of a recipe, from its file and what was recorded of it.

    Attributes:
        code: CUDA's machine code, or the library of the CPU's kernels.
        kernels: those that it has.
        templates: names of the source's templates of kernels.
    """

    def __init__(self, library: Path, facts: dict):
        self.templates = facts["templates"]
        if facts["inputs"]["target"] == "cpu":
            from .emulate import Library

            self.code = Library(library, facts["kernels"])
            self.kernels = self.code.kernels
        else:
            self.code = library.read_bytes()
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


class SourceRecipe(NamedTuple):
    """One source for one architecture, or for the CPU; see engine.Recipe.

    Attributes:
        macros: constants, as C++ spells them.
        options: the user's own for NVRTC.
        folders: the user's own, of headers.
        place: tells where the source's first line stands.
        arch: such as "90a"; "" on the CPU.
        names: instances of templates that are wanted.
        made: builds of this and its like, by architecture and names: each is the same for ever.
    """

    source: str
    macros: dict[str, str]
    options: list[str]
    folders: list[str]
    place: Callable[[], tuple[str, int] | None]
    arch: str
    names: tuple[str, ...]
    made: dict[tuple, Build]
    unit = label = "source_module"

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
            from .emulate import OPTIONS as options
            from .emulate import OWN as own

            compiler = [str(tools.cxx), *tools.environment, *toolchain.words(toolchain.FLAGS)]
        else:
            compiler = nvrtc.identity(nvrtc.header_folders(tools.cuda_home))
            options, own = [*nvrtc.OPTIONS, *self.options], [nvrtc.PRELUDE]
        texts = {nvrtc.FILE: self.source.encode(errors="surrogatepass")}
        files = Sources(HOME, (*self.folders, *(tools.header_folders if cpu else ())), texts)
        digests = files.closure(nvrtc.FILE)
        for path in own:
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
        if not self.arch and _tools().cxx is None:
            raise BuildError(
                f"source_module: no C++ compiler: {toolchain.command('CXX')[0]}: not found; "
                "apt install g++, or set CXX"
            )

    def make(self, workshop, inputs: dict) -> tuple[Path, dict]:
        """Compile the source; NeedsGpu for what cannot run on the CPU."""
        from . import text as kernel_text

        workshop.at_once = True
        shutil.rmtree(workshop.folder)  # what killed processes left
        workshop.folder.mkdir(mode=0o700)
        there = kernel_text.kernels(self.source)
        facts = {"templates": [kernel.name for kernel in there if kernel.template], "kernels": []}
        facts["why"] = [f"{', '.join(kernel.name for kernel in there)} for {inputs['target']}"]
        prologue = constants.prologue(self.macros, nvrtc.FILE)
        folders = [*self.folders, str(HOME / "include")]
        if not self.arch:
            from .emulate import compile

            made, facts["kernels"] = compile(workshop, self, prologue, folders)
            return made, facts
        folders += nvrtc.header_folders(_tools().cuda_home)
        options = [*(f"-I{path}" for path in folders), *self.options]
        source = prologue + kernel_text.with_cxx_names(self.source)
        code, sizes, instances = nvrtc.compile(source, self.arch, options, self.names)
        for symbol in sizes:
            name, types = split_symbol(symbol)
            names = kernel_text.parameters(name, there)
            kernel = Kernel(instances.get(symbol, name), types, sizes[symbol], names, symbol)
            facts["kernels"].append(kernel)
        made = workshop.folder / "kernels.cubin"
        made.write_bytes(code)
        return made, facts

    def explain(self, output: str, workshop) -> BuildError:
        """Return the first errors of a compiler, at the lines of the string."""
        from ..errors.diagnose import explain_failure

        (workshop.folder / nvrtc.FILE).write_text(self.source, errors="replace")
        causes = explain_failure(output, workshop.folder, (nvrtc.FILE,))
        file, first = self.place() or ("source", 1)
        name = re.escape(nvrtc.FILE)

        def moved(number: re.Match) -> str:
            return f"{int(number[0]) + first - 1:>{len(number[0])}}"

        def with_lines(place: re.Match) -> str:  # those that are quoted below it
            return re.sub(r"(?m)^ *\d+(?= \|)", moved, place[0])

        text = causes.replace("; the others are in the log)", ")")
        text = re.sub(rf"(?m)^{name}:\d.*(?:\n *\d* \|.*)*", with_lines, text)
        text = re.sub(rf"(?<=\b{name}:)\d+", moved, text).replace(f"{nvrtc.FILE}:", f"{file}:")
        return BuildError(f"source_module: the source does not compile:\n{text}")

    def at(self, file: str, line: int) -> str:
        """Return where a line of a file is, the source's as the user finds it."""
        if file != nvrtc.FILE:
            return f"{file}:{line}"
        place = self.place()
        return f"{place[0]}:{place[1] + line - 1}" if place else f"line {line} of the source"


def _opened(recipe: SourceRecipe, store: Store, key: str) -> Build | None:
    """The build that the store has; None where it has none, or one that is damaged."""
    library = store.verified(recipe.unit, key)
    facts = library and store.manifest(recipe.unit, key)
    if not facts or (not recipe.arch and store.hold(library) is None):
        return None
    try:
        return Build(library, facts)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):  # damaged facts
        store.discard(store.path / library.parent.name)
        return None


def _built(recipe: SourceRecipe, store: Store) -> Build:
    """A new build, of this process or of the one that was about to make the same."""
    if settings.value("LOADER_BUILD") == "never":
        raise BuildError(
            "source_module: there is no build of this source with these constants in the cache "
            "and LOADER_BUILD=never; run it once where LOADER_BUILD is eager or lazy"
        )
    from ..build import batch
    from ..build.progress import Quiet

    try:
        job = batch.build(recipe, store, Quiet())
    except CacheError as error:
        warnings.warn(
            f"kernels from a string are compiled anew in each process: {error}", stacklevel=2
        )
        with tempfile.TemporaryDirectory(prefix="octet-") as folder:
            store = Store([Path(folder)])
            return _opened(recipe, store, batch.build(recipe, store, Quiet()).key)
    if built := _opened(recipe, store, job.key):
        return built
    raise BuildError("source_module: its build was removed at once; try again")


def _tools() -> toolchain.Toolchain:
    return toolchain.current(settings.cache_dirs(HOME)[-1])
