"""The threads that work while the window answers: rendering, opening files, taking in edits."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, QThread, Signal

import loader

from ..core.edits import Notice, notices
from ..core.flat import Screen
from ..core.scene import Camera, Frame, Look, Scene, Stopped
from ..core.sources import Cancelled, CannotOpen, Source, open_file

PATIENCE = 5000  # milliseconds for what is under way, as the window closes


@dataclass(frozen=True, eq=False)
class Request:
    """One picture that somebody wants; `compared` with the reference."""

    scene: Scene
    camera: Camera
    look: Look
    screens: dict[str, Screen]
    compared: bool


class Renderer(QThread):
    """Renders the newest request; those that it has not come to by then are dropped.

    The reference, which takes far longer, is left out for as long as newer requests come.
    """

    rendered = Signal(Frame)
    failed = Signal(str)
    busy = Signal(bool)

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()
        self._wanted: Request | None = None
        self._stop, self._working = False, False
        self._warm: Scene | None = None  # the last one that was rendered

    def request(self, request: Request) -> None:
        """Have a picture rendered, instead of whatever is not begun."""
        with self._news:
            self._wanted = request
            self._news.notify()
        if not self.isRunning():
            self.start()

    @property
    def is_idle(self) -> bool:
        """True if nothing is under way, nor wanted."""
        with self._news:
            return self._wanted is None and not self._working

    def stop(self) -> bool:
        """End it; False if what is under way does not end."""
        with self._news:
            self._stop, self._wanted = True, None
            self._news.notify()
        return self.wait(PATIENCE)

    def run(self) -> None:
        """Render until it is stopped."""
        while True:
            with self._news:
                while self._wanted is None and not self._stop:
                    self._news.wait()
                if self._stop:
                    return
                request, self._wanted, self._working = self._wanted, None, True
            self.busy.emit(True)
            try:
                self._serve(request)
            except Stopped:
                pass
            except Exception as error:  # of any operator: the picture before stays
                self.failed.emit(str(error) or type(error).__name__)
            with self._news:
                self._working = False
            self.busy.emit(False)

    def _serve(self, request: Request | None) -> None:
        if request is None:
            return
        scene = request.scene
        frame = scene.render(request.camera, request.look, request.screens, self._check_stop)
        self.rendered.emit(frame)
        if self._warm is not scene and self._wanted is None:  # the first also loads, and copies
            self._warm = scene
            frame = scene.render(request.camera, request.look, request.screens, self._check_stop)
            self.rendered.emit(frame)
        if request.compared:
            self.rendered.emit(scene.compare(frame, self._check_newer))

    def _check_stop(self) -> None:
        if self._stop:
            raise Stopped

    def _check_newer(self) -> None:
        if self._stop or self._wanted is not None:
            raise Stopped


class Opening(QThread):
    """Reads a file; `cancel` ends it."""

    progressed = Signal(float)
    opened = Signal(object)
    failed = Signal(str)
    cancelled = Signal()

    def __init__(self, path: Path, read: Callable[..., Source] = open_file):
        super().__init__()
        self.path, self._read = path, read
        self._unwanted = threading.Event()

    def cancel(self) -> None:
        """Have it end soon, without a result."""
        self._unwanted.set()

    def run(self) -> None:
        """Read, and tell how it ended."""
        shown = -1

        def progress(share: float) -> None:
            nonlocal shown
            if self._unwanted.is_set():
                raise Cancelled
            if int(100 * share) > shown:
                shown = int(100 * share)
                self.progressed.emit(share)

        try:
            source = self._read(self.path, progress)
            progress(1.0)
        except Cancelled:
            self.cancelled.emit()
        except CannotOpen as error:
            self.failed.emit(str(error))
        except Exception as error:  # what no reader of files foresees
            self.failed.emit(f"{self.path.name}: {error or type(error).__name__}")
        else:
            self.opened.emit(source)


class Call(QThread):
    """Calls a function in a thread of its own, and tells what came of it."""

    done = Signal(object)
    failed = Signal(str)

    def __init__(self, function: Callable[[], Any]):
        super().__init__()
        self._function = function

    def run(self) -> None:
        """Call it."""
        try:
            result = self._function()
        except Exception as error:
            self.failed.emit(str(error) or type(error).__name__)
        else:
            self.done.emit(result)


class Watching(QObject):
    """Takes in edits of kernels as their files are saved, and tells of each.

    To begin and to end may take a moment, in threads; `is_on` is what is wanted.
    """

    noticed = Signal(Notice)
    failed = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self._watch: Any = None
        self._calls: list[Call] = []

    def start(self) -> None:
        """Watch the sources of `loader` and of every `loader.Library` that there is by now."""
        self.stop()
        self.is_on = True
        self._call(self._begin)

    def stop(self) -> None:
        """Watch no more."""
        self.is_on = False
        self._call(self._end)

    def finish(self) -> bool:
        """Watch no more, and wait for what is under way; False if that does not end."""
        self.stop()
        return all(call.wait(PATIENCE) for call in [*self._calls])

    def _call(self, function: Callable[[], None]) -> None:
        """Call it in a thread, after those before."""
        before = [*self._calls]

        def in_turn() -> None:
            for call in before:
                call.wait()
            function()

        call = Call(in_turn)
        call.failed.connect(self._fail)
        call.finished.connect(lambda: self._calls.remove(call))
        self._calls.append(call)
        call.start()

    def _begin(self) -> None:
        self._watch = loader.watch(tell=self._tell, differing=True)

    def _end(self) -> None:
        if self._watch:
            self._watch.stop()
        self._watch = None

    def _fail(self, text: str) -> None:
        self.is_on = False
        self.failed.emit(text)

    def _tell(self, report: Any) -> None:
        """In the thread that watches."""
        if isinstance(report, Exception):
            self.failed.emit(str(report))
            return
        for notice in notices(report):
            self.noticed.emit(notice)
