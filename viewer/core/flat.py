"""The camera of a photograph: where on it each pixel of the screen looks."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

WARPS = ("none", "swirl", "lens", "ripple")
_RINGS = 4  # of a ripple, within its radius
_CLOSEST, _FARTHEST = 64.0, 1 / 64  # pixels of the screen for one of the photograph
Screen = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True)
class Warp:
    """A bend of the photograph within a circle; `centre` and `radius` in its pixels."""

    kind: str = "none"
    centre: tuple[float, float] = (0.0, 0.0)
    radius: float = 1.0
    strength: float = 0.0

    @property
    def is_still(self) -> bool:
        """True if nothing moves."""
        return self.kind == "none" or self.strength == 0

    def bend(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return where points of the photograph (x, y) look instead."""
        dx, dy = x - self.centre[0], y - self.centre[1]
        r = torch.hypot(dx, dy).div_(self.radius)
        fade = (1 - r).clamp_(min=0).square_()  # 1 in the centre, 0 from the circle on, smooth
        if self.kind == "swirl":
            turn = fade.mul_(self.strength * math.pi)
            cos, sin = turn.cos(), turn.sin()
            moved = dx * cos - dy * sin, dx * sin + dy * cos
        else:
            if self.kind == "lens":
                scale = 1 - self.strength * fade.clamp_(max=1)
            else:
                scale = 1 + self.strength * 0.25 * fade * torch.sin(2 * math.pi * _RINGS * r)
            moved = dx * scale, dy * scale
        return moved[0].add_(self.centre[0]), moved[1].add_(self.centre[1])


@dataclass(frozen=True)
class Flat:
    """What of a photograph is on screen, and how large.

    Attributes:
        size: width and height of the photograph in pixels.
        centre: the point of it in the middle of the screen.
        zoom: pixels of the screen for one of the photograph.
        angle: by which it is turned clockwise, in radians.
        warp: how it is bent.
    """

    size: Screen
    centre: tuple[float, float]
    zoom: float
    angle: float = 0.0
    warp: Warp = Warp()

    @classmethod
    def fit(cls, size: Screen, screen: Screen) -> "Flat":
        """Return the camera that shows all of it."""
        zoom = min(screen[0] / size[0], screen[1] / size[1])
        middle = size[0] / 2, size[1] / 2
        return cls(size, middle, zoom, warp=Warp(centre=middle, radius=min(size) / 2))

    def to_photo(self, x: float, y: float, screen: Screen) -> tuple[float, float]:
        """Return the point of the photograph at a point of the screen, but for the warp."""
        (ax, bx), (ay, by) = self._steps()
        dx, dy = x - screen[0] / 2, y - screen[1] / 2
        return self.centre[0] + ax * dx + bx * dy, self.centre[1] + ay * dx + by * dy

    def to_screen(self, x: float, y: float, screen: Screen) -> tuple[float, float]:
        """Return where on the screen a point of the photograph is, but for the warp."""
        dx, dy = x - self.centre[0], y - self.centre[1]
        cos, sin = math.cos(self.angle) * self.zoom, math.sin(self.angle) * self.zoom
        return screen[0] / 2 + cos * dx - sin * dy, screen[1] / 2 + sin * dx + cos * dy

    def zoomed(self, factor: float, x: float, y: float, screen: Screen) -> "Flat":
        """Return it closer by a factor; what is at this point of the screen stays there."""
        zoom = min(_CLOSEST, max(_FARTHEST, self.zoom * factor))
        held = self.to_photo(x, y, screen)
        share = self.zoom / zoom
        cx, cy = (h + (c - h) * share for h, c in zip(held, self.centre, strict=True))
        return replace(self, zoom=zoom, centre=(cx, cy))

    def panned(self, dx: float, dy: float) -> "Flat":
        """Return it moved with the mouse."""
        (ax, bx), (ay, by) = self._steps()
        return replace(
            self, centre=(self.centre[0] - ax * dx - bx * dy, self.centre[1] - ay * dx - by * dy)
        )

    def turned(self, radians: float) -> "Flat":
        """Return it turned clockwise about the middle of the screen."""
        return replace(self, angle=math.remainder(self.angle + radians, 2 * math.pi))

    def warped(self, **changes: Any) -> "Flat":
        """Return it with another warp."""
        return replace(self, warp=replace(self.warp, **changes))

    def level(self, levels: int) -> int:
        """Return which of the photograph's halves has about the pixels of the screen."""
        return min(levels - 1, max(0, math.floor(math.log2(max(1.0, 1 / self.zoom)) + 0.01)))

    def grid(self, screen: Screen, rows: slice, device: str) -> Tensor:
        """Return where rows of the screen look, (1, rows, width, 2) as `grid_sample` takes it."""
        (ax, bx), (ay, by) = self._steps()
        make = {"device": device, "dtype": torch.float64}
        across = torch.arange(screen[0], **make) + 0.5 - screen[0] / 2
        down = torch.arange(rows.start, rows.stop, **make) + 0.5 - screen[1] / 2
        scale = torch.tensor([2 / n for n in self.size], **make)
        along = torch.stack([ax * across, ay * across], -1)
        below = torch.stack([bx * down + self.centre[0], by * down + self.centre[1]], -1)
        if self.warp.is_still:
            along, below = (along * scale).float(), (below * scale - 1).float()
            return (below[:, None] + along)[None]
        points = below.float()[:, None] + along.float()
        x, y = self.warp.bend(points[..., 0], points[..., 1])
        sx, sy = scale.tolist()
        return torch.stack([x.mul_(sx).sub_(1), y.mul_(sy).sub_(1)], -1)[None]

    def _steps(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return by how much x and y of the photograph change a pixel across, and one down."""
        cos, sin = math.cos(self.angle) / self.zoom, math.sin(self.angle) / self.zoom
        return (cos, sin), (-sin, cos)
