"""The corners of a cell in plain PyTorch: what second derivatives by a place in it are made of."""

from itertools import combinations

import torch
from torch import Tensor


def shares(low: Tensor, high: Tensor, slope: float = 1.0, by: set[int] = frozenset()) -> Tensor:
    """(2^D, N) shares of the corners, the last axis the fastest; see include/corners.h.

    Args:
        low: (N, D) what the first corner has along each axis.
        high: and the second, which grows by `slope` as low shrinks.
        slope: of a derivative.
        by: axes by which it is.
    """
    found = low.new_ones(1, len(low))
    for axis in range(low.shape[1]):
        a, b = (-slope, slope) if axis in by else (low[:, axis], high[:, axis])
        found = torch.stack([found * a, found * b], 1).flatten(0, 1)
    return found


def along(pace, grad, corners, low, high, slope, need):
    """Gradients of sum(grad * c), c being how the interpolation changes where the place has `pace`.

    Args:
        pace: (N, D).
        grad: (N, F).
        corners: (N, 2^D, F).
        low, high, slope: as in `shares`.
        need: which of the gradients.

    Returns:
        to grad (N, F), to corners (N, 2^D, F) and to the place (N, D); None for those not needed.
    """
    axes, to_place = range(low.shape[1]), None
    change = sum(pace[:, d] * shares(low, high, slope, {d}) for d in axes)
    if need[2]:
        meets = (corners @ grad[..., None])[..., 0].t()
        # A share is linear along each axis: twice by the same axis there is nothing.
        columns = [pace.new_zeros(()) for _ in axes]
        for d, e in combinations(axes, 2):
            mixed = (shares(low, high, slope, {d, e}) * meets).sum(0)
            columns[d] = columns[d] + pace[:, e] * mixed
            columns[e] = columns[e] + pace[:, d] * mixed
        to_place = torch.stack(columns, 1)
    return *weighed(change, grad, corners, need), to_place


def weighed(share, grad, corners, need):
    """Gradients of sum(grad * share * corners) to grad and corners; share is (2^D, N)."""
    return (
        (share.t()[:, None] @ corners)[:, 0] if need[0] else None,
        share.t()[..., None] * grad[:, None] if need[1] else None,
    )
