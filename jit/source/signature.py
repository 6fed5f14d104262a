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
from typing import Any, NamedTuple

import torch

from ..errors.cxx import closing
from .constants import SCALARS

# torch's types for each element type of C++; several where both are in use for it.
_ELEMENTS: dict[str, tuple] = {name: tuple(dtypes) for name, (_, *dtypes) in SCALARS.items()} | {
    "Half": (torch.float16,),  # include/common.h
    "BFloat16": (torch.bfloat16,),
    "__nv_fp8_e4m3": (torch.float8_e4m3fn,),
    "__nv_fp8_e5m2": (torch.float8_e5m2,),
}
_VECTORS = {  # CUDA's: element, and how a pointer to them has to be aligned
    f"{element.replace('unsigned ', 'u').replace('signed ', '').replace(' ', '')}{n}": (
        element,
        min(16, size * n) if n != 3 else size,
    )
    for element, (code, *_) in SCALARS.items()
    if element not in ("__half", "__nv_bfloat16", "bool", "char")
    for size in [struct.calcsize(f"={code}")]
    for n in (1, 2, 3, 4)
} | {"__half2": ("__half", 4), "__nv_bfloat162": ("__nv_bfloat16", 4)}
_COMPLEX = {"float2": (torch.complex64,), "double2": (torch.complex128,)}


class Kernel(NamedTuple):
    """A kernel as it was compiled."""

    name: str  # with its namespaces and what a template was made for
    types: list[str] | None  # of its parameters in C++; None where the symbol does not tell them
    sizes: list[int]  # of its parameters, in bytes
    names: list[str]  # of its parameters, "" where one has none; none where the text tells none
    symbol: str  # on the CPU its number


class Parameter:
    """One parameter: its C++ type, its name or place, how it is checked and packed."""

    def __init__(self, kernel: str, place: int, name: str, type: str, size: int):
        self.label = name or f"argument {place + 1}"  # what messages call it
        self.kernel, self.type, self.name, self.size = kernel, type, name, size
        self.pointer = type.endswith("*") or "(*) [" in type  # a tensor goes there
        self.convert: Callable  # checks an argument; the number or bytes that are packed
        self.code, *_ = SCALARS.get(type, ("", None))  # its format for the struct module
        if self.pointer:
            self.code, self.convert = "Q", self._pointer_check()
        elif self.code and struct.calcsize(f"={self.code}") == size:
            float_like = self.code in "def" or type == "__nv_bfloat16"
            self.convert = self._float_check() if float_like else self._integer_check()
        else:
            self.code, self.convert = f"{size}s", self._raw

    def __str__(self) -> str:
        """As in C++: `float const* pic`."""
        return f"{self.type} {self.name}".rstrip()

    def _pointer_check(self) -> Callable:
        element = self.type.split(" (*)")[0] if "(*)" in self.type else self.type[:-1]
        element = re.sub(r"( const| volatile)+$", "", element.strip())
        base, alignment = _VECTORS.get(element, (element, 1))
        dtypes = _ELEMENTS.get(base, ()) + _COMPLEX.get(element, ())
        if element.endswith("*"):  # addresses
            dtypes = (torch.int64, torch.uint64)
        anything, takes = element == "void", dtypes or (torch.uint8,)
        first, lazy = takes[0], anything or any(dtype.is_complex for dtype in takes)
        Tensor, grad_mode = torch.Tensor, torch.is_grad_enabled

        def convert(x: Any) -> int:  # on the way to every launch: each look at a tensor takes 50 ns
            if x is None:
                return 0
            if isinstance(x, Tensor):
                dtype = x.dtype
                try:
                    if (
                        (dtype is first or anything or dtype in takes)
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
            raise self._refused(x, None if anything else dtypes, alignment)

        return convert

    def _refused(self, x: Any, dtypes: tuple | None, alignment: int) -> Exception:
        """Why a value is none for a pointer; `dtypes` is None where any will do."""
        where, name = f"{self.kernel}: {self.label}", self.name or "x"
        if not isinstance(x, torch.Tensor):
            cure = "; pass torch.from_numpy(it)" if type(x).__module__ == "numpy" else ""
            return TypeError(f"{where} must be a tensor ({self.type}), got {_told(x)}{cure}")
        if dtypes and x.dtype not in dtypes:
            wanted, first = " or ".join(map(_short, dtypes)), _short(dtypes[0])
            said = (
                f"must be {wanted} ({self.type}), got {_short(x.dtype)}; pass "
                f"{name}.to(torch.{first}), or change the kernel"
            )
        elif dtypes == () and x.dtype != torch.uint8:
            said = (
                f"is a {self.type}, which no dtype is like: pass its bytes, "
                f"{name}.view(torch.uint8), got {_short(x.dtype)}"
            )
        elif x.layout is not torch.strided:
            said = f"must be dense, got {x.layout}; pass {name}.to_dense()"
        elif not x.is_contiguous():
            said = (
                f"must be contiguous, got shape {tuple(x.shape)} with strides "
                f"{tuple(x.stride())}; pass {name}.contiguous()"
            )
        elif x.requires_grad:
            said = (
                "requires grad, and no gradient flows through a kernel from a string; "
                f"pass {name}.detach(), or call it within a torch.autograd.Function"
            )
        elif x.dtype.is_complex and x.is_conj():
            said = "is a lazy conjugate; pass it with .resolve_conj()"
        elif x.is_neg():
            said = "is lazily negated; pass it with .resolve_neg()"
        elif not (address := _address(x)):
            said = "has no memory of its own: it is torch.func's, a fake one, or was freed"
        else:
            said = (
                f"must lie at a multiple of {alignment} bytes for {self.type}, "
                f"got {address:#x}; pass {name}.clone()"
            )
        return RuntimeError(f"{where} {said}")

    def _unfit(self, x: object, said: str, kind: type[Exception] = RuntimeError) -> Exception:
        """Why a value is none for a number."""
        cure = "; pass its .item()" if isinstance(x, torch.Tensor) else ""
        where = f"{self.kernel}: {self.label}"
        return kind(f"{where} must be {said} ({self.type}), got {_told(x)}{cure}")

    def _float_check(self) -> Callable:
        pack, is_bfloat16 = struct.Struct(f"={self.code}").pack, self.code == "H"

        def convert(x: Any) -> float:
            if x.__class__ is not float and not isinstance(x, numbers.Real):
                raise self._unfit(x, "a number", TypeError)
            try:
                value = float(x)
                if is_bfloat16:
                    return _bfloat16(value)
                pack(value)
            except OverflowError:
                raise self._unfit(x, f"within the range of {self.type}") from None
            return value

        return convert

    def _integer_check(self) -> Callable:
        values = 1 << 8 * self.size if self.code != "?" else 2
        low = 0 if self.code in "?BHIQ" else -values // 2
        high = low + values - 1

        def convert(x: Any) -> int:
            if x.__class__ is not int:
                try:
                    if isinstance(x, torch.Tensor):  # its index would wait for the GPU
                        raise TypeError
                    x = operator.index(x.item() if type(x).__module__ == "numpy" else x)
                except (TypeError, ValueError):
                    raise self._unfit(x, "an integer", TypeError) from None
            if low <= x <= high:
                return x
            raise self._unfit(x, f"in [{low}, {high}]")

        return convert

    def _raw(self, x: Any) -> bytes:
        """A struct's bytes, of its exact size."""
        try:
            if isinstance(x, (int, float, torch.Tensor)):
                raise TypeError
            data = bytes(x) if isinstance(x, (bytes, bytearray, ctypes.Structure)) else x.tobytes()
            if len(data) == self.size:
                return data
            got = f"{len(data)} bytes"
        except (TypeError, AttributeError):
            got = _told(x)
        raise TypeError(
            f"{self.kernel}: {self.label} is a {self.type} by value: pass {self.size} bytes, as "
            f"bytes, a NumPy scalar of a structured dtype or a ctypes.Structure, got {got}"
        )


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


def _told(x: object) -> str:
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    return f"{type(x).__name__} {x!r:.60}" if isinstance(x, (int, float, str)) else type(x).__name__


def split_symbol(symbol: str) -> tuple[str, list[str] | None]:
    """Return name and parameter types of a function's symbol; None for the types if it has none.

    `_Z4convIfLi3EEvPT_i` gives `conv<float, 3>` and [`float*`, `int`].
    """
    text = torch._C._demangle(symbol).replace("(anonymous namespace)::", "")
    if not text.endswith(")"):
        return text, None
    opens = len(text) - closing(text[::-1], 1, ")", "(")
    types = [re.sub(r"__restrict(__)?", "", kind) for kind in split_commas(text[opens + 1 : -1])]
    types = [kind.replace(" *", "*").strip() for kind in types if kind != "void"]
    return text[:opens].removeprefix("void "), types  # a template's begins with what it returns


def split_commas(text: str) -> list[str]:
    """Return the parts of a list, commas within brackets left alone."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [part.strip() for part in (*parts, text[begin:]) if part.strip()]
