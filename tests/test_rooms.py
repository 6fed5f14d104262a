"""The borders inside the code: what a file may use of another, what a room says of itself."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

ROOMS = sorted(path.parent for path in (ROOT / "jit").glob("*/__init__.py"))
FILES = [ROOT / "loader.py", *sorted(ROOT.glob("ops/*.py"))]
FILES += [path for room in ("jit", "viewer") for path in sorted((ROOT / room).rglob("*.py"))]


def private_names(source: str) -> list[str]:
    """The names of other files of ours that begin with an underscore, with their lines."""
    tree, ours, found = ast.parse(source), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("loader.")):
            ours.update(alias.asname or alias.name for alias in node.names)
            found += [(node.lineno, alias.name) for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in ours:
            found.append((node.lineno, node.attr))
    return [
        f"line {line}: {name}"
        for line, name in found
        if name.startswith("_") and not name.startswith("__")
    ]


def test_a_private_name_of_another_file_is_found():
    source = "from . import a, b\nfrom ..c import _d\nfrom os import _exit\na._e(b.f, b.__doc__)\n"
    assert private_names(source) == ["line 2: _d", "line 4: _e"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_uses_a_private_name_of_another(path: Path):
    assert private_names(path.read_text()) == []


def imports(path: Path) -> list[tuple[str, str]]:
    """Room and name, "" for a name of its `__init__`, of all that a file imports from the rooms."""
    found = []
    package = ["loader", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            whole = [*above, *(node.module or "").split(".")]
            if whole[:2] == ["loader", "jit"]:
                found += [tuple([*whole[2:], name.name][:2]) for name in node.names]
    return found


def imported_by_others(room: str) -> set[str]:
    """The modules of a room, and the names of its `__init__`, that code outside of it imports."""
    others = [path for path in FILES if f"/jit/{room}/" not in str(path)]
    return {name for path in others for home, name in imports(path) if home == room}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_others_enter_a_room_by_the_doors_that_it_names(room: Path):
    """Its docstring has them, between what the room is for and what it imports itself."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    _, doors, imports = text.split("\n\n")
    assert doors.startswith("Doors: ") and imports.startswith("Imports ")
    assert imported_by_others(room.name) <= set(re.findall(r"`(\w+)`", doors))


def test_the_architecture_names_every_room_and_files_that_are_there():
    text = (ROOT / "docs/architecture.md").read_text()
    drawn = set(re.findall(r"(?:^|\|)   (\w+)", text.split("```")[1], re.MULTILINE))
    assert {room.name for room in ROOMS} <= drawn
    paths = set(re.findall(r"`([\w/]+(?:/|\.(?:py|h|cpp|cu)))`", text))
    placeholders = {path for path in paths if re.search(r"\bX(_cpu)?\b", path)}
    assert len(paths - placeholders) > 15
    for path in paths - placeholders:
        assert (ROOT / path).exists() or (ROOT / "jit" / path).exists(), path
