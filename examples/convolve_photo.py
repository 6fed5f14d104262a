"""Convolve a real photograph with a kernel from a string: what `loader.source_module` is for.

A portrait (512 x 512 pixels, from scikit-image) is blurred as an out-of-focus lens would, smeared
along a curved path as a shaken camera would, and searched for edges. The kernel is fifteen lines of
CUDA with the sizes of image and kernel as compile-time constants; without a GPU the same lines run
on the CPU. Each result is held against scipy.ndimage.convolve in float64.

    python examples/convolve_photo.py [--device cpu] [--out picture.png]
"""

import functools
import sys
from pathlib import Path

import common
import torch

import loader

try:
    import numpy as np
    from matplotlib import pyplot
    from scipy import ndimage
    from skimage import data
except ImportError as missing:
    sys.exit(f"convolve_photo: {missing}; pip install scikit-image scipy matplotlib")

SOURCE = """
// out[y,x,c] = sum_ij kernel[i,j] * pic[y+R-i, x+R-j, c]; the picture goes on mirrored.
__device__ int mirrored(int i, int size) {
    return i < 0 ? -1 - i : i < size ? i : 2 * size - 1 - i;
}
__global__ void conv(float* out, const float* kernel, const float* pic) {
    constexpr int side = 2 * KERNEL_R + 1;
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= IMAGE_W || y >= IMAGE_H) return;
    float sum[CHANNELS] = {};
    for (int i = 0; i < side; ++i)
        for (int j = 0; j < side; ++j) {
            const int from = mirrored(y + KERNEL_R - i, IMAGE_H) * IMAGE_W +
                             mirrored(x + KERNEL_R - j, IMAGE_W);
            for (int c = 0; c < CHANNELS; ++c)
                sum[c] += kernel[i * side + j] * pic[from * CHANNELS + c];
        }
    for (int c = 0; c < CHANNELS; ++c) out[(y * IMAGE_W + x) * CHANNELS + c] = sum[c];
}
"""
BLOCK = 32, 8


@functools.cache
def convolution(H: int, W: int, C: int, side: int, device: str):
    """The kernel for pictures and kernels of these sizes: one build for each, kept in the cache."""
    sizes = {"IMAGE_H": H, "IMAGE_W": W, "CHANNELS": C, "KERNEL_R": side // 2}
    return loader.source_module(SOURCE, device=device, **sizes).get_function("conv")


def convolve(pic: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """A picture (H, W, C) convolved with a square kernel of odd side, both on one device."""
    H, W, C = pic.shape
    out = torch.empty_like(pic)
    grid = -(-W // BLOCK[0]), -(-H // BLOCK[1])
    convolution(H, W, C, len(kernel), pic.device.type)(out, kernel, pic, grid=grid, block=BLOCK)
    return out


def lens(radius: int) -> torch.Tensor:
    """A disc, as a lens that is out of focus draws a point."""
    ticks = torch.arange(-radius, radius + 1)
    disc = (ticks[:, None] ** 2 + ticks**2 <= radius**2).float()
    return disc / disc.sum()


def shake(radius: int) -> torch.Tensor:
    """A quarter of a circle: the path of a point in a shaken camera."""
    angles = torch.linspace(0, torch.pi / 2, 8 * radius)
    rows, columns = (2 * radius * f(angles) for f in (torch.sin, torch.cos))
    path = torch.zeros(2 * radius + 1, 2 * radius + 1)
    path.index_put_((rows.round().long(), columns.round().long()), torch.ones(1), accumulate=True)
    return path / path.sum()


def edges(sigma: float) -> torch.Tensor:
    """The Laplacian of a Gaussian: how much brighter a point is than its surroundings."""
    ticks = torch.arange(-round(3 * sigma), round(3 * sigma) + 1.0)
    squared = (ticks[:, None] ** 2 + ticks**2) / (2 * sigma**2)
    bell = (1 - squared) * torch.exp(-squared)
    return (bell - bell.mean()) / bell.abs().sum()


def check(name: str, pic: torch.Tensor, kernel: torch.Tensor, out: torch.Tensor) -> None:
    """Print the largest difference from SciPy; end the program where it is more than rounding."""
    exact = ndimage.convolve(
        pic.cpu().double().numpy(), kernel.cpu().double().numpy()[..., None], mode="reflect"
    )
    difference = float(np.abs(out.cpu().numpy() - exact).max())
    # Each of the products and partial sums is rounded once, by half an eps of sum |kernel * pic|.
    eps = torch.finfo(torch.float32).eps
    allowed = (kernel.numel() + 1) / 2 * eps * float(kernel.abs().sum() * pic.abs().max())
    print(f"{name:<16}difference from SciPy {difference:.1e} ({allowed:.1e} allowed)")
    if not difference <= allowed:
        sys.exit(f"convolve_photo: {name}: that is more than rounding can explain")


def compare_speed(pic: torch.Tensor, kernel: torch.Tensor) -> None:
    """Times of the kernel, of torch's own convolution, and of SciPy's."""
    side, device = len(kernel), pic.device.type
    planes = torch.nn.functional.pad(pic.movedim(2, 0)[:, None], [side // 2] * 4, mode="reflect")
    weights = kernel.flip(0, 1)[None, None]
    plane, single = pic[..., 0].cpu().numpy(), kernel.cpu().numpy()
    runs = {
        "the string": lambda: convolve(pic, kernel),
        "torch conv2d": lambda: torch.nn.functional.conv2d(planes, weights),
        "SciPy, 1 channel": lambda: ndimage.convolve(plane, single),
    }
    devices = dict(zip(runs, (device, device, "cpu"), strict=True))
    for name, times in common.take_turns(runs, devices, rounds=3, flush=True).items():
        print(f"{name:<18}{side} x {side}: {times} on {devices[name]}")


def draw(pictures: dict[str, np.ndarray], file: Path) -> None:
    """The pictures side by side."""
    figure, axes = pyplot.subplots(1, len(pictures), figsize=(11, 3.05), facecolor="black")
    for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
        axis.imshow(picture.clip(0, 1))
        axis.set_title(name, color="white", fontsize=11)
        axis.set_axis_off()
    figure.tight_layout()
    common.save(figure, file)


def main() -> None:
    """Convolve, check, time, draw."""
    options = common.options(__doc__, "convolve_photo")
    others = common.Others()
    pic = torch.from_numpy(data.astronaut()).to(options.device).float() / 255
    print(f"{' x '.join(map(str, pic.shape))} pixels on {options.device}")
    pictures = {"photograph": pic.cpu().numpy()}
    kernels = {"out of focus": lens(9), "shaken": shake(9), "edges": edges(1.5)}
    for name, kernel in kernels.items():
        out = convolve(pic, kernel.to(options.device))
        check(name, pic, kernel, out)
        pictures[name] = out.cpu().numpy()
    pictures["edges"] = 0.5 + 4 * pictures["edges"]
    compare_speed(pic, kernels["out of focus"].to(options.device))
    others.report()
    draw(pictures, options.out)
    print(f"before and after: {options.out}")


if __name__ == "__main__":
    main()
