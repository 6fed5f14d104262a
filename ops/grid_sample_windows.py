"""The windows of a volume that ranks hold for `sample_sharded`: their part, and a seam.

The seam of a rank is the last rows of its part with the first of those that follow, for points
between. A window is sampled with the coordinates, border rule and arithmetic of the whole volume.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .ranks import Ranks

NAME = "sample_sharded"
_REACH = {0: 1, 1: 0, 2: 3}  # pixels beyond the first that a point has, by interpolation


class Whole:
    """The volume of which a rank has a part, as all ranks have agreed that it is."""

    def __init__(self, ranks: Ranks, problem, shard, grid, options, dim: int, limit: int):
        """A collective. `problem`: what keeps this rank from taking part; options by number."""
        alike, own = {}, [0, 0]
        if not problem:
            wanted = shard.requires_grad + 2 * grid.requires_grad if torch.is_grad_enabled() else 0
            alike = {
                "shape of shard, but for its rows,": tuple(_with(shard.shape, dim, -1)),
                "dtype of shard": shard.dtype,
                "dtype of grid": grid.dtype,
                "mode, padding_mode and align_corners, by number,": tuple(options),
                "dim": dim,
                "limit": limit,
                "number of images": len(grid),
                "wish for gradients": wanted > 0,
            }
            own = [shard.shape[dim], wanted]
        found = ranks.agree(problem, alike, own)
        self.ranks, self.options, self.dim, self.limit = ranks, options, dim, limit
        self.need = tuple(any(wanted & bit for _, wanted in found) for bit in (1, 2))
        self.ends = torch.tensor([rows for rows, _ in found]).cumsum(0).tolist()
        self.begins = [0, *self.ends[:-1]]
        self.size = self.ends[-1]
        if self.size == 0:
            raise RuntimeError(f"{NAME}: some rank's shard must have rows, got none on all ranks")
        self.reach = _REACH[self.options[0]]
        self.exact = shard.dtype == torch.float64
        self.first = self.begins[ranks.me]
        self.seam_first = max(self.first, self.ends[ranks.me] - self.reach)

    def seam_rows(self, rank: int) -> range:
        """The rows after those of a rank that its points may sample too."""
        end = self.ends[rank]
        return range(end, min(self.size, end + self.reach) if end > self.begins[rank] else end)

    def shared(self, giver: int, taker: int) -> range:
        """Rows of one rank that are in another's seam."""
        wanted = self.seam_rows(taker)
        begin = max(wanted.start, self.begins[giver])
        return range(begin, max(begin, min(wanted.stop, self.ends[giver])))

    def groups(self, grid: Tensor) -> Tensor:
        """Return the group that each point of an image belongs to, (P,)."""
        rows = torch.ops.octet.grid_sample_rows(
            grid, *self.options, self.dim, self.size, self.exact
        ).view(-1)
        bounds = []  # where groups begin; of ranks without rows nowhere
        for begin, end in zip(self.begins, self.ends, strict=True):
            seam = end if end == self.size else max(begin, end - self.reach)
            bounds += [begin, seam]
        edges = torch.tensor(bounds[1:], dtype=torch.int32).to(rows.device, non_blocking=True)
        found = torch.bucketize(rows, edges, right=True, out_int32=True)
        return torch.where(rows < 0, 2 * self.ranks.me, found)


class Seams:
    """The windows of a rank, and their gradients."""

    def __init__(self, whole: Whole, shard: Tensor):
        self.whole, self.ranks = whole, whole.ranks
        dim, me = whole.dim, self.ranks.me
        self.shard = shard if shard.shape[dim] else shard.new_zeros(_with(shard.shape, dim, 1))
        self._firsts = whole.first if shard.shape[dim] else 0, whole.seam_first
        every = range(self.ranks.count)
        self.given = [whole.shared(me, other) for other in every]
        self.taken = [whole.shared(other, me) for other in every]
        self._begin(shard)
        self.gradients: list[Tensor | None] = [None, None]

    def _begin(self, shard: Tensor) -> None:
        """Send rows to whom they are in the seam of."""
        dim, whole = self.whole.dim, self.whole
        self._shape = shard.shape
        pieces = [
            shard.narrow(dim, rows.start - whole.first, len(rows)).reshape(-1)
            for rows in self.given
            if len(rows)
        ]
        flat = torch.cat(pieces) if pieces else shard.new_empty(0)
        per_row = math.prod(_with(shard.shape, dim, 1))
        self._counts = [[len(rows) * per_row for rows in of] for of in (self.given, self.taken)]
        self._coming = self.ranks.exchange(flat, *self._counts)

    def seam(self) -> Tensor | None:
        """Return the rows around this rank's end, once they are there."""
        if self._coming is None:
            return self._seam
        flat, self._coming = self._coming.wait(), None
        dim, whole = self.whole.dim, self.whole
        own = whole.ends[self.ranks.me] - whole.seam_first
        parts, at = [self.shard.narrow(dim, self.shard.shape[dim] - own, own)], 0
        for rows, count in zip(self.taken, self._counts[1], strict=True):
            if count:
                parts.append(flat[at : at + count].view(_with(self._shape, dim, len(rows))))
            at += count
        self._seam = torch.cat(parts, dim) if len(parts) > 1 else None
        return self._seam

    def window(self, number: int, image: int) -> tuple[Tensor, int]:
        """Return a window of an image, and its first row in the whole."""
        window = self.seam() if number else self.shard
        assert window is not None, "points of the seam have one"
        return window[image : image + 1], self._firsts[number]

    def sample_all(self, grid: Tensor) -> Tensor:
        """Return values at all of this rank's points, right at those in its own part.

        Taps outside of a window cost nothing; to pick points and to spread values does.
        """
        w = self.whole
        return torch.ops.octet.grid_sample_window(
            self.shard, grid, *w.options, w.dim, self._firsts[0], w.size
        )

    def sample(self, image: int, points: Sequence[Tensor]) -> list[Tensor]:
        """Return (C, n) values at the points (n, D) of each window."""
        out = []
        for number, at in enumerate(points):
            if len(at) == 0:
                out.append(self.shard.new_empty(self.shard.shape[1], 0))
                continue
            window, first = self.window(number, image)
            w = self.whole
            found = torch.ops.octet.grid_sample_window(
                window, _as_grid(at), *w.options, w.dim, first, w.size
            )
            out.append(found.view(found.shape[1], -1))
        return out

    def differentiate(self, image: int, points, grads) -> list[Tensor]:
        """Return gradients (n, D) to the points; those to the windows are added up."""
        out = []
        for number, (at, grad) in enumerate(zip(points, grads, strict=True)):
            if len(at) == 0:
                out.append(torch.empty_like(at))
                continue
            window, first = self.window(number, image)
            w, shape = self.whole, (1, -1, *[1] * (at.shape[1] - 1), len(at))
            to_window, to_points = torch.ops.octet.grid_sample_window_backward(
                grad.reshape(shape),
                window,
                _as_grid(at),
                *w.options,
                w.dim,
                first,
                w.size,
                *w.need,
                torch.are_deterministic_algorithms_enabled(),
            )
            if w.need[0]:
                self._add(number, image, to_window)
            out.append(to_points.view(-1, at.shape[1]) if w.need[1] else at[:0])
        return out

    def _add(self, number: int, image: int, gradient: Tensor) -> None:
        whole = self.seam() if number else self.shard
        if self.gradients[number] is None and len(whole) == 1:
            self.gradients[number] = gradient
            return
        if self.gradients[number] is None:
            self.gradients[number] = torch.zeros_like(whole)
        self.gradients[number][image : image + 1] += gradient

    def gradient(self) -> Tensor:
        """Return the gradient to the shard, with what others have found for their seams."""
        whole, dim = self.whole, self.whole.dim
        (to_shard, to_seam), self.gradients = self.gradients, [None, None]  # the leaf takes it
        if to_shard is None:
            to_shard = torch.zeros_like(self.shard)
        own = whole.ends[self.ranks.me] - whole.seam_first
        flat = self.shard.new_zeros(sum(self._counts[1]))
        if to_seam is not None:
            to_shard.narrow(dim, to_shard.shape[dim] - own, own).add_(to_seam.narrow(dim, 0, own))
            beyond, pieces = own, []
            for rows in self.taken:
                if len(rows):
                    pieces.append(to_seam.narrow(dim, beyond, len(rows)).reshape(-1))
                beyond += len(rows)
            flat = torch.cat(pieces)
        came = self.ranks.exchange(flat, self._counts[1], self._counts[0]).wait()
        at = 0
        for rows, count in zip(self.given, self._counts[0], strict=True):
            if count:
                piece = came[at : at + count].view(_with(self._shape, dim, len(rows)))
                to_shard.narrow(dim, rows.start - whole.first, len(rows)).add_(piece)
            at += count
        return to_shard if self._shape[dim] else to_shard.narrow(dim, 0, 0)


def _as_grid(points: Tensor) -> Tensor:
    n, D = points.shape
    return points.view(1, *[1] * (D - 1), n, D)


def _with(shape: Sequence[int], dim: int, rows: int) -> list[int]:
    return [rows if d == dim else n for d, n in enumerate(shape)]
