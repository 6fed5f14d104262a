"""A hash grid and a small network learn a real photograph, pixel by pixel.

A photograph (512 x 512, from scikit-image) becomes a function of two coordinates: twelve grids of
trainable features (`loader.hash_grid_encoding`, Instant-NGP's encoding) and a network of two hidden
layers of 64. Each step takes random pixels, and Adam descends through the network and the gradient
to the hash tables. How near the function is to the photograph (PSNR) is measured on all pixels.

    python examples/fit_image.py [--device cuda] [--steps 600] [--out fit.png]
    torchrun --nproc-per-node 2 examples/fit_image.py [--parallel fsdp] [--checkpoint FOLDER]
"""

import sys
import time
from pathlib import Path

import common
import together
import torch
from torch import nn

import loader

try:
    from matplotlib import pyplot
    from skimage import data
except ImportError as missing:
    sys.exit(f"fit_image: {missing}; pip install scikit-image matplotlib")

GRIDS = {"levels": 12, "table_size": 1 << 14, "per_level_scale": 1.35}  # 16 to 435 corners an axis
HIDDEN, BATCH, WANTED = 64, 8192, 30.0  # WANTED: least PSNR at the end, in dB


class Field(nn.Module):
    """Colour at points (N, 2) in [0, 1]."""

    def __init__(self):
        super().__init__()
        self.encoding = loader.nn.HashGridEncoding(2, **GRIDS)
        self.network = nn.Sequential(
            nn.Linear(self.encoding.out_features, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 3),
        )

    def forward(self, points):
        """(N, 3), red, green and blue."""
        return self.network(self.encoding(points))


def pixel_centres(H: int, W: int, device: str) -> torch.Tensor:
    """(H * W, 2), across and down, in [0, 1]."""
    down, across = (((torch.arange(n, device=device) + 0.5) / n) for n in (H, W))
    return torch.stack(torch.meshgrid(down, across, indexing="ij")[::-1], -1).view(-1, 2)


def learner(photo: torch.Tensor, steps: int, processes: together.Together, batch: int = BATCH):
    """The field, what a checkpoint of it holds, and a function that takes the next step.

    That returns the loss of this process's part of the batch.
    """
    H, W, _ = photo.shape
    points, colours = pixel_centres(H, W, photo.device), photo.view(-1, 3)
    torch.manual_seed(0)
    plain = Field().to(photo.device)
    field, mine = processes.wrapped(plain), processes.part(batch)
    groups = [
        # Rows of the table are met rarely: no floor.
        {"params": plain.encoding.parameters(), "lr": 2e-2, "eps": 1e-15},
        {"params": plain.network.parameters(), "lr": 5e-3},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    draw = torch.Generator(photo.device)

    def step():
        draw.manual_seed(decay.last_epoch)  # all processes draw, and go on, alike
        pick = torch.randint(len(points), (batch,), device=photo.device, generator=draw)[mine]
        loss = (field(points[pick]) - colours[pick]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        return loss

    return field, {"learned": together.Learned(field, optimizer), "decay": decay}, step


def fit(
    photo: torch.Tensor, steps: int, early: float, processes: together.Together, folder: Path | None
):
    """Learn `photo` (H, W, 3); the curve (seconds, PSNR), an early picture and its place, the last.

    The early one is the first after `early` seconds. The clock stands still while PSNR is measured.
    `folder`: of a checkpoint to begin from, where there is one, and to leave.
    """
    H, W, _ = photo.shape
    points, colours = pixel_centres(H, W, photo.device), photo.view(-1, 3)
    field, state, take = learner(photo, steps, processes)
    if folder:
        processes.load(folder, **state)
    curve, first, seconds = [], None, 0.0
    for step in range(state["decay"].last_epoch, steps + 1):
        if step % max(steps // 25, 1) == 0 or step == steps:
            with torch.no_grad():
                picture = field(points).clamp(0, 1)
            curve.append((seconds, -10 * (picture - colours).square().mean().log10().item()))
            if first is None and seconds >= early:
                first = len(curve) - 1, picture
        if step == steps:
            break
        start = time.perf_counter()
        take()
        if photo.is_cuda:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
    if folder:
        processes.save(folder, steps, **state)
    return curve, first or (len(curve) - 1, picture), picture.view(H, W, 3)


def draw(photo, curve, first, last, file: Path) -> None:
    """The photograph, what is learned early and at the end, and the curve."""
    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4.6), layout="constrained")
    at, early = first
    for axis, picture, (seconds, psnr) in (
        (axes[0], early.view(photo.shape), curve[at]),
        (axes[1], last, curve[-1]),
        (axes[2], photo, (0, None)),
    ):
        axis.imshow(picture.cpu().numpy())
        axis.set_axis_off()
        axis.set_title(f"after {seconds:.1f} s: {psnr:.1f} dB" if psnr else "the photograph")
    axes[3].plot(*zip(*curve, strict=True), marker=".")
    axes[3].set_xlabel("seconds of training")
    axes[3].set_ylabel("PSNR (dB)")
    axes[3].grid(alpha=0.3)
    common.save(figure, file, 90)


def main() -> None:
    """Fit, report, draw; fails where the photograph was not learned."""
    steps = {"type": int, "default": 600}
    options = common.options(__doc__, "fit_image", steps=steps, **together.OPTIONS)
    others = common.Others()
    processes = together.Together.started(options.device, options.parallel)
    photo = torch.from_numpy(data.astronaut()).to(processes.device).float() / 255
    early = 0.05 if options.device == "cuda" else 1.0
    curve, first, last = fit(photo, options.steps, early, processes, options.checkpoint)
    processes.close()
    if processes.rank > 0:
        return
    seconds, psnr = curve[-1]
    print(f"{options.steps} steps in {seconds:.1f} s on {processes}")
    others.report()
    print(f"PSNR {curve[0][1]:.1f} dB -> {curve[first[0]][1]:.1f} -> {psnr:.1f} dB")
    draw(photo, curve, first, last, options.out)
    print(f"pictures: {options.out}")
    if not psnr >= WANTED:
        sys.exit(f"not learned: {psnr:.1f} dB, should have been {WANTED:.0f} dB or more")


if __name__ == "__main__":
    main()
