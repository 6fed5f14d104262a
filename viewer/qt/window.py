"""The window: it brings files, choices, threads and pictures together."""

from pathlib import Path

import torch
from PySide6.QtCore import Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QCloseEvent, QDesktopServices, QImage, QPixmap
from PySide6.QtWidgets import (
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QMainWindow,
    QMenu,
    QScrollArea,
    QSizePolicy,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from ..core.edits import Notice
from ..core.scene import Frame, Look, Scene
from ..core.sources import Photo, Source, Volume
from . import overlay
from .actions import add_menus
from .banner import Banner
from .choices import Choices
from .commands import Commands
from .memory import keep, restore
from .opening import Empty, OpeningBar
from .panel import Panel
from .photo_view import PhotoView
from .settings import Settings
from .views import View
from .volume_view import VolumeView
from .worker import Renderer, Request, Watching

_TITLE = "Octet"
_WORKING = "Working …"
_FIRST = "The first picture comes once its operators are built and loaded …"
_SHOWN_FOR = 6000  # milliseconds, of a message in the status bar
_SLOW = 400  # milliseconds after which a picture that does not come is worth a word


class Window(QMainWindow):
    """One picture or volume, and all that can be done with it."""

    recent_menu: QMenu
    closed = Signal()

    def __init__(self, settings: Settings, watch: bool = True):
        super().__init__()
        self.settings, self.scene, self.failure = settings, None, None
        self.stuck = False  # True where a thread did not end as the window closed
        self.setWindowIcon(QPixmap.fromImage(overlay.logo()))
        self.setAcceptDrops(True)
        self.renderer, self.watching, self.choices = Renderer(), Watching(), Choices()
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        self.panel, self.banner, self.opening = Panel(devices), Banner(), OpeningBar()
        self.photo, self.volume, self.empty = PhotoView(), VolumeView(), Empty()
        self.commands, self._place = Commands(self), None
        self._lay_out()
        add_menus(self)
        self._connect()
        restore(self)
        self._fill_recent()
        self._retitle()
        if watch and settings.get("watch", True):
            self.panel.watching.setChecked(True)

    # Files

    def open(self, path: Path) -> None:
        """Show a file, once it is read; what is shown stays until then."""
        self.opening.open(Path(path).expanduser())

    def save_picture(self, path: Path) -> None:
        """Write what is on screen, labels included."""
        view = self.view
        picture: QImage = view.grab().toImage() if view else QImage()
        if picture.isNull() or not picture.save(str(path)):
            self.complain("The picture could not be saved", str(path))
        else:
            self.statusBar().showMessage(f"Saved {path}", _SHOWN_FOR)

    def dragEnterEvent(self, event) -> None:
        """Take files."""
        if event.mimeData().hasUrls():
            event.acceptProposedAction()

    def dropEvent(self, event) -> None:
        """Open what was dropped: a picture, a volume, a table, or a folder of operators."""
        for url in event.mimeData().urls():
            path = Path(url.toLocalFile())
            if path.is_dir():
                self.choices.add_library(path)
            elif path.suffix.lower() == ".cube":
                self.choices.read_table(path)
            else:
                self.open(path)

    def show_source(self, source: Source, path: Path | None = None) -> None:
        """Show a photograph or a volume."""
        self.scene = Scene(source)
        view = self.photo if isinstance(source, Photo) else self.volume
        self.panel.show_kind("photo" if isinstance(source, Photo) else "volume")
        if isinstance(source, Volume):
            self.panel.show_times(len(source.values))
            self.panel.set_window(*source.usual, float(source.values.max()))
        self.stack.setCurrentWidget(view)
        self.banner.dismiss()
        self.place.clear()
        view.compare(self.panel.comparison.value)
        QTimer.singleShot(0, lambda: self._open_in(view, source))  # once it has its size
        if path:
            self.settings.add_recent(path)
            self._fill_recent()
        self._retitle()

    def _open_in(self, view: View, source: Source) -> None:
        if self.scene and self.scene.source is source:
            view.open(source)
            self.statusBar().showMessage(f"{source.title}: {source.describe()}", _SHOWN_FOR)

    # Pictures

    @property
    def view(self) -> View | None:
        """The pictures that are shown now."""
        shown = self.stack.currentWidget()
        return shown if isinstance(shown, View) else None

    def look(self) -> Look:
        """Return how pictures are to be made."""
        return Look(
            self.panel.interpolation.value,
            self.choices.table,
            self.panel.method.value,
            self.choices.operator,
            self.panel.window(),
            self.panel.device.currentData() or "cpu",
        )

    def request(self) -> None:
        """Have a new picture rendered."""
        view = self.view
        if view and view.camera and self.scene and self.scene.source is view.source:
            compared = self.panel.comparison.value != "off"
            self.renderer.request(
                Request(self.scene, view.camera, self.look(), view.screens(), compared)
            )

    def show_frame(self, frame: Frame) -> None:
        """Show a picture that was rendered."""
        view = self.view
        if view is None or view.camera is None or type(frame.camera) is not type(view.camera):
            return
        view.show_frame(frame)
        if self.failure == "render":
            self.banner.dismiss()
        rate = f"{frame.points_per_second / 1e6:.1f} M points/s"
        self.speed.setText(f"{frame.milliseconds:.1f} ms per frame   {rate}")
        words = ""
        if self.panel.comparison.value != "off":
            words = "PyTorch …"
            if frame.reference:
                times = frame.reference / frame.milliseconds
                words = (
                    f"PyTorch {frame.reference:.0f} ms ({times:.1f}x)   "
                    f"largest difference {frame.largest:.2g}"
                )
        self.compared.setText(words)

    def complain(self, title: str, text: str = "", about: str = "file") -> None:
        """Say what is wrong; the picture stays."""
        self.failure = about
        self.banner.say("error", title, text)

    def _render_failed(self, text: str) -> None:
        first, _, rest = text.partition("\n")
        self.complain(first, "\n".join(rest.split("\n")[:3]), "render")

    def _busy(self, busy: bool) -> None:
        self._waiting.stop()
        if busy:
            self._waiting.start(_SLOW)
        elif self.status.text() in (_WORKING, _FIRST):
            self.say("")

    def _say_working(self) -> None:
        self.say(_WORKING if self.view and self.view.frame else _FIRST)

    def say(self, words: str) -> None:
        """Say what is being waited for; "" for nothing."""
        self.status.setText(words)
        self.status.setVisible(bool(words))

    # Edits

    def take_notice(self, notice: Notice) -> None:
        """Tell of an edit, and show what it does."""
        self.panel.watched.setText(f"{notice.title} ({notice.seconds:.2f} s)")
        if notice.kind == "failed":
            self.failure = "edit"
            self._place = notice.file
            text = f"{notice.text}\nThe code before it stays in use."
            self.banner.say("error", notice.title, text, notice.file is not None)
            return
        if notice.kind == "differs":
            self.failure = "edit"
            self.banner.say("warning", notice.title, notice.text)
        elif self.failure == "edit":
            self.banner.dismiss()
        self.statusBar().showMessage(f"{notice.title} ({notice.seconds:.2f} s)", _SHOWN_FOR)
        self.request()

    def set_watching(self, wanted: bool) -> None:
        """Watch the sources of kernels, or no more."""
        if wanted:
            self.watching.start()
        else:
            self.watching.stop()
        on = self.watching.is_on
        self.panel.watched.setText("Save an edit: the picture changes." if on else "")
        self.settings.put("watch", on)

    def _watch_failed(self, text: str) -> None:
        self.complain("Sources of kernels are not watched", text, "edit")
        self.panel.watching.blockSignals(True)
        self.panel.watching.setChecked(self.watching.is_on)
        self.panel.watching.blockSignals(False)

    def _open_place(self) -> None:
        if self._place:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self._place)))

    # The window itself

    def _lay_out(self) -> None:
        self.stack = QStackedWidget()
        for page in (self.empty, self.photo, self.volume):
            self.stack.addWidget(page)
        middle, above = QWidget(), QWidget()
        column = QVBoxLayout(above)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        for widget in (self.banner, self.opening):
            column.addWidget(widget)
        grid = QGridLayout(middle)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.addWidget(self.stack, 0, 0)
        grid.addWidget(above, 0, 0, Qt.AlignmentFlag.AlignTop)  # over the picture, which stays
        self.side = QScrollArea(widgetResizable=True)
        self.side.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.side.setWidget(self.panel)
        self.side.setFixedWidth(self.panel.width() + 14)
        whole = QWidget()
        row = QHBoxLayout(whole)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addWidget(middle, 1)
        row.addWidget(self.side)
        self.setCentralWidget(whole)
        self.status, self.place, self.compared, self.speed = (QLabel() for _ in range(4))
        for label in (self.status, self.place):  # however long, they do not widen the window
            label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
            self.statusBar().addWidget(label, 1)
        self.status.hide()
        for label in (self.compared, self.speed):
            label.setContentsMargins(10, 0, 6, 0)
            self.statusBar().addPermanentWidget(label)
        self.speed.setToolTip("For a whole picture; and how fast points are sampled")
        self._waiting = QTimer(self, singleShot=True)
        self._waiting.timeout.connect(self._say_working)

    def _connect(self) -> None:
        self.renderer.rendered.connect(self.show_frame)
        self.renderer.failed.connect(self._render_failed)
        self.renderer.busy.connect(self._busy)
        self.watching.noticed.connect(self.take_notice)
        self.watching.failed.connect(self._watch_failed)
        self.choices.changed.connect(self.request)
        self.choices.changed.connect(self.show_choices)
        self.choices.failed.connect(self.complain)
        self.choices.waiting.connect(self.say)
        self.choices.library_added.connect(self._library_added)
        self.opening.opened.connect(self.show_source)
        self.opening.failed.connect(lambda text: self.complain("This file cannot be shown", text))
        self.empty.open_button.clicked.connect(self.commands.ask_for_file)
        self.empty.brain_button.clicked.connect(self.commands.open_brain)
        self.banner.opened.connect(self._open_place)
        for view in (self.photo, self.volume):
            view.changed.connect(self.request)
            view.told.connect(self.place.setText)
        panel = self.panel
        panel.changed.connect(self.request)
        panel.compared.connect(self.commands.compare)
        panel.table_wanted.connect(self.commands.want_table)
        panel.operator_wanted.connect(self.commands.want_operator)
        panel.watch_wanted.connect(self.set_watching)
        panel.warp_changed.connect(self.photo.warp_by)
        panel.view_changed.connect(
            lambda: self.volume.set_time(panel.time.value(), panel.mirrored.isChecked())
        )
        self.photo.changed.connect(self._show_warp)

    def show_choices(self) -> None:
        """Offer what there is, and show what is in use."""
        panel, choices = self.panel, self.choices
        panel.fill(panel.table, choices.table_entries(), "Open .cube …")
        panel.fill(panel.operator, choices.operator_entries(), "Open folder …")
        panel.choose(panel.table, choices.table_name)
        panel.choose(panel.operator, choices.operator.name if choices.operator else "")

    def _show_warp(self) -> None:
        if self.photo.camera:
            self.panel.show_warp(self.photo.camera.warp, min(self.photo.camera.size))

    def _library_added(self) -> None:
        self.settings.put("libraries", "\n".join(self.choices.libraries))
        if self.watching.is_on:
            self.watching.start()

    def _fill_recent(self) -> None:
        self.recent_menu.clear()
        for path in self.settings.recent:
            action = self.recent_menu.addAction(path.name)
            action.setToolTip(str(path))
            action.triggered.connect(lambda _=False, path=path: self.open(path))
        self.recent_menu.setEnabled(bool(self.settings.recent))

    def _retitle(self) -> None:
        self.setWindowTitle(f"{self.scene.source.title} - {_TITLE}" if self.scene else _TITLE)

    def closeEvent(self, event: QCloseEvent) -> None:
        """Keep the choices, and end the threads; what is under way in them is dropped."""
        keep(self)
        self.hide()
        ended = [self.opening.stop(), self.renderer.stop(), self.choices.stop()]
        self.stuck = not all([*ended, self.watching.finish()])
        event.accept()
        self.closed.emit()  # Qt itself sees no window closed that is hidden
