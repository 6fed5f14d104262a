"""Which points of `sample_sharded` go to which rank, and how they and their values travel.

Groups of points are numbered 2 rank + window (see grid_sample_windows.py); those of one rank are
neighbours. Values travel in blocks (C, n), one for each group, since kernels write them so.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .grid_sample_windows import NAME, Whole
from .ranks import Exchange


class Routes:
    """Which points go where: all images' points sorted by group, and who has how many for whom."""

    def __init__(self, whole: Whole, grid: Tensor):
        self.whole, self.grid = whole, grid
        me, R = whole.ranks.me, whole.ranks.count
        self.order, counts = [], []
        for image in range(len(grid)):
            groups = whole.groups(grid[image : image + 1])
            narrow = groups.to(torch.uint8 if R <= 128 else torch.int16)
            found = torch.sort(narrow, stable=True)
            self.order.append(found.indices)
            edges = torch.arange(2 * R, device=groups.device, dtype=narrow.dtype)
            ends = torch.searchsorted(found.values, edges, right=True)
            counts.append(ends.diff(prepend=ends.new_zeros(1)))
        table = torch.stack(counts).view(-1) if counts else torch.zeros(0, dtype=torch.int64)
        everyone = whole.ranks.gather(table)
        self.table = [
            [row[2 * R * i : 2 * R * (i + 1)] for row in everyone] for i in range(len(grid))
        ]  # by image, sender, group
        self.me, self.R = me, R

    def rounds(self, image: int, bytes_per_point: int, least: int = 1) -> int:
        """Return in how many rounds an image's points go, the same on all ranks.

        `least`: where these have some 250,000 points each.

        Raises: RuntimeError on all ranks where even one point of each for each is beyond the limit.
        """
        table, R, limit = self.table[image], self.R, self.whole.limit
        most = 0
        for rank in range(R):
            out = sum(n for g, n in enumerate(table[rank]) if g // 2 != rank)
            come = sum(
                sum(row[2 * rank : 2 * rank + 2]) for s, row in enumerate(table) if s != rank
            )
            most = max(most, out + come)
        room = limit // bytes_per_point - 4 * R
        if most > 0 and room < 1:
            needed = (4 * R + 1) * bytes_per_point
            raise RuntimeError(
                f"{NAME}: limit must be {needed} bytes or more for a point of each of {R} ranks "
                f"for each other, at {bytes_per_point} bytes a point, got {limit}"
            )
        return max(-(-most // room) if most else 1, min(least, most >> 18))

    def slices(self, image: int, sender: int, k: int, rounds: int) -> list[range]:
        """Return where in the sender's order each group's points of round k are."""
        found, at = [], 0
        for n in self.table[image][sender]:
            found.append(range(at + n * k // rounds, at + n * (k + 1) // rounds))
            at += n
        return found


class Round:
    """A round of an image's points: those that go, those that come, and this rank's own."""

    def __init__(self, routes: Routes, image: int, k: int, rounds: int):
        self.ranks, self.image = routes.whole.ranks, image
        me, R = routes.me, routes.R
        slices, order = routes.slices(image, me, k, rounds), routes.order[image]
        self.points = routes.grid[image].reshape(-1, routes.grid.shape[-1])
        away = [s for g, s in enumerate(slices) if g // 2 != me]
        self.going = joined([order[s.start : s.stop] for s in away if len(s)], order[:0])
        self.own = [order[s.start : s.stop] for s in slices[2 * me : 2 * me + 2]]
        table = [routes.slices(image, sender, k, rounds) for sender in range(R)]
        self.out = [0 if r == me else len(slices[2 * r]) + len(slices[2 * r + 1]) for r in range(R)]
        self.come = [
            [0, 0] if r == me else [len(s) for s in table[r][2 * me : 2 * me + 2]] for r in range(R)
        ]
        self.due = [sum(both) for both in self.come]
        self.to_groups = [
            [0, 0] if r == me else [len(s) for s in slices[2 * r : 2 * r + 2]] for r in range(R)
        ]

    def own_points(self) -> list[Tensor]:
        """Return this rank's own points by window."""
        return [self.points.index_select(0, own) for own in self.own]

    def send_points(self) -> Exchange:
        """Begin to exchange points."""
        return self._send(self.points.index_select(0, self.going).view(-1), self.points.shape[1])

    def _send(self, flat, width: int, back: bool = False) -> Exchange:
        counts = [[n * width for n in of] for of in (self.out, self.due)]
        return self.ranks.exchange(flat, *(reversed(counts) if back else counts))

    def by_window(self, rows: Tensor) -> list[Tensor]:
        """Return received rows (n, width), by sender and window, as those of each window."""
        parts = rows.split([n for both in self.come for n in both])
        return [joined([x for x in parts[w::2] if len(x)], rows[:0]) for w in (0, 1)]

    def by_sender(self, values: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Return what was computed by window as pieces by sender and window."""
        parts = [v.split([both[w] for both in self.come], dim) for w, v in enumerate(values)]
        return [x for pair in zip(*parts, strict=True) for x in pair]

    def send_values(self, values: Sequence[Tensor], C: int) -> Exchange:
        """Begin to send values (C, n) of each window back, block by block."""
        blocks = [x.reshape(-1) for x in self.by_sender(values, 1) if x.numel()]
        return self._send(joined(blocks, values[0].new_empty(0)), C, back=True)

    def put_values(self, flat: Tensor, out: Tensor) -> None:
        """Put values that came back where their points are in out (C, P)."""
        C, pieces, at = len(out), [], 0
        for n in (n for both in self.to_groups for n in both):
            if n:
                pieces.append(flat[at : at + n * C].view(C, n))
            at += n * C
        if pieces:
            out.index_copy_(1, self.going, joined(pieces, out, 1))

    def send_gradients(self, grad_out: Tensor) -> Exchange:
        """Begin to send what arrives for points (C, P) to where these are sampled."""
        C, at = len(grad_out), 0
        chosen, blocks = grad_out.index_select(1, self.going), []
        for n in (n for both in self.to_groups for n in both):
            if n:
                blocks.append(chosen[:, at : at + n].reshape(-1))
            at += n
        return self._send(joined(blocks, grad_out.new_empty(0)), C)

    def gradients_by_window(self, flat: Tensor, C: int) -> list[Tensor]:
        """Return gradients that came, (C, n) of each window."""
        pieces, at = [[], []], 0
        for both in self.come:
            for w, n in enumerate(both):
                if n:
                    pieces[w].append(flat[at : at + n * C].view(C, n))
                at += n * C
        return [joined(of, flat.new_empty(C, 0), 1) for of in pieces]

    def send_back(self, to_points: Sequence[Tensor]) -> Exchange:
        """Begin to send gradients to points (n, D) of each window back."""
        pieces = [x.reshape(-1) for x in self.by_sender(to_points, 0) if x.numel()]
        return self._send(
            joined(pieces, to_points[0].new_empty(0)), self.points.shape[1], back=True
        )


def joined(parts: Sequence[Tensor], empty: Tensor, dim: int = 0) -> Tensor:
    """Return the parts as one tensor, without a copy of a single one."""
    if len(parts) < 2:
        return parts[0] if parts else empty
    return torch.cat(list(parts), dim)
