"""Resample a real brain onto a rotated and zoomed grid: the main job, checked and timed.

The MNI152 T1 template (197 x 233 x 189 voxels of 1 mm), which the nilearn package holds, is sampled
at some 2.7 million positions by `loader.grid_sample`, straight from the volume. Beside it runs what
a caller without such an operator does: each position's cell of eight voxels is gathered to
(N, 8, 1), and `loader.trilinear_interpolation` does the rest. Both are held against plain PyTorch
and against scipy.ndimage.map_coordinates, timed, and the volume is drawn before and after.

    python examples/resample_brain.py [--device cuda] [--points 1000000] [--out picture.png]
"""

import importlib.util
import math
import resource
import statistics
import sys
from functools import partial
from pathlib import Path

import common
import torch
import torch.nn.functional as F

import loader

try:
    import nibabel
    import numpy as np
    from matplotlib import pyplot
    from scipy import ndimage
    from scipy.spatial.transform import Rotation
except ImportError as missing:
    sys.exit(f"resample_brain: {missing}; pip install 'nilearn==0.12.*' matplotlib")

ANGLES = (25, 35)  # degrees, about the left-right and then the head-foot axis
ZOOM = 1.2
PLANES = ("axial", "coronal", "sagittal")
TEMPLATE = "datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
# Points that go from position to value together. On the CPU what lies between then stays in the
# caches, some three times faster; a GPU wants few and long kernels.
BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}


def load_brain() -> torch.Tensor:
    """The template as float32 (197, 233, 189): axes to the right, to the front, upwards."""
    package = importlib.util.find_spec("nilearn")  # found, not imported: that takes seconds
    file = Path(package.origin).parent / TEMPLATE if package else Path("nilearn", TEMPLATE)
    if not file.exists():
        sys.exit(f"resample_brain: there is no {file}; pip install 'nilearn==0.12.*'")
    # NIfTI keeps the first axis fastest; the cells below are gathered from rows of the last.
    return torch.from_numpy(np.ascontiguousarray(nibabel.load(file).dataobj, dtype=np.float32))


def grid_positions(centre: torch.Tensor, extent: float, side: int) -> torch.Tensor:
    """Positions (side^3, 3), in voxels, of a turned cubic grid of this extent about a centre."""
    turn = torch.from_numpy(Rotation.from_euler("xz", ANGLES, degrees=True).as_matrix())
    ticks = torch.linspace(-0.5, 0.5, side, dtype=torch.float64) * extent
    grid = torch.stack(torch.meshgrid(ticks, ticks, ticks, indexing="ij"), -1).view(-1, 3)
    return grid @ turn.T + centre


def gather_cells(volume: torch.Tensor, positions: torch.Tensor):
    """Corners (N, 8, 1) of each position's cell, the place in it (N, 3), and whether it has one.

    The cell is split off in float64: what is left has all of float32's digits. A position on the
    last voxel of an axis belongs to the cell before it; one outside is moved to the border.
    """
    last = torch.tensor(volume.shape, dtype=torch.float64, device=volume.device) - 1
    held = positions.clamp(torch.zeros_like(last), last)
    cell = held.floor().minimum(last - 1)
    x, y, z = volume.stride()
    first = (cell @ last.new_tensor([x, y, z])).long()  # exact: far below 2^53
    corners = [i * x + j * y + k * z for i in (0, 1) for j in (0, 1) for k in (0, 1)]
    feats = volume.take(first[:, None] + first.new_tensor(corners))[:, :, None]
    return feats, (2 * (held - cell) - 1).float(), (held == positions).all(1)


def resample_cells(volume: torch.Tensor, positions: torch.Tensor, interpolate) -> torch.Tensor:
    """Values (N,) at positions (N, 3), 0 outside of the volume, by way of gathered cells."""
    out = volume.new_empty(len(positions))
    block = BLOCK[volume.device.type]
    for some, values in zip(positions.split(block), out.split(block), strict=True):
        feats, points, inside = gather_cells(volume, some)
        torch.mul(interpolate(feats, points)[:, 0], inside, out=values)
    return out


def normalised(volume: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As `grid_sample` takes positions: float32 (1, 1, 1, N, 3) in [-1, 1], last axis first."""
    last = torch.tensor(volume.shape, dtype=torch.float64, device=volume.device) - 1
    return (2 * positions / last - 1).flip(1).float()[None, None, None]


def resample(volume: torch.Tensor, grid: torch.Tensor, sample) -> torch.Tensor:
    """Values (N,) at the points of a normalised grid; zeros lie around the volume."""
    return sample(volume[None, None], grid, align_corners=True).flatten()


def rounding_of_grid(volume: torch.Tensor) -> float:
    """By how much a value may be off for the rounding of a float32 grid.

    A place among n voxels is 1 + x in [0, 2], times (n - 1) / 2. With e = 2^-24, x is off by e / 2
    and 1 + x by another e: together 3/4 e n voxels; rounding the product to e n makes it 7/4 e n.
    Along each axis that shifts the value by so much of the step from one voxel to the next.
    """
    padded = F.pad(volume, (1,) * 6)
    steps = (float(padded.diff(dim=axis).abs().max()) for axis in range(3))
    return 7 / 4 * 2**-24 * sum(n * step for n, step in zip(volume.shape, steps, strict=True))


def check(name: str, difference: float, allowed: float, largest: float) -> None:
    """Print the largest difference; end the program where it is more than rounding."""
    share = f"{difference / largest:.1e} of the range ({allowed / largest:.1e} allowed)"
    print(f"largest difference from {name:<27}{difference:9.2e}, {share}")
    if not difference <= allowed:
        sys.exit(f"resample_brain: the difference from {name} is more than rounding can explain")


def compare_values(volume: torch.Tensor, positions: torch.Tensor, scipy) -> np.ndarray:
    """The values at the positions, once they agree with both peers, by both ways."""
    expected, largest = scipy(), float(volume.abs().max())
    ulp, coarse = largest * torch.finfo(torch.float32).eps, rounding_of_grid(volume)
    grid = normalised(volume, positions)
    result = resample(volume, grid, loader.grid_sample)
    plain = resample(volume, grid, loader.grid_sample_reference)
    sampled, cells = result.cpu().numpy(), "of gathered cells"
    # In units of eps times the largest intensity: each axis' two weights are off by 1 at most,
    # from rounding the place in the cell, x + 1 and 1 - u; products and the sum of eight add 5.
    check("eager PyTorch", float((result - plain).abs().max()), 16 * ulp + 2 * coarse, largest)
    check("SciPy", float(np.abs(sampled - expected).max()), 8 * ulp + coarse, largest)
    by_cells = resample_cells(volume, positions, loader.trilinear_interpolation)
    plain = resample_cells(volume, positions, loader.trilinear_interpolation_reference)
    check(f"eager, {cells}", float((by_cells - plain).abs().max()), 16 * ulp, largest)
    # Beyond the last voxel zeros begin at once; in "grid-constant" and above, a voxel further.
    last = positions.new_tensor(volume.shape) - 1
    inside = ((positions >= 0) & (positions <= last)).all(1).cpu().numpy()
    off = np.abs(by_cells.cpu().numpy() - expected) * inside
    check(f"SciPy, {cells}", float(off.max()), 8 * ulp, largest)
    return sampled


def compare_speed(volume: torch.Tensor, positions: torch.Tensor, scipy) -> None:
    """Print points per second: from the volume, and by way of gathered cells."""
    grid = normalised(volume, positions)
    feats, points, _ = gather_cells(volume, positions[: BLOCK["cuda"]])
    N, device = len(positions), volume.device.type
    runs = {
        "loader.grid_sample": (N, resample, volume, grid, loader.grid_sample),
        "F.grid_sample": (N, resample, volume, grid, F.grid_sample),
    }
    peers = loader.trilinear_interpolation, loader.trilinear_interpolation_reference
    for name, interpolate in zip(("loader", "eager PyTorch"), peers, strict=True):
        runs[f"{name}, cells gathered"] = N, resample_cells, volume, positions, interpolate
        runs[f"{name}, cells that lie ready"] = len(feats), interpolate, feats, points
    runs["SciPy, one core"] = N, scipy
    devices = {name: "cpu" if name.startswith("SciPy") else device for name in runs}
    calls = {name: partial(*call) for name, (_, *call) in runs.items()}
    for name, times in common.take_turns(calls, devices).items():
        best, usual = (runs[name][0] / ms / 1e3 for ms in (min(times), statistics.median(times)))
        print(f"{name:<36}{best:10.1f} million points/s (median {usual:.1f})")


def draw(before: np.ndarray, after: np.ndarray, centre: list[float], file: Path) -> None:
    """Three slices of each volume, through the same point: the centre of the grid."""
    figure, axes = pyplot.subplots(2, 3, figsize=(9, 6.4), facecolor="black")
    style = {"cmap": "gray", "origin": "lower", "vmin": 0, "vmax": before.max()}
    half = max(before.shape) / 2
    for axis, plane, (top, bottom) in zip((2, 1, 0), PLANES, axes.T, strict=True):
        top.imshow(before.take(round(centre[axis]), axis).T, **style)
        bottom.imshow(after.take(len(after) // 2, axis).T, **style)
        x, y = (c for i, c in enumerate(centre) if i != axis)
        top.axis((x - half, x + half, y - half, y + half))  # square, as the grid's slices are
        top.set_title(f"MNI152, {plane}", color="white", fontsize=11)
        bottom.set_title(f"turned, {ZOOM:g} times as large", color="white", fontsize=11)
        top.set_axis_off()
        bottom.set_axis_off()
    figure.tight_layout()
    common.save(figure, file)


def main() -> None:
    """Resample, check, time, draw."""
    options = common.options(
        __doc__,
        "resample_brain",
        points={"type": int, "default": 140**3, "help": "at least so many"},
    )
    others = common.Others()
    volume = load_brain()
    centre = torch.tensor(ndimage.center_of_mass(volume.numpy()), dtype=torch.float64)
    side = max(2, math.ceil(round(options.points ** (1 / 3), 6)))
    positions = grid_positions(centre, max(volume.shape) / ZOOM, side)
    exact = volume.double().numpy(), positions.T.numpy()
    scipy = partial(ndimage.map_coordinates, *exact, order=1, mode="grid-constant")
    sizes = " x ".join(map(str, volume.shape))
    print(f"{len(positions):,} points from {sizes} voxels on {options.device}")
    on_device = volume.to(options.device), positions.to(options.device)
    result = compare_values(*on_device, scipy).reshape(side, side, side)
    compare_speed(*on_device, scipy)
    others.report()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:,.0f} MiB", end="")
    if options.device == "cuda":
        print(f", of the GPU {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB", end="")
    draw(volume.numpy(), result, centre.tolist(), options.out)
    print(f"\nbefore and after: {options.out}")


if __name__ == "__main__":
    main()
