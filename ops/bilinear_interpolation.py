"""Interpolation between the four corners of a pixel's cell."""

import torch
from torch import Tensor

from .multilinear import multilinear


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
    return _call(feats, points)


def bilinear_interpolation_reference(feats: Tensor, points: Tensor) -> Tensor:
    """The same in plain PyTorch, as textbooks have it; 16-bit dtypes are computed in float32."""
    work = torch.promote_types(feats.dtype, torch.float32)
    u, v = ((points.to(work) + 1) / 2)[:, None].unbind(-1)
    f1, f2, f3, f4 = feats.to(work).unbind(1)
    out = (1 - u) * (1 - v) * f1 + u * (1 - v) * f2 + (1 - u) * v * f3 + u * v * f4
    return out.to(feats.dtype)


_forms = multilinear(bilinear_interpolation, axes=(1, 0), order="corner i + 2j at (i, j)")
_call, bilinear_interpolation_fw, bilinear_interpolation_bw, samples, benchmark = _forms
bilinear_interpolation_py = bilinear_interpolation_reference
