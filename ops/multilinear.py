"""Shared by the interpolation operators: shapes, samples, the derivative along points."""

from collections.abc import Callable

import torch

from loader.jit.operators.frame import batched
from loader.jit.operators.shapes import Sizes

from . import corners
from .linear import Linear


def multilinear(function: Callable, axes: tuple[int, ...], order: str) -> tuple[Callable, ...]:
    """The part of interpolation X's module beside `function`, X itself, and its reference.

    `axes`: of the cell, the slowest in the order of its corners first; `order` says where those
    lie, in the words of include/X.h. Returns the operator with its arguments checked and `X_fw`,
    `X_bw`, `samples`, `benchmark`.
    """
    D, K = len(axes), 2 ** len(axes)
    of_feats, of_points, of_out = f"(N, {K}, F)", f"(N, {D})", "(N, F)"

    def sizes_of(feats, points) -> Sizes:
        """The sizes of the inputs; without feats N alone."""
        sizes = Sizes(function.__name__)
        if feats is not None:
            cure = f"stack the corners of a cell along dimension 1, {order}"
            sizes.match("feats", feats, of_feats, cure)
        sizes.match("points", points, of_points)
        return sizes

    def fake(feats, points):
        sizes = sizes_of(feats, points)
        return feats.new_empty((sizes["N"], sizes["F"]))

    def fake_gradients(grad_out, feats, points):
        sizes = sizes_of(feats, points)
        sizes.match_known("grad_out", grad_out, of_out)
        return grad_out.new_empty((sizes["N"], K, sizes["F"])), points.new_empty(points.shape)

    def along(to, grad_out, feats, points, need):
        """In plain PyTorch, so that derivatives exist to any order."""
        work = torch.promote_types(grad_out.dtype, torch.float32)
        at, pace = (x.to(work)[:, axes] for x in (points, to))
        grad, rows = grad_out.to(work), feats.to(work)
        to_grad, to_rows, to_place = corners.along(pace / 2, grad, rows, (1 + at) / 2, need)
        if to_place is not None:
            to_place = to_place[:, axes] / 2  # `axes` is its own inverse
        return to_grad, to_rows, to_place

    operator = Linear(
        function,
        ("feats", "points"),
        linear=(0,),
        fake=fake,
        shapes=f"{of_feats}, {of_points} -> {of_out}",
        along=along,
        spared=True,
        fake_gradients=fake_gradients,
    )
    batched(operator.op, flatten=True)
    batched(operator.backward_op, flatten=True)
    return operator.call, operator.fw, operator.bw, *_arguments(D)


def _arguments(D: int) -> tuple[Callable, Callable]:
    """`samples` and `benchmark` of an interpolation of so many dimensions."""
    K = 2**D

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
            points = torch.rand(N, D, **make) * 2 - 1
            yield torch.randn(N, K, F, **make).to(dtype), points

    def benchmark(device):
        """Arguments of a size worth timing."""
        make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
        return torch.randn(65536, K, 32, **make), torch.rand(65536, D, **make) * 2 - 1

    return samples, benchmark
