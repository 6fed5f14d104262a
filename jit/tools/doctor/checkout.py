"""Checks of the environment's settings and of the sources."""

import os
import shlex
import time
from pathlib import Path

from ...machine import settings
from ...machine.toolchain import FLAGS, LINK_FLAGS
from .context import Context, Found


def check_settings(context: Context) -> Found:
    """Environment variables with values that are refused or ignored."""
    for setting in settings.SETTINGS:
        try:
            settings.value(setting.name)
        except ValueError as error:
            return "error", str(error), f"$ unset {setting.name}"
    for name in ("CXX", "CC", "PYTORCH_NVCC", *FLAGS, *LINK_FLAGS):
        try:
            shlex.split(os.environ.get(name, ""))
        except ValueError as error:
            return (
                "error",
                f"{name} must be words as in a shell, got {os.environ[name]!r}: {error}",
                f"$ unset {name}",
            )
    jobs = os.environ.get("MAX_JOBS", "1")
    if not (jobs.isdigit() and int(jobs)):
        found = f"MAX_JOBS must be a positive number, got {jobs!r}: it is ignored"
        return "warning", found, "$ unset MAX_JOBS"
    return "ok", "none has a value that is refused"


def check_sources(context: Context) -> Found:
    """Sources from the future count as newer than what is made of them, for ever."""
    rooms = [context.root / name for name in ("ops", "kernels", "include", "jit")]
    files = [file for room in rooms for file in sorted(room.rglob("*")) if _is_source(file)]
    late = [str(file) for file in files if file.stat().st_mtime > time.time() + 2]
    if not late:
        return "ok", f"{len(files)} files, none with a time in the future"
    found = f"a time in the future, {len(late)} files, {late[0]} among them: looked at every time"
    return "warning", found, "$ touch " + " ".join(map(shlex.quote, late))


def _is_source(file: Path) -> bool:
    return file.is_file() and file.suffix != ".pyc"
