"""Menus, keys, and the list of them."""

from typing import Any

from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QLabel, QScrollArea, QVBoxLayout, QWidget

# By menu: words, keys, the method of `Commands`, its arguments. None is a line between.
MENUS: dict[str, list[tuple | None]] = {
    "File": [
        ("Open…", "Ctrl+O", "ask_for_file"),
        ("Open the MNI brain", "Ctrl+B", "open_brain"),
        ("Open colour table…", "Ctrl+T", "ask_for_table"),
        ("Open folder of operators…", "Ctrl+L", "ask_for_library"),
        ("Save picture…", "Ctrl+S", "ask_where_to_save"),
        None,
        ("Quit", "Ctrl+Q", "close"),
    ],
    "View": [
        ("Show all", "Home", "reset"),
        ("One to one", "0", "actual_size"),
        ("Closer", "+", "zoom", 1.25),
        ("Farther", "-", "zoom", 0.8),
        ("Turn clockwise", "R", "turn", 5),
        ("Turn counterclockwise", "Shift+R", "turn", -5),
        ("Move left", "Left", "pan", 0.05, 0),
        ("Move right", "Right", "pan", -0.05, 0),
        ("Move up", "Up", "pan", 0, 0.05),
        ("Move down", "Down", "pan", 0, -0.05),
        None,
        ("Next slice / stronger warp", "]", "step", 1),
        ("Previous slice / weaker warp", "[", "step", -1),
        ("Ten slices on", "PgUp", "step", 10),
        ("Ten slices back", "PgDown", "step", -10),
        ("Next plane", "N", "next_plane"),
        ("Enlarge the plane", "E", "enlarge"),
        ("Radiological / neurological", "X", "mirror"),
        None,
        ("Choices at the side", "F9", "toggle_panel"),
        ("Full screen", "F11", "toggle_full_screen"),
    ],
    "Picture": [
        ("Nearest", "1", "interpolate", "nearest"),
        ("Linear", "2", "interpolate", "linear"),
        ("Cubic", "3", "interpolate", "cubic"),
        None,
        ("Next colour table", "C", "next_table"),
        ("Tetrahedral / trilinear", "T", "next_method"),
        ("Next operator", "O", "next_operator"),
        None,
        ("Octet alone", "F5", "compare", "off"),
        ("Split with PyTorch", "F6", "compare", "split"),
        ("Difference from PyTorch", "F7", "compare", "difference"),
        None,
        ("Watch the sources of kernels", "W", "toggle_watching"),
        ("Hide message, cancel opening", "Esc", "escape"),
    ],
    "Help": [("Keys and mouse", "F1", "show_help")],
}

_FIRST = "<td width=205>"  # the column of keys

MOUSE = {
    "Photograph": [
        ("Drag", "move"),
        ("Wheel", "zoom at the mouse"),
        ("Right drag, or Shift+drag", "turn"),
        ("Ctrl+drag", "warp: where it begins is the centre, to the right is stronger"),
        ("Ctrl+wheel", "radius of the warp"),
    ],
    "Volume": [
        ("Click or drag", "slice: all three planes go through that point"),
        ("Wheel", "through the slices of this plane"),
        ("Ctrl+wheel", "zoom at the mouse"),
        ("Right drag, or Shift+drag", "turn this plane, and the others with it"),
        ("Middle drag, or Alt+drag", "move"),
        ("Double click", "enlarge this plane, or show all"),
    ],
    "Split": [("Drag the line", "more of Octet, or more of PyTorch")],
}


def add_menus(window: Any) -> None:
    """Give a `window.Window` its menus; every entry has a key."""
    for title, entries in MENUS.items():
        menu = window.menuBar().addMenu(title)
        for entry in entries:
            if entry is None:
                menu.addSeparator()
                continue
            words, key, method, *arguments = entry
            action = QAction(words, window)
            action.setShortcut(QKeySequence(key))
            action.setStatusTip(words)
            action.triggered.connect(
                lambda _=False, m=method, a=tuple(arguments): getattr(window.commands, m)(*a)
            )
            menu.addAction(action)
            if words.startswith("Open the MNI"):
                window.recent_menu = menu.addMenu("Open recent")


def help_text() -> str:
    """Return all keys and what the mouse does, as HTML."""
    parts = []
    for title, rows in MOUSE.items():
        lines = "".join(f"<tr>{_FIRST}<b>{how}</b></td><td>{what}</td></tr>" for how, what in rows)
        parts.append(f"<h3>Mouse: {title.lower()}</h3><table cellpadding=3>{lines}</table>")
    for title, entries in MENUS.items():
        lines = "".join(
            f"<tr>{_FIRST}<b>{entry[1]}</b></td><td>{entry[0]}</td></tr>"
            for entry in entries
            if entry
        )
        parts.append(f"<h3>Keys: {title.lower()}</h3><table cellpadding=3>{lines}</table>")
    return "".join(parts)


class Help(QDialog):
    """The list of keys."""

    def __init__(self, parent: QWidget):
        super().__init__(parent)
        self.setWindowTitle("Keys and mouse")
        self.resize(520, 640)
        layout = QVBoxLayout(self)
        area = QScrollArea(widgetResizable=True)
        words = QLabel(help_text(), wordWrap=True)
        words.setContentsMargins(12, 4, 12, 12)
        area.setWidget(words)
        layout.addWidget(area)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        layout.addWidget(buttons)
