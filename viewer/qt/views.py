"""What a photograph's view and a volume's have in common."""

import math

from PySide6.QtCore import QPointF, QSize, Signal
from PySide6.QtGui import QPainter
from PySide6.QtWidgets import QWidget

from ..core.flat import Screen
from ..core.scene import Camera, Frame
from ..core.sources import Source
from . import overlay
from .canvas import Canvas

NOTCH = 1.2  # zoom of one notch of the wheel


class View(QWidget):
    """Pictures of one thing, and the camera that mouse and keys move."""

    changed = Signal()  # the camera is elsewhere
    told = Signal(str)  # what is under the mouse

    def __init__(self) -> None:
        super().__init__()
        self.source: Source | None = None
        self.camera: Camera | None = None
        self.frame: Frame | None = None
        self.canvases: dict[str, Canvas] = {}

    def open(self, source: Source) -> None:
        """Show something else, all of it."""
        self.source, self.frame, self.camera = source, None, None
        for canvas in self.canvases.values():
            canvas.show_pane(None)
        self.reset()

    def screens(self) -> dict[str, Screen]:
        """Return the sizes of the pictures on screen, by name."""
        shown = {name: c for name, c in self.canvases.items() if not c.isHidden()}
        return {name: canvas.screen_size() for name, canvas in shown.items()}

    def show_frame(self, frame: Frame) -> None:
        """Show a frame; a reference that is still to come leaves the split as it was."""
        self.frame = frame
        for name, pane in frame.panes.items():
            self.canvases[name].show_pane(pane)

    def compare(self, comparison: str) -> None:
        """Show one of `canvas.COMPARISONS`."""
        for canvas in self.canvases.values():
            canvas.compare(comparison)

    def move_to(self, camera: Camera) -> None:
        """Look from elsewhere."""
        self.camera = camera
        for canvas in self.canvases.values():
            canvas.update()
        self.changed.emit()

    def reset(self) -> None:
        """Show all of it."""
        raise NotImplementedError

    def _add(self, canvas: Canvas) -> Canvas:
        self.canvases[canvas.name] = canvas
        name = canvas.name
        canvas.dragged.connect(lambda how, a, b: self._drag(name, how, a, b))
        canvas.began.connect(lambda how, at: self._begin(name, how, at))
        canvas.turned_wheel.connect(lambda steps, at, more: self._wheel(name, steps, at, more))
        canvas.hovered.connect(lambda at: self._hover(name, at))
        canvas.left.connect(lambda: self.told.emit(""))
        canvas.resized.connect(self._resized)
        return canvas

    def _resized(self) -> None:
        if self.camera is not None:
            self.changed.emit()

    def _begin(self, name: str, how: str, at: QPointF) -> None: ...

    def _drag(self, name: str, how: str, before: QPointF, now: QPointF) -> None: ...

    def _wheel(self, name: str, steps: float, at: QPointF, more: bool) -> None: ...

    def _hover(self, name: str, at: QPointF) -> None: ...

    def _values_at(self, name: str, at: QPointF) -> str:
        """Return the colours of the pixel there, and the reference's difference."""
        pane = self.frame.panes.get(name) if self.frame else None
        if pane is None:
            return ""
        H, W, _ = pane.values.shape
        x, y = int(at.x()), int(at.y())
        if not (0 <= x < W and 0 <= y < H):
            return ""
        return "shown " + " ".join(f"{v:.3f}" for v in pane.values[y, x].tolist())


def angle_between(centre: QPointF, before: QPointF, now: QPointF) -> float:
    """Return by how much the mouse went clockwise about a point, in radians."""
    first, second = before - centre, now - centre
    turned = math.atan2(second.y(), second.x()) - math.atan2(first.y(), first.x())
    return math.remainder(turned, 2 * math.pi)


def draw_comparison(painter: QPainter, size: QSize, canvas: Canvas) -> None:
    """Draw what belongs to a comparison with the reference."""
    ready = bool(canvas.pane and canvas.pane.difference)
    if canvas.comparison == "split":
        overlay.split(painter, size, canvas.split, ready)
    elif canvas.comparison == "difference" and canvas.pane:
        overlay.difference(painter, size, canvas.pane)
