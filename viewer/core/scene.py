"""A picture of what is open: sampled, sent through an operator and a colour table, and timed."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import loader

from . import bands
from .flat import Flat, Screen
from .operators import Operator
from .planes import Planes
from .sources import Photo, Source, Volume
from .tables import Table, inferno

INTERPOLATIONS = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}
Camera = Flat | Planes


class Stopped(Exception):
    """Nobody waits for the picture any more."""


@dataclass(frozen=True)
class Look:
    """How pictures are made of samples.

    Attributes:
        interpolation: a key of INTERPOLATIONS.
        table: the colours' table, sent through by `method`.
        operator: between sampling and colours.
        window: values of a volume that become black and white.
        device: where it is computed.
    """

    interpolation: str = "linear"
    table: Table | None = None
    method: str = "tetrahedral"
    operator: Operator | None = None
    window: tuple[float, float] = (0.0, 1.0)
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Difference:
    """How far a picture is from the reference's.

    Attributes:
        reference: the reference's picture, (H, W, 4) bytes.
        picture: the difference of each pixel as a share of the largest, coloured, likewise.
        largest: over all channels, in units of white; `at` is its pixel (x, y).
        milliseconds: that the reference took.
    """

    reference: Tensor
    picture: Tensor
    largest: float
    at: tuple[int, int]
    milliseconds: float


@dataclass(frozen=True, eq=False)
class Pane:
    """One picture: (H, W, 4) bytes, blue, green, red, 255, as screens have them.

    `values` (H, W, 3) is what it was made of, before rounding, 1 being white.
    """

    name: str
    picture: Tensor
    values: Tensor
    difference: Difference | None = None


@dataclass(frozen=True, eq=False)
class Frame:
    """All panes of one look at one time, and what they took."""

    camera: Camera
    look: Look
    panes: dict[str, Pane]
    milliseconds: float
    sampling: float  # milliseconds of it
    points: int

    @property
    def points_per_second(self) -> float:
        """How many points `grid_sample` gave values for, a second."""
        return 1e3 * self.points / self.sampling if self.sampling else 0.0

    @property
    def reference(self) -> float:
        """Milliseconds of the reference for the same, 0 where it was not run."""
        return sum(p.difference.milliseconds for p in self.panes.values() if p.difference)

    @property
    def largest(self) -> float:
        """The largest difference from the reference, in units of white; NaN counts as largest."""
        found = [p.difference.largest for p in self.panes.values() if p.difference]
        return max(found, key=lambda x: math.inf if math.isnan(x) else x, default=0.0)


@dataclass
class Scene:
    """A photograph or a volume, on the devices where it was needed."""

    source: Source
    _placed: dict[str, Source] = field(default_factory=dict)

    def render(
        self,
        camera: Camera,
        look: Look,
        screens: dict[str, Screen],
        check: Callable[[], None] = lambda: None,
    ) -> Frame:
        """Return the pictures of screens by name ("photo", or a volume's planes).

        `check` is called between parts, and may raise to end it.
        """
        begun = time.perf_counter()
        clock, panes = _Clock(look.device), {}
        for name, screen in screens.items():
            values = self._values(name, camera, look, screen, clock, check, reference=False)
            panes[name] = Pane(name, _bytes(values), values)
        points = sum(width * height for width, height in screens.values())
        whole = (time.perf_counter() - begun) * 1e3
        return Frame(camera, look, panes, whole, clock.milliseconds, points)

    def compare(self, frame: Frame, check: Callable[[], None] = lambda: None) -> Frame:
        """Return a frame with the reference beside it: the same in plain PyTorch."""
        panes = {}
        for name, pane in frame.panes.items():
            begun = time.perf_counter()
            screen = pane.values.shape[1], pane.values.shape[0]
            clock = _Clock(frame.look.device)
            theirs = self._values(
                name, frame.camera, frame.look, screen, clock, check, reference=True
            )
            _bytes(theirs)  # as ours were
            taken = (time.perf_counter() - begun) * 1e3
            panes[name] = Pane(
                name, pane.picture, pane.values, difference(pane.values, theirs, taken)
            )
        return Frame(
            frame.camera, frame.look, panes, frame.milliseconds, frame.sampling, frame.points
        )

    def _on(self, device: str) -> Source:
        if device not in self._placed:
            self._placed[device] = self.source.to(device)
        return self._placed[device]

    def _values(
        self,
        name: str,
        camera: Camera,
        look: Look,
        screen: Screen,
        clock: "_Clock",
        check: Callable[[], None],
        reference: bool,
    ) -> Tensor:
        """Return the colours (height, width, 3) of a screen; an operator sees all of it at once."""
        source, (width, height) = self._on(look.device), screen
        colours = torch.empty(height, width, 3, device=look.device)
        channels = 3 if isinstance(source, Photo) else 1
        whole = torch.empty(channels, height, width, device=look.device) if look.operator else None
        parts = bands.split(height, width)

        def sample(rows: slice) -> None:
            check()
            with clock:
                part = _sample(source, name, camera, look, screen, rows, reference)
            if whole is None:
                colours[rows] = _coloured(part, look, reference)
            else:
                whole[:, rows] = part

        clock.at_once = bands.each(parts, sample, look.device)
        if look.operator and whole is not None:
            made = look.operator(whole, reference).to(whole.dtype)

            def colour(rows: slice) -> None:
                check()
                colours[rows] = _coloured(made[:, rows], look, reference)

            bands.each(parts, colour, look.device)
        return colours


class _Clock:
    """Milliseconds of what happens within it, by threads at once; on a GPU until it is done."""

    def __init__(self, device: str):
        self.at_once, self._sum, self._gpu = 1, 0.0, device.startswith("cuda")
        self._thread, self._lock = threading.local(), threading.Lock()

    @property
    def milliseconds(self) -> float:
        """Of each thread."""
        return self._sum / self.at_once

    def __enter__(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()
        self._thread.begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._gpu:
            torch.cuda.synchronize()
        taken = time.perf_counter() - self._thread.begun
        with self._lock:
            self._sum += taken * 1e3


def _sample(
    source: Source,
    name: str,
    camera: Camera,
    look: Look,
    screen: Screen,
    rows: slice,
    reference: bool,
) -> Tensor:
    """Return what lies where these rows look: (3, rows, width), of a volume (1, rows, width)."""
    sample = loader.grid_sample_reference if reference else loader.grid_sample
    mode = INTERPOLATIONS[look.interpolation]
    if isinstance(source, Photo) and isinstance(camera, Flat):
        level = 0 if mode == "nearest" else camera.level(len(source.levels))
        grid = camera.grid(screen, rows, look.device)
        return sample(source.levels[level], grid, mode, align_corners=False)[0]
    assert isinstance(source, Volume) and isinstance(camera, Planes)
    grid = camera.grid(name, source, screen, rows, look.device)
    low, high = look.window
    found = sample(source.values[camera.time], grid, mode, align_corners=True)[0, :, 0]
    return found.sub_(low).mul_(1 / max(high - low, 1e-12)).clamp_(0, 1)


def _coloured(part: Tensor, look: Look, reference: bool) -> Tensor:
    """Return the colours (rows, width, 3) of samples (1 or 3, rows, width)."""
    part = part.expand(3, -1, -1).movedim(0, -1)
    if look.table is None:
        return part
    apply = loader.apply_lut3d_reference if reference else loader.apply_lut3d
    return apply(part, look.table.entries.to(part.device), look.method)


def _bytes(colours: Tensor) -> Tensor:
    """Return colours (H, W, 3), 1 being white, as (H, W, 4) bytes: blue, green, red, 255."""
    out = torch.empty(*colours.shape[:2], 4, dtype=torch.uint8, device=colours.device)

    def convert(rows: slice) -> None:
        levels = colours[rows].mul(255).add_(0.5).clamp_(0, 255).nan_to_num_(0)
        into = out[rows]
        into[..., 3] = 255
        for channel in range(3):
            into[..., 2 - channel] = levels[..., channel]

    bands.each(bands.split(*colours.shape[:2]), convert, colours.device.type)
    return out.cpu()


def difference(ours: Tensor, theirs: Tensor, milliseconds: float = 0.0) -> Difference:
    """Return how far colours (H, W, 3) are from the reference's; a NaN in one alone is infinite."""
    off = (ours - theirs).abs().amax(-1)
    lone = ours.isnan().ne(theirs.isnan()).any(-1)
    off = torch.where(lone, math.inf, off.nan_to_num(0.0, posinf=math.inf))
    largest, place = off.flatten().max(0)
    y, x = divmod(int(place), off.shape[1])
    scale = float(largest)
    shares = off / scale if 0 < scale < math.inf else off.isinf().to(off.dtype)
    picture = _bytes(inferno(shares))
    return Difference(_bytes(theirs), picture, scale, (x, y), milliseconds)
