"""A witness's side of a GPU: arguments between patterns, memory poisoned, results read in order.

Made before the candidate's code is loaded, so what it calls of torch is what torch had then.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PAD = 4096  # bytes of a pattern before and behind each argument
_PATTERN = 0xA5
_FLUSH = 1 << 28  # bytes written between calls that are timed: several times any L2 cache
_ROOM = 1 << 28  # bytes that torch's allocator has to give out, besides what results may need
_BEHIND = 10_000_000  # cycles that arguments take to come, some milliseconds
_AHEAD = 2_000_000  # cycles, in which the host may get ahead of a GPU that is timed
_LATE = 64  # elements of an argument that come last of all


class Taken(NamedTuple):
    """What a number of calls took, by CUDA's events: milliseconds of each."""

    results: list[list[Tensor]]
    claimed: list[float]  # until the current stream was done
    idle: list[float]  # until all streams were


class Gpu:
    """The current CUDA device; `strict` for a candidate."""

    def __init__(self, strict: bool) -> None:
        self._event, self._wait, self._sleep = (
            torch.cuda.Event,
            torch.cuda.synchronize,
            torch.cuda._sleep,
        )
        self._snapshot, self._free = torch.cuda.memory_snapshot, torch.cuda.mem_get_info
        self._strict = strict
        self._buffers: list[Tensor] = []
        self._fresh: list[Tensor] = []
        self._key: Any = None
        self._flush: Tensor | None = None
        self._driver: Any = None

    def wake(self, share: float) -> int:
        """Have this process's context made; how many bytes of memory the GPU has.

        `share`: the part of it that torch's allocator may take.
        """
        torch.zeros(1, device="cuda")
        torch.cuda.set_per_process_memory_fraction(share)
        self._driver = ctypes.CDLL("libcuda.so.1") if torch.version.cuda else None
        self._wait()
        return self._free()[1]

    def take(self, tensors: Sequence[Tensor], results: int) -> list[Tensor]:
        """Return arguments on the GPU: of the same shapes as before, at the same addresses.

        They come there only after a while, in the order of the current stream: whoever does not
        wait for it finds a pattern. `results`: about how many bytes are to come back.
        """
        sizes = [_reach(x) * x.element_size() for x in tensors]
        key = [(x.dtype, x.shape, x.stride()) for x in tensors]
        if key != self._key:
            self._key, whole = key, [size + 2 * _PAD for size in sizes]
            self._buffers = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in whole]
            self._fresh = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]
        places = []
        for x, buffer, fresh, size in zip(tensors, self._buffers, self._fresh, sizes, strict=True):
            buffer.fill_(_PATTERN)
            if size:
                fresh.view(x.dtype).copy_(x.as_strided((_reach(x),), (1,)))
            places.append(buffer[_PAD : _PAD + size])
        if self._strict:
            self._poison(results + 4 * sum(sizes))
            self._sleep(_BEHIND)
        for place, fresh in zip(places, self._fresh, strict=True):
            place.copy_(fresh)
        memory = [place.view(x.dtype) for place, x in zip(places, tensors, strict=True)]
        return [
            m.as_strided(x.shape, x.stride(), m.storage_offset())
            for m, x in zip(memory, tensors, strict=True)
        ]

    def _poison(self, wanted: int) -> None:
        """Leave NaN in all memory that torch's allocator has to give out, and have it have some."""
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            return
        most = min(wanted + _ROOM, self._free()[0] // 4)
        rooms = [
            torch.empty(n, dtype=torch.uint8, device="cuda")
            for n in (*[1 << 20] * 4, *[9 << 20] * 4, most)
        ]
        del rooms
        self._wait()
        for segment in self._snapshot():
            if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):  # of a graph
                continue
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    place = ctypes.c_uint64(block["address"])
                    self._driver.cuMemsetD8_v2(place, 0xFF, ctypes.c_size_t(block["size"]))
        self._wait()

    def outside(self) -> str:
        """Say what was written beside an argument; "" for nothing."""
        for number, buffer in enumerate(self._buffers):
            for where, part in (("before", buffer[:_PAD]), ("behind", buffer[-_PAD:])):
                if bool((part != _PATTERN).any()):
                    return f"wrote {where} argument {number}"
        return ""

    def in_order(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """Copy results as the current stream has them; True if other streams changed them later."""
        early = [x.detach().clone() for x in tensors]
        self._wait()
        changed = not all(
            torch.equal(_bits(a), _bits(b.detach())) for a, b in zip(early, tensors, strict=True)
        )
        return [x.cpu() for x in early], changed

    def timed(self, calls: Sequence[tuple[Callable[[], list[Tensor]], list[Tensor]]]) -> Taken:
        """Call each once with a cold L2 cache; beside each its arguments.

        The last elements of these come behind what empties the cache, and a while after it, so
        that nobody begins early, and what is timed is the GPU and not the host that launches.
        """
        if self._flush is None:
            self._flush = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
        results, events = [], []
        parts = [[_late(x) for x in given if x.numel()] for _, given in calls]
        self._wait()
        for (call, _), late in zip(calls, parts, strict=True):
            begun, ended, idle = [self._event(enable_timing=True) for _ in range(3)]
            self._flush.zero_()
            self._sleep(_AHEAD)
            for place, numbers in late:
                place.copy_(numbers)
            begun.record()
            results.append(call())
            ended.record()
            self._wait()
            idle.record()
            events.append((begun, ended, idle))
        self._wait()
        claimed = [begun.elapsed_time(ended) for begun, ended, _ in events]
        return Taken(results, claimed, [begun.elapsed_time(idle) for begun, _, idle in events])

    def copying(self, size: int) -> float:
        """Return the milliseconds in which so many bytes are copied, with a cold L2 cache."""
        x = torch.empty(size, dtype=torch.uint8, device="cuda").zero_()
        y = torch.empty_like(x)

        def copy() -> list[Tensor]:
            return [y.copy_(x)]

        return min(self.timed([(copy, [])] * 5).claimed)


def _late(x: Tensor) -> tuple[Tensor, Tensor]:
    """Take a few elements of an argument away; where they belong, and what they were."""
    flat = x.as_strided((_reach(x),), (1,), x.storage_offset())
    first = int.from_bytes(os.urandom(4), "little") % max(1, flat.numel() - _LATE)
    place = flat[first : first + _LATE]
    numbers = place.clone()
    place.fill_(torch.nan if x.is_floating_point() or x.is_complex() else 0)
    return place, numbers


def _reach(x: Tensor) -> int:
    if not x.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
