"""Bands of a picture, each made from beginning to end by one thread, while it lies in its caches.

Where compilers and other programs want the same cores this is far quicker than to have all threads
meet after each step, as torch's own parallel loops do.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_BAND = 1 << 16  # pixels of a band
_made: dict[int, ThreadPoolExecutor] = {}  # by the number of threads
_lock = threading.Lock()


def split(height: int, width: int) -> list[slice]:
    """Return rows, in bands."""
    step = max(1, _BAND // max(1, width))
    return [slice(at, min(height, at + step)) for at in range(0, height, step)]


def each(bands: list[slice], work: Callable[[slice], None], device: str) -> int:
    """Call `work` with every band; return how many worked at once.

    On the CPU by as many threads as torch uses, each of which uses no others; elsewhere in turn.
    Raises what a call of `work` raises, once those that were begun have ended.
    """
    threads = min(len(bands), torch.get_num_threads()) if device == "cpu" else 1
    if threads <= 1:
        for band in bands:
            work(band)
        return 1
    for _ in _pool(threads).map(work, bands):
        pass
    return threads


def _pool(threads: int) -> ThreadPoolExecutor:
    with _lock:
        if threads not in _made:
            started = threading.Barrier(threads + 1)

            def start() -> None:
                torch.set_num_threads(1)
                started.wait()

            pool = _made[threads] = ThreadPoolExecutor(threads, "viewer band", start)
            for _ in range(threads):
                pool.submit(int)
            before = torch.get_num_threads()
            started.wait()
            torch.set_num_threads(before)  # what threads that begin later have
        return _made[threads]
