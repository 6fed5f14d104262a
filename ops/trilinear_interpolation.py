"""Interpolation between the eight corners of a voxel."""

import torch
from torch import Tensor

from .multilinear import multilinear


def trilinear_interpolation(feats: Tensor, points: Tensor) -> Tensor:
    """Interpolate each cell's 8 corner features at one point of the cell.

    With u = (x + 1) / 2, and v and w likewise from y and z:
    out[n] = sum over i, j, l in {0, 1} of [u or 1-u] [v or 1-v] [w or 1-w] feats[n, 4i + 2j + l].

    Args:
        feats: (N, 8, F) float32, float64, float16 or bfloat16, on the CPU or a CUDA device, any
            strides; corner 4i + 2j + l lies at (i, j, l), 0 where the coordinate is -1.
        points: (N, 3) of any of these dtypes, on the same device, any strides; (x, y, z) in units
            of half a cell, each in [-1, 1]. Outside of it the result extrapolates; NaN gives NaN.

    Returns:
        (N, F), contiguous, dtype and device of `feats`; accumulated in float32 (float64 for
        float64). Differentiable in both arguments, twice and more; results are deterministic.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a shape, a dtype, a layout or a device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: tensor product of linear interpolation along each axis; equals
    `trilinear_interpolation_reference`.
    """
    return _call(feats, points)


def trilinear_interpolation_reference(feats: Tensor, points: Tensor) -> Tensor:
    """The same in plain PyTorch, axis by axis; 16-bit dtypes are computed in float32."""
    work = torch.promote_types(feats.dtype, torch.float32)
    x, y, z = points.to(work)[:, None].unbind(-1)
    cells = feats.to(work).unflatten(1, (2, 2, 2))
    planes = (
        cells[:, 0] * ((1 - x) / 2)[..., None, None] + cells[:, 1] * ((1 + x) / 2)[..., None, None]
    )
    lines = planes[:, 0] * ((1 - y) / 2)[..., None] + planes[:, 1] * ((1 + y) / 2)[..., None]
    return (lines[:, 0] * (1 - z) / 2 + lines[:, 1] * (1 + z) / 2).to(feats.dtype)


_forms = multilinear(
    trilinear_interpolation, axes=(0, 1, 2), order="corner 4i + 2j + l at (i, j, l)"
)
_call, trilinear_interpolation_fw, trilinear_interpolation_bw, samples, benchmark = _forms
trilinear_interpolation_py = trilinear_interpolation_reference
