"""Tensors that pass between processes: bytes in a file in memory, and a description in JSON.

Nothing that a process sends is executed or unpickled by the one that reads it. In the file each
tensor ends where a page does, and a page that nobody needs lies before and behind it, which the
process that maps it can forbid itself to touch.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_PATTERN = 0xA5
_ALIGN = 64  # bytes, as torch's own allocator
_ODD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # numbers that mix bits of words
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_ADD_SEALS = 1033
_MOST_DIMENSIONS, _MOST_TENSORS = 64, 4096


class Malformed(ValueError):
    """What came from another process describes no tensors."""


class Place(NamedTuple):
    """One tensor in a file: where its memory begins, and how it lies in that."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int  # of memory, which strides may make fewer or more than the tensor has

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return self.elements * self.dtype.itemsize


class Layout(NamedTuple):
    """Where tensors lie in a file of `size` bytes, of which the rest is never touched."""

    places: tuple[Place, ...]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Layout":
        """Lay these tensors out, one behind the other."""
        places, at = [], PAGE
        for x in tensors:
            place = Place(x.dtype, tuple(x.shape), tuple(x.stride()), 0, _elements(x))
            room = -(-place.size // _ALIGN) * _ALIGN
            pages = -(-room // PAGE) * PAGE
            places.append(place._replace(offset=at + pages - room))
            at += pages + PAGE
        return cls(tuple(places), at)

    def repeated(self, period: int, times: int) -> "Layout":
        """Lay the same tensors out `times` over, each set `period` bytes behind the last."""
        places = (
            p._replace(offset=p.offset + i * period) for i in range(times) for p in self.places
        )
        return Layout(tuple(places), self.size + (times - 1) * period)

    @property
    def period(self) -> int:
        """Bytes from one set of the tensors to the next."""
        return self.size - PAGE

    def json(self) -> list:
        """Return it as plain data."""
        return [
            [str(p.dtype).removeprefix("torch."), p.shape, p.stride, p.offset, p.elements]
            for p in self.places
        ]

    @classmethod
    def read(cls, data: Any, size: int) -> "Layout":
        """Read what `json` gave, from a process that is not trusted. Raises: Malformed."""
        try:
            if len(data) > _MOST_TENSORS:
                raise Malformed(f"{len(data)} tensors")
            return cls(tuple(_place(entry, size) for entry in data), size)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise Malformed(f"no description of tensors: {error}") from None


def _elements(x: Tensor) -> int:
    if not x.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


def _place(entry: Any, size: int) -> Place:
    name, shape, stride, offset, elements = entry
    dtype = getattr(torch, name) if isinstance(name, str) and name.isidentifier() else None
    numbers = [*shape, *stride, offset, elements]
    if not isinstance(dtype, torch.dtype) or any(type(n) is not int or n < 0 for n in numbers):
        raise Malformed(f"dtype {name!r}, shape {shape!r}, strides {stride!r}")
    if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
        raise Malformed(f"shape {shape!r} with strides {stride!r}")
    reached = 1 + sum((s - 1) * t for s, t in zip(shape, stride, strict=True))
    if (elements < reached and 0 not in shape) or offset + elements * dtype.itemsize > size:
        raise Malformed(f"shape {shape!r} is larger than there is room for")
    return Place(dtype, tuple(shape), tuple(stride), offset, elements)


def make(size: int) -> int:
    """Make a file in memory whose size nobody can change; its descriptor."""
    file = os.memfd_create("octet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, _ADD_SEALS, _SEALS)
    return file


class Mapped:
    """A file in memory as tensors of this process, on the memory that others see."""

    def __init__(self, file: int, layout: Layout):
        """Map the file, which may be closed then."""
        self._map = mmap.mmap(file, layout.size)
        self.layout = layout
        self.memory = [_memory(self._map, place) for place in layout.places]
        self.tensors = [
            memory.as_strided(place.shape, place.stride)
            for memory, place in zip(self.memory, layout.places, strict=True)
        ]

    def guard(self) -> None:
        """Have a touch of the pages beside the tensors end this process."""
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        at = 0
        for place in self.layout.places:
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + at), PAGE, 0)
            at = (place.offset + place.size + PAGE - 1) // PAGE * PAGE
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + at), PAGE, 0)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of the layout's shapes into it; what lies between their elements is kept."""
        for mine, x in zip(self.memory, tensors, strict=True):
            if mine.numel():
                mine.copy_(x.as_strided((mine.numel(),), (1,)))

    def paint(self) -> None:
        """Fill what alignment leaves over beside the tensors with a pattern."""
        for part in self._beside():
            part.fill_(_PATTERN)

    def is_spoilt(self) -> bool:
        """True if something beside the tensors is not the pattern any more."""
        return any(bool((part != _PATTERN).any()) for part in self._beside())

    def _beside(self) -> Iterator[Tensor]:
        for place in self.layout.places:
            end = place.offset + place.size
            for first, last in (
                (place.offset // PAGE * PAGE, place.offset),
                (end, -(-end // PAGE) * PAGE),
            ):
                if last > first and place.size:
                    count = last - first
                    yield torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=first)

    def copies(self) -> list[Tensor]:
        """Return the tensors as they are now, in memory that nobody else has."""
        return [
            memory.clone().as_strided(place.shape, place.stride)
            for memory, place in zip(self.memory, self.layout.places, strict=True)
        ]


def turned(x: Tensor, places: int = 0, scale: float = 1.0) -> Tensor:
    """Return a copy whose elements are rolled by so many places and scaled, with the same strides.

    What lies between them, a slice's neighbours, is none of its numbers and stays where it is.
    """
    flat = x.as_strided((_elements(x),), (1,))
    if scale == 1 and not places:
        return flat.clone().as_strided(x.shape, x.stride())
    once = [
        min(size, 1) if not step else size for size, step in zip(x.shape, x.stride(), strict=True)
    ]
    own = x.as_strided(once, x.stride())
    if own.numel() >= flat.numel():
        return (flat.roll(places) * scale).as_strided(x.shape, x.stride())
    flat = flat.clone()
    flat.as_strided(once, x.stride()).copy_(own.flatten().roll(places).view(once) * scale)
    return flat.as_strided(x.shape, x.stride())


def fingerprint(x: Tensor, seed: int) -> Tensor:
    """Return a number for each bit of a tensor and the seed, where it lies, the same everywhere."""
    data = x.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    words = torch.zeros(-(-data.numel() // 8), dtype=torch.int64, device=x.device)
    words.view(torch.uint8)[: data.numel()] = data
    for odd in _ODD:
        words.bitwise_xor_(seed).mul_(odd)
        words.bitwise_xor_(words >> 31)
    return words.sum()


def _memory(buffer: Any, place: Place) -> Tensor:
    if not place.elements:
        return torch.empty(0, dtype=place.dtype)
    return torch.frombuffer(buffer, dtype=place.dtype, count=place.elements, offset=place.offset)


def pack(tensors: Sequence[Tensor]) -> tuple[Layout, int]:
    """Copy tensors into a new file; the descriptor is the caller's to close."""
    layout = Layout.of(tensors)
    file = make(layout.size)
    Mapped(file, layout).fill(tensors)
    return layout, file


def put(tensors: Sequence[Tensor], file: int) -> Layout:
    """Copy tensors into a file that is there, unless they are too large for it."""
    layout, size = Layout.of(tensors), os.fstat(file).st_size
    if layout.size <= size:
        Mapped(file, Layout(layout.places, size)).fill(tensors)
    return layout


def unpack(description: Any, file: int, most: int) -> list[Tensor]:
    """Copy tensors out of a file of a process that is not trusted. Raises: Malformed."""
    size = os.fstat(file).st_size
    if size > most:
        raise Malformed(f"{size} bytes, of which {most} are too many")
    found = []
    for place in Layout.read(description, size).places:
        data = bytearray(place.size)
        read = 0
        with contextlib.suppress(OSError):  # no file that can be read at a place
            while read < place.size:
                step = os.preadv(file, [memoryview(data)[read:]], place.offset + read)
                if not step:
                    break
                read += step
        if read < place.size:
            raise Malformed("fewer bytes than it says")
        found.append(_memory(data, place._replace(offset=0)).as_strided(place.shape, place.stride))
    return found


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Return arguments or results as plain data, with their tensors put into a list.

    Raises: TypeError for what is neither tensor nor plain.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [flatten(v, tensors) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[str(k), flatten(v, tensors)] for k, v in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(f"neither a tensor nor a number, a text or a list of such: {type(value)!r}")


def unflatten(data: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what `flatten` was given, with these tensors."""
    ((kind, value),) = data.items()
    if kind == "tensor":
        return tensors[value]
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](unflatten(v, tensors) for v in value)
    if kind == "dict":
        return {k: unflatten(v, tensors) for k, v in value}
    return getattr(torch, value) if kind == "dtype" else value
