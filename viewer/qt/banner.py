"""One message above the picture, which stays until it is dealt with."""

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QToolButton, QVBoxLayout

_COLOURS = {
    "error": ("#4a2220", "#e25c54"),
    "warning": ("#453514", "#e0aa46"),
    "good": ("#1f3a26", "#68be78"),
}


class Banner(QFrame):
    """Says what is wrong, and where."""

    dismissed = Signal()
    opened = Signal()  # the place was clicked

    def __init__(self) -> None:
        super().__init__(objectName="banner")
        layout = QHBoxLayout(self)
        layout.setContentsMargins(12, 7, 8, 7)
        words = QVBoxLayout()
        words.setSpacing(2)
        self.title, self.text = QLabel(wordWrap=True), QLabel(wordWrap=True)
        for label in (self.title, self.text):
            label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
            words.addWidget(label)
        layout.addLayout(words, 1)
        self.open_button = QToolButton(text="Open file", toolTip="Open it in the system's editor")
        self.open_button.clicked.connect(self.opened)
        self.close_button = QToolButton(text="Close", toolTip="Hide this message (Esc)")
        self.close_button.clicked.connect(self.dismiss)
        layout.addWidget(self.open_button)
        layout.addWidget(self.close_button)
        self.kind = ""
        self.hide()

    def say(self, kind: str, title: str, text: str = "", has_file: bool = False) -> None:
        """Show a message of a kind: error, warning or good."""
        ground, edge = _COLOURS[kind]
        self.kind = kind
        self.setStyleSheet(
            f"#banner {{ background: {ground}; border: none; border-left: 4px solid {edge}; }}"
        )
        self.title.setText(f"<b>{_escaped(title)}</b>")
        self.text.setText(_escaped(text))
        self.text.setVisible(bool(text))
        self.open_button.setVisible(has_file)
        self.show()

    def dismiss(self) -> None:
        """Hide it."""
        self.kind = ""
        self.hide()
        self.dismissed.emit()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", "<br>")
