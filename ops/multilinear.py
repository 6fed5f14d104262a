"""What the interpolation operators share: argument checks, fake kernels, derivatives."""

import torch
from torch import Tensor

from loader.jit.operators.frame import (
    batched,
    check_fake,
    check_mask,
    check_tensors,
    differentiable,
    fake,
    library,
    registered,
)


class Multilinear:
    """Interpolation in a cell of 2^D corners; `axes`: the one slowest in their order first."""

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
        check_tensors(self.name, feats=feats, points=points)
        return self._forward(feats, points)

    def fw(self, feats: Tensor, points: Tensor) -> Tensor:
        """The forward kernel alone."""
        check_tensors(self.name, feats=feats, points=points)
        with torch.no_grad():
            return self._forward(feats, points)

    def bw(self, grad_out: Tensor, feats: Tensor, points: Tensor, output_mask: tuple[bool, bool]):
        """The backward kernel alone."""
        check_tensors(self.name, grad_out=grad_out, feats=feats, points=points)
        check_mask(self.name, output_mask, "feats", "points")
        with torch.no_grad():
            both = self._gradients(grad_out, feats, points, *map(bool, output_mask))
        return both if all(output_mask) else both[0 if output_mask[0] else 1]

    def _fake(self, feats, points):
        check_fake(self.name, feats=feats, points=points)
        shapes = f"feats (N, {self.corners}, F) and points (N, {len(self.axes)})"
        torch._check(
            feats.dim() == 3
            and points.dim() == 2
            and feats.shape[1] == self.corners
            and points.shape[1] == len(self.axes),
            lambda: (
                f"{self.name}: expected {shapes}, "
                f"got {tuple(feats.shape)} and {tuple(points.shape)}"
            ),
        )
        torch._check(
            feats.shape[0] == points.shape[0],
            lambda: (
                f"{self.name}: {shapes} must have the same N, "
                f"got {tuple(feats.shape)} and {tuple(points.shape)}"
            ),
        )
        return feats.new_empty((feats.shape[0], feats.shape[2]))

    def _fake_backward(self, grad_out, feats, points, need_feats, need_points):
        check_fake(self.name, grad_out=grad_out, points=points)
        N, F = grad_out.shape
        return (
            grad_out.new_empty((N, self.corners, F) if need_feats else (0,)),
            points.new_empty((N, len(self.axes)) if need_points else (0,)),
        )

    @staticmethod
    def _setup(ctx, inputs, output):
        feats, points = inputs
        ctx.save_for_backward(feats if ctx.needs_input_grad[1] else None, points)

    def _backward(self, ctx, grad_out):
        feats, points = ctx.saved_tensors
        need_feats, need_points = ctx.needs_input_grad[:2]
        if not (need_feats or need_points):
            return None, None
        grad_feats, grad_points = self._gradients(grad_out, feats, points, need_feats, need_points)
        return grad_feats if need_feats else None, grad_points if need_points else None

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
                to_g = extra if to_g is None else to_g + extra
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
                for_points = extra if for_points is None else for_points + extra
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
