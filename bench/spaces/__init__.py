"""What `python -m loader bench sweep` draws its cases from: a module for each operator's space.

A module has `draw(random, largest)`, a case as plain values, of at most so many bytes, and
`tasks(case, make)`, what there is to measure of it: a `Task` for each direction.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SECTOR = 32  # bytes that a cache hands out at a time
LINE = 64  # and memory: a CPU's, an H100's and an H200's, as `limits.py` measures it
L1 = 1 << 18  # bytes: gathers from less need not go to the L2 cache
DTYPES = {"float32": 6, "float16": 5, "bfloat16": 5, "float64": 2}  # how often each is drawn


class Task(NamedTuple):
    """A direction of a case: who is timed, and what has to be done whoever does it."""

    runs: dict[str, Callable[[], object]]  # "loader" and the peers
    bytes: float  # that have to be read or written at least once
    flops: float = 0
    sectors: float = 0  # that random gathers need of the L2 cache


def log_uniform(draw: random.Random, low: float, high: float) -> int:
    """Return a whole number, each power of two being equally likely."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def size(draw: random.Random, low: int, high: int) -> int:
    """Return a size: two in five anything, else odd, a power of two, or one beside it."""
    n = log_uniform(draw, low, high)
    power = 1 << max(n, 1).bit_length() - 1
    kind = draw.choice("aaobn")
    n = {"a": n, "o": n | 1, "b": power, "n": power + draw.choice((-1, 1))}[kind]
    return min(max(n, low), high)


def choose(draw: random.Random, weights: dict[str, float]) -> str:
    """Return one of these, as often as its weight says."""
    return draw.choices([*weights], [*weights.values()])[0]


def misaligned(x: Tensor, elements: int) -> Tensor:
    """Return a copy that begins so many elements past a boundary of 16 bytes."""
    room = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return room[elements:].view(x.shape).copy_(x)


def padded(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Return a copy that is part of a tensor with so much more in one dimension."""
    shape = [*x.shape]
    shape[dim] += before + after
    room = torch.empty(shape, dtype=x.dtype, device=x.device)
    return room.narrow(dim, before, x.shape[dim]).copy_(x)


def every_other(x: Tensor) -> Tensor:
    """Return a copy whose innermost stride is 2."""
    room = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    return room[..., ::2].copy_(x)


def sectors_of(run: float, element: int) -> float:
    """Return how many sectors a run of so many bytes lies in, wherever elements begin."""
    return run / SECTOR if run % SECTOR == 0 else (run + SECTOR - element) / SECTOR


def fetched(x: Tensor) -> float:
    """Return how many bytes are read of a tensor with gaps, in whole lines.

    Its elements lie in memory in their order; the first quarter of a million stand for all.
    """
    some = x[: max(1, (1 << 18) // x[0].numel())]
    at = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(some.shape, some.stride(), strict=True):
        at = at[..., None] + stride * torch.arange(size)
    at = x.data_ptr() % LINE + x.element_size() * at.flatten()
    ends = at // LINE, (at + x.element_size() - 1) // LINE
    return len(torch.cat(ends).unique()) * LINE * x.numel() / some.numel()


def backward(function: Callable, tensors: list[Tensor], wanted: list[int], grad_out) -> Callable:
    """Return what computes the gradients to the wanted ones, its graph being made already."""
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    out = function(*leaves)
    return lambda: torch.autograd.grad(
        out, [leaves[i] for i in wanted], grad_out, retain_graph=True
    )


def agree(ours: Tensor, theirs: Tensor, share: float, case: dict) -> None:
    """Raise where results differ by more than this share of the largest."""
    off = (ours.double() - theirs.double()).abs().max().item()
    most = theirs.abs().max().double().item()
    if not off <= share * (most + 1e-3):
        raise AssertionError(f"{case}: ours is off by {off:.2e}, where the largest is {most:.2e}")
