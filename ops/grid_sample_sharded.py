"""`grid_sample` of a volume that no GPU holds whole: a part of it on each rank, cut along one axis.

Each point goes to the rank that has the first pixel it samples along that axis, and its values come
back. While points travel a rank samples its own.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from .grid_sample import options_of, output_like
from .grid_sample_routes import Round, Routes
from .grid_sample_windows import NAME, Seams, Whole
from .ranks import Ranks

_LEAST = 4  # rounds of many points: while one is sampled, values of the one before go back


@torch.compiler.disable  # collectives, and sizes that only data tell: a break in the graph
def sample_sharded(
    shard: Tensor,
    grid: Tensor,
    mesh: DeviceMesh,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
    *,
    dim: int = 2,
    limit: int = 1 << 30,
) -> Tensor:
    """Sample an image or a volume that is spread over the ranks of a mesh, as `grid_sample` does.

    A collective: every rank of the mesh calls it, each with its part and with points of its own,
    and where one rank's backward runs those of all others have to.

    Args:
        shard: (N, C, H, W) or (N, C, D, H, W), this rank's part of `input` of `grid_sample`: rows
            along `dim`, those of rank 0 first. Parts may differ in rows, and have none.
        grid: as `grid_sample`'s: points anywhere in the whole, as many as each rank likes.
        mesh: of one dimension, e.g. `init_device_mesh("cuda", (4,))` or one of a larger mesh's.
        mode, padding_mode, align_corners: as `grid_sample`'s.
        dim: along which axis the whole is cut, 2 to 4; the slowest in memory is best.
        limit: bytes that points and results under way may take on each rank. More go in rounds.

    Returns:
        (N, C, *points) of this rank's points, dtype of `shard`. Values, and gradients to `grid`,
        have the arithmetic of `grid_sample` of the whole; the gradient to `shard` adds up in
        another order. Differentiable once in both arguments.

    Raises:
        TypeError: `mesh` is no DeviceMesh, an argument no tensor.
        ValueError: `mode` or `padding_mode` is none of `grid_sample`'s, or the mesh has two
            dimensions.
        RuntimeError: on every rank, where any has a wrong shape, dtype, device or no part; where
            ranks differ in what has to be alike; where `limit` is too small for one point of each
            rank; where a rank is lost, once the process group's time-out is over.
    """
    ranks = Ranks(NAME, mesh)
    problem, options = None, (0, 0, False)
    try:
        options = _checked(ranks, shard, grid, mode, padding_mode, align_corners, dim, limit)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error  # raised once all ranks know
    whole = Whole(ranks, problem, shard, grid, options, dim, limit)
    return _Sampling.apply(whole, shard, grid)


def _checked(ranks, shard, grid, mode, padding_mode, align_corners, dim, limit):
    """Return the options by number. Raises: where this rank cannot take part."""
    ranks.check("shard", shard, "its part, of no rows if it has none")
    ranks.check("grid", grid, "points")
    if not isinstance(dim, int) or not 2 <= dim < shard.dim():
        raise RuntimeError(
            f"{NAME}: dim must be 2 to {shard.dim() - 1} for a shard of {shard.dim()} dimensions, "
            f"got {dim}"
        )
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{NAME}: limit must be a positive number of bytes, got {limit!r}")
    options = options_of(shard, grid, mode, padding_mode, align_corners)
    one_row = [max(n, 1) if d == dim else n for d, n in enumerate(shard.shape)]
    output_like(shard.new_empty(one_row, device="meta"), grid.to("meta"), *options)
    return options


class _Sampling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole: Whole, shard: Tensor, grid: Tensor) -> Tensor:
        routes = Routes(whole, grid)
        C, D = shard.shape[1], grid.shape[-1]
        each = 2 * (D * grid.element_size() + 2 * C * shard.element_size())  # two rounds at a time
        rounds = [
            Round(routes, image, k, count)
            for image in range(len(grid))
            for count in [routes.rounds(image, each, least=_LEAST)]
            for k in range(count)
        ]
        seams = Seams(whole, shard)
        coming = [rounds[0].send_points()] if rounds else []
        out = seams.sample_all(grid)
        returning: list = []
        for at, now in enumerate(rounds):
            if at + 1 < len(rounds):
                coming.append(rounds[at + 1].send_points())
            flat = out[now.image].view(C, -1)
            if len(own := now.own[1]):
                at_seam = now.points.index_select(0, own)
                flat.index_copy_(1, own, seams.sample(now.image, (at_seam[:0], at_seam))[1])
            points = now.by_window(coming.pop(0).wait().view(-1, D))
            returning.append((now, now.send_values(seams.sample(now.image, points), C), flat))
            del points
            if len(returning) > 1:
                _finish(*returning.pop(0))
        for last in returning:
            _finish(*last)
        seams.seam()
        ctx.whole, ctx.routes, ctx.seams = whole, routes, seams
        ctx.save_for_backward(shard, grid)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        """Gradients of all of a round's points at once: a pass over the part for each window."""
        shard, grid = ctx.saved_tensors
        whole, routes, seams = ctx.whole, ctx.routes, ctx.seams
        C, D = shard.shape[1], grid.shape[-1]
        seams.gradients = [None, None]
        grad_grid = torch.empty_like(grid, memory_format=torch.contiguous_format)
        each = 2 * D * grid.element_size() + 3 * C * shard.element_size()
        for image in range(len(grid)):
            count = routes.rounds(image, each)
            to_image = grad_grid[image].view(-1, D)
            grads = grad_out[image].reshape(C, -1)
            for k in range(count):
                now = Round(routes, image, k, count)
                coming = now.send_points(), now.send_gradients(grads)
                own_points = now.own_points()
                own_grads = [grads.index_select(1, own) for own in now.own]
                points = now.by_window(coming[0].wait().view(-1, D))
                came = now.gradients_by_window(coming[1].wait(), C)
                found = seams.differentiate(
                    image,
                    [torch.cat(both) for both in zip(own_points, points, strict=True)],
                    [torch.cat(both, 1) for both in zip(own_grads, came, strict=True)],
                )
                if not whole.need[1]:
                    continue
                for own, to in zip(now.own, found, strict=True):
                    to_image.index_copy_(0, own, to[: len(own)])
                back = [to[len(own) :] for own, to in zip(now.own, found, strict=True)]
                to_image.index_copy_(0, now.going, now.send_back(back).wait().view(-1, D))
        to_shard = seams.gradient() if whole.need[0] else None
        need = ctx.needs_input_grad
        return None, to_shard if need[1] else None, grad_grid if need[2] else None


def _finish(now: Round, values, flat: Tensor) -> None:
    now.put_values(values.wait(), flat)
