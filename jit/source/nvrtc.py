"""CUDA source to machine code within this process, by NVIDIA's runtime compiler (NVRTC).

Through cuda-bindings, which is NVIDIA's own, comes with torch for CUDA and finds its NVRTC; torch's
own functions for this are private, and start CUDA. It is imported for a compilation only: that
takes 30 ms, which a build found in the store does without. Neither driver nor GPU is needed here.
"""

import glob
import os
import re
import struct
import sys
from functools import cache
from pathlib import Path

from ..errors import BuildError

FILE = "kernel.cu"  # what the source is called in the compiler's messages

# What nvcc declares unasked and NVRTC does not; types as in cuda::std, which may come on top.
_PRELUDE = """
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef int64_t intptr_t; typedef uint64_t uintptr_t;
#define INT8_MAX 127
#define INT16_MAX 32767
#define INT32_MAX 2147483647
#define INT64_MAX 9223372036854775807LL
#define INT32_MIN (-INT32_MAX - 1)
#define INT64_MIN (-INT64_MAX - 1)
#define UINT8_MAX 255
#define UINT16_MAX 65535
#define UINT32_MAX 4294967295U
#define UINT64_MAX 18446744073709551615ULL
#define CHAR_BIT 8
#define INT_MAX INT32_MAX
#define INT_MIN INT32_MIN
#define UINT_MAX UINT32_MAX
#define FLT_MAX 3.402823466e+38F
#define FLT_MIN 1.175494351e-38F
#define FLT_EPSILON 1.192092896e-07F
#define DBL_MAX 1.7976931348623157e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#define M_PI 3.14159265358979323846
#define M_E 2.7182818284590452354
#define M_SQRT2 1.41421356237309504880
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
"""
# Headers that a source may name, and whose content NVRTC or the prelude has anyhow.
_EMPTY = """assert.h cassert cfloat climits cmath cstddef cstdint cstdio cstdlib cstring cuda.h
    cuda_runtime.h device_launch_parameters.h float.h limits.h math.h stddef.h stdint.h stdio.h
    stdlib.h string.h"""
_HEADERS = {"octet_prelude.h": _PRELUDE, **dict.fromkeys(_EMPTY.split(), "")}
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",  # a plain helper function is for the device
    "--pre-include=octet_prelude.h",
    "--disable-warnings",
)


def compile(source: str, arch: str, options: tuple[str, ...], names: tuple[str, ...] = ()):
    """Machine code for an architecture such as "90a", and the symbols of the kernels `names`.

    PTX of the newest architecture that this NVRTC knows, for one that it does not know.
    BuildError with the compiler's output as its message, where the source does not compile.
    """
    nvrtc = _bindings()
    _, known = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    real = int(re.sub(r"\D", "", arch)) in known
    target = f"sm_{arch}" if real else f"compute_{known[-1]}"
    words = [f"--gpu-architecture={target}", *OPTIONS, *options]
    headers = [(name.encode(), text.encode()) for name, text in _HEADERS.items()]
    _, program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            FILE.encode(),
            len(headers),
            [text for _, text in headers],
            [name for name, _ in headers],
        ),
    )
    try:
        for name in names:
            _checked(nvrtc, nvrtc.nvrtcAddNameExpression(program, name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), [w.encode() for w in words])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _taken(nvrtc, program, "ProgramLog").decode(errors="replace").rstrip("\0")
            raise BuildError(log.strip() or str(status))
        code = _taken(nvrtc, program, "CUBIN" if real else "PTX")
        lowered = [
            _checked(nvrtc, nvrtc.nvrtcGetLoweredName(program, name.encode()))[1].decode()
            for name in names
        ]
        return code, dict(zip(names, lowered, strict=True))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bindings():
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc, nvrtc.nvrtcVersion())  # finds the library
    except Exception as error:  # each release of the binding says it in another way
        import torch

        which = (torch.version.cuda or "13").split(".")[0]
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(
            f"source_module: NVIDIA's runtime compiler cannot be used: {said[0]:.200}; "
            f"pip install 'cuda-bindings=={which}.*' 'nvidia-cuda-nvrtc', which torch for CUDA "
            'brings along, or make the module with device="cpu"'
        ) from None
    return nvrtc


def _checked(nvrtc, result: tuple) -> tuple:
    """Return the result of a function of NVRTC's, with its status; BuildError if that is bad."""
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, text = nvrtc.nvrtcGetErrorString(result[0])
        raise BuildError(f"source_module: NVRTC failed: {text.decode()}")
    return result if len(result) != 3 else (result[0], result[1:])


def _taken(nvrtc, program, what: str) -> bytes:
    _, size = _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = bytes(size)
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


@cache
def identity(folders: tuple[str, ...]) -> list[str]:
    """The compiler and CUDA's headers, told from their files: nothing is loaded."""
    files = [file for folder in _packages() for file in glob.glob(f"{folder}/lib/libnvrtc*.so*")]
    files += [f"{folder}/cuda_fp16.h" for folder in folders]
    facts = [(file, os.stat(file)) for file in sorted(files) if os.path.isfile(file)]
    named = [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in facts]
    if not any("libnvrtc" in file for file, _ in facts):
        import torch

        named.append(f"NVRTC of the system, torch for CUDA {torch.version.cuda}")
    return named


@cache
def header_folders(toolkit: str | None) -> tuple[str, ...]:
    """Where CUDA's own headers are: beside NVRTC, then in the toolkit."""
    homes = [*_packages(), *filter(None, [toolkit])]
    folders = [f"{home}/include{below}" for home in homes for below in ("", "/cccl")]
    return tuple(folder for folder in folders if os.path.isdir(folder))


@cache
def _packages() -> tuple[str, ...]:
    """The folders of NVIDIA's wheels that have NVRTC or headers."""
    found = []
    for path in sys.path:
        if path.endswith("-packages"):
            found += sorted(glob.glob(f"{path}/nvidia/cu[0-9]*"), reverse=True)
            found += glob.glob(f"{path}/nvidia/cuda_nvrtc") + glob.glob(
                f"{path}/nvidia/cuda_runtime"
            )
    return tuple(str(Path(folder)) for folder in found)


def symbols(code: bytes) -> list[str]:
    """The symbols of the kernels in machine code (ELF) or PTX."""
    if code[:4] != b"\x7fELF":
        return [name.decode() for name in re.findall(rb"\.entry\s+([\w$]+)", code)]
    offset, size, count, names = struct.unpack_from("<Q10xHHH", code, 40)
    heads = [struct.unpack_from("<II8x8xQQ", code, offset + i * size) for i in range(count)]
    start, found = heads[names][2], []
    for name, *_ in heads:
        text = code[start + name : code.index(b"\0", start + name)].decode()
        if text.startswith(".text."):
            found.append(text.removeprefix(".text."))
    # Device functions that were not inlined have such sections too; only kernels have constants.
    return [name for name in found if f".nv.constant0.{name}".encode() in code]
