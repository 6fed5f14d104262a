"""Kernels from a string: compiled in a fraction of a second, kept in the store, called."""

import functools
import os
import re
import shlex
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from . import constants as _constants
from . import nvrtc, settings, toolchain, units
from .errors import BuildError
from .kernel_function import CpuFunction, CudaFunction
from .key import key as _key_of
from .source_place import locate_in
from .store import Store

_ROOT = Path(__file__).resolve().parent.parent
UNIT = "source_module"  # what its entries in the store are called
_FORMAT = 1  # raise when what is stored, or the way it is made, changes
_lock = threading.RLock()
_builds: dict[str, "_Build"] = {}  # by key: nothing is compiled twice in a process


def _unlock() -> None:
    global _lock  # noqa: PLW0603 - a thread that held it is not there after a fork
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def source_module(
    source: str,
    *,
    device: torch.device | str | None = None,
    arch: str | None = None,
    options: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike] = (),
    **constants,
) -> "SourceModule":
    '''Compile CUDA kernels from a string, PyCUDA's way, without the wait.

        mod = loader.source_module("""
        __global__ void scale(float* out, const float* x, float factor, int n) {
            const int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) out[i] = factor * x[i];
        }
        """)
        scale = mod.get_function("scale")
        scale(out, x, 2.0, x.numel(), grid=(x.numel() + 255) // 256, block=256)

    Args:
        source: CUDA C++; kernels plain, `extern "C"` or templates. The library's headers
            (`#include "common.h"`) and CUDA's own can be included; fixed-width integers, M_PI,
            FLT_MAX and the like are there unasked.
        device: "cuda", or "cpu", where the `__global__` bodies are looped over grid and block by
            the C++ compiler: for small cases, without shared memory, barriers, warps, textures,
            inline PTX and 16-bit types, which are refused, and without a check of bounds. A CUDA
            device where there is one, else the CPU.
        arch: compile for "9.0", say, where there is no GPU to ask; nothing can be launched then.
        options: more for NVRTC, such as "--use_fast_math" and "--maxrregcount=32".
        include_dirs: folders of headers, looked at before all others.
        constants: compile-time constants: `IMAGE_W=512` is a macro, which serves in `#if`, as the
            size of an array and as a template's argument. int, float (a double as in C++;
            numpy.float32 makes it a float), bool, or a torch.dtype for its C++ type.

    Returns: the module; `get_function(name)` gives its kernels. There is one build for each set of
        constants, kept on disk and in this process.

    Gradients, `torch.compile` and `torch.func` do not see such a kernel: an operator in `ops/` is
    made for that, or a torch.autograd.Function around the call.

    Raises: BuildError with the compiler's errors, each at its line of the string; TypeError or
        ValueError for an argument; NotImplementedError for what the CPU cannot run.
    '''
    place = functools.partial(locate_in, source, sys._getframe(1).f_code.co_filename)
    return _module(source, constants, device, arch, options, include_dirs, place)


def _module(source, constants, device, arch, options, include_dirs, place) -> "SourceModule":
    """A module, its arguments checked."""
    if not isinstance(source, str):
        cure = "; decode it" if isinstance(source, (bytes, bytearray)) else ""
        cure = "; pass its read_text()" if isinstance(source, os.PathLike) else cure
        raise TypeError(
            f"source_module: source must be text (str), got {type(source).__name__}{cure}"
        )
    if "\0" in source:
        raise ValueError("source_module: source must be text, got a string with null characters")
    for name, words in (("options", options), ("include_dirs", include_dirs)):
        if isinstance(words, (str, bytes)):
            raise TypeError(
                f"source_module: {name} must be a list, got {words!r}; pass [{words!r}]"
            )
    macros = _constants.definitions(constants)
    folders = [os.path.abspath(os.fspath(folder)) for folder in include_dirs]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(f"source_module: include_dirs: {folder} is no folder")
    kind, architecture = _target(device, arch)
    module = SourceModule(source, macros, kind, [*map(str, options)], folders, place)
    module._build(architecture)
    return module


def _target(device, arch: str | None) -> tuple[str, str]:
    """The kind of device to build for, and its architecture, such as "90"."""
    there = torch.cuda.is_available()
    kind = torch.device(device).type if device is not None else "cuda" if there or arch else "cpu"
    if kind not in ("cuda", "cpu"):
        raise ValueError(f'source_module: device must be "cuda" or "cpu", got {device!r}')
    if kind == "cpu":
        if arch is not None:
            raise ValueError('source_module: arch is for CUDA; leave it out with device="cpu"')
        return kind, ""
    if arch is not None:
        match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)", str(arch))
        if not match:
            raise ValueError(f'source_module: arch must be such as "9.0" or "sm_90a", got {arch!r}')
        return kind, "".join(match.groups())
    if there:
        named = torch.device(device if device is not None else "cuda")
        return kind, _architecture(named.index)
    listed = re.findall(r"(\d+)\.(\d)([af]?)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if not listed:
        raise RuntimeError(
            'source_module: torch sees no GPU here: pass arch="9.0", say, to compile for one, or '
            'device="cpu" to run small cases'
        )
    return kind, "".join(listed[-1])


def _architecture(index: int | None) -> str:
    return "{}{}".format(*torch.cuda.get_device_capability(index))


class _Build:
    """What a compiler made of a source for one architecture, or for the CPU.

    Attributes:
        code: CUDA's machine code, or the library of the CPU's kernels.
        kernels: the symbol, or the number, of each kernel, by its name and parameter types.
        names: what an instance such as `conv<float, 3>` is called among them.
        text: name, names of the parameters, and whether it is a template, of each kernel in the
            source's text.
    """

    def __init__(self, code, kernels: dict, names: Mapping[str, str], text: list):
        self.code, self.kernels, self.names, self.text = code, kernels, names, text
        self.modules: dict[int, int] = {}  # the driver's, by device


class SourceModule:
    """Kernels compiled from a string; made by `loader.source_module`."""

    def __init__(self, source, macros, kind, options, folders, place):
        self._source, self._macros, self._kind = source, macros, kind
        self._options, self._folders, self._place = options, folders, place
        self._arch = ""
        self._functions: dict[str, CpuFunction | CudaFunction] = {}
        self._made: dict[tuple, _Build] = {}

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels, templates left out."""
        return sorted({name for name, _ in self._build(self._arch).kernels})

    def __repr__(self) -> str:
        """What it is for, its constants and its kernels."""
        target = f"sm_{self._arch}" if self._kind == "cuda" else "the CPU"
        set_to = "".join(f", {name}={value}" for name, value in self._macros.items())
        return f"<source_module for {target}{set_to}: {', '.join(self.kernels) or 'no kernel'}>"

    def get_function(self, name: str) -> CpuFunction | CudaFunction:
        """A kernel, to be called on tensors: `f(out, x, n, grid=(blocks, 1), block=256)`.

        Args:
            name: as in the source, with or without its namespace; of a template an instance, such
                as "conv<float, 3>", which is compiled when first named.

        Raises: ValueError for a name that is no kernel's, with those that are.
        """
        if not isinstance(name, str):
            raise TypeError(f"get_function: name must be text, got {type(name).__name__}")
        if name not in self._functions:
            self._functions[name] = self._function(name)
        return self._functions[name]

    def _function(self, name: str) -> CpuFunction | CudaFunction:
        base, bracket, rest = name.strip().partition("<")
        instance = ()
        if bracket:
            templates = [n for n in self._templates() if _means(base.strip(), n)]
            if len(templates) != 1:
                raise self._no_kernel(name)
            instance = (f"{templates[0]}<{rest}",)
        build = self._build(self._arch, instance)
        found = self._matching(build, *(instance or (name,)))
        parameters = self._parameters(base.strip())
        if self._kind == "cpu":
            return CpuFunction(name, *build.kernels[found], build.code, parameters)

        def module(device: int) -> tuple[int, str]:
            """The driver's module on a device, which is the current one, and the symbol there."""
            there = self._build(_architecture(device), instance)
            with _lock:
                if device not in there.modules:
                    from . import driver

                    there.modules[device] = driver.load(there.code)
            return there.modules[device], there.kernels[self._matching(there, found[0])][0]

        return CudaFunction(name, *build.kernels[found], module, parameters, self._arch)

    def _matching(self, build: _Build, name: str) -> tuple[str, str]:
        """The one kernel that a name means."""
        wanted = _squeezed(build.names.get(name, name))
        full = [key for key in build.kernels if _squeezed(key[0]) == wanted]
        found = full or [key for key in build.kernels if _means(wanted, _squeezed(key[0]))]
        if not found:
            raise self._no_kernel(name)
        if len(found) > 1:
            forms = ", ".join(f"{kernel}({types})" for kernel, types in found)
            raise ValueError(f"get_function: {name!r} means more than one kernel: {forms}")
        return found[0]

    def _parameters(self, name: str) -> tuple[str, ...]:
        """Names of a kernel's parameters, as far as its text tells."""
        text = self._build(self._arch).text
        found = [parameters for kernel, parameters, _ in text if _means(name, kernel)]
        return found[0] if len(found) == 1 else ()

    def _templates(self) -> list[str]:
        return [name for name, _, template in self._build(self._arch).text if template]

    def _no_kernel(self, name: str) -> ValueError:
        import difflib

        forms = self._templates()
        base = name.partition("<")[0].strip()
        if "<" not in name and any(_means(base, form) for form in forms):
            return ValueError(
                f"get_function: {name!r} is a template: name what it is to be made for, such as "
                f'"{base}<float>"'
            )
        names = [*self.kernels, *(f"{form}<...>" for form in forms)]
        close = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        there = f"there are {', '.join(names)}" if names else "the source has none"
        return ValueError(f"get_function: there is no kernel {name!r}; {there}{hint}")

    def _build(self, arch: str, names: tuple[str, ...] = ()) -> _Build:
        """The build for an architecture, from this process, the store, or the compiler."""
        self._arch = self._arch or arch
        if (arch, names) in self._made:
            return self._made[arch, names]
        inputs = self._inputs(arch, names)
        key = _key_of(inputs)
        with _lock:
            if key not in _builds:
                _builds[key] = self._from_store(key) or self._compiled(inputs)
            self._made[arch, names] = _builds[key]
        return _builds[key]

    def _inputs(self, arch: str, names: tuple[str, ...]) -> dict:
        """All that a build depends on, as plain data."""
        tools = toolchain.current(settings.cache_dirs(_ROOT)[-1])
        if self._kind == "cuda":
            compiler = nvrtc.identity(nvrtc.header_folders(tools.cuda_home))
            options = [*nvrtc.OPTIONS, *self._options]
        else:
            from .emulate import OPTIONS as options

            compiler = [str(tools.cxx), *tools.environment, *toolchain.words(toolchain.FLAGS)]
        folders = [*self._folders, *(tools.header_folders if self._kind == "cpu" else ())]
        return {
            "unit": UNIT,
            "format": _FORMAT,
            "source": sha256(self._source.encode(errors="surrogatepass")).hexdigest(),
            "constants": self._macros,
            "names": [*names],
            "options": options,
            "target": f"sm_{arch}" if self._kind == "cuda" else "cpu",
            "compiler": compiler,
            "folders": self._folders,
            "files": _headers(self._source, folders, self._kind == "cpu"),
        }

    def _from_store(self, key: str) -> _Build | None:
        store = Store(settings.cache_dirs(_ROOT))
        library = store.verified(UNIT, key)
        recorded = library and store.manifest(UNIT, key)
        if not recorded:
            return None
        held = store.hold(library) if self._kind == "cpu" else None
        if self._kind == "cpu" and held is None:
            return None
        try:
            return self._loaded(library, recorded)
        except (OSError, KeyError, ValueError, TypeError, AttributeError):  # damaged facts
            store.discard(store.path / library.parent.name)
            return None

    def _loaded(self, path: Path, facts: dict) -> _Build:
        """A build from its file and what was recorded of it."""
        if self._kind == "cpu":
            from . import emulate

            library, kernels = emulate.Library(path), {}
            for number, kernel in enumerate(facts["kernels"]):
                types = _types_of(library.type(number))
                kernels[kernel["name"], ", ".join(types)] = (number, types)
            return _Build(library, kernels, {}, facts["text"])
        from .signature import split_symbol

        code, kernels = path.read_bytes(), {}
        for symbol in nvrtc.symbols(code):
            name, types = split_symbol(symbol)
            kernels[name, ", ".join(types or ["..."])] = (symbol, types)
        names = {name: split_symbol(symbol)[0] for name, symbol in facts["names"].items()}
        return _Build(code, kernels, names, facts["text"])

    def _compiled(self, inputs: dict) -> _Build:
        """A new build, put into the store where that can be written."""
        if settings.value("LOADER_BUILD") == "never":
            raise BuildError(
                "source_module: there is no build of this source with these constants in the cache "
                "and LOADER_BUILD=never; run it once where LOADER_BUILD is eager or lazy"
            )
        with tempfile.TemporaryDirectory(prefix="octet-") as name:
            folder = Path(name)
            try:
                built, facts = self._compile(inputs, folder)
            except BuildError as error:
                if str(error).startswith("source_module: "):
                    raise
                raise self._explained(str(error), folder) from None
            try:
                store = Store(settings.cache_dirs(_ROOT))
                store.publish(built, inputs, **facts)
                _make_room(_key_of(inputs))
            except (BuildError, OSError) as error:
                warnings.warn(
                    f"kernels from a string are compiled anew in each process: {error}",
                    stacklevel=2,
                )
                return self._loaded(built, facts)
            return self._from_store(_key_of(inputs)) or self._loaded(built, facts)

    def _compile(self, inputs: dict, folder: Path) -> tuple[Path, dict]:
        """The compiled file and what to record of it."""
        from . import kernel_text

        names = tuple(inputs["names"])
        text = [[k.name, k.parameters, k.template] for k in kernel_text.kernels(self._source)]
        why = [f"{', '.join(name for name, *_ in text)} for {inputs['target']}"]
        prologue = _constants.prologue(self._macros, nvrtc.FILE)
        if self._kind == "cpu":
            from . import emulate

            try:
                folders = (*self._folders, str(_ROOT / "include"))
                path, kernels = emulate.compile(self._source, folder, folders, prologue, names)
            except emulate.Unsupported as error:
                raise NotImplementedError(
                    f"source_module: {self._at(error.file, error.line)}: {error.what} cannot run "
                    "on the CPU, where one thread runs after the other; it needs a GPU"
                ) from None
            return path, {"kernels": kernels, "text": text, "why": why}
        tools = toolchain.current(settings.cache_dirs(_ROOT)[-1])
        headers = nvrtc.header_folders(tools.cuda_home)
        paths = [f"-I{path}" for path in (*self._folders, _ROOT / "include", *headers)]
        source = prologue + kernel_text.with_cxx_names(self._source)
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
        from .diagnose import explain_failure

        (folder / nvrtc.FILE).write_text(self._source, errors="replace")
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


def _types_of(encoded: str) -> list[str]:
    """The parameter types in a function pointer's type such as `PFvPfiE`."""
    from .signature import split_symbol

    symbol = f"_Z1f{encoded.removeprefix('PFv').removesuffix('E')}"
    return split_symbol(symbol)[1] or []


def _means(name: str, full: str) -> bool:
    """Whether a name, with or without its namespaces, is that of a kernel."""
    return full == name or full.endswith(f"::{name}")


def _squeezed(name: str) -> str:
    return re.sub(r"\s+", "", name)


def _headers(source: str, folders: Sequence[str], with_emulate: bool) -> dict[str, str]:
    """Digests of the headers that a source can reach, CUDA's and the system's left out."""
    files = units.Sources(_ROOT, tuple(folders))
    names = ()
    if any(word in source for word in ("include", "import", "embed")):  # its pattern is a long one
        names = units._directives().findall(source.encode(errors="surrogatepass"))
    found = dict(files.closure("include/emulate.h")) if with_emulate else {}
    for quoted, bracketed, macro in names:
        if macro:  # any header may be meant
            for file in sorted((_ROOT / "include").iterdir()):
                found |= files.closure(os.path.join("include", file.name))
            continue
        for folder in (*folders, "include"):
            path = os.path.normpath(os.path.join(folder, os.fsdecode(quoted or bracketed)))
            found |= files.closure(path)
    return dict(sorted(found.items()))


@functools.cache
def _make_room(key: str, _once: bool = True) -> None:
    """Keep the cache within its limit, once in a process."""
    from .cache import prune

    if _make_room.cache_info().misses == 1:
        prune(Store(settings.cache_dirs(_ROOT)), settings.cache_limit(), keep=[key])


def magic(line: str, cell: str, namespace: dict) -> None:
    """`%%cuda NAME IMAGE_W=512 device=cpu`: the cell's kernels as the module NAME.

    Args:
        line: the name, then constants (and `device=`, `arch=`) as name=value, values in Python.
        cell: the CUDA source.
        namespace: where NAME is put.

    Raises: ValueError for a line that does not read so; what `source_module` raises.
    """
    try:
        name, *words = shlex.split(line) or [""]
    except ValueError as error:
        raise ValueError(f"%%cuda: the line cannot be split into words ({error})") from None
    if not name.isidentifier():
        raise ValueError(
            f"%%cuda: a name must come first, as in `%%cuda mod IMAGE_W=512`, got {line!r}"
        )
    values: dict[str, object] = {"device": None, "arch": None}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"%%cuda: constants are NAME=VALUE, got {word!r}")
        values[key] = text if key in ("device", "arch") else _value(key, text, namespace)
    device, arch = values.pop("device"), values.pop("arch")
    namespace[name] = _module(cell, values, device, arch, (), (), _cell_place)


def _value(name: str, text: str, namespace: dict) -> object:
    """A constant's value: a literal of Python, or a variable of the notebook's."""
    import ast

    if text.isidentifier() and text in namespace:
        return namespace[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ValueError(
            f"%%cuda: the constant {name} must be a number, True, False or a variable, got {text!r}"
        ) from None


def _cell_place() -> tuple[str, int] | None:
    """The running cell, whose second line is the source's first."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return (f"cell In[{shell.execution_count}]", 2) if shell else ("cell", 2)
