"""Resample a real brain onto a rotated and zoomed grid: the main job, checked and timed.

The MNI152 T1 template (197 x 233 x 189 voxels of 1 mm), which the nilearn package holds, is sampled
at some 2.7 million positions. Each lies in a cell of eight voxels: the cell's corners are gathered
to (N, 8, 1), and `loader.trilinear_interpolation` does the rest. The result is held against the
plain PyTorch reference and against scipy.ndimage.map_coordinates, and drawn before and after.

    python examples/resample_brain.py [--device cuda] [--side 140] [--out picture.png]
"""

import argparse
import importlib.util
import math
import resource
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import matplotlib
import nibabel
import numpy as np
import torch
from scipy import ndimage

import loader

ANGLES = (25.0, 35.0)  # degrees, about the left-right and then the head-foot axis
ZOOM = 1.12
TEMPLATE = "datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"


def load_brain() -> torch.Tensor:
    """The template as float32 (197, 233, 189): axes to the right, to the front, upwards."""
    package = importlib.util.find_spec("nilearn")  # found, not imported: that takes seconds
    file = Path(package.submodule_search_locations[0]) / TEMPLATE if package else None
    if file is None or not file.exists():
        sys.exit("The MNI152 template comes with nilearn 0.12: pip install 'nilearn==0.12.*'")
    # NIfTI keeps the first axis fastest; the cells below are gathered from rows of the last.
    return torch.from_numpy(np.ascontiguousarray(nibabel.load(file).dataobj, dtype=np.float32))


def grid_positions(shape: tuple[int, ...], side: int) -> torch.Tensor:
    """Positions (side^3, 3), in voxels, of a grid about the volume's centre."""
    a, b = (math.radians(angle) for angle in ANGLES)
    about_x = [[1, 0, 0], [0, math.cos(a), -math.sin(a)], [0, math.sin(a), math.cos(a)]]
    about_z = [[math.cos(b), -math.sin(b), 0], [math.sin(b), math.cos(b), 0], [0, 0, 1]]
    turn = torch.tensor(about_z, dtype=torch.float64) @ torch.tensor(about_x, dtype=torch.float64)
    ticks = torch.linspace(-0.5, 0.5, side, dtype=torch.float64) * max(shape) / ZOOM
    grid = torch.stack(torch.meshgrid(ticks, ticks, ticks, indexing="ij"), -1).view(-1, 3)
    return grid @ turn.T + (torch.tensor(shape, dtype=torch.float64) - 1) / 2


def gather_cells(volume: torch.Tensor, positions: torch.Tensor):
    """Corners (N, 8, 1) of each position's cell, the place in the cell (N, 3), and if it exists.

    The cell is split off in float64: what is left has all of float32's digits.
    """
    last = torch.tensor(volume.shape, device=positions.device) - 1
    inside = ((positions >= 0) & (positions <= last)).all(1)
    cell = torch.minimum(positions.floor().long().clamp(min=0), last - 1)
    points = (2 * (positions - cell) - 1).float()
    steps = torch.tensor(volume.stride(), device=positions.device)
    corners = torch.tensor([[k >> 2, k >> 1 & 1, k & 1] for k in range(8)], device=positions.device)
    index = (cell * steps).sum(1, keepdim=True) + (corners * steps).sum(1)
    return volume.flatten()[index][:, :, None], points, inside


def resample(volume, positions, interpolate):
    """Values at `positions`, 0 outside of the volume."""
    feats, points, inside = gather_cells(volume, positions)
    return torch.where(inside, interpolate(feats, points)[:, 0], 0)


def seconds(run, repeats=7) -> float:
    """Median time of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def check(name: str, difference: float, allowed: float, span: float) -> None:
    """Print the largest difference; end the program where it is more than rounding."""
    print(
        f"largest difference from {name:<28}{difference:9.2e}  ({difference / span:.1e} of range)"
    )
    if not difference <= allowed:
        sys.exit(f"that is more than rounding can explain ({allowed:.2e})")


def draw(before: np.ndarray, after: np.ndarray, file: Path) -> None:
    """Three slices through the middle of each volume."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(9, 6.4), facecolor="black")
    for row, (volume, name) in enumerate(((before, "MNI152, 1 mm"), (after, "resampled"))):
        for axis, plane in enumerate(("sagittal", "coronal", "axial")):
            image = volume.take(volume.shape[axis] // 2, axis).T
            axes[row, axis].imshow(image, cmap="gray", origin="lower", vmin=0, vmax=before.max())
            axes[row, axis].set_title(f"{name}, {plane}", color="white", fontsize=10)
            axes[row, axis].set_axis_off()
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Resample, check, time, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--side", type=int, default=140, help="points along an edge of the grid")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "resample_brain.png")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU here")

    volume = load_brain().to(options.device)
    positions = grid_positions(volume.shape, options.side).to(options.device)
    N, span = len(positions), float(volume.max() - volume.min())
    feats, points, _ = gather_cells(volume, positions)
    print(f"{N:,} points from {' x '.join(map(str, volume.shape))} voxels on {options.device}")

    ours = loader.trilinear_interpolation
    reference = loader.trilinear_interpolation_reference
    result = resample(volume, positions, ours)
    exact = volume.cpu().double().numpy(), positions.cpu().numpy().T
    start = time.perf_counter()
    scipy_result = ndimage.map_coordinates(*exact, order=1, mode="constant", cval=0.0)
    scipy_time = time.perf_counter() - start
    # Eight terms of up to four rounded factors, and the place in the cell rounded once per axis.
    allowed = 16 * torch.finfo(torch.float32).eps * span
    plain = resample(volume, positions, reference)
    check("the PyTorch reference", float((result - plain).abs().max()), allowed, span)
    off = np.abs(result.cpu().numpy() - scipy_result).max()
    check("scipy.ndimage.map_coordinates", float(off), allowed, span)

    rows = {
        "loader, interpolation alone": seconds(lambda: ours(feats, points)),
        "eager PyTorch, likewise": seconds(lambda: reference(feats, points)),
        "loader, with gathering": seconds(lambda: resample(volume, positions, ours), 3),
        "eager PyTorch, likewise ": seconds(lambda: resample(volume, positions, reference), 3),
        "SciPy, one core": scipy_time,
    }
    for name, time_taken in rows.items():
        print(f"{name:<30}{N / time_taken / 1e6:10.1f} million points/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:,.0f} MiB", end="")
    if options.device == "cuda":
        print(f", of the GPU {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB", end="")
    print()

    side = options.side
    draw(volume.cpu().numpy(), result.cpu().numpy().reshape(side, side, side), options.out)
    print(f"before and after: {options.out}")


if __name__ == "__main__":
    main()
