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

_CUDA = {"threadIdx", "blockIdx", "blockDim", "gridDim", "warpSize", "dim3", "printf", "assert"}

# Of each type of C++'s the code of struct, and torch's types for what a pointer to it points to.
# The first row with a dtype in front is how C++ calls that, for constants that are types.
SCALARS = {
    "double": ("d", torch.float64),
    "float": ("f", torch.float32),
    "__half": ("e", torch.float16),
    "__nv_bfloat16": ("H", torch.bfloat16),
    "long long": ("q", torch.int64),
    "int": ("i", torch.int32),
    "short": ("h", torch.int16),
    "signed char": ("b", torch.int8),
    "unsigned char": ("B", torch.uint8, torch.bool),
    "unsigned short": ("H", torch.uint16),
    "unsigned int": ("I", torch.uint32),
    "unsigned long long": ("Q", torch.uint64),
    "bool": ("?", torch.bool),
    "long": ("q", torch.int64),
    "unsigned long": ("Q", torch.uint64),
    "char": ("b", torch.int8, torch.uint8),
}
_TYPES = {dtypes[0]: name for name, (_, *dtypes) in reversed(SCALARS.items())}
_HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}


def prologue(definitions: Mapping[str, str], file: str) -> str:
    """Return the lines to put before a source called `file`, whose own keep their numbers."""
    types = {name: text for name, text in definitions.items() if text in SCALARS}
    lines = [f"#include <{header}>" for kind, header in _HEADERS.items() if kind in types.values()]
    lines += [f"using {name} = {text};" for name, text in types.items()]
    lines += [f"#define {name} {text}" for name, text in definitions.items() if name not in types]
    return "\n".join([*lines, f'#line 1 "{file}"\n'])


def definitions(constants: Mapping[str, object]) -> dict[str, str]:
    """Return C++'s text for each constant; raise ValueError or TypeError for what cannot be one."""
    for name in constants:
        if said := _no_name(name):
            raise ValueError(f"source_module: {said}")
    return {name: _literal(name, constants[name]) for name in sorted(constants)}


def _no_name(name: str) -> str:
    """Return why a constant cannot be called so; "" where it can."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return f"a constant's name must be a C++ identifier such as IMAGE_W, got {name!r}"
    reserved = ""
    if re.match(r"_[A-Z]|.*__", name):
        reserved = "reserved for the compiler, as all with two underscores or _ and a capital are"
    elif name in KEYWORDS | {"defined", "final", "override"}:
        reserved = "a keyword of C++"
    elif name in _CUDA:
        reserved = "a name of CUDA's own"
    return f"{name} cannot be a constant's name: it is {reserved}" if reserved else ""


def _literal(name: str, value: object) -> str:
    """Return C++'s text for a value, of the type that the same text has in a source.

    A Python float is a double, as 0.5 is in C++; numpy.float32(0.5) is 0.5f.
    """
    kind = getattr(getattr(value, "dtype", None), "name", "")  # of NumPy's scalars
    if isinstance(value, torch.dtype) and value in _TYPES:
        return _TYPES[value]
    if isinstance(value, bool) or kind == "bool":
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        value = int(value)
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(
                f"source_module: the constant {name} must fit into 64 bits, got {value}"
            )
        suffix = "" if -(1 << 31) < value < 1 << 31 else "LL" if value < 1 << 63 else "ULL"
        text = f"{value}{suffix}" if value != -(1 << 63) else f"{value + 1}LL-1"
    elif not isinstance(value, numbers.Real) or kind == "float16":
        raise TypeError(
            f"source_module: the constant {name} must be an int, a float, a bool or a torch.dtype, "
            f"got {type(value).__name__} {value!r:.60}; data goes in as an argument"
        )
    elif not math.isfinite(value):
        raise ValueError(
            f"source_module: the constant {name} must be finite, got {value}; "
            "C++ spells it INFINITY or NAN in the source itself"
        )
    else:
        text = f"{float(str(value))!r}f" if kind == "float32" else repr(float(value))
    return f"({text})" if text[0] == "-" else text
