"""Functions in plain PyTorch of DTensors, on each rank's parts, to be differentiated any number of
times: `redistribute`, `to_local` and `from_local` have no second derivative.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .sharding import TENSORS, Names

Placements = list[Any]


def locally(
    names: Sequence[Names | None],
    function: Callable,
    args: Sequence[Any],
    like: Sequence[int | tuple[Sequence[int], Names]],
    cuts: Sequence[str] | None = None,
) -> Any:
    """Call a differentiable function in plain PyTorch; of DTensors, on each rank's parts.

    PyTorch's own operators take no tensors beside DTensors, and cut few of those in two.

    Args:
        names: of the arguments' sizes.
        function: returns as many tensors as `like` has elements, or None in their places.
        args: its arguments.
        like: of these, those whose shapes and names the results have, or both themselves; along a
            name that one has not it is a sum.
        cuts: for each dimension of the mesh the name along which all are cut, "" for none; else
            the one along which most elements are.
    """
    kind = getattr(sys.modules.get(TENSORS), "DTensor", None)
    given = [kind is not None and isinstance(x, kind) for x in args]
    mixed = any(hasattr(x, "shape") and not d for x, d in zip(args, given, strict=True))
    if mixed or not any(given):
        return function(*args)
    mesh = args[given.index(True)].device_mesh
    names = [*names, *[None] * (len(args) - len(names))]
    cuts = cuts or [_along(names, args, given, dim) for dim in range(mesh.ndim)]

    def part(x: Any, of: Names | None, distributed: bool) -> Any:
        if not distributed:
            return x
        return _Part.apply(x, *_placements(of, cuts))

    def whole(x: Any, of: int | tuple[Sequence[int], Names]) -> Any:
        if x is None:
            return None
        shape, known = (args[of].shape, names[of]) if isinstance(of, int) else of
        return _Whole.apply(x, mesh, *_placements(known, cuts), tuple(shape))

    return tuple(map(whole, function(*map(part, args, names, given)), like))


def _placements(of: Names | None, cuts: Sequence[str]) -> tuple[Placements, Placements]:
    """Return those of a tensor, and of its gradient, which is a sum where the tensor is whole."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    assert of is not None
    cut = [Shard(of.index(name)) if name in of else None for name in cuts]
    placed = [p or Replicate() for p in cut]
    sums = [p or (Partial() if name else Replicate()) for p, name in zip(cut, cuts, strict=True)]
    return placed, sums


def _along(
    names: Sequence[Names | None], args: Sequence[Any], given: Sequence[bool], dim: int
) -> str:
    """Return the name along which most elements are cut over a dimension of a mesh, "" for none."""
    votes: dict[str, int] = {}
    for x, distributed, of in zip(args, given, names, strict=True):
        if distributed and of and x.placements[dim].is_shard():
            name = of[x.placements[dim].dim]
            votes[name] = votes.get(name, 0) + x.numel()
    votes.pop("_", None)
    return max(votes, key=lambda name: votes[name], default="")


class _Part(torch.autograd.Function):
    """A rank's part of a DTensor; its gradient is a DTensor as `sums` has it."""

    @staticmethod
    def forward(ctx: Any, x: Any, placed: Placements, sums: Placements) -> Any:
        ctx.how = x.device_mesh, placed, sums, tuple(x.shape)
        part = x.redistribute(x.device_mesh, placed).to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Whole.apply(grad, *ctx.how), None, None


class _Whole(torch.autograd.Function):
    """The DTensor of which ranks have parts, or which is their sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, mesh: Any, placed: Placements, sums: Placements, shape: tuple[int, ...]
    ) -> Any:
        from torch.distributed.tensor import DTensor

        ctx.how = placed, sums
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), mesh, sums, run_check=False, shape=torch.Size(shape), stride=strides
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Part.apply(grad, *ctx.how), None, None, None, None
