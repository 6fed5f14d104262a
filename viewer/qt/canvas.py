"""One picture on screen, beside its reference if wanted, and the mouse on it."""

from collections.abc import Callable

from PySide6.QtCore import QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QImage, QMouseEvent, QPainter, QWheelEvent
from PySide6.QtWidgets import QSizePolicy, QWidget
from torch import Tensor

from ..core.flat import Screen
from ..core.scene import Pane
from . import theme

COMPARISONS = ("off", "split", "difference")
_HANDLE = 6.0  # pixels to both sides of the split, where the mouse takes hold of it
_ANGLE_STEP = 120.0  # of a wheel's notch, in eighths of a degree

# What a drag does, by the button and the keys held with it.
_HOW = {
    (Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier): "main",
    (Qt.MouseButton.LeftButton, Qt.KeyboardModifier.ShiftModifier): "turn",
    (Qt.MouseButton.LeftButton, Qt.KeyboardModifier.ControlModifier): "warp",
    (Qt.MouseButton.LeftButton, Qt.KeyboardModifier.AltModifier): "pan",
    (Qt.MouseButton.RightButton, Qt.KeyboardModifier.NoModifier): "turn",
    (Qt.MouseButton.MiddleButton, Qt.KeyboardModifier.NoModifier): "pan",
}


def as_image(pixels: Tensor) -> QImage:
    """Return (H, W, 4) bytes as Qt paints them; they are copied."""
    H, W, _ = pixels.shape
    data = pixels.contiguous().numpy().data
    return QImage(data, W, H, 4 * W, QImage.Format.Format_RGB32).copy()


class Canvas(QWidget):
    """Shows a pane and tells of the mouse; positions are in pixels of the screen itself.

    `decorate(painter, size)` draws over the picture, in the widget's coordinates.
    """

    began = Signal(str, QPointF)
    dragged = Signal(str, QPointF, QPointF)  # how, from, to
    ended = Signal(str)
    turned_wheel = Signal(float, QPointF, bool)  # notches, where, with Ctrl
    hovered = Signal(QPointF)
    left = Signal()
    resized = Signal()

    def __init__(self, name: str, decorate: Callable[[QPainter, QSize], None] | None = None):
        super().__init__()
        self.name, self._decorate = name, decorate
        self.pane: Pane | None = None
        self.comparison, self.split = "off", 0.5
        self._images: dict[str, QImage] = {}
        self._how, self._last, self._splitting = "", QPointF(), False
        self.setMouseTracking(True)
        self.setMinimumSize(120, 100)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.PreventContextMenu)

    def screen_size(self) -> Screen:
        """Return its size in pixels of the screen itself."""
        ratio = self.devicePixelRatioF()
        return max(1, round(self.width() * ratio)), max(1, round(self.height() * ratio))

    def show_pane(self, pane: Pane | None) -> None:
        """Show another picture."""
        self.pane = pane
        self._images = {"ours": as_image(pane.picture)} if pane else {}
        if pane and pane.difference:
            self._images["reference"] = as_image(pane.difference.reference)
            self._images["difference"] = as_image(pane.difference.picture)
        self.update()

    def compare(self, comparison: str) -> None:
        """Show one of COMPARISONS."""
        self.comparison = comparison
        self.update()

    def paintEvent(self, event) -> None:
        """Draw the picture, the reference beside it, and what lies over both."""
        painter = QPainter(self)
        painter.fillRect(self.rect(), theme.GROUND)
        whole = QRectF(self.rect())
        different = self.comparison == "difference" and "difference" in self._images
        if image := self._images.get("difference" if different else "ours"):
            painter.drawImage(whole, image, QRectF(image.rect()))
        if self.comparison == "split" and (image := self._images.get("reference")):
            at = self.split * self.width()
            share = self.split * image.width()
            painter.drawImage(
                QRectF(at, 0, self.width() - at, self.height()),
                image,
                QRectF(share, 0, image.width() - share, image.height()),
            )
        if self._decorate:
            self._decorate(painter, self.size())
        painter.end()

    def resizeEvent(self, event) -> None:
        """Tell, so that it gets a picture of its size."""
        self.resized.emit()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        """Begin a drag."""
        if self._on_split(event.position()) and event.button() == Qt.MouseButton.LeftButton:
            self._splitting = True
            return
        self._how = _HOW.get((event.button(), event.modifiers()), "")
        self._last = self._at(event)
        if self._how:
            self.began.emit(self._how, self._last)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        """Go on with it, or tell where the mouse is."""
        if self._splitting:
            self.split = min(0.98, max(0.02, event.position().x() / max(1, self.width())))
            self.update()
            return
        now = self._at(event)
        if self._how and event.buttons():
            self.dragged.emit(self._how, self._last, now)
        self._last = now
        across = Qt.CursorShape.SplitHCursor
        self.setCursor(across if self._on_split(event.position()) else Qt.CursorShape.CrossCursor)
        self.hovered.emit(now)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        """End it."""
        if self._how:
            self.ended.emit(self._how)
        self._how, self._splitting = "", False

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Tell by how much the wheel was turned, and where."""
        delta = event.angleDelta()
        with_control = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        notches = (delta.y() or delta.x()) / _ANGLE_STEP
        self.turned_wheel.emit(notches, self._at(event), with_control)
        event.accept()

    def leaveEvent(self, event) -> None:
        """Tell that the mouse is elsewhere."""
        self.left.emit()

    def _at(self, event: QMouseEvent | QWheelEvent) -> QPointF:
        return event.position() * self.devicePixelRatioF()

    def _on_split(self, position: QPointF) -> bool:
        if self.comparison != "split":
            return False
        return abs(position.x() - self.split * self.width()) <= _HANDLE
