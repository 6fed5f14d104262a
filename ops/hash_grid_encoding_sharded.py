"""`hash_grid_encoding` with its levels spread over ranks: points go to all, features come back."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from .hash_grid_encoding import options_of, output_like
from .ranks import Ranks

_NAME = "encode_sharded"


@torch.compiler.disable  # collectives, and sizes that only data tell: a break in the graph
def encode_sharded(
    points: Tensor,
    shard: Tensor,
    mesh: DeviceMesh,
    *,
    base_resolution: int = 16,
    per_level_scale: float = 2.0,
) -> Tensor:
    """Encode points by a hash grid whose levels are spread over the ranks of a mesh.

    A collective: every rank of the mesh calls it, each with its levels and with points of its own,
    and where one rank's backward runs those of all others have to.

    Args:
        points: as `hash_grid_encoding`'s, as many as each rank likes.
        shard: (levels, T, F), this rank's part of the table of `hash_grid_encoding`, those of rank
            0 first. Parts may differ in levels, and have none.
        mesh: of one dimension.
        base_resolution, per_level_scale: as `hash_grid_encoding`'s, of level 0 of the whole.

    Returns:
        (N, L * F) of this rank's points, as `hash_grid_encoding` with the whole table gives. The
        gradient to `points` adds up rank by rank. Differentiable once in both arguments.

    Raises:
        TypeError: an argument is no tensor, no number or no mesh.
        ValueError: an option is out of its range, or the mesh has two dimensions.
        RuntimeError: as `sample_sharded`, on every rank.
    """
    ranks = Ranks(_NAME, mesh)
    problem, alike, own = None, {}, [0, 0, 0]
    try:
        alike, own = _facts(ranks, points, shard, base_resolution, per_level_scale)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error  # raised once all ranks know
    found = ranks.agree(problem, alike, own)
    return _Encoding.apply(_Plan(ranks, found, base_resolution, per_level_scale), points, shard)


def _facts(ranks, points, shard, base_resolution, per_level_scale):
    """Return what ranks have to have in common, and this one's own. Raises: where it is wrong."""
    ranks.check("points", points, "points")
    ranks.check("shard", shard, "its part, of no levels if it has none")
    options = options_of(points, shard, base_resolution, per_level_scale)
    if shard.dim() != 3:
        raise RuntimeError(f"{_NAME}: shard must be (levels, T, F), got {tuple(shard.shape)}")
    one = shard.new_empty((max(len(shard), 1), *shard.shape[1:]), device="meta")
    output_like(points.to("meta"), one, *options)
    wanted = points.requires_grad + 2 * shard.requires_grad if torch.is_grad_enabled() else 0
    alike = {
        "T and F of shard": tuple(shard.shape[1:]),
        "dtype of shard": shard.dtype,
        "dtype of points": points.dtype,
        "number of coordinates": points.shape[1],
        "base_resolution and per_level_scale": options[1:],
        "wish for gradients": wanted > 0,
    }
    return alike, [len(shard), len(points), wanted]


class _Plan:
    """Who has which levels, and how many points."""

    def __init__(self, ranks: Ranks, found: list[list[int]], base: int, scale: float):
        self.ranks, self.base, self.scale = ranks, base, scale
        self.levels, self.counts, wanted = map(list, zip(*found, strict=True))
        self.need = tuple(any(w & bit for w in wanted) for bit in (1, 2))
        self.first = sum(self.levels[: ranks.me])

    def points(self, points: Tensor) -> Tensor:
        """Return the points of all ranks."""
        each = [points.numel()] * self.ranks.count
        flat = points.reshape(-1).repeat(self.ranks.count)
        due = [n * points.shape[1] for n in self.counts]
        return self.ranks.swap(flat, each, due).view(-1, points.shape[1])

    def sizes(self, F: int) -> tuple[list[int], list[int]]:
        """Return how many features this rank has for each, and gets from each."""
        me = self.ranks.me
        mine = [n * self.levels[me] * F for n in self.counts]
        return mine, [self.counts[me] * n * F for n in self.levels]


class _Encoding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: _Plan, points: Tensor, shard: Tensor) -> Tensor:
        F, everywhere = shard.shape[2], plan.points(points)
        features = shard.new_empty(len(everywhere), 0)
        if len(shard):
            features = torch.ops.octet.hash_grid_encoding_levels(
                everywhere, shard, None, plan.base, plan.scale, plan.first
            )
        came = plan.ranks.swap(features.view(-1), *plan.sizes(F))
        ctx.plan = plan
        ctx.save_for_backward(points, shard)
        pieces = came.split(plan.sizes(F)[1])
        n = len(points)
        return torch.cat(
            [x.view(n, levels * F) for x, levels in zip(pieces, plan.levels, strict=True)], 1
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        (points, shard), plan = ctx.saved_tensors, ctx.plan
        F, everywhere = shard.shape[2], plan.points(points)
        flat = torch.cat([x.reshape(-1) for x in grad_out.split([n * F for n in plan.levels], 1)])
        mine, theirs = plan.sizes(F)
        grads = plan.ranks.swap(flat, theirs, mine).view(len(everywhere), -1)
        to_points, to_shard = torch.zeros_like(everywhere), torch.zeros_like(shard)
        if len(shard):
            fixed = torch.are_deterministic_algorithms_enabled()
            found = torch.ops.octet.hash_grid_encoding_levels_backward(
                grads, everywhere, shard, None, plan.base, plan.scale, plan.first, *plan.need, fixed
            )
            to_points = found[0] if plan.need[0] else to_points
            to_shard = found[1] if plan.need[1] else to_shard
        if plan.need[0]:
            sent = [n * points.shape[1] for n in plan.counts]
            due = [points.numel()] * plan.ranks.count
            parts = plan.ranks.swap(to_points.reshape(-1), sent, due)
            work = torch.promote_types(points.dtype, torch.float32)
            whole = parts.view(plan.ranks.count, *points.shape).sum(0, dtype=work)
            to_points = whole.to(points.dtype)
        need = ctx.needs_input_grad
        return None, to_points if need[1] else None, to_shard if need[2] else None
