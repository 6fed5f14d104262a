"""Run kornia as it stands on this library's kernels: what `loader.accelerate_torch` is for.

A photograph (a cup of coffee, 400 x 600 pixels, from scikit-image) goes through kornia's
`warp_perspective`, `remap` and `undistort_image`, first as they are, then inside
`with loader.accelerate_torch():`. Results are compared and times shown, of gradients too.

    python examples/warp_kornia.py [--device cpu] [--batch 4] [--out picture.png]
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler reports a missing GPU as an error

import common
import torch

import loader

try:
    from kornia.geometry.calibration import undistort_image
    from kornia.geometry.transform import get_perspective_transform, remap, warp_perspective
    from matplotlib import pyplot
    from skimage import data
except ImportError as missing:
    sys.exit(f"warp_kornia: {missing}; pip install kornia scikit-image matplotlib")

# The table, seen from the side, as if from above: these corners (x, y) go to the picture's own.
CORNERS = [[95.0, 20.0], [520.0, 45.0], [640.0, 400.0], [-40.0, 380.0]]
TURN = 1.2  # radians at the middle of the swirl, which fades with the square of the radius

OPERATORS = r"aten::(grid_sampler_2d|cudnn_grid_sampler)(_backward)?"


def from_above(photos: torch.Tensor) -> torch.Tensor:
    """Homographies (N, 3, 3) that bring CORNERS to the corners of the photographs (N, 3, H, W)."""
    H, W = photos.shape[-2:]
    to = torch.tensor([[0.0, 0.0], [W - 1.0, 0.0], [W - 1.0, H - 1.0], [0.0, H - 1.0]])
    found = get_perspective_transform(torch.tensor(CORNERS)[None], to[None])
    return found.to(photos.device).expand(len(photos), 3, 3)


def swirl(photos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each pixel of a stirred photograph comes from, x and y, each (N, H, W)."""
    H, W = photos.shape[-2:]
    y, x = torch.meshgrid(
        torch.arange(H, device=photos.device) - H / 2.0,
        torch.arange(W, device=photos.device) - W / 2.0,
        indexing="ij",
    )
    turn = TURN * torch.exp(-(x * x + y * y) / (H / 4) ** 2)
    sin, cos = torch.sin(turn), torch.cos(turn)
    maps = W / 2 + cos * x - sin * y, H / 2 + sin * x + cos * y
    return tuple(at.expand(len(photos), H, W).contiguous() for at in maps)


def lens(photos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A camera matrix (N, 3, 3) and coefficients (N, 4) of a wide lens, in OpenCV's order."""
    (H, W), N = photos.shape[-2:], len(photos)
    camera = torch.tensor([[W / 2, 0.0, W / 2], [0.0, W / 2, H / 2], [0.0, 0.0, 1.0]])
    bent = torch.tensor([-0.25, 0.05, 0.0, 0.0])
    return camera.to(photos.device).expand(N, 3, 3), bent.to(photos.device).expand(N, 4)


def tasks(photos: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return kornia's tasks, by name."""
    size, homographies = tuple(photos.shape[-2:]), from_above(photos)
    x, y = swirl(photos)
    camera, bent = lens(photos)

    def gradient():
        matrix = homographies.clone().requires_grad_()
        out = warp_perspective(photos, matrix, size)
        return torch.autograd.grad((out - photos).square().mean(), matrix)[0]

    return {
        "warp_perspective": lambda: warp_perspective(photos, homographies, size),
        "remap": lambda: remap(photos, x, y, padding_mode="reflection", align_corners=True),
        "undistort_image": lambda: undistort_image(photos, camera, bent),
        "gradient to homography": gradient,
    }


def sampling(run: Callable, device: str) -> float:
    """Milliseconds that a call spends in the operators behind F.grid_sample."""
    with torch.profiler.profile(acc_events=True) as profile:
        run()
    time = "device_time_total" if device == "cuda" else "cpu_time_total"
    events = [e for e in profile.key_averages() if re.fullmatch(OPERATORS, e.key)]
    return sum(getattr(event, time) for event in events) / 1e3


def turns(run: Callable, device: str, count: int) -> list[common.Samples]:
    """Milliseconds without and with this library's kernels, which take turns: of all that kornia
    does, then of sampling alone.
    """
    taken = [common.Samples() for _ in range(4)]

    def once(place):
        taken[place] += loader.time(run, device=device, repeats=3, warmup=3).samples
        taken[place + 2].append(sampling(run, device))

    for _ in range(count):
        once(0)
        with loader.accelerate_torch():
            once(1)
    return taken


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest, as a share of the range."""
    return float((a - b).abs().max() / a.abs().max())


def draw(pictures: list[tuple[str, torch.Tensor]], file: Path) -> None:
    """The pictures, each of them a title and (3, H, W), in rows of four."""
    figure, axes = pyplot.subplots(2, 4, figsize=(12, 4.8), facecolor="black")
    for axis, (name, picture) in zip(axes.flat, pictures, strict=True):
        axis.imshow(picture.movedim(0, 2).clamp(0, 1).cpu().numpy())
        axis.set_title(name, color="white", fontsize=10)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.tight_layout()
    common.save(figure, file)


def main() -> None:
    """Warp without and with our kernels, compare, time, draw."""
    options = common.options(
        __doc__,
        "warp_kornia",
        batch={"type": int, "default": 4, "help": "photographs at a time"},
        turns={"type": int, "default": 7, "help": "how often times are taken"},
    )
    others = common.Others()
    photo = torch.from_numpy(data.coffee()).to(options.device).movedim(2, 0).float() / 255
    photos = photo.expand(options.batch, *photo.shape).contiguous()
    print(f"{' x '.join(map(str, photos.shape))} on {options.device}")
    # An image point lies at some 600 pixels, within an eps of that and of a few steps to it; from
    # one pixel to the next the photograph changes by its range at most.
    allowed = 8 * max(photo.shape) * torch.finfo(torch.float32).eps
    rows = [("kornia on PyTorch's kernels", photo)], [("loader.accelerate_torch", photo)]
    for name, run in tasks(photos).items():
        without = run()
        with loader.accelerate_torch():
            within = run()
        apart = difference(without, within)
        whole, whole_within, sampler, ours = turns(run, options.device, options.turns)
        print(
            f"{name:<23}{whole} -> {whole_within}, sampling {sampler} -> {ours}, difference "
            f"{apart:.1e} ({allowed:.1e} allowed)"
        )
        if not apart <= allowed:
            sys.exit(f"warp_kornia: {name}: that is more than rounding can explain")
        if without.dim() == 4:
            rows[0].append((f"{name}, {min(whole):.2f} ms", without[0]))
            rows[1].append((f"{name}, {min(whole_within):.2f} ms", within[0]))
    others.report()
    draw(rows[0] + rows[1], options.out)
    print(f"without and with: {options.out}")


if __name__ == "__main__":
    main()
