"""The same CUDA source on the CPU: `__global__` bodies looped over grid and block, by g++.

For small cases: to learn and to test where there is no GPU. One thread of the grid runs after the
other, so what needs several at a time is refused, with its line.
"""

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BuildError
from ..errors.cxx import blanked
from ..machine.forks import Lock
from ..machine.sources import HOME
from ..machine.toolchain import FLAGS, command, words
from .nvrtc import FILE
from .signature import Kernel, split_symbol
from .text import kernels, parameters

if TYPE_CHECKING:
    from ..build.workshop import Workshop

_GUARD = "jit/source/guard.cpp"  # of faults in kernels
OWN = "include/emulate.h", _GUARD  # from loader's home
OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-w"]
_MARK = "__attribute__((__used__))"  # what include/emulate.h makes of __global__
_NO_HEADERS = "cuda_runtime.h", "cuda.h", "device_launch_parameters.h", "assert.h", "cassert"
_NEEDS_GPU = {
    "shared memory": r"\b__shared__",
    "barriers": r"\b(?:__sync\w+|__cluster\w*|__nanosleep)",
    "warps": r"\b(?:__shfl\w*|__ballot\w*|__any|__all|__any_sync|__all_sync|__activemask"
    r"|__match_\w+|__reduce_\w+_sync|warpSize|wmma|__vote\w*)\b",
    "cooperative groups": r"\b(?:cooperative_groups|cg(?=::))",
    "textures and surfaces": r"\b(?:tex[123]D\w*|texCubemap\w*|surf[123]D\w+|cudaTextureObject_t"
    r"|cudaSurfaceObject_t|texture(?=\s*<))",
    "inline PTX": r"\b(?:asm|__asm__|__asm)\b",
    "launches from within a kernel": "<<<",
    "CUDA's 16-bit and 8-bit types": r"\b(?:__half2?|__nv_bfloat162?|__nv_fp8\w*)\b",
    "the GPU's clocks": r"\b(?:clock(?:64)?|globaltimer)(?=\s*\()",
}
_HEADERS = (
    r"(?m)^[ \t]*#[ \t]*include[ \t]*[<\"]((?:cuda_(?:fp|bf)\w+\.h|cooperative_groups|curand|cub/"
    r"|thrust/|cuda/|mma\.h|nv/|nvtx|cu[A-Z])[^>\"]*)"
)


class NeedsGpu(BuildError, NotImplementedError):
    """A source that does not run on the CPU."""

    def __init__(self, where: str, what: str):
        super().__init__(
            f"source_module: {where}: {what} cannot run on the CPU, where one thread runs after "
            "the other; it needs a GPU"
        )


def compile(
    workshop: "Workshop",
    source: str,
    names: Sequence[str],
    prologue: str,
    folders: list[str],
    at: Callable[[str, int], str],
) -> tuple[Path, list[tuple]]:
    """Return a library that runs a source's kernels; their names and their parameters'.

    `names` are instances of templates that are wanted; `prologue` stands before the source and ends
    with a `#line`; `folders` have headers; `at` tells where a line of a file is.

    Raises: CompileError with the compiler's output; NeedsGpu for what only a GPU can run.
    """
    folder = workshop.folder
    if header := re.search(_HEADERS, blanked(source, strings=False)):
        where = at(FILE, source.count("\n", 0, header.start()) + 1)
        raise NeedsGpu(where, f"<{header[1]}>, a header for GPUs")
    (folder / FILE).write_text(source)  # to be quoted
    (folder / "unit.cpp").write_text(f'#include "emulate.h"\n{prologue}{source}\n')
    (folder / "none").mkdir(exist_ok=True)
    for name in _NO_HEADERS:
        (folder / "none" / name).touch()
    compiler = [*command("CXX"), *words(FLAGS), *OPTIONS]
    paths = [f"-I{path}" for path in ("none", *folders)]
    unit = workshop.link([*compiler, "-E", *paths, "unit.cpp"], "unit.ii")
    try:
        lines = [*_own_lines(unit.read_text(errors="replace"))]
        code = "\n".join(line for *_, line in lines)
        for (file, number, _), line in zip(lines, blanked(code).split("\n"), strict=True):
            for what, pattern in _NEEDS_GPU.items():
                if match := re.search(pattern, line):
                    raise NeedsGpu(at(file, number), f"{match[0]} ({what})")
        there = kernels(code.replace(_MARK, "__global__"))
        found = [kernel.name for kernel in there if not kernel.template] + [*names]
        with unit.open("a") as more:
            more.write('\n# 1 "kernels"\n' + "".join(map(_launcher, range(len(found)), found)))
        inputs = ["-x", "c++-cpp-output", unit.name, "-x", "c++", str(HOME / _GUARD)]
        library = workshop.link([*compiler, *inputs, "-shared"], "kernels.so")
        return library, [(name, parameters(name, there)) for name in found]
    finally:
        unit.unlink()


def _own_lines(text: str) -> Iterator[tuple[str, int, str]]:
    """File, number and text of each preprocessed line that is neither the system's nor ours."""
    file, number, own = "", 0, False
    for line in text.split("\n"):
        if marker := re.match(r'# (\d+) "(.*?)"((?: \d)*)$', line):
            file, number = marker[2], int(marker[1])
            foreign = "3" in marker[3] or file.startswith("<") or file == "unit.cpp"
            own = not foreign and not file.endswith("emulate.h")
        else:
            if own:
                yield file, number, line
            number += 1


def _launcher(number: int, name: str) -> str:
    show, kernel = 'extern "C" __attribute__((visibility("default")))', f"octet_kernel<&{name}>"
    return (
        f"{show} const char* octet_run_{number}(const unsigned* shape, void** at) "
        f"{{ return {kernel}::run(shape, at); }}\n"
        f"{show} const char* octet_type_{number}() {{ return {kernel}::type(); }}\n"
        f"{show} const size_t* octet_sizes_{number}() {{ return {kernel}::sizes; }}\n"
    )


_launch = Lock()  # one at a time: handlers of faults, and the grid's variables, are shared


class Library:
    """A loaded library of `compile`, and its kernels."""

    def __init__(self, path: Path, named: Sequence[tuple[str, list[str]]]):
        self._library, self.kernels = ctypes.CDLL(str(path)), list[Kernel]()
        for number, (name, names) in enumerate(named):
            tell, sizes = (self._library[f"octet_{what}_{number}"] for what in ("type", "sizes"))
            tell.restype, sizes.restype = ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)
            _, types = split_symbol(tell().decode())  # such as FvPfiE
            known = sizes()[: len(types or ())]
            self.kernels.append(Kernel(name, types, known, names, str(number)))

    def run(self, number: str, shape: tuple[int, ...], arguments: int) -> str | None:
        """Run a kernel over grid and block; None, or what failed in it."""
        call = self._library[f"octet_run_{number}"]
        call.restype, call.argtypes = ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_void_p)
        with _launch:
            said = call(ctypes.byref((ctypes.c_uint * 6)(*shape[:6])), arguments)
        return said.decode(errors="replace") if said else None
