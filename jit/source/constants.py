"""Compile-time constants of a kernel: names that C++ takes, values as C++ spells them.

Numbers are macros, so that `#if KERNEL_R > 3`, array sizes and template arguments all take them;
types are aliases, which leave a `template <typename T>` alone. They stand before the source, and
behind the compiler's own headers.
"""

import math
import numbers
import re
from collections.abc import Mapping

import torch

from ..errors.cxx import KEYWORDS

_KEYWORDS = KEYWORDS | {"defined", "final", "override"}
_CUDA = {"threadIdx", "blockIdx", "blockDim", "gridDim", "warpSize", "dim3", "printf", "assert"}

# What C++ calls torch's types, for constants that are types.
TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.int64: "long long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.uint16: "unsigned short",
    torch.uint32: "unsigned int",
    torch.uint64: "unsigned long long",
    torch.bool: "bool",
}


_HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}


def prologue(definitions: Mapping[str, str], file: str) -> str:
    """Return the lines to put before a source called `file`, whose own keep their numbers."""
    types = {name: text for name, text in definitions.items() if text in TYPES.values()}
    lines = [f"#include <{header}>" for kind, header in _HEADERS.items() if kind in types.values()]
    lines += [f"using {name} = {text};" for name, text in types.items()]
    lines += [f"#define {name} {text}" for name, text in definitions.items() if name not in types]
    return "\n".join([*lines, f'#line 1 "{file}"\n'])


def definitions(constants: Mapping[str, object]) -> dict[str, str]:
    """C++'s text for each constant, by name; ValueError or TypeError for what cannot be one."""
    return {name: _literal(_checked(name), constants[name]) for name in sorted(constants)}


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(
            f"source_module: a constant's name must be a C++ identifier such as IMAGE_W, "
            f"got {name!r}"
        )
    reserved = "a keyword of C++" if name in _KEYWORDS else "a name of CUDA's own"
    if re.match(r"_[A-Z]|.*__", name):
        reserved = "reserved for the compiler, as all with two underscores or _ and a capital are"
    elif name not in _KEYWORDS | _CUDA:
        return name
    raise ValueError(f"source_module: {name} cannot be a constant's name: it is {reserved}")


def _literal(name: str, value: object) -> str:
    """C++'s text for a value, of the type that the same text has in a source.

    A Python float is a double, as 0.5 is in C++; numpy.float32(0.5) is 0.5f.
    """
    kind = getattr(getattr(value, "dtype", None), "name", "")  # of NumPy's scalars
    if isinstance(value, torch.dtype) and value in TYPES:
        return TYPES[value]
    if isinstance(value, bool) or kind == "bool":
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return _integer(name, int(value))
    if isinstance(value, numbers.Real) and kind != "float16":
        if not math.isfinite(value):
            raise ValueError(
                f"source_module: the constant {name} must be finite, got {value}; "
                "C++ spells it INFINITY or NAN in the source itself"
            )
        text = repr(float(value)) if kind != "float32" else f"{float(str(value))!r}f"
        return f"({text})" if text[0] == "-" else text
    raise TypeError(
        f"source_module: the constant {name} must be an int, a float, a bool or a torch.dtype, "
        f"got {type(value).__name__} {value!r:.60}; data goes in as an argument"
    )


def _integer(name: str, value: int) -> str:
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"source_module: the constant {name} must fit into 64 bits, got {value}")
    if value == -(1 << 63):
        return "(-9223372036854775807LL-1)"
    suffix = "" if -(1 << 31) < value < 1 << 31 else "LL" if value < 1 << 63 else "ULL"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"
