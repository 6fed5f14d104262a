"""Colour tables and operators: which there are, which are in use, and how one is got."""

from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Signal

import loader

from ..core import operators, tables
from ..core.operators import Operator
from ..core.tables import CannotRead, Table
from .worker import PATIENCE, Call

_HOME = Path(loader.__file__).resolve().parent


class Choices(QObject):
    """What is on offer, and the table and the operator in use."""

    changed = Signal()
    failed = Signal(str, str)  # title, text
    waiting = Signal(str)  # for what; "" for nothing more
    library_added = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Table] = tables.ready_made()
        self.table: Table | None = None
        self.operator: Operator | None = None
        self.table_file = ""
        self.libraries: dict[str, Any] = {}
        self._homes: dict[str, Any] = dict.fromkeys(operators.offered(_HOME), loader)
        self._calls: list[Call] = []
        self._wanted = ""

    @property
    def table_name(self) -> str:
        """The name of the table in use, "" for none."""
        return next((name for name, table in self.tables.items() if table is self.table), "")

    def table_entries(self) -> list[tuple[str, str]]:
        """Return title and name of each table."""
        return [(title, title) for title in self.tables]

    def operator_entries(self) -> list[tuple[str, str]]:
        """Return title and name of each operator."""
        return [
            (name if home is loader else f"{name} ({home.__name__})", name)
            for name, home in self._homes.items()
        ]

    def use_table(self, title: str) -> None:
        """Send colours through a table, or, for "", through none."""
        self.table = self.tables.get(title)
        self.changed.emit()

    def read_table(self, path: Path) -> bool:
        """Read a `.cube` file and use it; False if it is none."""
        try:
            table = tables.read_cube(path)
        except CannotRead as error:
            self.failed.emit("This colour table cannot be read", str(error))
            return False
        title = table.title if table.title not in self.tables else path.name
        self.tables[title], self.table_file = Table(title, table.entries), str(path)
        self.use_table(title)
        return True

    def use_operator(self, name: str) -> None:
        """Send pictures through an operator, or, for "", through none; built first if need be."""
        self._wanted = name
        if not name:
            self.operator = None
            self.changed.emit()
            return
        home = self._homes.get(name, loader)
        self.waiting.emit(f"Getting {name} ready …")
        self._call(lambda: operators.find(name, home), lambda found: self._found(name, found), name)

    def add_library(self, path: Path, use: bool = True) -> None:
        """Offer the operators of a folder, and use the first."""
        self.waiting.emit(f"Reading {path.name} …")
        self._call(
            lambda: loader.Library(path), lambda found: self._added(path, found, use), path.name
        )

    def stop(self) -> bool:
        """Wait for what is under way; False if it does not end."""
        return all(call.wait(PATIENCE) for call in [*self._calls])

    def _call(self, function: Any, done: Any, title: str) -> None:
        call = Call(function)
        call.done.connect(done)
        call.failed.connect(lambda text: self._failed(title, text))
        call.finished.connect(lambda: self._calls.remove(call))
        self._calls.append(call)
        call.start()

    def _found(self, name: str, operator: Operator) -> None:
        self.waiting.emit("")
        if name == self._wanted:
            self._homes.setdefault(name, loader)
            self.operator = operator
            self.changed.emit()

    def _added(self, path: Path, library: Any, use: bool) -> None:
        self.waiting.emit("")
        found = operators.offered(path.expanduser().resolve())
        if not found:
            self.failed.emit(f"{path.name} has no operator that takes an image", str(path))
            return
        self.libraries[str(path)] = library
        self._homes |= dict.fromkeys(found, library)
        self.library_added.emit()
        if use:
            self.use_operator(found[0])
        else:
            self.changed.emit()

    def _failed(self, title: str, text: str) -> None:
        self.waiting.emit("")
        self._wanted = self.operator.name if self.operator else ""
        first = text.split("\n", maxsplit=1)[0]
        rest = "\n".join(text.split("\n")[1:4])
        self.failed.emit(first if len(first) < 160 else title, rest if len(first) < 160 else text)
        self.changed.emit()
