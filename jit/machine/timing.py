"""How long a call takes on its device: CUDA events, the L2 cache flushed, the median of many."""

import contextlib
import statistics
import time as _clock
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..errors.table import Table

_FLUSHED = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes written or read, several times any cache


class Times(float):
    """The median in milliseconds: a number, with all samples behind it."""

    samples: list[float]  # milliseconds of each call, in their order
    device: torch.device

    def __new__(cls, samples: Iterable[float], device: torch.device) -> "Times":
        """Of these samples."""
        taken = [*samples]
        self = super().__new__(cls, statistics.median(taken))
        self.samples, self.device = taken, device
        return self

    def quantile(self, share: float) -> float:
        """The sample that this share of them does not exceed."""
        return sorted(self.samples)[min(len(self.samples) - 1, int(share * len(self.samples)))]

    def _texts(self) -> list[str]:
        times = self, self.quantile(0.1), self.quantile(0.9)
        return [*map(milliseconds, times), str(len(self.samples)), str(self.device)]

    def __reduce__(self) -> tuple:
        """A copy has the samples too."""
        return Times, (self.samples, self.device)

    def __repr__(self) -> str:
        """`0.1463 ms (0.1460 to 0.1471 ms in 80 % of 100 calls, cuda:0)`."""
        median, low, high, calls, device = self._texts()
        return f"{median} ({low} to {high} in 80 % of {calls} calls, {device})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        table = Table("", ("median", "10 %", "90 %", "calls", "device"))
        table.rows.append(self._texts())
        return table._repr_html_()


def milliseconds(ms: float) -> str:
    """A time with four digits."""
    if ms < 0.01:
        return f"{1e3 * ms:.3f} us"
    return f"{ms:.4f} ms" if ms < 1 else f"{ms:.3f} ms" if ms < 100 else f"{ms:.0f} ms"


def time(
    fn: Callable[[], object],
    *,
    device: torch.device | str | None = None,
    repeats: int | None = None,
    warmup: int = 3,
    flush: bool = True,
) -> Times:
    """Time calls of `fn` on its device, in milliseconds: `print(loader.time(lambda: f(x)))`.

    On a GPU each call is taken between two CUDA events on the current stream, after the L2 cache
    was overwritten: work queued ahead, so that the GPU is timed and not the host that launches. On
    the CPU it is the clock on the wall, after more than the caches hold was read.

    Args:
        fn: called without arguments; what it launches on other streams is not seen.
        device: the current CUDA device where there is one, else the CPU; "cpu" for CPU tensors.
        repeats: samples; without it as many as fit into about half a second, from 5 to 100.
        warmup: calls before, which compile, allocate and fill caches.
        flush: False leaves the caches as the call before left them.

    Returns: the median, a float that prints with its spread; `samples` has every call.

    Raises: TypeError where `fn` cannot be called; ValueError for counts below 1; RuntimeError for a
        CUDA device where there is none.
    """
    if not callable(fn):
        raise TypeError(
            f"time: fn must be a function without arguments, got {type(fn).__name__}; "
            "wrap the call: loader.time(lambda: f(x))"
        )
    for name, count, least in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if count is not None and (not isinstance(count, int) or count < least):
            raise ValueError(f"time: {name} must be {least} or more, got {count!r}")
    place = _device(device)
    clock = Clock(place, flush)
    with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
        for _ in range(warmup):
            fn()
        if repeats is None:
            first = clock.results([clock.once(fn)])[0]
            repeats = max(5, min(100, int(500 / max(first, 1e-3))))
        return Times(clock.results([clock.once(fn) for _ in range(repeats)]), place)


def _device(device: torch.device | str | None) -> torch.device:
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type not in _FLUSHED:
        raise ValueError(f"time: device must be a CUDA device or the CPU, got {place}")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f'time: {place} is not there: torch sees no GPU; device="cpu"')
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return place


class Clock:
    """Times single calls on a device: what `time` and the benchmarks measure with."""

    def __init__(self, device: torch.device, flush: bool = True):
        self.device = torch.device(device)
        self._on_gpu = self.device.type == "cuda"
        self._flush: Callable[[], object] | None = None
        if flush and self._on_gpu:
            size = torch.cuda.get_device_properties(self.device).total_memory // 8
            size = min(size, _FLUSHED["cuda"])
            self._flush = torch.empty(size, dtype=torch.uint8, device=self.device).zero_
        elif flush:
            # Large blocks are written past the caches: what empties them is reading. Not by torch,
            # whose own code would then be in them, and of zeros all might be one page.
            half = bytes([1]) * (_FLUSHED["cpu"] // 2)
            self._flush = partial(half.__eq__, bytes([1]) * len(half))

    def once(self, fn: Callable[[], object]) -> Any:
        """One call; on a GPU a pair of events, to be read by `results` when all is done."""
        if self._flush is not None:
            self._flush()
        if not self._on_gpu:
            start = _clock.perf_counter()
            fn()
            return 1e3 * (_clock.perf_counter() - start)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        fn()
        events[1].record()
        return events

    def results(self, taken: list) -> list[float]:
        """Milliseconds of what `once` returned."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
            return [begun.elapsed_time(ended) for begun, ended in taken]
        return taken
