"""The camera of a volume: three planes through one point, and where their pixels look.

The world is in millimetres, x to the patient's right, y to the front, z upwards (RAS).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .flat import Screen
from .sources import Volume

PLANES = ("axial", "coronal", "sagittal")
# Across the screen, up, and out of the plane, in the world as it lies.
_AXES = {
    "axial": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "coronal": ((1, 0, 0), (0, 0, 1), (0, 1, 0)),
    "sagittal": ((0, 1, 0), (0, 0, 1), (1, 0, 0)),
}
_LETTERS = ("RL", "AP", "SI")
_OBLIQUE = math.sin(math.radians(20))  # from here on a letter more says where a direction points
_CLOSEST, _FARTHEST = 40.0, 0.05  # pixels for a millimetre
_FILLED = 0.96  # of a plane's shorter side
Point = tuple[float, float, float]
_UNTURNED = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def _point(values: np.ndarray) -> Point:
    x, y, z = (float(v) for v in values)
    return x, y, z


@dataclass(frozen=True)
class Planes:
    """What of a volume is on screen.

    Attributes:
        focus: the point that all three planes go through.
        centre: the point in the middle of each plane, moved into it.
        zoom: pixels of the screen for a millimetre.
        turn: the rotation of the planes, whose columns are their axes in the world.
        mirrored: True if the patient's right is on the left, as radiologists look.
        time: which of the volumes.
    """

    focus: Point
    centre: Point
    zoom: float
    turn: tuple[Point, Point, Point] = _UNTURNED
    mirrored: bool = False
    time: int = 0

    @classmethod
    def fit(cls, volume: Volume, screens: dict[str, Screen]) -> "Planes":
        """Return the camera that shows all of it, through its middle."""
        corners = volume.corners()
        middle, extent = corners.mean(0), np.ptp(corners, axis=0)
        zooms = []
        for plane, (width, height) in screens.items():
            across, up = (float(np.abs(axis) @ extent) for axis in np.array(_AXES[plane][:2]))
            zooms.append(min(width / max(across, 1e-6), height / max(up, 1e-6)))
        return cls(_point(middle), _point(middle), _FILLED * min(zooms))

    def axes(self, plane: str) -> np.ndarray:
        """Return the unit vectors across the screen, up, and out of it."""
        across, up, out = np.array(_AXES[plane], dtype=np.float64)
        if self.mirrored and plane != "sagittal":
            across = -across
        return np.array([across, up, out]) @ np.array(self.turn).T

    def to_world(self, plane: str, x: float, y: float, screen: Screen) -> np.ndarray:
        """Return the point of the world at a point of a plane's screen."""
        across, up, _ = self.axes(plane)
        dx, dy = (x - screen[0] / 2) / self.zoom, (screen[1] / 2 - y) / self.zoom
        return self._middle(plane) + dx * across + dy * up

    def to_screen(self, plane: str, point: np.ndarray, screen: Screen) -> tuple[float, float]:
        """Return where on a plane's screen a point of the world is seen."""
        across, up, _ = self.axes(plane)
        d = (np.asarray(point) - self._middle(plane)) * self.zoom
        return screen[0] / 2 + float(d @ across), screen[1] / 2 - float(d @ up)

    def focused(self, plane: str, x: float, y: float, screen: Screen) -> "Planes":
        """Return it with all planes through a point of this one's screen."""
        return replace(self, focus=_point(self.to_world(plane, x, y, screen)))

    def scrolled(self, plane: str, millimetres: float) -> "Planes":
        """Return it with a plane moved along its normal."""
        out = self.axes(plane)[2]
        return replace(self, focus=_point(np.array(self.focus) + millimetres * out))

    def panned(self, plane: str, dx: float, dy: float) -> "Planes":
        """Return it moved with the mouse."""
        across, up, _ = self.axes(plane)
        moved = np.array(self.centre) + (up * dy - across * dx) / self.zoom
        return replace(self, centre=_point(moved))

    def zoomed(self, plane: str, factor: float, x: float, y: float, screen: Screen) -> "Planes":
        """Return it closer by a factor; what is at this point of the plane's screen stays there."""
        zoom = min(_CLOSEST, max(_FARTHEST, self.zoom * factor))
        held = self.to_world(plane, x, y, screen)
        away = (held - self._middle(plane)) * (1 - self.zoom / zoom)
        return replace(self, zoom=zoom, centre=_point(np.array(self.centre) + away))

    def turned(self, plane: str, radians: float) -> "Planes":
        """Return it with what a plane shows turned clockwise, about the focus, by all planes."""
        across, up, _ = self.axes(plane)
        x, y, z = np.cross(across, up)  # towards who looks
        cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
        spin = np.eye(3) + math.sin(radians) * cross + (1 - math.cos(radians)) * cross @ cross
        u, _, v = np.linalg.svd(spin @ np.array(self.turn))  # a rotation for good
        now = u @ v
        first, second, third = (_point(row) for row in now)
        centre = np.array(self.focus) + spin @ (np.array(self.centre) - np.array(self.focus))
        return replace(self, turn=(first, second, third), centre=_point(centre))

    def labels(self, plane: str) -> tuple[str, str, str, str]:
        """Return where left, right, top and bottom of a plane's screen point, in letters."""
        across, up, _ = self.axes(plane)
        left, right, top, bottom = map(direction, (-across, across, up, -up))
        return left, right, top, bottom

    def voxel(self, volume: Volume, point: np.ndarray) -> np.ndarray:
        """Return the place of a point of the world among the voxels."""
        inverse = np.linalg.inv(volume.affine)
        return inverse[:3, :3] @ np.asarray(point) + inverse[:3, 3]

    def grid(self, plane: str, volume: Volume, screen: Screen, rows: slice, device: str) -> Tensor:
        """Return where rows of a plane's screen look, (1, 1, rows, width, 3) for `grid_sample`.

        For `align_corners=True`: -1 and 1 are the centres of the outermost voxels.
        """
        across, up, _ = self.axes(plane)
        inverse = np.linalg.inv(volume.affine)[:3, :3]
        last = np.maximum(np.array(volume.size, dtype=np.float64) - 1, 1e-9)
        right, down = (inverse @ axis / self.zoom * 2 / last for axis in (across, -up))
        middle = 2 * self.voxel(volume, self._middle(plane)) / last - 1
        steps = np.arange(screen[0]) + 0.5 - screen[0] / 2
        lines = np.arange(rows.start, rows.stop) + 0.5 - screen[1] / 2
        along = torch.from_numpy((steps[:, None] * right).astype(np.float32)).to(device)
        below = torch.from_numpy((lines[:, None] * down + middle).astype(np.float32)).to(device)
        return (below[:, None] + along)[None, None]

    def _middle(self, plane: str) -> np.ndarray:
        """Return the point in the middle of a plane's screen."""
        out, centre = self.axes(plane)[2], np.array(self.centre)
        return centre + ((np.array(self.focus) - centre) @ out) * out


def direction(vector: np.ndarray) -> str:
    """Return where a unit vector of the world points, in letters, the main one first: `R`, `RA`."""
    order = sorted(range(3), key=lambda i: -abs(vector[i]))
    letters = [_LETTERS[i][int(vector[i] < 0)] for i in order if abs(vector[i]) > _OBLIQUE]
    return "".join(letters)
