"""What the next start remembers."""

from pathlib import Path
from typing import Any

from PySide6.QtCore import QByteArray, QSettings

_RECENT = 8  # files


class Settings:
    """The user's choices, kept in a file: by default where the system keeps such files."""

    def __init__(self, file: Path | None = None):
        where = (str(file), QSettings.Format.IniFormat) if file else ("octet", "viewer")
        self._kept = QSettings(*where)

    def get(self, name: str, default: Any) -> Any:
        """Return a choice in the type of its default; that where there is none that fits."""
        found = self._kept.value(name)
        try:
            if isinstance(default, bool):
                return default if found is None else str(found).lower() == "true"
            return default if found is None else type(default)(found)
        except (TypeError, ValueError):
            return default

    def put(self, name: str, value: Any) -> None:
        """Remember a choice."""
        self._kept.setValue(name, value)

    def bytes(self, name: str) -> QByteArray:
        """Return what Qt packed itself, such as a window's place."""
        found = self._kept.value(name)
        return found if isinstance(found, QByteArray) else QByteArray()

    @property
    def recent(self) -> list[Path]:
        """The files opened last, the last one first."""
        found = self._kept.value("recent") or []
        names = [found] if isinstance(found, str) else found
        return [Path(name) for name in names]

    def add_recent(self, path: Path) -> None:
        """Remember a file that was opened."""
        others = [p for p in self.recent if p != path]
        self._kept.setValue("recent", [str(p) for p in [path, *others][:_RECENT]])

    def forget_recent(self) -> None:
        """Forget them all."""
        self._kept.setValue("recent", [])

    def save(self) -> None:
        """Write it all."""
        self._kept.sync()
