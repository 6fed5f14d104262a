"""A photograph, and what mouse and keys do to it."""

import math

from PySide6.QtCore import QPointF, QSize, Qt
from PySide6.QtGui import QPainter, QPainterPath, QPen, QPolygonF
from PySide6.QtWidgets import QGridLayout

from ..core.flat import Flat
from ..core.sources import Photo
from . import overlay, theme
from .canvas import Canvas
from .views import NOTCH, View, angle_between, draw_comparison

_RADIUS_NOTCH = 1.12  # of the wheel
_FULL_WARP = 300.0  # pixels of a drag for a warp of 1
_FIRST = 0.5  # strength of a warp that is chosen from the list


class PhotoView(View):
    """A photograph: drag to move, turn and bend it; the wheel zooms."""

    camera: Flat | None

    def __init__(self) -> None:
        super().__init__()
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        self.canvas = self._add(Canvas("photo", self._decorate))
        self.canvas.setToolTip("")
        layout.addWidget(self.canvas)

    def reset(self) -> None:
        """Show all of it, straight."""
        if isinstance(self.source, Photo):
            self.move_to(Flat.fit(self.source.size, self.canvas.screen_size()))

    def actual_size(self) -> None:
        """Show one pixel of the photograph as one of the screen."""
        if self.camera:
            self.zoom(1 / self.camera.zoom)

    def zoom(self, factor: float) -> None:
        """Go closer, about the middle."""
        if self.camera:
            width, height = screen = self.canvas.screen_size()
            self.move_to(self.camera.zoomed(factor, width / 2, height / 2, screen))

    def pan(self, dx: float, dy: float) -> None:
        """Move by a share of the screen."""
        if self.camera:
            width, height = self.canvas.screen_size()
            self.move_to(self.camera.panned(dx * width, dy * height))

    def turn(self, degrees: float) -> None:
        """Turn clockwise."""
        if self.camera:
            self.move_to(self.camera.turned(math.radians(degrees)))

    def step(self, steps: float) -> None:
        """Of a photograph the warp gets stronger or weaker."""
        if self.camera:
            warp = self.camera.warp
            kind = "swirl" if warp.kind == "none" else warp.kind
            strength = max(-1.0, min(1.0, warp.strength + steps / 10))
            self.move_to(self.camera.warped(kind=kind, strength=strength))

    def warp(self, **changes: object) -> None:
        """Bend it."""
        if self.camera:
            self.move_to(self.camera.warped(**changes))

    def warp_by(self, changes: dict) -> None:
        """Bend it as the sliders say; `share` is the radius as a share of the shorter side."""
        if self.camera:
            radius = max(1.0, changes["share"] * min(self.camera.size))
            kind, strength = changes["kind"], changes["strength"]
            if kind != self.camera.warp.kind and strength == 0:  # so that there is one to see
                strength = _FIRST
            self.warp(kind=kind, strength=strength, radius=radius)

    def _begin(self, name: str, how: str, at: QPointF) -> None:
        if how == "warp" and self.camera:
            place = self.camera.to_photo(at.x(), at.y(), self.canvas.screen_size())
            kind = "swirl" if self.camera.warp.kind == "none" else self.camera.warp.kind
            self.warp(kind=kind, centre=place, strength=0.0)

    def _drag(self, name: str, how: str, before: QPointF, now: QPointF) -> None:
        if self.camera is None:
            return
        moved = now - before
        if how in ("main", "pan"):
            self.move_to(self.camera.panned(moved.x(), moved.y()))
        elif how == "turn":
            width, height = self.canvas.screen_size()
            turned = angle_between(QPointF(width / 2, height / 2), before, now)
            self.move_to(self.camera.turned(turned))
        else:
            strength = self.camera.warp.strength + moved.x() / _FULL_WARP
            self.warp(strength=max(-1.0, min(1.0, strength)))

    def _wheel(self, name: str, steps: float, at: QPointF, more: bool) -> None:
        if self.camera is None:
            return
        screen = self.canvas.screen_size()
        if more and not self.camera.warp.is_still:
            self.warp(radius=self.camera.warp.radius * _RADIUS_NOTCH**steps)
        else:
            self.move_to(self.camera.zoomed(NOTCH**steps, at.x(), at.y(), screen))

    def _hover(self, name: str, at: QPointF) -> None:
        if self.camera is None:
            return
        x, y = self.camera.to_photo(at.x(), at.y(), self.canvas.screen_size())
        self.told.emit(f"pixel {x:.1f}, {y:.1f}   {self._values_at(name, at)}")

    def _darken_around(self, painter: QPainter, size: QSize, ratio: float) -> None:
        """Paint over what a colour table has made of the nothing around the photograph."""
        camera, screen = self.camera, self.canvas.screen_size()
        width, height = camera.size
        corners = [(0, 0), (width, 0), (width, height), (0, height)]
        outline = [QPointF(*camera.to_screen(x, y, screen)) / ratio for x, y in corners]
        around, inside = QPainterPath(), QPainterPath()
        around.addRect(0, 0, size.width(), size.height())
        inside.addPolygon(QPolygonF([*outline, outline[0]]))
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.fillPath(around.subtracted(inside), theme.GROUND)

    def _decorate(self, painter: QPainter, size: QSize) -> None:
        camera, canvas = self.camera, self.canvas
        if camera is None or canvas.pane is None:
            return
        ratio = self.devicePixelRatioF()
        if canvas.comparison != "difference" and camera.warp.is_still:
            self._darken_around(painter, size, ratio)
        turned = math.degrees(camera.angle)
        faint = f"{100 * camera.zoom:.0f} %" + (f", {turned:.0f}°" if abs(turned) >= 0.5 else "")
        overlay.title(painter, self.source.title if self.source else "", faint)
        if canvas.comparison != "difference" and not camera.warp.is_still:
            x, y = camera.to_screen(*camera.warp.centre, canvas.screen_size())
            reach = camera.warp.radius * camera.zoom / ratio
            painter.setPen(QPen(theme.FAINT, 1, Qt.PenStyle.DashLine))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawEllipse(QPointF(x, y) / ratio, reach, reach)
        draw_comparison(painter, size, canvas)
        overlay.scale(painter, size, camera.zoom / ratio, "px")
