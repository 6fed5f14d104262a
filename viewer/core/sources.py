"""Photographs and volumes from files, read with progress and until somebody cancels."""

import gzip
import importlib.util
import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PHOTOS = (".png", ".jpg", ".jpeg", ".tif", ".tiff")
VOLUMES = (".nii", ".nii.gz")
_TEMPLATE = "datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
_PIECE = 1 << 16  # bytes read between two looks at whether it was cancelled
_READ = 0.8  # of the progress: reading and decoding; the rest is what follows
_COLOURED = (128, 2304)  # NIfTI's codes of voxels that are colours
_COLOURS = (3, 4)  # channels of a TIFF that is a photograph
_SMALLEST = 64  # pixels, of the coarsest copy of a photograph

Progress = Callable[[float], None]


class Cancelled(Exception):
    """Nobody wants the file any more."""


class CannotOpen(ValueError):
    """A file that is not shown, and why, in one sentence."""


@dataclass(frozen=True, eq=False)
class Photo:
    """A photograph; `levels` are it and its halves, each (1, 3, H, W) in [0, 1], channels last."""

    title: str
    levels: tuple[Tensor, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        H, W = self.levels[0].shape[2:]
        return W, H

    def describe(self) -> str:
        """Return its sizes in words."""
        return "{} x {} pixels".format(*self.size)

    def to(self, device: str) -> "Photo":
        """Return the same on a device."""
        return Photo(self.title, tuple(level.to(device) for level in self.levels))


@dataclass(frozen=True, eq=False)
class Volume:
    """A volume; several where it changes with time.

    Attributes:
        values: (T, 1, 1, Z, Y, X) float32, the least of them 0, so that black lies around it.
        least: what 0 stands for.
        affine: (4, 4), from voxels (x, y, z) to millimetres to the right, to the front, upwards.
        usual: the range of values that holds nearly all.
    """

    title: str
    values: Tensor
    least: float
    affine: np.ndarray
    usual: tuple[float, float]

    @property
    def size(self) -> tuple[int, int, int]:
        """Voxels along x, y and z."""
        Z, Y, X = self.values.shape[3:]
        return X, Y, Z

    @property
    def spacing(self) -> tuple[float, ...]:
        """Millimetres from one voxel to the next, along x, y and z."""
        return tuple(float(n) for n in np.linalg.norm(self.affine[:3, :3], axis=0))

    def corners(self) -> np.ndarray:
        """Where its eight outermost voxels lie, (8, 3) in millimetres."""
        ends = np.array(np.meshgrid(*((0, n - 1) for n in self.size))).reshape(3, -1)
        return (self.affine[:3, :3] @ ends).T + self.affine[:3, 3]

    def value(self, voxel: np.ndarray, time: int = 0) -> float:
        """Return what the file has for a voxel (x, y, z)."""
        x, y, z = (int(v) for v in voxel)
        return float(self.values[time, 0, 0, z, y, x]) + self.least

    def describe(self) -> str:
        """Return its sizes in words."""
        sizes, steps = (" x ".join(f"{n:.4g}" for n in way) for way in (self.size, self.spacing))
        times = f", {len(self.values)} times" if len(self.values) > 1 else ""
        return f"{sizes} voxels of {steps} mm{times}"

    def to(self, device: str) -> "Volume":
        """Return the same on a device."""
        return Volume(self.title, self.values.to(device), self.least, self.affine, self.usual)


Source = Photo | Volume


def brain() -> Path | None:
    """Return the MNI152 template in nilearn's package, or None where that is not installed."""
    package = importlib.util.find_spec("nilearn")
    file = Path(package.origin).parent / _TEMPLATE if package and package.origin else None
    return file if file and file.exists() else None


def open_file(path: Path, progress: Progress = lambda share: None) -> Source:
    """Read a photograph or a volume.

    Args:
        path: a file whose name ends in one of PHOTOS or VOLUMES; a TIFF of many pages is a volume.
        progress: called again and again with the share that is done, in [0, 1]; whatever it raises
            ends the reading, such as Cancelled.

    Raises: CannotOpen, with one sentence on what is wrong.
    """
    name = path.name.lower()
    readers = {VOLUMES: _nifti, (".tif", ".tiff"): _tiff, PHOTOS: _photo}
    reader = next((read for ends, read in readers.items() if name.endswith(ends)), None)
    if reader is None:
        ends = ", ".join((*PHOTOS, *VOLUMES))
        raise CannotOpen(f"{path.name}: a file to view ends in one of {ends}")
    try:
        source = reader(path, progress)
    except (CannotOpen, Cancelled):
        raise
    except FileNotFoundError:
        raise CannotOpen(f"{path}: there is no such file") from None
    except MemoryError:
        raise CannotOpen(f"{path.name}: it is larger than the memory that is free") from None
    except Exception as error:  # whatever a reader meets in a damaged file
        text = str(error).split("\n")[0] or type(error).__name__
        raise CannotOpen(f"{path.name}: it is damaged, or no {_kind(name)}: {text}") from error
    progress(1.0)
    return source


def _kind(name: str) -> str:
    return "NIfTI volume" if name.endswith(VOLUMES) else "image of the kind that its name says"


class _Counted(io.RawIOBase):
    """A file that tells how much of it was read."""

    def __init__(self, file: io.FileIO, progress: Progress):
        self._file, self._progress = file, progress
        self._size = max(1, os.fstat(file.fileno()).st_size)

    def readinto(self, buffer: Any) -> int:
        """Read at most a piece, as any raw file."""
        count = self._file.readinto(memoryview(buffer)[:_PIECE])
        self._progress(_READ * min(1.0, self._file.tell() / self._size))
        return count

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of any file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As of any file."""
        return self._file.tell()

    def readable(self) -> bool:
        """As of any file."""
        return True

    def seekable(self) -> bool:
        """As of any file."""
        return True

    def close(self) -> None:
        """As of any file."""
        self._file.close()
        super().close()


def _opened(path: Path, progress: Progress) -> io.BufferedReader:
    """Open a file that tells `progress` how much of it was read."""
    return io.BufferedReader(_Counted(io.FileIO(path), progress), _PIECE)


def _photo(path: Path, progress: Progress) -> Photo:
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # `_check_memory` is the limit
    with _opened(path, progress) as file:
        try:
            image: Image.Image = Image.open(file)
        except UnidentifiedImageError:
            raise CannotOpen(f"{path.name}: it is damaged, or no {_kind('')}") from None
        _check_memory(path, image.width * image.height * 3 * 4 * 2)
        image.load()
    progress(_READ)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        pixels = np.asarray(image).astype(np.float32)
        return _made(path, pixels / (65535 if image.mode.startswith("I") else 1), progress)
    if "A" in image.getbands() or "transparency" in image.info:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image.convert("RGBA"))
    return _made(path, np.asarray(image.convert("RGB")), progress)


def _tiff(path: Path, progress: Progress) -> Source:
    import tifffile

    with _opened(path, progress) as file:
        try:
            with tifffile.TiffFile(file) as pages:
                series = pages.series[0]
                _check_memory(path, math.prod(series.shape) * 4 * 2)
                photo = len(series.shape) == 2 or series.shape[-1] in _COLOURS
                planar = len(series.shape) == 3 and series.axes.startswith("S")
                pixels = series.asarray()
        except (tifffile.TiffFileError, IndexError) as error:
            raise CannotOpen(f"{path.name}: it is damaged, or no TIFF: {error}") from None
        except ValueError:  # a compression that it leaves to others
            return _photo(path, progress)
    progress(_READ)
    if planar:
        pixels, photo = np.moveaxis(pixels, 0, -1), True
    if photo and pixels.ndim <= 3:
        return _made(path, pixels, progress)
    if pixels.ndim != 3:
        raise CannotOpen(
            f"{path.name}: a TIFF must hold an image or a stack of grey ones, got {pixels.shape}"
        )
    return _volume(path, pixels[None].astype(np.float32), np.diag([1.0, -1.0, -1.0, 1.0]), progress)


def _made(path: Path, pixels: np.ndarray, progress: Progress) -> Photo:
    """Return the photograph of pixels (H, W) or (H, W, 3 or more)."""
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, 2)
    full = np.iinfo(pixels.dtype).max if pixels.dtype.kind in "ui" else 1
    if pixels.dtype.kind == "b":
        full = 1
    levels = [torch.from_numpy(np.ascontiguousarray(pixels[..., :3], np.float32))]
    levels = [levels[0].div_(full).permute(2, 0, 1)[None]]  # (1, 3, H, W), channels last
    progress((1 + _READ) / 2)
    while min(levels[-1].shape[2:]) >= 2 * _SMALLEST:
        half = tuple((n + 1) // 2 for n in levels[-1].shape[2:])
        smaller = F.interpolate(levels[-1], half, mode="area")
        levels.append(smaller.contiguous(memory_format=torch.channels_last))
    return Photo(path.name, tuple(levels))


def _nifti(path: Path, progress: Progress) -> Volume:
    import nibabel
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError

    with _opened(path, progress) as raw:
        packed = raw.peek(2)[:2] == b"\x1f\x8b"
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        second = int.from_bytes(file.peek(4)[:4], "little") in (540, 0x1C020000)
        form = nibabel.Nifti2Image if second else nibabel.Nifti1Image
        try:
            image = form.from_stream(file)
            _check_memory(path, math.prod(image.shape) * 4 * 2)
            if image.header["datatype"] in _COLOURED:
                raise CannotOpen(f"{path.name}: its voxels are colours; one number each is needed")
            values = np.asarray(image.dataobj, dtype=np.float32)
        except (HeaderDataError, ImageFileError) as error:
            raise CannotOpen(f"{path.name}: it is damaged, or no NIfTI volume: {error}") from None
    if values.ndim not in (3, 4) or 0 in values.shape:
        raise CannotOpen(
            f"{path.name}: a volume must have three dimensions, or time as a fourth, "
            f"got {values.shape}"
        )
    affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        raise CannotOpen(f"{path.name}: its affine has no inverse, so no voxel has a place")
    # NIfTI keeps the first axis fastest: (T, Z, Y, X) is the order in memory.
    return _volume(path, values.T.reshape(-1, *values.shape[2::-1]), affine, progress)


def _volume(path: Path, values: np.ndarray, affine: np.ndarray, progress: Progress) -> Volume:
    """Return the volume of values (T, Z, Y, X)."""
    np.nan_to_num(values, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    least = float(values.min())
    values -= least
    progress((1 + _READ) / 2)
    some = values[0].ravel()[:: max(1, values[0].size // 1_000_000)]
    inside = some[some > 0.02 * some.max()]
    low, high = (
        (float(np.percentile(some, 2)), float(np.percentile(inside, 99.7)))
        if len(inside)
        else (0.0, 1.0)
    )
    usual = (low, high if high > low else low + 1)
    cells = torch.from_numpy(np.ascontiguousarray(values))[:, None, None]
    return Volume(path.name, cells, least, affine, usual)


def _check_memory(path: Path, needed: int) -> None:
    """Raise CannotOpen where a file takes more than the memory that is free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    if needed > free:
        raise CannotOpen(
            f"{path.name}: it takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        )
