"""A witness's side of a GPU: arguments between patterns, memory poisoned, results read in order.

Made before the candidate's code is loaded, so what it calls of torch is what torch had then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_PAD = 4096  # bytes of a pattern before and behind each argument
_PATTERN = 0xA5
_FLUSH = 1 << 28  # bytes written between calls that are timed: several times any L2 cache
_POISON = range(9, 27)  # powers of two: sizes of the blocks that are left full of NaN


class Gpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        self._event, self._wait = torch.cuda.Event, torch.cuda.synchronize
        self._buffers: list[Tensor] = []
        self._key: Any = None
        self._flush: Tensor | None = None

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return arguments on the GPU: of the same shapes as before, at the same addresses."""
        sizes = [_reach(x) * x.element_size() for x in tensors]
        key = [(x.dtype, x.shape, x.stride()) for x in tensors]
        if key != self._key:
            self._key, whole = key, [size + 2 * _PAD for size in sizes]
            self._buffers = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in whole]
        found = []
        for x, buffer, size in zip(tensors, self._buffers, sizes, strict=True):
            buffer.fill_(_PATTERN)
            memory = buffer[_PAD : _PAD + size].view(x.dtype)
            if size:
                memory.copy_(x.as_strided((_reach(x),), (1,)))
            found.append(memory.as_strided(x.shape, x.stride(), memory.storage_offset()))
        return found

    def poison(self) -> None:
        """Leave NaN in the memory that torch's allocator will give out next."""
        for power in _POISON:
            torch.full((2, 1 << power), 0xFF, dtype=torch.uint8, device="cuda")
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
        early = [x.detach().to("cpu", copy=True) for x in tensors]
        self._wait()
        late = [x.detach().to("cpu", copy=True) for x in tensors]
        pairs = zip(early, late, strict=True)
        changed = not all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)
        return early, changed

    def timed(self, calls: Sequence[Callable[[], list[Tensor]]]) -> tuple[list[list[Tensor]], list]:
        """Call each once with a cold L2 cache; the results, and milliseconds by CUDA's events."""
        if self._flush is None:
            self._flush = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
        results, events = [], []
        self._wait()
        for call in calls:
            self._flush.zero_()
            pair = self._event(enable_timing=True), self._event(enable_timing=True)
            pair[0].record()
            results.append(call())
            pair[1].record()
            events.append(pair)
        self._wait()
        return results, [begun.elapsed_time(ended) for begun, ended in events]


def _reach(x: Tensor) -> int:
    if not x.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
