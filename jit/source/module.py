"""Kernels from a string: compiled in a fraction of a second, kept in the store, called."""

import functools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from ctypes import c_void_p
from dataclasses import replace
from typing import Any

import torch

from ..errors.literal import locate_in
from . import constants as _constants
from .build import Build, SourceRecipe
from .launch import CpuFunction, CudaFunction
from .signature import Kernel


def source_module(
    source: str,
    *,
    device: torch.device | str | None = None,
    arch: str | None = None,
    options: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    **constants: object,
) -> "SourceModule":
    '''Compile CUDA kernels from a string, PyCUDA's way, without the wait.

        mod = loader.source_module("""
        __global__ void scale(float* out, const float* x, float factor, int n) {
            const int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) out[i] = factor * x[i];
        }
        """)
        mod.scale(out, x, 2.0, x.numel(), grid=(x.numel() + 255) // 256, block=256)

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

    Returns: the module; its kernels are attributes, and `get_function("conv<float, 3>")` gives an
        instance of a template. There is one build for each set of constants, kept on disk and in
        this process.

    Gradients, `torch.compile` and `torch.func` do not see such a kernel by itself:
    `loader.operator` makes an operator of it.

    Raises: BuildError with the compiler's errors, each at its line of the string; TypeError or
        ValueError for an argument; NotImplementedError for what the CPU cannot run.
    '''
    folders, caller = _checked(source, options, include_dirs), sys._getframe(1).f_code
    is_cell = caller is magic.__code__
    place = _cell_place if is_cell else functools.partial(locate_in, source, caller.co_filename)
    macros, target = _constants.definitions(constants), _target(device, arch)
    source = source.removeprefix("\ufeff")  # a byte order mark
    return SourceModule(SourceRecipe(source, macros, [*map(str, options)], folders, place, target))


def _checked(source: object, options: object, include_dirs: Any) -> list[str]:
    """Return the folders, for sources and lists that can be used."""
    if not isinstance(source, str):
        cure = "; decode it" if isinstance(source, (bytes, bytearray)) else ""
        cure = "; pass its read_text()" if isinstance(source, os.PathLike) else cure
        raise TypeError(
            f"source_module: source must be text (str), got {type(source).__name__}{cure}"
        )
    if "\0" in source:
        raise ValueError("source_module: source must be text, got a string with null characters")
    for name, words in (("options", options), ("include_dirs", include_dirs)):
        if isinstance(words, (str, bytes)) or not isinstance(words, Iterable):
            raise TypeError(
                f"source_module: {name} must be a list, got {words!r}; pass [{words!r}]"
            )
    folders = [os.path.abspath(os.fspath(folder)) for folder in include_dirs]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(f"source_module: include_dirs: {folder} is no folder")
    return folders


def _target(device: torch.device | str | None, arch: str | None) -> str:
    """The architecture to build for, such as "90"; "" for the CPU."""
    there = torch.cuda.is_available()
    wanted = torch.device(device if device is not None else "cuda" if there or arch else "cpu")
    if wanted.type not in ("cuda", "cpu"):
        raise ValueError(f'source_module: device must be "cuda" or "cpu", got {device!r}')
    if wanted.type == "cpu":
        if arch is not None:
            raise ValueError('source_module: arch is for CUDA; leave it out with device="cpu"')
        return ""
    if arch is not None:
        match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)", str(arch))
        if not match:
            raise ValueError(f'source_module: arch must be such as "9.0" or "sm_90a", got {arch!r}')
        return "".join(match.groups())
    if there:
        return _architecture(wanted.index)
    listed = re.findall(r"(\d+)\.(\d)([af]?)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if not listed:
        raise RuntimeError(
            'source_module: torch sees no GPU here: pass arch="9.0", say, to compile for one, or '
            'device="cpu" to run small cases'
        )
    return "".join(listed[-1])


def _architecture(index: int | None) -> str:
    return "{}{}".format(*torch.cuda.get_device_capability(index))


class SourceModule:
    """Kernels compiled from a string; made by `loader.source_module`."""

    def __init__(self, recipe: SourceRecipe):
        self._recipe, self._build = recipe, recipe.build()
        self._functions: dict[str, CpuFunction | CudaFunction] = {}

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels, templates left out."""
        return sorted({kernel.name for kernel in self._build.kernels})

    def __repr__(self) -> str:
        """Its target, its constants and its kernels."""
        target = f"sm_{self._recipe.arch}" if self._recipe.arch else "the CPU"
        set_to = "".join(f", {name}={value}" for name, value in self._recipe.macros.items())
        return f"<source_module for {target}{set_to}: {', '.join(self.kernels) or 'no kernel'}>"

    def __getattr__(self, name: str) -> CpuFunction | CudaFunction:
        """`mod.blur` is `mod.get_function("blur")`, for names that Python can spell."""
        if "_functions" in self.__dict__ and not name.startswith("__"):
            try:
                return self.get_function(name)
            except ValueError as error:
                said = str(error).removeprefix("get_function: ")
                raise AttributeError(f"{self!r}: {said}", name=name, obj=self) from None
        raise AttributeError(f"a source_module has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """The kernels too."""
        return sorted({*super().__dir__(), *(name.split("::")[-1] for name in self.kernels)})

    def get_function(self, name: str) -> CpuFunction | CudaFunction:
        """A kernel, to be called on tensors: `f(out, x, n, grid=(blocks, 1), block=256)`.

        Without `grid` there is one block.

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
        names: tuple[str, ...] = ()
        if bracket:
            templates = [n for n in self._build.templates if _means(base.strip(), n)]
            if len(templates) != 1:
                raise self._no_kernel(name)
            names = (f"{templates[0]}<{rest}",)
        recipe = replace(self._recipe, names=names)
        build = recipe.build()
        kernel = self._matching(build, *(names or (name,)))
        if not recipe.arch:
            return CpuFunction(name, kernel, build.run)

        def load(device: int) -> c_void_p:
            """Return the driver's handle on a device, which is the current one."""
            there = replace(recipe, arch=_architecture(device)).build()
            return there.handle(self._matching(there, kernel.name), device)

        return CudaFunction(name, kernel, load, recipe.arch)

    def _matching(self, build: Build, name: str) -> Kernel:
        """The one kernel that a name means."""
        wanted = _squeezed(name)
        named = [(_squeezed(kernel.name), kernel) for kernel in build.kernels]
        found = [kernel for full, kernel in named if full == wanted]
        found = found or [kernel for full, kernel in named if _means(wanted, full)]
        if not found:
            raise self._no_kernel(name)
        if len(found) > 1:
            forms = ", ".join(f"{k.name}({', '.join(k.types or ['...'])})" for k in found)
            raise ValueError(f"get_function: {name!r} means more than one kernel: {forms}")
        return found[0]

    def _no_kernel(self, name: str) -> ValueError:
        import difflib

        forms = self._build.templates
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


def _means(name: str, full: str) -> bool:
    """True if a name, with or without its namespaces, is that of a kernel."""
    return full == name or full.endswith(f"::{name}")


def _squeezed(name: str) -> str:
    return re.sub(r"\s+", "", name)


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
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"%%cuda: constants are NAME=VALUE, got {word!r}")
        values[key] = text if key in ("device", "arch") else _value(key, text, namespace)
    namespace[name] = source_module(cell, **values)


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
