"""CUDA source to machine code within this process, by NVIDIA's runtime compiler (NVRTC).

Through cuda-bindings, which comes with torch for CUDA and finds its NVRTC; torch's own functions
for this are private, and start CUDA. To import it takes 30 ms, so only a compilation does. Neither
driver nor GPU is needed.
"""

import glob
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from ..errors import BuildError

FILE = "kernel.cu"  # what the source is called in the compiler's messages

PRELUDE = "include/nvrtc_prelude.h"  # of every source, from loader's home
# Headers that a source may name, and whose content NVRTC or the prelude has anyhow.
_EMPTY = b"""assert.h cassert cfloat climits cmath cstddef cstdint cstdio cstdlib cstring cuda.h
    cuda_runtime.h device_launch_parameters.h float.h limits.h math.h stddef.h stdint.h stdio.h
    stdlib.h string.h"""
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",  # a plain helper function is for the device
    "--pre-include=nvrtc_prelude.h",
    "--disable-warnings",
)
# In PTX: a kernel's symbol and its parameters; of each parameter the bits, and how many times.
_ENTRY = r"\.entry\s+([\w$]+)\s*\(([^)]*)\)"
_PARAMETER = r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?"


def compile(
    source: str, arch: str, options: Sequence[str], names: Sequence[str]
) -> tuple[bytes, dict[str, list[int]], dict[str, str]]:
    """Return machine code for an architecture such as "90a", and what is in it.

    That is the symbol of each kernel with the sizes of its parameters, and each symbol that is one
    of `names`. For an architecture that this NVRTC does not know it is PTX of its newest one.

    Raises: CompileError with the compiler's output; BuildError where NVRTC cannot be used.
    """
    from ..build.workshop import CompileError

    call = _nvrtc()
    known = call("GetSupportedArchs")
    real = int(re.sub(r"\D", "", arch)) in known
    target = f"sm_{arch}" if real else f"compute_{known[-1]}"
    words = [w.encode() for w in (f"--gpu-architecture={target}", *OPTIONS, *options)]
    empty = _EMPTY.split()
    headers = len(empty), [b""] * len(empty), empty
    program = call("CreateProgram", source.encode(), FILE.encode(), *headers)

    def text(what: str) -> bytes:
        buffer = bytes(call(f"Get{what}Size", program))
        call(f"Get{what}", program, buffer)
        return buffer

    try:
        for name in names:
            call("AddNameExpression", program, name.encode())
        try:
            call("CompileProgram", program, len(words), words)
        except BuildError as error:
            log = text("ProgramLog").decode(errors="replace").rstrip("\0")
            raise CompileError(log.strip() or str(error)) from None
        made = {call("GetLoweredName", program, name.encode()).decode(): name for name in names}
        ptx = text("PTX")
        kernels = {
            symbol: [int(bits) // 8 * int(n or 1) for bits, n in re.findall(_PARAMETER, parameters)]
            for symbol, parameters in re.findall(_ENTRY, ptx.decode(errors="replace"))
        }
        return text("CUBIN") if real else ptx, kernels, made
    finally:
        call("DestroyProgram", program)


def _nvrtc() -> Callable:
    """Return what calls a function of NVRTC by its name, and raises BuildError where it fails."""

    def call(name: str, *arguments: object) -> Any:
        status, *result = getattr(nvrtc, f"nvrtc{name}")(*arguments)
        if status:
            said = nvrtc.nvrtcGetErrorString(status)[1].decode()
            raise BuildError(f"source_module: NVRTC failed: {said}")
        return result[0] if result else None

    try:
        from cuda.bindings import nvrtc

        call("Version")  # finds the library
    except Exception as error:  # each release of the binding says it in another way
        which = (torch.version.cuda or "13").split(".")[0]
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(
            f"source_module: NVIDIA's runtime compiler cannot be used: {said[0]:.200}; "
            f"pip install 'cuda-bindings=={which}.*' 'nvidia-cuda-nvrtc', which torch for CUDA "
            'brings along, or make the module with device="cpu"'
        ) from None
    return call


@cache
def identity(folders: tuple[str, ...]) -> list[str]:
    """Return the compiler and CUDA's headers, told from their files: nothing is loaded."""
    files = [file for home in _packages() for file in glob.glob(f"{home}/lib/libnvrtc*.so*")]
    system = [] if files else [f"NVRTC of the system, torch for CUDA {torch.version.cuda}"]
    files += filter(os.path.isfile, [f"{folder}/cuda_fp16.h" for folder in folders])
    stats = {file: os.stat(file) for file in sorted(files)}
    return [f"{file} {s.st_size} {s.st_mtime_ns}" for file, s in stats.items()] + system


@cache
def header_folders(toolkit: str | None) -> tuple[str, ...]:
    """Return where CUDA's own headers are: beside NVRTC, then in the toolkit."""
    homes = [*_packages(), *filter(None, [toolkit])]
    folders = [f"{home}/include{below}" for home in homes for below in ("", "/cccl")]
    return tuple(filter(os.path.isdir, folders))


@cache
def _packages() -> list[str]:
    """The folders of NVIDIA's wheels that have NVRTC or headers."""
    there = [f"{path}/nvidia" for path in sys.path if path.endswith("-packages")]
    names = "cu[0-9]*", "cuda_nvrtc", "cuda_runtime"
    found = (sorted(glob.glob(f"{at}/{name}"), reverse=True) for at in there for name in names)
    return [folder for folders in found for folder in folders]
