"""What menus and keys do."""

from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog

from ..core import sources
from ..core.sources import PHOTOS, VOLUMES
from .actions import Help
from .panel import MORE

_SHOWN_FOR = 6000  # milliseconds, of a message in the status bar


class Commands:
    """Each a method, by the name that `actions.MENUS` has; `window` is a `window.Window`."""

    def __init__(self, window: Any):
        self._window = window

    def open_brain(self) -> None:
        """Show the MNI template."""
        if (brain := sources.brain()) is None:
            words = "There is no MNI brain here", "It comes with nilearn: pip install nilearn"
            self._window.complain(*words)
        else:
            self._window.open(brain)

    def ask_for_file(self) -> None:
        """Ask which file to show."""
        kinds = " ".join(f"*{end}" for end in (*PHOTOS, *VOLUMES))
        name, _ = QFileDialog.getOpenFileName(
            self._window, "Open", self._folder(), f"Photographs and volumes ({kinds});;All (*)"
        )
        if name:
            self._window.open(Path(name))

    def ask_for_table(self) -> None:
        """Ask for a colour table."""
        name, _ = QFileDialog.getOpenFileName(
            self._window, "Open colour table", self._folder(), "Colour tables (*.cube)"
        )
        if name:
            self._window.choices.read_table(Path(name))
        self._window.show_choices()

    def ask_for_library(self) -> None:
        """Ask for a folder of operators."""
        title = "Open folder of operators, with ops/ and kernels/"
        name = QFileDialog.getExistingDirectory(self._window, title, self._folder())
        if name:
            self._window.choices.add_library(Path(name))
        self._window.show_choices()

    def want_table(self, title: str) -> None:
        """Use a colour table by its title, or ask for one."""
        if title == MORE:
            self.ask_for_table()
        else:
            self._window.choices.use_table(title)

    def want_operator(self, name: str) -> None:
        """Use an operator by its name, or ask for a folder of operators."""
        if name == MORE:
            self.ask_for_library()
        else:
            self._window.choices.use_operator(name)

    def ask_where_to_save(self) -> None:
        """Ask where to save the picture."""
        name, _ = QFileDialog.getSaveFileName(
            self._window, "Save picture", f"{self._folder()}/octet.png", "Pictures (*.png)"
        )
        if name:
            self._window.save_picture(Path(name))

    def close(self) -> None:
        """End it."""
        self._window.close()

    def reset(self) -> None:
        """Show all."""
        self._do("reset")

    def actual_size(self) -> None:
        """Show one to one."""
        self._do("actual_size")

    def zoom(self, factor: float) -> None:
        """Go closer."""
        self._do("zoom", factor)

    def turn(self, degrees: float) -> None:
        """Turn clockwise."""
        self._do("turn", degrees)

    def pan(self, dx: float, dy: float) -> None:
        """Move by shares of the screen."""
        self._do("pan", dx, dy)

    def step(self, steps: float) -> None:
        """Go through slices, or bend more."""
        self._do("step", steps)

    def next_plane(self) -> None:
        """Let keys move the next plane."""
        volume = self._window.volume
        planes = [*volume.canvases]
        volume.activate(planes[(planes.index(volume.active) + 1) % len(planes)])
        self._window.statusBar().showMessage(f"Keys move the {volume.active} plane", _SHOWN_FOR)

    def enlarge(self) -> None:
        """Give one plane all the room, or not."""
        volume = self._window.volume
        volume.enlarge(not volume.is_enlarged)

    def mirror(self) -> None:
        """Show the patient's right on the other side."""
        self._window.panel.mirrored.toggle()

    def toggle_panel(self) -> None:
        """Show the choices, or not."""
        self._window.side.setVisible(self._window.side.isHidden())

    def toggle_full_screen(self) -> None:
        """Take the whole screen, or not."""
        window = self._window
        window.setWindowState(window.windowState() ^ Qt.WindowState.WindowFullScreen)

    def toggle_watching(self) -> None:
        """Watch, or not."""
        self._window.panel.watching.toggle()

    def interpolate(self, name: str) -> None:
        """Choose an interpolation."""
        self._window.panel.interpolation.choose(name)
        self._window.request()

    def next_method(self) -> None:
        """Go through the methods of colour tables."""
        choice = self._window.panel.method
        names = [*choice.buttons]
        choice.choose(names[(names.index(choice.value) + 1) % len(names)])
        self._window.request()

    def next_table(self) -> None:
        """Use the next colour table."""
        choices = self._window.choices
        names = ["", *choices.tables]
        choices.use_table(names[(names.index(choices.table_name) + 1) % len(names)])

    def next_operator(self) -> None:
        """Use the next operator."""
        choices = self._window.choices
        names = ["", *(name for _, name in choices.operator_entries())]
        now = names.index(choices.operator.name if choices.operator else "")
        choices.use_operator(names[(now + 1) % len(names)])

    def compare(self, comparison: str) -> None:
        """Show one of `canvas.COMPARISONS`."""
        window = self._window
        window.panel.comparison.choose(comparison)
        for view in (window.photo, window.volume):
            view.compare(comparison)
        window.request()

    def escape(self) -> None:
        """Cancel what is being opened, or hide the message."""
        if not self._window.opening.cancel():
            self._window.banner.dismiss()

    def show_help(self) -> None:
        """Show the list of keys."""
        Help(self._window).show()

    def _folder(self) -> str:
        recent = self._window.settings.recent
        return str(recent[0].parent if recent else Path.home())

    def _do(self, name: str, *arguments: float) -> None:
        if self._window.view:
            getattr(self._window.view, name)(*arguments)
