"""`python -m loader view`: the application."""

import os
import sys
from pathlib import Path

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication

from ..core import sources
from . import theme
from .settings import Settings
from .window import Window

_LOOK = 200  # milliseconds between two looks for a Ctrl-C in the terminal


def main(file: str | None = None, operator: str | None = None, library: str | None = None) -> int:
    """Show a file, or the MNI brain, or that there is nothing yet; the exit status."""
    app = QApplication.instance() or QApplication(sys.argv[:1])
    app.setApplicationName("octet")
    theme.dress(app)
    chosen = os.environ.get("OCTET_VIEWER_SETTINGS")
    window = Window(Settings(Path(chosen) if chosen else None))
    window.closed.connect(app.quit)
    window.show()
    if file:
        window.open(Path(file))
    elif sources.brain():
        window.commands.open_brain()
    if library:
        window.choices.add_library(Path(library))
    if operator:
        window.choices.use_operator(operator)
    awake = QTimer(interval=_LOOK)  # Python sees signals between two of its own steps alone
    awake.timeout.connect(lambda: None)
    awake.start()
    try:
        status = app.exec()
    except KeyboardInterrupt:
        window.close()
        status = 130
    if window.stuck:  # in an operator, or a build: a thread that nothing can end
        sys.stdout.flush()
        os._exit(status)
    return status
