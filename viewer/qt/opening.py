"""What is shown while a file is read, and while there is none."""

from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QPixmap
from PySide6.QtWidgets import QHBoxLayout, QLabel, QProgressBar, QPushButton, QVBoxLayout, QWidget

from ..core.sources import PHOTOS, VOLUMES, Source
from . import overlay
from .worker import PATIENCE, Opening


class OpeningBar(QWidget):
    """Reads a file in a thread; shows how far it is, and a button that ends it."""

    opened = Signal(object, Path)
    failed = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.setAutoFillBackground(True)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 6, 8, 6)
        self.label, self.bar = QLabel(), QProgressBar(maximum=100)
        self.button = QPushButton("Cancel", toolTip="Do not open this file (Esc)")
        self.button.clicked.connect(self.cancel)
        row.addWidget(self.label)
        row.addWidget(self.bar, 1)
        row.addWidget(self.button)
        self.thread_now: Opening | None = None
        self._ending: list[Opening] = []
        self.hide()

    def open(self, path: Path) -> None:
        """Read a file, instead of one that is being read."""
        self.cancel()
        thread = self.thread_now = Opening(path)
        self._ending.append(thread)
        thread.progressed.connect(lambda share: self._progress(thread, share))
        thread.opened.connect(lambda source: self._end(thread, source=source))
        thread.failed.connect(lambda text: self._end(thread, text=text))
        thread.cancelled.connect(lambda: self._end(thread))
        thread.finished.connect(lambda: self._ending.remove(thread))
        self.label.setText(f"Opening {path.name}")
        self.bar.setValue(0)
        self.show()
        thread.start()

    def cancel(self) -> bool:
        """End the reading; True if there was any."""
        thread, self.thread_now = self.thread_now, None
        if thread:
            thread.cancel()
        self.hide()
        return thread is not None

    def stop(self) -> bool:
        """End all reading, and wait for it; False if it does not end."""
        self.cancel()
        return all(thread.wait(PATIENCE) for thread in self._ending)

    def _progress(self, thread: Opening, share: float) -> None:
        if thread is self.thread_now:
            self.bar.setValue(round(100 * share))

    def _end(self, thread: Opening, source: Source | None = None, text: str = "") -> None:
        if thread is not self.thread_now:
            return
        self.thread_now = None
        self.hide()
        if source is not None:
            self.opened.emit(source, thread.path)
        elif text:
            self.failed.emit(text)


class Empty(QWidget):
    """What there is to do where nothing is open."""

    def __init__(self) -> None:
        super().__init__()
        column = QVBoxLayout(self)
        column.setAlignment(Qt.AlignmentFlag.AlignCenter)
        column.setSpacing(14)
        icon = QLabel(pixmap=QPixmap.fromImage(overlay.logo(96)))
        words = QLabel("<h2>Drop a photograph or a volume here</h2>")
        ends = QLabel("  ".join((*PHOTOS, *VOLUMES)), objectName="faint")
        for label in (icon, words, ends):
            label.setAlignment(Qt.AlignmentFlag.AlignCenter)
            column.addWidget(label)
        self.open_button = QPushButton("Open a file…", toolTip="Ctrl+O")
        self.brain_button = QPushButton("Open the MNI brain", toolTip="Ctrl+B; comes with nilearn")
        row = QHBoxLayout()
        row.setAlignment(Qt.AlignmentFlag.AlignCenter)
        row.addWidget(self.open_button)
        row.addWidget(self.brain_button)
        column.addLayout(row)
        hint = QLabel("F1 lists all keys", objectName="faint")
        hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
        column.addWidget(hint)
