"""The Python side of an operator in a living process: its files, and running them again."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TypeGuard

from ..errors import BuildError
from ..operators.session import Session

Stamp = tuple[int, int, int]  # what tells one state of a file from another without reading it

_OF_A_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__doc__")


def stamp(path: str | Path) -> Stamp | None:
    """Return the stamp of a file; None if it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def python_files(session: Session, name: str) -> dict[str, Stamp | None]:
    """Return `ops/X.py` and the modules beside it that it uses, with their stamps.

    Empty before the first use of the operator.
    """
    module = sys.modules.get(f"{session.package}.{name}")
    files: dict[str, Stamp | None] = {}
    pending = [module] if module else []
    while pending:
        module = pending.pop(0)
        file = module.__file__ or ""
        path = os.path.relpath(file, session.root)
        if path not in files:
            files[path] = stamp(file)
            pending += _used(session, module)
    return files


def texts_of(root: Path, stamps: dict[str, Stamp | None]) -> dict[str, bytes]:
    """Return the content of those files that are as their stamps say."""
    texts = {}
    for path, seen in stamps.items():
        with contextlib.suppress(OSError):
            text = (root / path).read_bytes()
            if seen and stamp(root / path) == seen:
                texts[path] = text
    return texts


def run_again(
    session: Session, name: str, texts: dict[str, bytes], before: dict[str, bytes] | None = None
) -> None:
    """Run changed Python files again in their modules, the ones that others use first.

    Functions that somebody holds get the code of those that replaced them. `texts` has the files by
    path, `before` what the modules were made of, as far as it is known.

    Raises: BuildError where a file raises; all modules are then as they were, and what they had
        registered with torch is registered again where `before` has their content.
    """
    if not texts:
        return
    before = before or {}
    done: list[tuple[str, Callable[[], None]]] = []
    for path in reversed([*python_files(session, name)]):
        if path not in texts and Path(path).stem != name:
            continue
        module = sys.modules[f"{session.package}.{Path(path).stem}"]
        text = texts.get(path) or before.get(path) or (session.root / path).read_bytes()
        done.append((path, _restorer(module)))
        try:
            _run(module, text)
        except (Exception, SystemExit) as error:
            _take_back(session, done, before)
            raise BuildError(f"{name}: {path}: {type(error).__name__}: {error}", name) from error
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # graphs have the old formulas in them


def _run(module: ModuleType, text: bytes) -> None:
    """Run `text` in a module, and give the functions that were there the new code."""
    before = {**vars(module)}
    exec(compile(text, module.__file__ or "", "exec"), vars(module))
    for key, old in before.items():
        new = vars(module).get(key)
        if _is_own(old, module) and _is_own(new, module) and old is not new:
            for what in _OF_A_FUNCTION:
                setattr(old, what, getattr(new, what))
            old.__dict__.update(new.__dict__)
            vars(module)[key] = old


def _restorer(module: ModuleType) -> Callable[[], None]:
    """Return what puts the names of a module, and the code of its functions, back as they are."""
    names = {**vars(module)}
    functions = [
        (function, {what: getattr(function, what) for what in _OF_A_FUNCTION}, {**vars(function)})
        for function in names.values()
        if _is_own(function, module)
    ]

    def restore() -> None:
        vars(module).clear()
        vars(module).update(names)
        for function, facts, own in functions:
            for what, value in {**facts, "__dict__": own}.items():
                setattr(function, what, value)

    return restore


def _take_back(session: Session, done: list, before: dict[str, bytes]) -> None:
    """Undo what `run_again` did so far."""
    for path, _ in done:
        if path in before:
            module = sys.modules[f"{session.package}.{Path(path).stem}"]
            with contextlib.suppress(Exception):  # it ran once; for what it registers
                _run(module, before[path])
    for _, restore in reversed(done):
        restore()


def _used(session: Session, module: ModuleType) -> list[ModuleType]:
    """Return the modules of the session's package whose things a module has."""
    names: set[str] = set()
    for value in vars(module).values():
        of = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        names.update(found for found in (of, type(value).__module__) if isinstance(found, str))
    prefix = f"{session.package}."
    return [
        sys.modules[found]
        for found in sorted(names)
        if found.startswith(prefix) and found in sys.modules and found != module.__name__
    ]


def _is_own(value: object, module: ModuleType) -> TypeGuard[FunctionType]:
    """Return True for a plain function that a module defines."""
    return (
        isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and not value.__closure__
    )
