"""A window of the viewer that a test clicks on, in memory (`offscreen`)."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import qt_stand_ins

qt_stand_ins.provide()

from PIL import Image
from PySide6.QtCore import QEvent, QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDropEvent, QMouseEvent, QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QWidget

from loader.viewer.core.scene import Frame
from loader.viewer.qt import theme
from loader.viewer.qt.canvas import Canvas
from loader.viewer.qt.settings import Settings
from loader.viewer.qt.window import Window

NONE, LEFT, RIGHT = (
    Qt.KeyboardModifier.NoModifier,
    Qt.MouseButton.LeftButton,
    Qt.MouseButton.RightButton,
)
SHIFT, CTRL = Qt.KeyboardModifier.ShiftModifier, Qt.KeyboardModifier.ControlModifier
_PATIENCE = 60  # seconds, until a test gives up


def application() -> QApplication:
    """The one of this process."""
    app = QApplication.instance() or QApplication(["viewer"])
    theme.dress(app)
    return app


def until(true: Callable[[], object], what: str = "") -> None:
    """Let the window work until something is true."""
    end = time.monotonic() + _PATIENCE
    while not true():
        assert time.monotonic() < end, f"it never came: {what}"
        QTest.qWait(5)


class Viewing:
    """A window, and the frames that it got."""

    def __init__(self, folder: Path, watch: bool = False, size: tuple[int, int] = (760, 520)):
        self.app, self.folder = application(), folder
        self.window = Window(Settings(folder / "settings.ini"), watch=watch)
        self.frames: list[Frame] = []
        self.window.renderer.rendered.connect(self.frames.append)
        self.window.resize(*size)
        self.window.show()
        assert QTest.qWaitForWindowActive(self.window)

    def settle(self) -> Frame:
        """The newest frame, once nothing is under way."""
        renderer, compared = self.window.renderer, self.window.panel.comparison.value != "off"

        def done() -> bool:
            view = self.window.view
            if not renderer.is_idle or not self.frames:
                return False
            self.app.processEvents()  # which brings the last frame
            if renderer.is_idle and view and view.frame is self.frames[-1]:
                frame = self.frames[-1]
                wanted = (view.camera, self.window.look(), view.screens())
                sizes = {n: tuple(p.values.shape[1::-1]) for n, p in frame.panes.items()}
                got = (frame.camera, frame.look, sizes)
                return wanted == got and (not compared or frame.reference > 0)
            return False

        until(done, "a frame")
        return self.frames[-1]

    def open(self, path: Path) -> Frame:
        """Show a file."""
        self.window.open(path)
        source = self.window.scene.source if self.window.scene else None
        until(lambda: self.window.scene and self.window.scene.source is not source, str(path))
        view = self.window.view
        until(lambda: view.source is self.window.scene.source)
        return self.settle()

    def open_photo(self) -> None:
        """Show a photograph of 120 x 80 pixels."""
        self.pixels = write_photo(self.folder / "photo.png")
        self.open(self.folder / "photo.png")
        self.canvas = self.window.photo.canvas

    def __enter__(self) -> "Viewing":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; whatever is under way."""
        self.window.close()
        assert not self.window.stuck
        self.window.deleteLater()
        self.app.processEvents()

    def key(self, key: str, modifier=NONE) -> None:
        """Press a key."""
        QTest.keyClick(self.window, getattr(Qt.Key, f"Key_{key}"), modifier)

    def drag(self, canvas: Canvas, start, end, button=LEFT, modifier=NONE) -> None:
        """Press, move in a few steps, release; positions are (x, y) on the canvas."""
        first, last = (QPoint(*place) for place in (start, end))
        QTest.mousePress(canvas, button, modifier, first)
        for step in (1, 2, 3):
            at = first + (last - first) * (step / 3)
            self.move(canvas, at, button, modifier)
        QTest.mouseRelease(canvas, button, modifier, last)

    def move(self, canvas: Canvas, at: QPoint, button=Qt.MouseButton.NoButton, modifier=NONE):
        """Move the mouse with buttons held, which QTest.mouseMove cannot."""
        event = QMouseEvent(
            QEvent.Type.MouseMove,
            QPointF(at),
            QPointF(canvas.mapToGlobal(at)),
            Qt.MouseButton.NoButton,
            button,
            modifier,
        )
        QApplication.sendEvent(canvas, event)

    def wheel(self, canvas: Canvas, at, notches: int, modifier=NONE) -> None:
        """Turn the wheel."""
        place = QPointF(*at)
        event = QWheelEvent(
            place,
            QPointF(canvas.mapToGlobal(place.toPoint())),
            QPoint(),
            QPoint(0, 120 * notches),
            Qt.MouseButton.NoButton,
            modifier,
            Qt.ScrollPhase.NoScrollPhase,
            False,
        )
        QApplication.sendEvent(canvas, event)

    def click(self, widget: QWidget) -> None:
        """Click in the middle."""
        QTest.mouseClick(widget, LEFT)

    def choose(self, combo, data: str) -> None:
        """Choose an entry of a list as a user does, by keys."""
        combo.setFocus()
        index = combo.findData(data)
        assert index >= 0, data
        QTest.keyClick(combo, Qt.Key.Key_Home)
        combo.setCurrentIndex(index)
        combo.activated.emit(index)


def write_photo(path: Path, size=(120, 80)) -> torch.Tensor:
    """A photograph of smooth colours, no two columns or rows alike; its values."""
    x, y = np.meshgrid(np.arange(size[0]) / size[0], np.arange(size[1]) / size[1])
    values = np.stack([x, y, 0.5 + 0.4 * np.sin(9 * x) * np.cos(7 * y)], -1)
    pixels = (values * 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return torch.from_numpy(pixels / 255).float()


def drop(viewing: Viewing, *paths: Path) -> None:
    """Drop files on the window."""
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    viewing.window.dropEvent(
        QDropEvent(
            QPointF(9, 9),
            Qt.DropAction.CopyAction,
            data,
            Qt.MouseButton.LeftButton,
            Qt.KeyboardModifier.NoModifier,
            QEvent.Type.Drop,
        )
    )
