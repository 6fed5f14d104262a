"""Recover a volume and the places where it was sampled, by gradient descent through both gradients.

A smooth random volume is sampled at known values but badly known places: a quarter of the points
are where they are said to be, the others are off by a few tenths of a voxel. From a volume of zeros
Adam recovers the volume (through the gradient to `feats`) and the offsets (through the one to
`points`) together.

    python examples/fit_volume.py [--device cuda] [--steps 300] [--out curves.png]
    torchrun --nproc-per-node 2 examples/fit_volume.py [--parallel fsdp] [--checkpoint FOLDER]
"""

import sys
import time
from pathlib import Path

import common
import together
import torch
from matplotlib import pyplot
from torch import nn
from torch.nn.functional import interpolate

import loader

SIDE, CHANNELS, POINTS = 12, 16, 16384
NOISE = 0.2  # standard deviation of the offsets, in voxels


def sample(grid: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Values (N, C) of a volume (S, S, S, C) at positions (N, 3) in voxels, with both gradients."""
    S = grid.shape[0]
    cell = positions.detach().floor().clamp(0, S - 2)
    x, y, z = cell.long().unbind(1)
    corners = [i * S * S + j * S + k for i in (0, 1) for j in (0, 1) for k in (0, 1)]
    index = ((x * S + y) * S + z)[:, None] + x.new_tensor(corners)
    # As grid[index] would do, but the gradient of that doubles the time of a step on a CPU.
    feats = grid.flatten(0, 2).index_select(0, index.flatten()).unflatten(0, (-1, 8))
    return loader.trilinear_interpolation(feats, 2 * (positions - cell) - 1)


def make_problem(device: str):
    """The true volume, where the points are said to be, their true offsets, and which have one."""
    generator = torch.Generator().manual_seed(0)
    # Far smoother than its voxels: a field that turns within an offset's reach would mislead it.
    coarse = torch.randn(1, CHANNELS, 5, 5, 5, generator=generator)
    grid = interpolate(coarse, size=(SIDE,) * 3, mode="trilinear", align_corners=True)
    grid = grid[0].permute(1, 2, 3, 0).contiguous()
    true = torch.rand(POINTS, 3, generator=generator) * (SIDE - 1)
    moved = torch.arange(POINTS) % 4 > 0
    offsets = torch.randn(POINTS, 3, generator=generator) * NOISE * moved[:, None]
    return [x.to(device) for x in (grid, true - offsets, offsets, moved[:, None])]


class Unknown(nn.Module):
    """The volume, and where the points really are."""

    def __init__(self, truth, said, moved):
        super().__init__()
        self.grid = nn.Parameter(torch.zeros_like(truth))
        self.guess = nn.Parameter(torch.zeros_like(said))
        self.said, self.moved = said, moved

    def forward(self, part: slice):
        """Values at a part of the points."""
        return sample(self.grid, (self.said + self.guess * self.moved)[part])


def fit(truth, said, offsets, moved, steps: int, processes: together.Together, folder: Path | None):
    """Descend; (loss, error of the volume, error of the offsets) of each step.

    `folder`: of a checkpoint to begin from, where there is one, and to leave.
    """
    unknown, mine = Unknown(truth, said, moved), processes.part(len(said))
    model, values = processes.wrapped(unknown), sample(truth, said + offsets)[mine]
    groups = [{"params": [unknown.grid], "lr": 0.1}, {"params": [unknown.guess], "lr": 0.02}]
    optimizer = torch.optim.Adam(groups)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    state = {"learned": together.Learned(model, optimizer), "decay": decay}
    if folder:
        processes.load(folder, **state)
    history = []
    while decay.last_epoch < steps:
        loss = (model(mine) - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            grid, guess = map(together.whole, (unknown.grid, unknown.guess))
            astray = (guess - offsets)[moved[:, 0]].square().sum(1).mean().sqrt()
            errors = processes.mean(loss), (grid - truth).square().mean().sqrt(), astray
        history.append(tuple(x.item() for x in errors))
        optimizer.step()
        decay.step()
    if folder:
        processes.save(folder, steps, **state)
    return history


def draw(history, file: Path) -> None:
    """Loss and errors over the steps."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    names = "loss (mean square)", "volume (RMS error)", "offsets (RMS error, voxels)"
    for name, curve in zip(names, zip(*history, strict=True), strict=True):
        axes.semilogy(curve, label=name)
    axes.set_xlabel("step")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    common.save(figure, file)


def main() -> None:
    """Fit, report, draw; fails where the volume or the offsets were not recovered."""
    steps = {"type": int, "default": 300}
    options = common.options(__doc__, "fit_volume", steps=steps, **together.OPTIONS)
    others = common.Others()
    processes = together.Together.started(options.device, options.parallel)
    start = time.perf_counter()
    problem = make_problem(str(processes.device))
    history = fit(*problem, options.steps, processes, options.checkpoint)
    processes.close()
    if processes.rank > 0:
        return
    print(f"{options.steps} steps in {time.perf_counter() - start:.1f} s on {processes}")
    others.report()
    for name, first, last in zip(
        ("loss", "volume", "offsets"), history[0], history[-1], strict=True
    ):
        print(f"{name:<8}{first:10.2e} -> {last:8.2e}  ({first / last:,.0f} times less)")
    draw(history, options.out)
    print(f"curves: {options.out}")
    if any(first < 5 * last for first, last in zip(history[0], history[-1], strict=True)):
        sys.exit("not recovered: each should have fallen to a fifth or less")


if __name__ == "__main__":
    main()
