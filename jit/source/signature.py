"""A kernel's parameters, from the symbol that a compiler gave it, and checks of what is passed.

A C++ symbol spells out the types that are left when macros, templates and typedefs are resolved.
"""

import ctypes
import math
import numbers
import operator
import re
import struct
from collections.abc import Callable
from functools import cache

import torch

# torch's types for each element type of C++; several where both are in use for it.
_ELEMENTS = {
    "double": (torch.float64,),
    "float": (torch.float32,),
    "__half": (torch.float16,),
    "Half": (torch.float16,),  # include/common.h
    "__nv_bfloat16": (torch.bfloat16,),
    "BFloat16": (torch.bfloat16,),
    "__nv_fp8_e4m3": (torch.float8_e4m3fn,),
    "__nv_fp8_e5m2": (torch.float8_e5m2,),
    "long": (torch.int64,),
    "long long": (torch.int64,),
    "int": (torch.int32,),
    "short": (torch.int16,),
    "signed char": (torch.int8,),
    "char": (torch.int8, torch.uint8),
    "unsigned char": (torch.uint8, torch.bool),
    "unsigned short": (torch.uint16,),
    "unsigned int": (torch.uint32,),
    "unsigned long": (torch.uint64,),
    "unsigned long long": (torch.uint64,),
    "bool": (torch.bool,),
}
_SCALARS = {  # code of struct, size
    "double": ("d", 8),
    "float": ("f", 4),
    "__half": ("e", 2),
    "__nv_bfloat16": ("H", 2),
    "long": ("q", 8),
    "long long": ("q", 8),
    "int": ("i", 4),
    "short": ("h", 2),
    "signed char": ("b", 1),
    "char": ("b", 1),
    "unsigned char": ("B", 1),
    "unsigned short": ("H", 2),
    "unsigned int": ("I", 4),
    "unsigned long": ("Q", 8),
    "unsigned long long": ("Q", 8),
    "bool": ("?", 1),
}
_FLOATS = ("double", "float", "__half", "__nv_bfloat16")
# CUDA's vectors: element, and how a pointer to them has to be aligned.
_VECTORS = {
    f"{short}{n}": (element, size * n if n != 3 else size)
    for short, element, size in (
        ("float", "float", 4),
        ("double", "double", 8),
        ("int", "int", 4),
        ("uint", "unsigned int", 4),
        ("short", "short", 2),
        ("ushort", "unsigned short", 2),
        ("char", "signed char", 1),
        ("uchar", "unsigned char", 1),
        ("longlong", "long long", 8),
        ("ulonglong", "unsigned long long", 8),
    )
    for n in (1, 2, 3, 4)
}
_COMPLEX = {"float2": (torch.complex64,), "double2": (torch.complex128,)}
_VECTORS["__half2"], _VECTORS["__nv_bfloat162"] = ("__half", 4), ("__nv_bfloat16", 4)


class Parameter:
    """One parameter: its C++ type, its name or place, how it is checked and packed.

    Attributes:
        label: what messages call it.
        type: in C++, as compilers print it.
        pointer: whether a tensor goes there.
        code: its format for the struct module.
        convert: a checked argument as the number or bytes that are packed.
    """

    def __init__(self, kernel: str, place: int, name: str, type: str, size: int | None = None):
        self.label = name or f"argument {place + 1}"
        self.kernel, self.type, self.name = kernel, type, name
        self.pointer = type.endswith("*") or "(*) [" in type
        self.convert: Callable
        if self.pointer:
            self.code, self.size, self.convert = "Q", 8, self._pointer_check()
        elif type in _SCALARS:
            self.code, self.size = _SCALARS[type]
            self.convert = self._scalar_check()
        else:
            self.size = size
            self.code, self.convert = f"{size or 0}s", self._raw

    def __str__(self) -> str:
        """As in C++: `float const* pic`."""
        return f"{self.type} {self.name}".rstrip()

    def _pointer_check(self) -> Callable:
        element = self.type.split(" (*)")[0] if "(*)" in self.type else self.type[:-1]
        element = re.sub(r"( const| volatile)+$", "", element.strip())
        base, alignment = _VECTORS.get(element, (element, 1))
        self.dtypes = _ELEMENTS.get(base, ()) + _COMPLEX.get(element, ())
        if element.endswith("*"):  # addresses
            self.dtypes = (torch.int64, torch.uint64)
        anything, dtypes = element == "void", self.dtypes or (torch.uint8,)
        first, lazy = dtypes[0], anything or any(dtype.is_complex for dtype in dtypes)
        Tensor, grad_mode = torch.Tensor, torch.is_grad_enabled

        def convert(x):  # on the way to every launch: each look at a tensor takes 50 ns
            if x is None:
                return 0
            if isinstance(x, Tensor):
                dtype = x.dtype
                try:
                    if (
                        (dtype is first or anything or dtype in dtypes)
                        and x.is_contiguous()
                        and not (x.requires_grad and grad_mode())
                        and not (lazy and x.is_conj())
                        and not x.is_neg()
                    ):
                        address = x.data_ptr()
                        if address % alignment == 0 and (address or x.is_meta or not x.numel()):
                            return address
                except RuntimeError:
                    pass  # sparse ones and those of torch.func have no address
            raise self._refused(x, dtypes, alignment, anything)

        return convert

    def _refused(self, x, dtypes, alignment: int, anything: bool) -> Exception:
        """Why a value is none for a pointer."""
        where = f"{self.kernel}: {self.label}"
        if not isinstance(x, torch.Tensor):
            cure = "; pass torch.from_numpy(it)" if type(x).__module__ == "numpy" else ""
            return TypeError(f"{where} must be a tensor ({self.type}), got {_told(x)}{cure}")
        if not (anything or x.dtype in dtypes):
            wanted, got = " or ".join(map(_short, dtypes)), _short(x.dtype)
            if not self.dtypes:
                return RuntimeError(
                    f"{where} is a {self.type}, which no dtype is like: pass its bytes, "
                    f"{self.name or 'x'}.view(torch.uint8), got {got}"
                )
            cure = f"{self.name or 'x'}.to(torch.{_short(dtypes[0])}), or change the kernel"
            return RuntimeError(f"{where} must be {wanted} ({self.type}), got {got}; pass {cure}")
        if x.layout is not torch.strided:
            return RuntimeError(
                f"{where} must be dense, got {x.layout}; pass {self.name or 'x'}.to_dense()"
            )
        if not x.is_contiguous():
            return RuntimeError(
                f"{where} must be contiguous, got shape {tuple(x.shape)} with strides "
                f"{tuple(x.stride())}; pass {self.name or 'x'}.contiguous()"
            )
        if x.requires_grad:
            return RuntimeError(
                f"{where} requires grad, and no gradient flows through a kernel from a string; "
                f"pass {self.name or 'x'}.detach(), or call it within a torch.autograd.Function"
            )
        if x.dtype.is_complex and x.is_conj():
            return RuntimeError(f"{where} is a lazy conjugate; pass it with .resolve_conj()")
        if x.is_neg():
            return RuntimeError(f"{where} is lazily negated; pass it with .resolve_neg()")
        if not _address(x):
            return RuntimeError(
                f"{where} has no memory of its own: it is torch.func's, a fake one, or was freed"
            )
        return RuntimeError(
            f"{where} must lie at a multiple of {alignment} bytes for {self.type}, "
            f"got {x.data_ptr():#x}; pass {self.name or 'x'}.clone()"
        )

    def _scalar_check(self) -> Callable:
        pack, is_float, code = struct.Struct(f"={self.code}").pack, self.type in _FLOATS, self.code
        bits, unsigned = 8 * self.size, code.isupper()
        low, high = (0, 1) if code == "?" else (0, (1 << bits) - 1)
        if not unsigned and code != "?":
            low, high = -(1 << bits - 1), (1 << bits - 1) - 1

        def refused(x, why: str) -> Exception:
            kind = RuntimeError if why else TypeError
            cure = "; pass its .item()" if isinstance(x, torch.Tensor) else ""
            said = why or ("a number" if is_float else "an integer")
            return kind(
                f"{self.kernel}: {self.label} must be {said} ({self.type}), got {_told(x)}{cure}"
            )

        def to_float(x):
            if not isinstance(x, numbers.Real):
                raise refused(x, "")
            try:
                value = float(x)
                if code == "H":
                    return _bfloat16(value)
                if code != "d":
                    pack(value)
            except OverflowError:
                raise refused(x, f"within the range of {self.type}") from None
            return value

        def to_integer(x):
            if x.__class__ is not int:
                try:
                    if isinstance(x, torch.Tensor):  # its index would wait for the GPU
                        raise TypeError
                    x = operator.index(x.item() if type(x).__module__ == "numpy" else x)
                except (TypeError, ValueError):
                    raise refused(x, "") from None
            if low <= x <= high:
                return x
            raise refused(x, f"in [{low}, {high}]")

        return to_float if is_float else to_integer

    def _raw(self, x) -> bytes:
        """A struct's bytes, of its exact size."""
        try:
            if isinstance(x, (int, float, torch.Tensor)):
                raise TypeError
            data = bytes(x) if isinstance(x, (bytes, bytearray, ctypes.Structure)) else x.tobytes()
        except (TypeError, AttributeError):
            data = None
        if data is None or (self.size is not None and len(data) != self.size):
            size = f"{self.size} bytes" if self.size is not None else "its bytes"
            got = _told(x) if data is None else f"{len(data)} bytes"
            raise TypeError(
                f"{self.kernel}: {self.label} is a {self.type} by value: pass {size}, as bytes, a "
                f"NumPy scalar of a structured dtype or a ctypes.Structure, got {got}"
            )
        return data


def _address(x: torch.Tensor) -> int:
    """Where a tensor's elements lie; 0 where they lie nowhere."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


def _bfloat16(x: float) -> int:
    """The bits of a float rounded to bfloat16; OverflowError beyond its range."""
    rounded = torch.tensor(x, dtype=torch.float64).bfloat16()
    if math.isfinite(x) and not rounded.isfinite():
        raise OverflowError
    return int(rounded.view(torch.int16)) & 0xFFFF


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _told(x) -> str:
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    return f"{type(x).__name__} {x!r:.60}" if isinstance(x, (int, float, str)) else type(x).__name__


@cache
def demangled(symbol: str) -> str:
    """A symbol, or the name of a type, as C++ spells it; as it is where it is no C++."""
    library = ctypes.CDLL("libstdc++.so.6")  # torch's own; loaded already
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    try:
        return ctypes.string_at(text).decode()
    finally:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = (ctypes.c_void_p,)
        libc.free(text)


def split_symbol(symbol: str) -> tuple[str, list[str] | None]:
    """Name and parameter types of a function's symbol; None for the types where it has none.

    `_Z4convIfLi3EEvPT_i` gives `conv<float, 3>` and [`float*`, `int`].
    """
    text = demangled(symbol)
    if not text.endswith(")"):
        return text, None
    depth, at = 0, len(text)
    while at:
        at -= 1
        depth += (text[at] == ")") - (text[at] == "(")
        if not depth:
            break
    name = text[:at]
    if "<" in name:  # an instance of a template, which begins with what it returns
        name = re.sub(r"^void ", "", name)
    types = [_plain(type) for type in split_commas(text[at + 1 : -1])]
    return name.replace("(anonymous namespace)::", ""), [t for t in types if t != "void"]


def split_commas(text: str) -> list[str]:
    """The parts of a list, commas within brackets left alone."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip()]


def _plain(type: str) -> str:
    """`float const*`, whatever says that nothing else points there."""
    return type.replace("__restrict__", "").replace("__restrict", "").replace(" *", "*").strip()
