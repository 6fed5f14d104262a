"""Interpolation between the four corners of a pixel's cell."""

import torch
from torch import Tensor

from .multilinear import Multilinear

_operator = Multilinear("bilinear_interpolation", axes=(1, 0))


def bilinear_interpolation(feats: Tensor, points: Tensor) -> Tensor:
    """Interpolate each cell's 4 corner features at one point of the cell.

    With u = (x + 1) / 2, and v likewise from y:
    out[n] = (1-u)(1-v) feats[n, 0] + u(1-v) feats[n, 1] + (1-u)v feats[n, 2] + uv feats[n, 3].

    Args:
        feats: (N, 4, F) float32, float64, float16 or bfloat16, on the CPU or a CUDA device, any
            strides; corner i + 2j lies at (i, j), 0 where the coordinate is -1. Mind that the first
            coordinate is the fastest here, and the slowest in `trilinear_interpolation`.
        points: (N, 2) of any of these dtypes, on the same device, any strides; (x, y) in units of
            half a cell, each in [-1, 1]. Outside of it the result extrapolates; NaN gives NaN.

    Returns:
        (N, F), contiguous, dtype and device of `feats`; accumulated in float32 (float64 for
        float64). Differentiable in both arguments, twice and more; results are deterministic.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a shape, a dtype, a layout or a device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: tensor product of linear interpolation along each axis; equals
    `bilinear_interpolation_reference`.
    """
    return _operator(feats, points)


def bilinear_interpolation_fw(feats: Tensor, points: Tensor) -> Tensor:
    """The forward kernel alone: as `bilinear_interpolation`, without gradients."""
    return _operator.fw(feats, points)


def bilinear_interpolation_bw(
    grad_out: Tensor, feats: Tensor, points: Tensor, output_mask: tuple[bool, bool] = (True, False)
) -> Tensor | tuple[Tensor, Tensor]:
    """The backward kernel alone: gradients of sum(grad_out * forward(feats, points)).

    Args:
        grad_out: (N, F), dtype and device of `feats`, any strides.
        feats, points: as in the forward.
        output_mask: which gradients to compute, of feats and of points.

    Returns:
        grad_feats (N, 4, F), or grad_points (N, 2) in the dtype of `points`, or both as a tuple,
        as `output_mask` says.
    """
    return _operator.bw(grad_out, feats, points, output_mask)


def bilinear_interpolation_reference(feats: Tensor, points: Tensor) -> Tensor:
    """The same in plain PyTorch, as textbooks have it; 16-bit dtypes are computed in float32."""
    work = torch.promote_types(feats.dtype, torch.float32)
    u, v = ((points.to(work) + 1) / 2)[:, None].unbind(-1)
    f1, f2, f3, f4 = feats.to(work).unbind(1)
    out = (1 - u) * (1 - v) * f1 + u * (1 - v) * f2 + (1 - u) * v * f3 + u * v * f4
    return out.to(feats.dtype)


def samples(device):
    """Small arguments, to compare operator and reference on after an edit."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    for N, F, dtype in (
        (300, 32, torch.float32),
        (129, 4, torch.float32),
        (37, 3, torch.float32),
        (50, 12, torch.float64),
        (131, 8, torch.float16),
    ):
        points = torch.rand(N, 2, **make) * 2 - 1
        yield torch.randn(N, 4, F, **make).to(dtype), points


def benchmark(device):
    """Arguments of a size worth timing."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    return torch.randn(65536, 4, 32, **make), torch.rand(65536, 2, **make) * 2 - 1


bilinear_interpolation_py = bilinear_interpolation_reference
