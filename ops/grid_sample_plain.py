"""`grid_sample` in plain PyTorch."""

from itertools import product

import torch
from torch import Tensor


def grid_sample_reference(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """The same in plain PyTorch, tap by tap; 16-bit dtypes are computed in float32."""
    work = torch.promote_types(input.dtype, torch.float32)
    sizes = input.shape[2:]
    pixels, points = input.to(work).flatten(2), grid.to(work).flatten(1, -2)
    axes = [
        _taps(points[..., -1 - axis], size, mode, padding_mode, bool(align_corners))
        for axis, size in enumerate(sizes)
    ]
    out = 0
    for taps in product(*(taps for taps, _ in axes)):
        at, weight, inside = 0, 1, True
        for (position, share), size in zip(taps, sizes, strict=True):
            within = (position >= 0) & (position < size)
            at = at * size + torch.where(within, position, 0).long()
            weight, inside = weight * share, inside & within
        value = pixels.gather(2, at.unsqueeze(1).expand(-1, input.shape[1], -1))
        out = out + torch.where(inside.unsqueeze(1), value, 0) * weight.unsqueeze(1)
    # Points without a place are given the first pixel, but are followed by no gradient.
    placed = torch.stack([placed for _, placed in axes]).all(0).unsqueeze(1)
    out = torch.where(placed, out, out.detach())
    return out.to(input.dtype).view(*input.shape[:2], *grid.shape[1:-1])


def _taps(x, size, mode, padding, align_corners):
    """[(position, weight), ...] along an axis of the reference, and which coordinates have any."""
    x = (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2
    if padding == "zeros" and mode != "bicubic":
        x = torch.where(x.isfinite(), x, -100.0)
    if mode == "bicubic":
        first = x.detach().floor()
        part = x - first  # of a huge one the next pixels are the same number
        taps = [
            (
                _padded(first + k, size, padding, align_corners)[0].nan_to_num(
                    -1 if padding == "zeros" else 0
                ),
                _keys(part - k),
            )
            for k in range(-1, 3)
        ]
        return taps, torch.ones_like(x, dtype=torch.bool)
    place, slope = _padded(x.detach(), size, padding, align_corners)
    placed = ~place.isnan()
    place = place.nan_to_num(0.0, float("inf"), float("-inf"))
    if mode == "nearest":
        return [(place.round(), 1 + 0 * torch.where(x.isfinite(), x, 0))], placed
    x = place + slope * torch.where(x.isfinite(), x - x.detach(), 0)
    first = place.floor()
    return [(first, first + 1 - x), (first + 1, x - first)], placed


def _padded(x, size, padding, align_corners):
    """A position along an axis moved into the image, and by how much it then moves with `x`."""
    slope = torch.ones_like(x)
    if padding == "reflection":
        low, span = (0, size - 1) if align_corners else (-0.5, size)
        if span == 0:
            return torch.zeros_like(x), torch.zeros_like(x)
        slope = torch.where(x < low, -1.0, 1.0).to(x.dtype)
        x = (x - low).abs()
        # Beyond the range of int each processor converts in its own way.
        lengths, huge = x / span, x / span >= 2**31
        odd = torch.where(huge, x.is_cuda, lengths.floor() % 2 == 1)
        x = torch.where(odd, span - x.fmod(span), x.fmod(span)) + low
        slope = torch.where(odd, -slope, slope)
    if padding != "zeros":
        slope = torch.where((x <= 0) | (x >= size - 1), 0, slope)
        x = x.clamp(0, size - 1)
    return x, slope


def _keys(distance):
    """Keys' cubic kernel."""
    a, t = -0.75, torch.where(distance < 0, -distance, distance)  # of slope 1 at 0, unlike abs
    inner = ((a + 2) * t - (a + 3)) * t * t + 1
    return torch.where(t <= 1, inner, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a)
