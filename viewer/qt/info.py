"""The fourth quarter beside a volume's planes: the focus, and how often which value occurs."""

import numpy as np
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QLinearGradient, QPainter, QPainterPath, QPen
from PySide6.QtWidgets import QWidget

from ..core.planes import Planes
from ..core.sources import Volume
from . import overlay, theme

_BINS = 128
_MARGIN = 14.0
_MOST = 200.0  # pixels, of the histogram's height


class Info(QWidget):
    """Tells where the planes meet; draws the histogram and what of it is black and white."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self._window, self._counts, self._counted = (0.0, 1.0), np.zeros(_BINS), (None, 0)
        self._most, self._least = 1.0, 0.0

    def show_focus(self, volume: Volume, camera: Planes, window: tuple[float, float]) -> None:
        """Tell of another place."""
        if self._counted != (volume, camera.time):
            self._counted, self._least = (volume, camera.time), volume.least
            values = volume.values[camera.time].numpy().ravel()
            some = values[:: max(1, values.size // 500_000)]
            self._most = float(max(some.max(), 1e-12))
            counts, _ = np.histogram(some, _BINS, (0, self._most))
            self._counts = np.log1p(counts)
        self._window = window
        voxel = np.rint(camera.voxel(volume, np.array(camera.focus))).astype(int)
        inside = all(0 <= v < n for v, n in zip(voxel, volume.size, strict=True))
        value = f"{volume.value(voxel, camera.time):.5g}" if inside else "outside"
        right, front, up = camera.focus
        self.lines = [
            (volume.title, ""),
            (volume.describe(), ""),
            ("right, front, up", f"{right:.1f}, {front:.1f}, {up:.1f} mm"),
            ("voxel", ", ".join(map(str, voxel))),
            ("value", value),
        ]
        self.update()

    def paintEvent(self, event) -> None:
        """Draw it."""
        painter = QPainter(self)
        painter.fillRect(self.rect(), theme.GROUND)
        line = painter.fontMetrics().height() * 1.35
        y, column = _MARGIN + painter.fontMetrics().ascent(), _MARGIN + 120
        for number, (name, value) in enumerate(self.lines):
            wide = painter.fontMetrics().elidedText(
                name, Qt.TextElideMode.ElideMiddle, int(self.width() - 2 * _MARGIN)
            )
            colour = theme.TEXT if number == 0 else theme.FAINT
            overlay.text(painter, QPointF(_MARGIN, y), wide, colour=colour, bold=number == 0)
            overlay.text(painter, QPointF(column, y), value)
            y += line * (1.5 if number == 1 else 1)
        room = self.height() - y - 2 * _MARGIN - line
        if self.lines and room > 40:
            height = min(room, _MOST)
            box = QRectF(_MARGIN, self.height() - _MARGIN - line - height, 0, height)
            box.setWidth(self.width() - 2 * _MARGIN)
            self._draw_histogram(painter, box)
        painter.end()

    def _draw_histogram(self, painter: QPainter, box: QRectF) -> None:
        low, high = (max(0.0, min(1.0, v / self._most)) for v in self._window)
        shades = QLinearGradient(box.topLeft(), box.topRight())
        for place, level in ((0.0, 40), (low, 40), (max(high, low + 1e-6), 230), (1.0, 230)):
            shades.setColorAt(min(1.0, place), QColor(level, level, level))
        path = QPainterPath(box.bottomLeft())
        tallest = max(float(self._counts.max()), 1e-9)
        for i, count in enumerate(self._counts):
            x = box.left() + box.width() * (i + 0.5) / _BINS
            path.lineTo(x, box.bottom() - box.height() * float(count) / tallest)
        path.lineTo(box.bottomRight())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.fillPath(path, shades)
        painter.setPen(QPen(QColor(90, 90, 90), 1))
        painter.drawLine(box.bottomLeft(), box.bottomRight())
        y = box.bottom() + painter.fontMetrics().ascent() + 4
        for share, name in ((low, "black"), (high, "white")):
            x = box.left() + box.width() * share
            painter.setPen(QPen(theme.ACCENT, 1))
            painter.drawLine(QPointF(x, box.top()), QPointF(x, box.bottom()))
            value = f"{name} {share * self._most + self._least:.4g}"
            right = share > 0.5
            align = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
            overlay.text(painter, QPointF(x, y), value, align, theme.FAINT)
