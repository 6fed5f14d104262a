"""One source's builds: found in this process or in the store, or made by its compiler.

Locks and the store are the engine's; its queue and work folders are not: a source is one short
run, of NVRTC in this process or of g++, which waits for no operator, keeps no object for an edit,
and is made where the cache cannot be written too.
"""

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from ..cache.key import key as key_of
from ..cache.store import Store, make_private
from ..errors import BuildError
from ..machine import settings, toolchain
from ..machine import sources as units
from ..machine.forks import Lock
from . import constants, nvrtc

UNIT = "source_module"  # what its entries in the store are called
_FORMAT = 1  # raise when what is stored, or the way it is made, changes
_lock = Lock()
_bounded: set[Path] = set()  # stores that this process has kept within their limit, once each
_builds: dict[str, "Build"] = {}  # by key: nothing is compiled twice in a process


class Build:
    """The product of one source for one architecture, or for the CPU.

    Attributes:
        code: CUDA's machine code, or the library of the CPU's kernels.
        kernels: the symbol, or the number, of each kernel, by its name and parameter types.
        names: the name among them of an instance such as `conv<float, 3>`.
        text: name, names of the parameters, and whether it is a template, of each kernel in the
            source's text.
    """

    def __init__(self, code, kernels: dict, names: Mapping[str, str], text: list):
        self.code, self.kernels, self.names, self.text = code, kernels, names, text
        self._modules: dict[int, int] = {}

    def module(self, device: int) -> int:
        """The driver's module on a device, which has to be the current one."""
        from . import driver

        with _lock:
            if device not in self._modules:
                self._modules[device] = driver.load(self.code)
        return self._modules[device]


class Recipe:
    """All that goes into the builds of one source, but for the architecture.

    `kind` is "cuda" or "cpu", `place` tells where the source's first line stands.
    """

    def __init__(
        self,
        source: str,
        macros: dict[str, str],
        kind: str,
        options: list[str],
        folders: list[str],
        place: Callable[[], tuple[str, int] | None],
    ):
        self.source, self.macros, self.kind = source, macros, kind
        self._options, self._folders, self._place = options, folders, place
        self._made: dict[tuple, Build] = {}

    def build(self, arch: str, names: tuple[str, ...] = ()) -> Build:
        """The build for an architecture, from this process, the store, or the compiler."""
        if (arch, names) in self._made:
            return self._made[arch, names]
        inputs = self._inputs(arch, names)
        key = key_of(inputs)
        with _lock:
            if key not in _builds:
                _builds[key] = self._from_store(key) or self._compiled(inputs)
            self._made[arch, names] = _builds[key]
        return _builds[key]

    def _inputs(self, arch: str, names: tuple[str, ...]) -> dict:
        """All that a build depends on, as plain data."""
        tools = toolchain.current(settings.cache_dirs(units.HOME)[-1])
        if self.kind == "cuda":
            compiler = nvrtc.identity(nvrtc.header_folders(tools.cuda_home))
            options = [*nvrtc.OPTIONS, *self._options]
        else:
            from .emulate import OPTIONS as options

            compiler = [str(tools.cxx), *tools.environment, *toolchain.words(toolchain.FLAGS)]
        folders = [*self._folders, *(tools.header_folders if self.kind == "cpu" else ())]
        return {
            "unit": UNIT,
            "format": _FORMAT,
            "source": sha256(self.source.encode(errors="surrogatepass")).hexdigest(),
            "constants": self.macros,
            "names": [*names],
            "options": options,
            "target": f"sm_{arch}" if self.kind == "cuda" else "cpu",
            "compiler": compiler,
            "folders": self._folders,
            "files": _headers(self.source, folders, self.kind == "cpu"),
        }

    def _from_store(self, key: str) -> Build | None:
        store = Store(settings.cache_dirs(units.HOME))
        library = store.verified(UNIT, key)
        recorded = library and store.manifest(UNIT, key)
        if not recorded:
            return None
        held = store.hold(library) if self.kind == "cpu" else None
        if self.kind == "cpu" and held is None:
            return None
        try:
            return self._loaded(library, recorded)
        except (OSError, KeyError, ValueError, TypeError, AttributeError):  # damaged facts
            store.discard(store.path / library.parent.name)
            return None

    def _loaded(self, path: Path, facts: dict) -> Build:
        """A build from its file and what was recorded of it."""
        if self.kind == "cpu":
            from . import emulate

            library, kernels = emulate.Library(path), {}
            for number, kernel in enumerate(facts["kernels"]):
                types = _types_of(library.type(number))
                kernels[kernel["name"], ", ".join(types)] = (number, types)
            return Build(library, kernels, {}, facts["text"])
        from .signature import split_symbol

        code, kernels = path.read_bytes(), {}
        for symbol in nvrtc.symbols(code):
            name, types = split_symbol(symbol)
            kernels[name, ", ".join(types or ["..."])] = (symbol, types)
        names = {name: split_symbol(symbol)[0] for name, symbol in facts["names"].items()}
        return Build(code, kernels, names, facts["text"])

    def _compiled(self, inputs: dict) -> Build:
        """A new build, put into the store where that can be written; another process's, if it is
        about to put the same there.
        """
        if settings.value("LOADER_BUILD") == "never":
            raise BuildError(
                "source_module: there is no build of this source with these constants in the cache "
                "and LOADER_BUILD=never; run it once where LOADER_BUILD is eager or lazy"
            )
        from ..build.batch import make_room

        key = key_of(inputs)
        with _alone(key), tempfile.TemporaryDirectory(prefix="octet-") as name:
            if made := self._from_store(key):
                return made
            folder = Path(name)
            try:
                built, facts = self._compile(inputs, folder)
            except BuildError as error:
                if str(error).startswith("source_module: "):
                    raise
                raise self._explained(str(error), folder) from None
            try:
                store = Store(settings.cache_dirs(units.HOME))
                store.publish(built, inputs, **facts)
                if store.path not in _bounded:  # that looks at every entry
                    _bounded.add(store.path)
                    make_room(store, [key])
            except (BuildError, OSError) as error:
                warnings.warn(
                    f"kernels from a string are compiled anew in each process: {error}",
                    stacklevel=2,
                )
                return self._loaded(built, facts)
            return self._from_store(key) or self._loaded(built, facts)

    def _compile(self, inputs: dict, folder: Path) -> tuple[Path, dict]:
        """The compiled file and what to record of it."""
        from . import text as kernel_text

        names = tuple(inputs["names"])
        text = [[k.name, k.parameters, k.template] for k in kernel_text.kernels(self.source)]
        why = [f"{', '.join(name for name, *_ in text)} for {inputs['target']}"]
        prologue = constants.prologue(self.macros, nvrtc.FILE)
        if self.kind == "cpu":
            from . import emulate

            try:
                folders = (*self._folders, str(units.HOME / "include"))
                path, kernels = emulate.compile(self.source, folder, folders, prologue, names)
            except emulate.Unsupported as error:
                raise NotImplementedError(
                    f"source_module: {self._at(error.file, error.line)}: {error.what} cannot run "
                    "on the CPU, where one thread runs after the other; it needs a GPU"
                ) from None
            return path, {"kernels": kernels, "text": text, "why": why}
        tools = toolchain.current(settings.cache_dirs(units.HOME)[-1])
        headers = nvrtc.header_folders(tools.cuda_home)
        paths = [f"-I{path}" for path in (*self._folders, units.HOME / "include", *headers)]
        source = prologue + kernel_text.with_cxx_names(self.source)
        arch = inputs["target"].removeprefix("sm_")
        code, lowered = nvrtc.compile(source, arch, (*paths, *self._options), names)
        (folder / "kernels.cubin").write_bytes(code)
        return folder / "kernels.cubin", {"names": lowered, "text": text, "why": why}

    def _at(self, file: str, line: int) -> str:
        """A line of the source, as the user finds it."""
        if file != nvrtc.FILE:
            return f"{file}:{line}"
        place = self._place()
        return f"{place[0]}:{place[1] + line - 1}" if place else f"line {line} of the source"

    def _explained(self, log: str, folder: Path) -> BuildError:
        """The first errors of a compiler, at the lines of the string."""
        from ..errors.diagnose import explain_failure

        (folder / nvrtc.FILE).write_text(self.source, errors="replace")
        place = self._place()
        file, first = place or ("source", 1)
        shown, ours = [], False
        for line in explain_failure(log, folder, (nvrtc.FILE,)).split("\n"):
            if match := re.match(r"(.*?)[:(](\d+)[:)]", line):
                ours = match[1] == nvrtc.FILE
            if ours and (quoted := re.match(r" *(\d+) \|", line)):
                line = f"{int(quoted[1]) + first - 1:>5} |" + line[quoted.end() :]  # noqa: PLW2901
            shown.append(line)
        text = re.sub(
            rf"\b{re.escape(nvrtc.FILE)}:(\d+)",
            lambda match: f"{file}:{int(match[1]) + first - 1}",
            "\n".join(shown),
        ).replace("; the others are in the log)", ")")
        return BuildError(f"source_module: the source does not compile:\n{text}")


@contextlib.contextmanager
def _alone(key: str) -> Iterator[None]:
    """Held while a key is compiled: another process that wants the same waits, and then finds it.

    256 files serve all keys. Where no file can be locked nobody waits.
    """
    from ..cache.lock import lock_of

    work = Store(settings.cache_dirs(units.HOME)).path.parent / "work"
    lock = None
    with contextlib.suppress(BuildError, OSError):  # what publishes will say why
        make_private(work)
        lock = lock_of(work / f"{UNIT}-{key[:2]}")
        lock.take(wait=True)
    try:
        yield
    finally:
        if lock:
            lock.close()


def _types_of(encoded: str) -> list[str]:
    """The parameter types in a function pointer's type such as `PFvPfiE`."""
    from .signature import split_symbol

    symbol = f"_Z1f{encoded.removeprefix('PFv').removesuffix('E')}"
    return split_symbol(symbol)[1] or []


def _headers(source: str, folders: Sequence[str], with_emulate: bool) -> dict[str, str]:
    """Digests of the headers that a source can reach, CUDA's and the system's left out."""
    files = units.Sources(units.HOME, tuple(folders))
    names = ()
    if any(word in source for word in ("include", "import", "embed")):  # its pattern is a long one
        names = units.included(source.encode(errors="surrogatepass"))
    found = {}
    if with_emulate:
        from .emulate import GUARD

        found |= files.closure("include/emulate.h") | files.closure(GUARD)
    for name in names:
        if name is None:  # a macro: any header may be meant
            for file in sorted((units.HOME / "include").rglob("*.*")):
                found |= files.closure(os.path.relpath(file, units.HOME))
            continue
        for folder in (*folders, "include"):
            path = os.path.normpath(os.path.join(folder, name))
            found |= files.closure(path)
    return dict(sorted(found.items()))
