"""What of a window is kept from one start to the next."""

from pathlib import Path
from typing import Any

from .panel import Choice, Panel


def restore(window: Any) -> None:
    """Put the choices kept into a `window.Window`."""
    settings, panel, choices = window.settings, window.panel, window.choices
    if not window.restoreGeometry(settings.bytes("geometry")):
        window.resize(1280, 820)
    for choice, name in _kept(panel).items():
        if (chosen := settings.get(name, choice.value)) in choice.buttons:
            choice.choose(chosen)
    window.volume.mirrored = settings.get("mirrored", False)
    panel.mirrored.setChecked(window.volume.mirrored)
    file = settings.get("table file", "")
    if file and Path(file).exists():
        choices.read_table(Path(file))
    choices.use_table(settings.get("table", ""))
    window.show_choices()
    for path in filter(None, settings.get("libraries", "").split("\n")):
        if Path(path).is_dir():
            choices.add_library(Path(path), use=False)


def keep(window: Any) -> None:
    """Keep the choices of a `window.Window`."""
    settings, panel = window.settings, window.panel
    settings.put("geometry", window.saveGeometry())
    for choice, name in _kept(panel).items():
        settings.put(name, choice.value)
    settings.put("mirrored", panel.mirrored.isChecked())
    settings.put("table", window.choices.table_name)
    settings.put("table file", window.choices.table_file)
    settings.save()


def _kept(panel: Panel) -> dict[Choice, str]:
    return {
        panel.interpolation: "interpolation",
        panel.method: "method",
        panel.comparison: "comparison",
    }
