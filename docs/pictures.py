"""The pictures of the operators' pages, and of how a build runs, made by the operators themselves.

    python docs/pictures.py [NAME ...]

writes docs/pictures/NAME.png, with a palette of 256 colours where it would be large.
"""

import io
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
import loader

FOLDER = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREY = "tab:blue", "tab:orange", "#555555"


def panels(count, size=(2.6, 2.6), **how):
    """A row of pictures without axes."""
    figure, axes = pyplot.subplots(1, count, figsize=(size[0] * count, size[1]), **how)
    for axis in axes:
        axis.set_axis_off()
    return figure, axes


def plane(side, *others):
    """Points over [-1, 1]^2, row by row, (x, y, *others)."""
    ticks = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    rest = [torch.full_like(x, value) for value in others]
    return torch.stack([x, y, *rest], -1).reshape(-1, 2 + len(others))


def photograph(side):
    """A face, (side, side, 3) in [0, 1]."""
    from skimage import data
    from skimage.transform import resize

    face = data.astronaut()[0:240, 110:350]
    return torch.from_numpy(resize(face, (side, side), anti_aliasing=True)).float()


def trilinear_interpolation():
    """A cell with a colour at each corner, cut at three heights."""
    colours = torch.tensor(
        [[0, 0, 0.5], [0, 0.4, 1], [0, 0.6, 0.3], [0.2, 1, 1],
         [0.8, 0, 0.2], [1, 0.4, 1], [1, 0.7, 0], [1, 1, 0.9]]
    )[None]  # fmt: skip
    figure, axes = panels(4)
    for axis, z in zip(axes, (-1, -0.33, 0.33, 1), strict=True):
        points = plane(96, z)
        out = loader.trilinear_interpolation(colours.expand(len(points), 8, 3), points)
        axis.imshow(out.view(96, 96, 3).numpy(), origin="lower")
        axis.set_title(f"z = {z:g}", fontsize=10)
    return figure


def bilinear_interpolation():
    """A cell with a colour at each corner; one feature of it, and where that is level."""
    colours = torch.tensor([[0.1, 0.2, 0.6], [1, 0.5, 0], [0.1, 0.8, 0.4], [0.9, 0.1, 0.3]])[None]
    points = plane(128).requires_grad_()
    out = loader.bilinear_interpolation(colours.expand(len(points), 4, 3), points)
    figure, axes = panels(2, (3.2, 3.2))
    axes[0].imshow(out.detach().view(128, 128, 3).numpy(), origin="lower")
    axes[0].set_title("three features as a colour", fontsize=10)
    blue = out[:, 2]
    (slope,) = torch.autograd.grad(blue.sum(), points)
    field, ticks = blue.detach().view(128, 128).numpy(), np.linspace(-1, 1, 128)
    axes[1].contour(ticks, ticks, field, 12, linewidths=1)
    some = slope.view(128, 128, 2)[8::16, 8::16].numpy()
    axes[1].quiver(ticks[8::16], ticks[8::16], some[..., 0], some[..., 1], color=GREY, width=0.006)
    axes[1].set_aspect("equal")
    axes[1].set_title("one of them, and its gradient to points", fontsize=10)
    return figure


def grid_sample():
    """A few pixels magnified in each mode; and what lies beyond the border."""
    image = photograph(24).movedim(-1, 0)[None]
    figure, axes = panels(6, (2.0, 2.2))
    grid = plane(144).view(1, 144, 144, 2)
    for axis, mode in zip(axes, ("nearest", "bilinear", "bicubic"), strict=False):
        out = loader.grid_sample(image, grid * 0.5, mode, "border", False)
        axis.imshow(out[0].movedim(0, -1).clamp(0, 1).numpy())
        axis.set_title(f'"{mode}"', fontsize=10)
    for axis, padding in zip(axes[3:], ("zeros", "border", "reflection"), strict=True):
        out = loader.grid_sample(image, grid * 1.8, "bilinear", padding, False)
        axis.imshow(out[0].movedim(0, -1).clamp(0, 1).numpy())
        axis.set_title(f'"{padding}"', fontsize=10)
    return figure


def apply_lut3d():
    """A photograph through a warm table, and how far the two interpolations are apart."""
    photo, ticks = photograph(200), torch.linspace(0, 1, 9)
    r, g, b = torch.meshgrid(ticks, ticks, ticks, indexing="ij")
    lut = torch.stack([r.sqrt(), g * (0.6 + 0.4 * r), (b * b * 0.8 + 0.1 * g)], -1).clamp(0, 1)
    made = {name: loader.apply_lut3d(photo, lut, name) for name in ("trilinear", "tetrahedral")}
    apart = (made["trilinear"] - made["tetrahedral"]).abs().amax(-1)
    figure, axes = panels(3, (2.8, 3.0))
    for axis, picture, name in (
        (axes[0], photo, "image"),
        (axes[1], made["tetrahedral"], "through a table of 9 x 9 x 9"),
        (axes[2], apart, f"trilinear against tetrahedral,\nat most {255 * apart.max():.1f} of 255"),
    ):
        axis.imshow(picture.numpy(), cmap="magma")
        axis.set_title(name, fontsize=10)
    return figure


def hash_grid_encoding():
    """One feature of some levels over the unit square."""
    points = (plane(160) + 1) / 2
    table = torch.rand(12, 1 << 12, 1, generator=torch.Generator().manual_seed(1))
    out = loader.hash_grid_encoding(points, table, base_resolution=4, per_level_scale=1.5)
    figure, axes = panels(4, (2.5, 2.7))
    for axis, level in zip(axes, (0, 3, 6, 11), strict=True):
        corners = int(np.ceil(4 * 1.5**level - 1)) + 1
        kind = "dense" if corners**2 <= 1 << 12 else "hashed"
        axis.imshow(out[:, level].view(160, 160).numpy(), cmap="viridis", interpolation="nearest")
        axis.set_title(f"level {level}: {corners} x {corners}, {kind}", fontsize=10)
    return figure


def convolve2d():
    """A photograph blurred, sharpened, and its edges."""
    grey, x = photograph(220).mean(-1), torch.arange(-6, 7.0)
    bell = torch.exp(-(x**2) / 8)
    bell = bell[:, None] * bell / bell.sum() ** 2
    sharp = -2 * bell
    sharp[6, 6] += 3
    edges = torch.tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0.0]])
    figure, axes = panels(4, (2.5, 2.7))
    for axis, kernel, name in (
        (axes[0], torch.ones(1, 1), "image"),
        (axes[1], bell, "13 x 13, Gaussian"),
        (axes[2], sharp, "13 x 13, sharpening"),
        (axes[3], edges, "3 x 3, Laplacian"),
    ):
        out = loader.convolve2d(grey, kernel, "same", "nearest")
        low, high = (-0.15, 0.15) if kernel is edges else (0, 1)
        axis.imshow(out.numpy(), cmap="gray", vmin=low, vmax=high)
        axis.set_title(name, fontsize=10)
    return figure


def curves(call, others):
    """A function of one number and its derivative."""
    x = torch.linspace(-2, 2, 101, requires_grad=True)
    out = call(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    figure, axis = pyplot.subplots(figsize=(4.4, 2.8))
    for name, line in others.items():
        axis.plot(x.detach(), line(x.detach()), ":", color=GREY, label=name)
    axis.plot(x.detach(), out.detach(), color=BLUE, label="out")
    axis.plot(x.detach(), slope, "--", color=ORANGE, label="its derivative")
    axis.set_xlabel("x")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def square():
    """The parabola and its slope."""
    return curves(loader.square, {})


def add2():
    """A wave and a line, and their sum."""
    wave, line = (lambda x: torch.sin(4 * x)), (lambda x: x)
    return curves(lambda x: loader.add2(wave(x), line(x)), {"a": wave, "b": line})


def build():
    """What `import loader` and a first call do."""
    figure, axis = pyplot.subplots(figsize=(9.4, 4.2))
    axis.set_xlim(0, 101)
    axis.set_ylim(0, 45)
    axis.set_axis_off()
    boxes = (
        (1, 34, "ops/  kernels/  include/\nflags, compilers,\ntorch, this CPU", "#e8eef7"),
        (21.5, 34, "key:\na digest of all\nthat goes in", "#e8eef7"),
        (42, 34, "in the store?", "#fdf3dc"),
        (62.5, 34, "library checked\nagainst its digest", "#e3f3e6"),
        (83, 34, "loader.X(...)\nits first use waits\nfor this alone", "#e3f3e6"),
        (42, 17.5, "lock: one process\nbuilds, others wait", "#fbe7df"),
        (42, 1, "compilers side by side,\nfinished objects kept", "#fbe7df"),
        (62.5, 1, "still the same sources?\npublished by one\nrename", "#fbe7df"),
    )
    for x, y, text, colour in boxes:
        shape = FancyBboxPatch((x, y), 16, 10, "round,pad=0.6", fc=colour, ec=GREY, lw=0.8)
        axis.add_patch(shape)
        axis.text(x + 8, y + 5, text, ha="center", va="center", fontsize=7.3)
    for begin, end in (
        *(((x, 39), (x + 3.2, 39)) for x in (17.9, 38.4, 58.9, 79.4)),
        *(((50, y), (50, y - 5)) for y in (33.2, 16.7)),
        *(((58.9, 6), (62.1, 6)), ((70.5, 12), (70.5, 33.2))),
    ):
        axis.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": GREY})
    axis.text(60.5, 40, "yes", ha="center", fontsize=8, color=GREY)
    axis.text(51, 30, "no", fontsize=8, color=GREY)
    return figure


PICTURES = {
    f.__name__: f
    for f in (
        *(trilinear_interpolation, bilinear_interpolation, grid_sample, apply_lut3d),
        *(hash_grid_encoding, convolve2d, square, add2, build),
    )
}


def save(figure, file: Path) -> None:
    """Write a figure as a small PNG."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, bbox_inches="tight", facecolor="white")
    pyplot.close(figure)
    if drawn.tell() > 100_000:
        picture = Image.open(drawn).convert("RGB")
        picture.quantize(256).save(file, optimize=True)
    else:
        file.write_bytes(drawn.getvalue())


def main(names) -> None:
    """Make the pictures named, or all."""
    for name in names or PICTURES:
        save(PICTURES[name](), FOLDER / f"{name}.png")
        print(f"{name}: {(FOLDER / f'{name}.png').stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
