"""A volume's three planes, and what mouse and keys do to them."""

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
from PySide6.QtCore import QPointF, QSize
from PySide6.QtGui import QPainter
from PySide6.QtWidgets import QGridLayout

from ..core.planes import PLANES, Planes
from ..core.scene import Frame
from ..core.sources import Volume
from . import overlay
from .canvas import Canvas
from .info import Info
from .views import NOTCH, View, angle_between, draw_comparison


class VolumeView(View):
    """A volume: three planes through one point; click to slice, drag to turn, the wheel scrolls."""

    camera: Planes | None
    _PLACES: ClassVar = {"axial": (0, 0), "sagittal": (0, 1), "coronal": (1, 0)}

    def __init__(self) -> None:
        super().__init__()
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        self.active, self.mirrored = "axial", False
        self.info = Info()
        for plane in PLANES:
            canvas = self._add(Canvas(plane, lambda p, s, plane=plane: self._decorate(plane, p, s)))
            canvas.installEventFilter(self)
            layout.addWidget(canvas, *self._PLACES[plane])
        layout.addWidget(self.info, 1, 1)
        for i in (0, 1):
            layout.setRowStretch(i, 1)
            layout.setColumnStretch(i, 1)

    def activate(self, plane: str) -> None:
        """Have keys move another plane."""
        self.active = plane
        if self.is_enlarged:
            self.enlarge(True)

    def set_time(self, time: int, mirrored: bool) -> None:
        """Show another time, or the patient's right on the other side."""
        self.mirrored = mirrored
        if self.camera:
            self.move_to(replace(self.camera, time=time, mirrored=mirrored))

    def eventFilter(self, canvas, event) -> bool:
        """Have a double click enlarge a plane."""
        if event.type() == event.Type.MouseButtonDblClick and isinstance(canvas, Canvas):
            self.active = canvas.name
            self.enlarge(not self.is_enlarged)
            return True
        return super().eventFilter(canvas, event)

    @property
    def is_enlarged(self) -> bool:
        """True if one plane has all the room."""
        return self.info.isHidden()

    def enlarge(self, one: bool) -> None:
        """Give all the room to the plane used last, or to all three."""
        self.info.setHidden(one)
        for name, canvas in self.canvases.items():
            canvas.setHidden(one and name != self.active)
        for i in (0, 1):
            row, column = self._PLACES[self.active]
            self.layout().setRowStretch(i, int(not one or i == row))
            self.layout().setColumnStretch(i, int(not one or i == column))
        self._resized()

    def reset(self) -> None:
        """Show all of it, as it lies, through its middle."""
        if isinstance(self.source, Volume):
            camera = Planes.fit(self.source, self.screens())
            time = self.camera.time if self.camera else 0
            self.move_to(replace(camera, mirrored=self.mirrored, time=time))

    def actual_size(self) -> None:
        """Show one voxel as one pixel of the screen."""
        if self.camera and isinstance(self.source, Volume):
            self.zoom(1 / min(self.source.spacing) / self.camera.zoom)

    def zoom(self, factor: float) -> None:
        """Go closer, about the focus."""
        if self.camera:
            screen = self.canvases[self.active].screen_size()
            x, y = self.camera.to_screen(self.active, np.array(self.camera.focus), screen)
            self.move_to(self.camera.zoomed(self.active, factor, x, y, screen))

    def pan(self, dx: float, dy: float) -> None:
        """Move by a share of the screen."""
        if self.camera:
            width, height = self.canvases[self.active].screen_size()
            self.move_to(self.camera.panned(self.active, dx * width, dy * height))

    def turn(self, degrees: float) -> None:
        """Turn the plane used last clockwise."""
        if self.camera:
            self.move_to(self.camera.turned(self.active, math.radians(degrees)))

    def step(self, steps: float) -> None:
        """Go through the slices of the plane used last."""
        if self.camera and isinstance(self.source, Volume):
            step = min(self.source.spacing)
            self.move_to(self.camera.scrolled(self.active, steps * step))

    def show_frame(self, frame: Frame) -> None:
        """Show a frame, and what lies at the focus."""
        super().show_frame(frame)
        if isinstance(self.source, Volume) and self.camera:
            self.info.show_focus(self.source, self.camera, frame.look.window)

    def _begin(self, name: str, how: str, at: QPointF) -> None:
        self.active = name
        if how == "main" and self.camera:
            screen = self.canvases[name].screen_size()
            self.move_to(self.camera.focused(name, at.x(), at.y(), screen))

    def _drag(self, name: str, how: str, before: QPointF, now: QPointF) -> None:
        if self.camera is None:
            return
        screen = self.canvases[name].screen_size()
        if how == "main":
            self.move_to(self.camera.focused(name, now.x(), now.y(), screen))
        elif how == "pan":
            moved = now - before
            self.move_to(self.camera.panned(name, moved.x(), moved.y()))
        elif how == "turn":
            x, y = self.camera.to_screen(name, np.array(self.camera.focus), screen)
            self.move_to(self.camera.turned(name, angle_between(QPointF(x, y), before, now)))

    def _wheel(self, name: str, steps: float, at: QPointF, more: bool) -> None:
        if self.camera is None:
            return
        self.active = name
        if more:
            screen = self.canvases[name].screen_size()
            self.move_to(self.camera.zoomed(name, NOTCH**steps, at.x(), at.y(), screen))
        else:
            self.step(steps)

    def _hover(self, name: str, at: QPointF) -> None:
        if self.camera is None or not isinstance(self.source, Volume):
            return
        point = self.camera.to_world(name, at.x(), at.y(), self.canvases[name].screen_size())
        voxel = np.rint(self.camera.voxel(self.source, point)).astype(int)
        inside = all(0 <= v < n for v, n in zip(voxel, self.source.size, strict=True))
        value = self.source.value(voxel, self.camera.time) if inside else None
        said = "outside" if value is None else f"voxel {', '.join(map(str, voxel))}: {value:.5g}"
        place = ", ".join(f"{c:.1f}" for c in point)
        self.told.emit(f"{place} mm   {said}   {self._values_at(name, at)}")

    def _decorate(self, plane: str, painter: QPainter, size: QSize) -> None:
        camera, canvas = self.camera, self.canvases[plane]
        if camera is None or canvas.pane is None:
            return
        ratio = self.devicePixelRatioF()
        focus = np.array(camera.focus)
        overlay.title(painter, plane.capitalize(), f"{camera.axes(plane)[2] @ focus:.1f} mm")
        at = QPointF(*camera.to_screen(plane, focus, canvas.screen_size())) / ratio
        overlay.crosshair(painter, size, at)
        overlay.directions(painter, size, camera.labels(plane))
        draw_comparison(painter, size, canvas)
        overlay.scale(painter, size, camera.zoom / ratio, "mm")
