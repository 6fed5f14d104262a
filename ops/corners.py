"""The corners of a cell in plain PyTorch: what second derivatives by a place in it are made of."""

from itertools import combinations

import torch


def along(pace, grad, corners, place, need):
    """Gradients of sum(grad * c), c being how the interpolation changes where the place has `pace`.

    Args:
        pace: (N, D).
        grad: (N, F).
        corners: (N, 2^D, F), the last axis the fastest.
        place: (N, D), in units of the cell.
        need: which of the gradients.

    Returns:
        to grad (N, F), to corners (N, 2^D, F) and to the place (N, D); None for those not needed.
    """
    places, paces, to_place = place.unbind(1), pace.unbind(1), None
    share, change = pace.new_ones(1, 1), pace.new_zeros(1, 1)  # of the corners: include/corners.h
    for axis, (t, step) in enumerate(zip(places, paces, strict=True)):
        sides, steps = torch.stack([1 - t, t]), torch.stack([-step, step])
        # Not flatten, slices below and not unflatten: batches of gradients know no other.
        change = (change[:, None] * sides + share[:, None] * steps).reshape(2 << axis, -1)
        share = (share[:, None] * sides).reshape(2 << axis, -1)
    if need[2]:
        meets = (corners @ grad[..., None])[..., 0].t()
        # A share is linear along each axis: twice by the same axis there is nothing.
        columns = [pace.new_zeros(()) for _ in places]
        for d, e in combinations(range(len(places)), 2):
            mixed = meets
            for axis in reversed(range(len(places))):
                lower, step = mixed[0::2], mixed[1::2] - mixed[0::2]
                mixed = step if axis in (d, e) else lower + places[axis] * step
            columns[d] = columns[d] + paces[e] * mixed[0]
            columns[e] = columns[e] + paces[d] * mixed[0]
        to_place = torch.stack(columns, 1)
    return *weighed(change, grad, corners, need), to_place


def weighed(share, grad, corners, need):
    """Gradients of sum(grad * share * corners) to grad and corners; share is (2^D, N)."""
    return (
        (share.t()[:, None] @ corners)[:, 0] if need[0] else None,
        share.t()[..., None] * grad[:, None] if need[1] else None,
    )
