"""Dark and neutral, so that no colour of the window bends those of a picture."""

from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication

GROUND = QColor(24, 24, 24)
TEXT = QColor(222, 222, 222)
FAINT = QColor(150, 150, 150)
ACCENT = QColor(90, 160, 235)
CROSS = QColor(255, 196, 61)
GOOD, WARNING, BAD = QColor(104, 190, 120), QColor(224, 170, 70), QColor(226, 92, 84)

_SHEET = """
* { font-size: 10pt; }
QMainWindow, QDialog { background: #2a2a2a; }
QToolTip { background: #3a3a3a; color: #eeeeee; border: 1px solid #555555; padding: 3px; }
QStatusBar { background: #222222; color: #c8c8c8; }
QStatusBar::item { border: none; }
QMenuBar { background: #222222; }
QMenuBar::item { padding: 4px 9px; background: transparent; }
QMenuBar::item:selected, QMenu::item:selected { background: #3f638f; }
QMenu { background: #2d2d2d; border: 1px solid #4a4a4a; }
QMenu::item { padding: 4px 28px 4px 22px; }
QMenu::item:disabled { color: #7d7d7d; }
QMenu::separator { height: 1px; background: #474747; margin: 4px 8px; }
QScrollArea, QWidget#panel { background: #2a2a2a; border: none; }
QLabel#heading { color: #9c9c9c; font-weight: 600; }
QLabel#faint { color: #a8a8a8; }
QToolButton, QPushButton {
    background: #3a3a3a; border: 1px solid #505050; border-radius: 3px; padding: 4px 8px;
}
QToolButton:hover, QPushButton:hover { background: #474747; }
QToolButton:checked { background: #3f638f; border-color: #5a8fc9; color: white; }
QToolButton:focus, QPushButton:focus, QComboBox:focus, QSlider:focus { border-color: #5aa0eb; }
QToolButton:disabled, QPushButton:disabled { color: #7d7d7d; }
QCheckBox::indicator { width: 13px; height: 13px; border: 1px solid #6a6a6a; border-radius: 2px;
    background: #1e1e1e; }
QCheckBox::indicator:checked { background: #5aa0eb; border-color: #9cc6f2; }
QCheckBox::indicator:focus { border-color: #5aa0eb; }
QComboBox { background: #3a3a3a; border: 1px solid #505050; border-radius: 3px; padding: 3px 8px; }
QComboBox QAbstractItemView { background: #2d2d2d; selection-background-color: #3f638f; }
QProgressBar { border: 1px solid #505050; border-radius: 3px; background: #1e1e1e;
    text-align: center; min-height: 16px; }
QProgressBar::chunk { background: #3f7fc0; border-radius: 2px; }
QSplitter::handle { background: #222222; }
"""


def dress(app: QApplication) -> None:
    """Give an application its colours."""
    app.setStyle("Fusion")
    palette, roles = QPalette(), QPalette.ColorRole
    colours = {
        roles.Window: QColor(42, 42, 42),
        roles.WindowText: TEXT,
        roles.Base: QColor(30, 30, 30),
        roles.AlternateBase: QColor(36, 36, 36),
        roles.Text: TEXT,
        roles.Button: QColor(58, 58, 58),
        roles.ButtonText: TEXT,
        roles.ToolTipBase: QColor(58, 58, 58),
        roles.ToolTipText: TEXT,
        roles.Highlight: QColor(63, 99, 143),
        roles.HighlightedText: QColor(255, 255, 255),
        roles.Link: ACCENT,
        roles.PlaceholderText: FAINT,
    }
    for role, colour in colours.items():
        palette.setColor(role, colour)
    for role in (roles.Text, roles.ButtonText, roles.WindowText):
        palette.setColor(QPalette.ColorGroup.Disabled, role, QColor(120, 120, 120))
    app.setPalette(palette)
    app.setStyleSheet(_SHEET)
