"""Shared by the interpolation operators: argument checks, fake kernels, derivatives."""

from collections.abc import Callable

import torch
from torch import Tensor

from loader.jit.operators.frame import (
    asked,
    backward_form,
    batched,
    check_fake,
    check_tensors,
    differentiable,
    fake,
    forward_form,
    library,
    registered,
    total,
)
from loader.jit.operators.shapes import Sizes


def multilinear(function: Callable, axes: tuple[int, ...]) -> tuple[Callable, ...]:
    """The part of interpolation X's module beside `function`, X itself, and its reference.

    `axes`: of the cell, the slowest in the order of its corners first. Returns the operator with
    its arguments checked and `X_fw`, `X_bw`, `samples`, `benchmark`.
    """
    operator, names = Multilinear(function.__name__, axes), ["feats", "points"]
    bw = backward_form(function, names, operator.gradients, default=(True, False))
    return operator, forward_form(function), bw, operator.samples, operator.benchmark


class Multilinear:
    """Interpolation in a cell of 2^D corners."""

    def __init__(self, name: str, axes: tuple[int, ...]):
        self.name, self.axes, self.corners = name, axes, 2 ** len(axes)
        forward, backward = library(name), registered(name + "_backward")
        fake(forward, self._fake)
        fake(backward, self._fake_backward)
        batched(forward, flatten=True)
        batched(backward, flatten=True)
        self._forward = differentiable(forward, self._setup, self._backward)
        self._gradients = differentiable(backward, self._setup_backward, self._double_backward)

    def __call__(self, feats: Tensor, points: Tensor) -> Tensor:
        """The differentiable operator."""
        if not (isinstance(feats, Tensor) and isinstance(points, Tensor)):
            check_tensors(self.name, feats=feats, points=points)
        return self._forward(feats, points)

    def gradients(self, grad_out, feats, points, mask):
        """Of sum(grad_out * forward(feats, points)) to feats and points, as `mask` says."""
        return self._gradients(grad_out, feats, points, *map(bool, mask))

    def samples(self, device):
        """Small arguments, to compare operator and reference on after an edit."""
        make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
        for N, F, dtype in (
            (300, 32, torch.float32),
            (129, 4, torch.float32),
            (37, 3, torch.float32),
            (50, 12, torch.float64),
            (131, 8, torch.float16),
        ):
            points = torch.rand(N, len(self.axes), **make) * 2 - 1
            yield torch.randn(N, self.corners, F, **make).to(dtype), points

    def benchmark(self, device):
        """Arguments of a size worth timing."""
        make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
        feats = torch.randn(65536, self.corners, 32, **make)
        return feats, torch.rand(65536, len(self.axes), **make) * 2 - 1

    def _sizes(self, feats, points) -> Sizes:
        """The sizes of the inputs; without feats N alone."""
        sizes = Sizes(self.name)
        if feats is not None:
            sizes.match("feats", feats, f"(N, {self.corners}, F)")
        sizes.match("points", points, f"(N, {len(self.axes)})")
        return sizes

    def _fake(self, feats, points):
        check_fake(self.name, feats=feats, points=points)
        sizes = self._sizes(feats, points)
        return feats.new_empty((sizes["N"], sizes["F"]))

    def _fake_backward(self, grad_out, feats, points, need_feats, need_points):
        check_fake(self.name, grad_out=grad_out, points=points)
        sizes = self._sizes(feats, points)
        sizes.match_known("grad_out", grad_out, "(N, F)")
        feats_shape = (sizes["N"], self.corners, sizes["F"])
        return (
            grad_out.new_empty(feats_shape if need_feats else (0,)),
            points.new_empty(points.shape if need_points else (0,)),
        )

    @staticmethod
    def _setup(ctx, inputs, output):
        feats, points = inputs
        ctx.save_for_backward(feats if ctx.needs_input_grad[1] else None, points)

    def _backward(self, ctx, grad_out):
        feats, points = ctx.saved_tensors
        need = ctx.needs_input_grad[:2]
        if not any(need):
            return None, None
        return tuple(asked(need, self._gradients(grad_out, feats, points, *need)))

    @staticmethod
    def _setup_backward(ctx, inputs, output):
        grad_out, feats, points, ctx.need_feats, ctx.need_points = inputs
        ctx.save_for_backward(grad_out, feats, points)
        ctx.set_materialize_grads(False)

    def _double_backward(self, ctx, to_feats, to_points):
        """Gradients of the backward; `to_*` is what arrives for its grad_feats and grad_points.

        With w_k the corners' shares, s = to_points and d_s the derivative along s, the backward's
        inner product with what arrives is
            sum_f g[f] (sum_k w_k to_feats[k, f] + sum_k (d_s w_k) feats[k, f]).
        The first sum is the operator itself with to_feats as features; the second is written out in
        differentiable PyTorch, so that derivatives exist to any order.
        """
        g, feats, points = ctx.saved_tensors
        need_g, need_feats, need_points = ctx.needs_input_grad[:3]
        to_g = for_feats = for_points = None
        if to_feats is not None and ctx.need_feats:
            if need_g:
                to_g = self._forward(to_feats, points)
            if need_points:
                for_points = self._gradients(g, to_feats, points, False, True)[1]
        if to_points is not None and ctx.need_points:
            work = torch.promote_types(g.dtype, torch.float32)
            at, along, rows, grad = points.to(work), to_points.to(work), feats.to(work), g.to(work)
            axes = range(len(self.axes))
            slope = sum(along[:, d : d + 1] * self._partial(at, {d}) for d in axes)
            if need_g:
                extra = torch.einsum("nk,nkf->nf", slope, rows).to(g.dtype)
                to_g = total(to_g, extra)
            if need_feats:
                for_feats = torch.einsum("nk,nf->nkf", slope, grad).to(feats.dtype)
            if need_points:
                dot = torch.einsum("nkf,nf->nk", rows, grad)
                columns = [
                    sum(
                        along[:, e] * (self._partial(at, {d, e}) * dot).sum(1)
                        for e in axes
                        if e != d
                    )
                    for d in axes
                ]
                extra = torch.stack(columns, 1).to(points.dtype)
                for_points = total(for_points, extra)
        return to_g, for_feats, for_points, None, None

    def _partial(self, points: Tensor, by: set[int]) -> Tensor:
        """(N, 2^D) shares of the corners, differentiated once by each of the axes in `by`."""
        shares = points.new_ones(len(points), 1)
        for axis in self.axes:
            x = points[:, axis]
            half = torch.full_like(x, 0.5)
            pair = (-half, half) if axis in by else ((1 - x) / 2, (1 + x) / 2)
            shares = (shares[:, :, None] * torch.stack(pair, 1)[:, None]).flatten(1)
        return shares
