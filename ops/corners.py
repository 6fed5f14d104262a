"""The corners of a cell in plain PyTorch: what second derivatives by a place in it are made of."""

import torch
from torch import Tensor


def shares(low: Tensor, high: Tensor, slope: float = 1.0, by: set[int] = frozenset()) -> Tensor:
    """(N, 2^D) shares of the corners, the last axis the fastest; see include/corners.h.

    Args:
        low: (N, D) what the first corner has along each axis.
        high: and the second, which grows by `slope` as low shrinks.
        slope: of a derivative.
        by: axes by which it is.
    """
    found = low.new_ones(len(low), 1)
    for axis in range(low.shape[1]):
        a, b = low[:, axis], high[:, axis]
        if axis in by:
            a, b = torch.full_like(a, -slope), torch.full_like(b, slope)
        found = (found[:, :, None] * torch.stack([a, b], 1)[:, None]).flatten(1)
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
    change = sum(pace[:, d : d + 1] * shares(low, high, slope, {d}) for d in axes)
    if need[2]:
        meets = torch.einsum("nkf,nf->nk", corners, grad)
        # A share is linear along each axis: twice by the same axis there is nothing.
        columns = [
            sum(
                pace[:, e] * (shares(low, high, slope, {d, e}) * meets).sum(1)
                for e in axes
                if e != d
            )
            for d in axes
        ]
        to_place = torch.stack(columns, 1)
    return *weighed(change, grad, corners, need), to_place


def weighed(share, grad, corners, need):
    """Gradients of sum(grad * share * corners) to grad and corners."""
    return (
        torch.einsum("nk,nkf->nf", share, corners) if need[0] else None,
        torch.einsum("nk,nf->nkf", share, grad) if need[1] else None,
    )
