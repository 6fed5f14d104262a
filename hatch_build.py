"""What `pip install -e .` installs: `loader`, found in this folder, and no other name.

A folder on `sys.path`, as is usual, would make `jit`, `ops` and `tests` importable as well.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableHook(BuildHookInterface):
    """Hatchling calls it for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Replace the files of an editable wheel."""
        if version == "editable":
            from editables import EditableProject

            project = EditableProject(self.metadata.core.name, self.root)
            project.map("loader", "loader.py")
            self._folder = TemporaryDirectory()  # until this hook goes
            for name, content in project.files():
                path = Path(self._folder.name, name)
                path.write_text(content)
                build_data["force_include_editable"][str(path)] = name
            build_data["dependencies"] += project.dependencies()
