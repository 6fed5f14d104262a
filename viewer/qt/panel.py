"""The choices beside the picture."""

from collections.abc import Iterable

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QComboBox,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QSlider,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from ..core.flat import WARPS, Warp
from ..core.scene import INTERPOLATIONS
from ..core.tables import METHODS
from .canvas import COMPARISONS

_TICKS = 1000  # of a slider
_WIDTH = 264
_OWN_KEYS = {
    getattr(Qt.Key, f"Key_{name}")
    for name in ("Left", "Right", "Up", "Down", "PageUp", "PageDown", "Home", "End")
}
MORE = "\x00more"  # data of the entry that opens a file or a folder


class Choice(QWidget):
    """A few buttons, of which one is down."""

    chosen = Signal(str)

    def __init__(self, names: dict[str, tuple[str, str]]):
        """`names`: by what is chosen, the words on the button and its tooltip."""
        super().__init__()
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(3)
        self.buttons: dict[str, QToolButton] = {}
        group = QButtonGroup(self)
        for name, (words, tip) in names.items():
            button = QToolButton(text=words, checkable=True, toolTip=tip)
            button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
            button.setSizePolicy(
                button.sizePolicy().Policy.Expanding, button.sizePolicy().verticalPolicy()
            )
            button.clicked.connect(lambda _, name=name: self.chosen.emit(name))
            group.addButton(button)
            layout.addWidget(button)
            self.buttons[name] = button

    @property
    def value(self) -> str:
        """What is chosen."""
        return next(name for name, button in self.buttons.items() if button.isChecked())

    def choose(self, name: str) -> None:
        """Choose, without telling."""
        self.buttons[name].setChecked(True)


class Panel(QWidget):
    """Every choice, in groups; `changed` tells that a picture with others is wanted."""

    changed = Signal()
    compared = Signal(str)
    table_wanted = Signal(str)  # a title, or MORE
    operator_wanted = Signal(str)  # a name, or MORE
    warp_changed = Signal(dict)
    view_changed = Signal()  # of a volume: time, mirrored
    watch_wanted = Signal(bool)

    def __init__(self, devices: Iterable[str]):
        super().__init__(objectName="panel")
        self.setFixedWidth(_WIDTH)
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(12, 10, 12, 10)
        self._layout.setSpacing(5)
        self._most = 1.0
        self._quiet = False
        self._add_picture()
        self._add_photo()
        self._add_volume()
        self._add_machine(devices)
        self._layout.addStretch(1)
        for child in self.findChildren(QWidget):
            child.installEventFilter(self)
        self.show_kind("")

    def eventFilter(self, child: QObject, event: QEvent) -> bool:
        """Leave the keys that move pictures to a slider or a list that has the focus."""
        if event.type() == QEvent.Type.ShortcutOverride and event.key() in _OWN_KEYS:
            event.accept()
            return True
        return super().eventFilter(child, event)

    def show_kind(self, kind: str) -> None:
        """Show what is for a "photo" or a "volume"."""
        self._photo.setVisible(kind == "photo")
        self._volume.setVisible(kind == "volume")

    def set_window(self, low: float, high: float, most: float) -> None:
        """Set black and white of a volume whose largest value is `most`."""
        self._most, self._quiet = max(most, 1e-12), True
        self.black.setValue(round(_TICKS * low / self._most))
        self.white.setValue(round(_TICKS * high / self._most))
        self._quiet = False

    def window(self) -> tuple[float, float]:
        """Return the values that are black and white; never equal."""
        low, high = self.black.value(), max(self.white.value(), self.black.value() + 1)
        return low * self._most / _TICKS, high * self._most / _TICKS

    def show_warp(self, warp: Warp, side: int) -> None:
        """Show how a photograph of this shorter side is bent."""
        self._quiet = True
        self.warp.setCurrentIndex(self.warp.findData(warp.kind))
        self.strength.setValue(round(warp.strength * _TICKS))
        self.radius.setValue(round(_TICKS * min(1.0, warp.radius / max(1, side))))
        self._quiet = False

    def show_times(self, count: int) -> None:
        """Offer so many times of a volume."""
        self.time.setMaximum(max(0, count - 1))
        for widget in (self.time, self._time_label):
            widget.setVisible(count > 1)

    def fill(self, combo: QComboBox, entries: list[tuple[str, str]], more: str) -> None:
        """Offer entries (title, data) and one that opens something; what is chosen stays."""
        chosen = combo.currentData()
        combo.blockSignals(True)
        combo.clear()
        for title, data in [("None", ""), *entries, (more, MORE)]:
            combo.addItem(title, data)
        combo.setCurrentIndex(max(0, combo.findData(chosen)))
        combo.blockSignals(False)

    def choose(self, combo: QComboBox, data: str) -> None:
        """Show what is in use, without telling."""
        combo.blockSignals(True)
        combo.setCurrentIndex(max(0, combo.findData(data)))
        combo.blockSignals(False)

    def _add_picture(self) -> None:
        self.interpolation = Choice(
            {
                name: (name.capitalize(), f"{name.capitalize()} interpolation ({number})")
                for number, name in enumerate(INTERPOLATIONS, 1)
            }
        )
        self.interpolation.choose("linear")
        self.interpolation.chosen.connect(self._tell)
        self._group("Interpolation", self.interpolation)
        self.table = QComboBox(toolTip="Colour table, applied last (C for the next one)")
        self.table.activated.connect(lambda: self.table_wanted.emit(self.table.currentData()))
        self.method = Choice(
            {
                name: (name.capitalize(), f"{name.capitalize()} between the table's entries (T)")
                for name in METHODS
            }
        )
        self.method.choose(METHODS[0])
        self.method.chosen.connect(self._tell)
        self._group("Colour table", self.table, self.method)
        self.operator = QComboBox(
            toolTip="An operator between sampling and colours; edit its kernel and watch (O)"
        )
        self.operator.activated.connect(
            lambda: self.operator_wanted.emit(self.operator.currentData())
        )
        self._group("Operator", self.operator)
        words = ("Octet", "Split", "Difference")
        tips = (
            "Our kernels alone (F5)",
            "Our kernels on the left, the plain-PyTorch reference on the right (F6)",
            "How far our kernels are from the reference, and the largest difference (F7)",
        )
        names = dict(zip(COMPARISONS, zip(words, tips, strict=True), strict=True))
        self.comparison = Choice(names)
        self.comparison.choose("off")
        self.comparison.chosen.connect(self.compared)
        self._group("Compare with PyTorch", self.comparison)

    def _add_photo(self) -> None:
        self.warp = QComboBox(
            toolTip="How the photograph is bent; Ctrl+drag does it with the mouse"
        )
        for name in WARPS:
            self.warp.addItem(name.capitalize(), name)
        self.warp.activated.connect(self._tell_warp)
        self.strength = self._slider("How much, to either side ([ and ])", -_TICKS)
        self.radius = self._slider("How far from the centre (Ctrl+wheel)", 10)
        for slider in (self.strength, self.radius):
            slider.valueChanged.connect(self._tell_warp)
        self._photo = self._group(
            "Warp",
            self.warp,
            self._rows({"Strength": self.strength, "Radius": self.radius}),
        )

    def _add_volume(self) -> None:
        self.black = self._slider("Values up to this are black", 0)
        self.white = self._slider("Values from this on are white", 1)
        self.time = QSlider(Qt.Orientation.Horizontal, toolTip="Which of the volumes")
        self.time.setMaximum(0)
        for slider in (self.black, self.white):
            slider.valueChanged.connect(self._tell)
        self.mirrored = QCheckBox("Radiological: right on the left")
        self.mirrored.setToolTip("Show the patient's right on the left of the screen (X)")
        self.time.valueChanged.connect(lambda _: self.view_changed.emit())
        self.mirrored.toggled.connect(lambda _: self.view_changed.emit())
        rows = self._rows({"Black": self.black, "White": self.white, "Time": self.time})
        self._volume = self._group("Window", rows, self.mirrored)

    def _add_machine(self, devices: Iterable[str]) -> None:
        self.device = QComboBox(toolTip="Where pictures are computed")
        for name in devices:
            self.device.addItem(name, name)
        self.device.activated.connect(self._tell)
        self.watching = QCheckBox("Watch the sources")
        self.watching.setToolTip("Take in an edit of a kernel as soon as it is saved (W)")
        self.watching.toggled.connect(self.watch_wanted)
        self.watched = QLabel("", objectName="faint", wordWrap=True)
        self._group("Kernels", self.watching, self.watched)
        if self.device.count() > 1:
            self._group("Device", self.device)

    def _group(self, title: str, *widgets: QWidget) -> QWidget:
        group = QWidget()
        layout = QVBoxLayout(group)
        layout.setContentsMargins(0, 0, 0, 8)
        layout.setSpacing(5)
        layout.addWidget(QLabel(title, objectName="heading"))
        for widget in widgets:
            layout.addWidget(widget)
        self._layout.addWidget(group)
        return group

    def _rows(self, sliders: dict[str, QSlider]) -> QWidget:
        rows = QWidget()
        grid = QGridLayout(rows)
        grid.setContentsMargins(0, 0, 0, 0)
        for number, (name, slider) in enumerate(sliders.items()):
            label = QLabel(name, objectName="faint")
            grid.addWidget(label, number, 0)
            grid.addWidget(slider, number, 1)
            if name == "Time":
                self._time_label = label
        return rows

    @staticmethod
    def _slider(tip: str, least: int) -> QSlider:
        slider = QSlider(Qt.Orientation.Horizontal, toolTip=tip)
        slider.setRange(least, _TICKS)
        return slider

    def _tell(self, *_: object) -> None:
        if not self._quiet:
            self.changed.emit()

    def _tell_warp(self, *_: object) -> None:
        if not self._quiet:
            self.warp_changed.emit(
                {
                    "kind": self.warp.currentData(),
                    "strength": self.strength.value() / _TICKS,
                    "share": self.radius.value() / _TICKS,
                }
            )
