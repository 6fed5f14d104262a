"""What is drawn over pictures: names, directions, scales, crosshairs, the difference's colours."""

import math

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QImage, QLinearGradient, QPainter, QPainterPath, QPen

from ..core.scene import Pane, inferno
from . import theme

_MARGIN = 10.0
_BAR = (150.0, 10.0)  # the difference's colours, in pixels
_ROUND = (1, 2, 5)  # of a scale, times a power of ten
_STOPS = 10


def text(
    painter: QPainter,
    position: QPointF,
    words: str,
    align: Qt.AlignmentFlag = Qt.AlignmentFlag.AlignLeft,
    colour: QColor = theme.TEXT,
    bold: bool = False,
) -> None:
    """Draw words whose baseline is at a position, with a dark rim that any picture lets be read."""
    font = QFont(painter.font())
    font.setBold(bold)
    painter.setFont(font)
    width = painter.fontMetrics().horizontalAdvance(words)
    shift = {Qt.AlignmentFlag.AlignHCenter: width / 2, Qt.AlignmentFlag.AlignRight: width}
    path = QPainterPath()
    path.addText(position - QPointF(shift.get(align, 0.0), 0), font, words)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.strokePath(path, QPen(QColor(0, 0, 0, 190), 3))
    painter.fillPath(path, colour)


def directions(painter: QPainter, size: QSize, labels: tuple[str, str, str, str]) -> None:
    """Draw where left, right, top and bottom point."""
    left, right, top, bottom = labels
    height = painter.fontMetrics().ascent()
    middle = size.height() / 2 + height / 2
    centre, end = Qt.AlignmentFlag.AlignHCenter, Qt.AlignmentFlag.AlignRight
    text(painter, QPointF(_MARGIN, middle), left, colour=theme.CROSS, bold=True)
    text(painter, QPointF(size.width() - _MARGIN, middle), right, end, theme.CROSS, True)
    text(painter, QPointF(size.width() / 2, _MARGIN + height), top, centre, theme.CROSS, True)
    below = QPointF(size.width() / 2, size.height() - _MARGIN)
    text(painter, below, bottom, centre, theme.CROSS, True)


def title(painter: QPainter, words: str, faint: str = "") -> None:
    """Draw what a picture is, in its corner."""
    line = painter.fontMetrics().height()
    text(painter, QPointF(_MARGIN, _MARGIN + painter.fontMetrics().ascent()), words, bold=True)
    if faint:
        below = QPointF(_MARGIN, _MARGIN + line + painter.fontMetrics().ascent())
        text(painter, below, faint, colour=theme.FAINT)


def crosshair(painter: QPainter, size: QSize, at: QPointF) -> None:
    """Draw where the other planes go through this one, open in the middle."""
    gap, rim = 9.0, 26.0  # open around the point, and where the directions' letters are
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
    colour = QColor(theme.CROSS)
    colour.setAlpha(150)
    painter.setPen(QPen(colour, 1))
    x, y = math.floor(at.x()) + 0.5, math.floor(at.y()) + 0.5
    for begin, end in (
        ((rim, y), (x - gap, y)),
        ((x + gap, y), (size.width() - rim, y)),
        ((x, rim), (x, y - gap)),
        ((x, y + gap), (x, size.height() - rim)),
    ):
        if begin[0] > end[0] or begin[1] > end[1]:
            continue
        painter.drawLine(QPointF(*begin), QPointF(*end))


def scale(painter: QPainter, size: QSize, per_unit: float, unit: str) -> None:
    """Draw how long a round number of units is; `per_unit` in pixels."""
    wanted = size.width() / 5 / per_unit
    power = 10 ** math.floor(math.log10(max(wanted, 1e-9)))
    length = max(n * power for n in _ROUND if n * power <= max(wanted, power))
    pixels, y = length * per_unit, size.height() - _MARGIN - 1
    x = size.width() - _MARGIN - pixels
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
    for colour, width in ((QColor(0, 0, 0, 190), 4), (theme.TEXT, 2)):
        painter.setPen(QPen(colour, width, Qt.PenStyle.SolidLine, Qt.PenCapStyle.FlatCap))
        painter.drawLine(QPointF(x, y), QPointF(x + pixels, y))
    words, middle = f"{length:g} {unit}", QPointF(x + pixels / 2, y - 6)
    text(painter, middle, words, Qt.AlignmentFlag.AlignHCenter)


def split(painter: QPainter, size: QSize, share: float, ready: bool) -> None:
    """Draw the border between ours and the reference's, and which is which."""
    x = round(share * size.width()) + 0.5
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
    painter.setPen(QPen(QColor(255, 255, 255, 210), 1))
    painter.drawLine(QPointF(x, 0), QPointF(x, size.height()))
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setBrush(QColor(255, 255, 255, 230))
    painter.setPen(Qt.PenStyle.NoPen)
    middle = size.height() / 2
    painter.drawRoundedRect(QRectF(x - 3, middle - 16, 6, 32), 3, 3)
    y = size.height() - _MARGIN - painter.fontMetrics().height() - 8
    text(painter, QPointF(x - 10, y), "Octet", Qt.AlignmentFlag.AlignRight, bold=True)
    text(painter, QPointF(x + 10, y), "PyTorch" if ready else "PyTorch …", bold=True)


def difference(painter: QPainter, size: QSize, pane: Pane) -> None:
    """Draw the colours of the difference, its largest value, and where that is."""
    found = pane.difference
    if found is None:
        return
    left, below = _MARGIN, size.height() - _MARGIN
    if found.largest == 0:
        text(painter, QPointF(left, below), "no difference, bit for bit")
        return
    ratio = pane.picture.shape[1] / max(1, size.width())
    spot = QPointF(*found.at) / ratio
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setBrush(Qt.BrushStyle.NoBrush)
    for colour, width in ((QColor(0, 0, 0, 200), 3.5), (theme.ACCENT, 1.5)):
        painter.setPen(QPen(colour, width))
        painter.drawEllipse(spot, 8, 8)
    width, height = min(_BAR[0], size.width() - 2 * _MARGIN), _BAR[1]
    bar = QRectF(left, below - height, width, height)
    colours = QLinearGradient(bar.topLeft(), bar.topRight())
    for step in range(_STOPS + 1):
        colours.setColorAt(step / _STOPS, _colour(step / _STOPS))
    painter.setPen(QPen(QColor(90, 90, 90), 1))
    painter.setBrush(colours)
    painter.drawRect(bar)
    words = f"0 to {found.largest:.2g}, the largest"
    text(painter, QPointF(left, bar.top() - 6), words)


def _colour(share: float) -> QColor:
    import torch

    red, green, blue = inferno(torch.tensor(share)).tolist()
    return QColor.fromRgbF(red, green, blue)


def logo(size: int = 64) -> QImage:
    """Return the window's icon: the eight corners of a cell."""
    image = QImage(size, size, QImage.Format.Format_ARGB32_Premultiplied)
    image.fill(Qt.GlobalColor.transparent)
    painter = QPainter(image)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(QPen(theme.ACCENT, size / 20))
    corners = {}
    for i in (0, 1):
        for j in (0, 1):
            for k in (0, 1):
                corners[i, j, k] = QPointF(
                    size * (0.16 + 0.44 * i + 0.24 * k), size * (0.84 - 0.44 * j - 0.24 * k)
                )
    for a, start in corners.items():
        for b, end in corners.items():
            if sum(abs(p - q) for p, q in zip(a, b, strict=True)) == 1:
                painter.drawLine(start, end)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(theme.CROSS)
    for corner in corners.values():
        painter.drawEllipse(corner, size / 12, size / 12)
    painter.end()
    return image
