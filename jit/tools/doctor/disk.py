"""Checks of the cache's folder and of the disk that it is on."""

import fcntl
import os
import re
import shlex
import stat
import tempfile
import time
from pathlib import Path

from ...cache.store import check_private
from ...errors import BuildError
from .context import MOVE_CACHE, Context, Found


def check_cache(context: Context) -> Found:
    """Rights of the folder that builds go to."""
    refusal, built = context.refusal, context.cache / "store"
    fault = _check_private(context.cache)
    if fault:
        return fault
    for folder in (built, context.cache / "work"):
        refusal = refusal or (_refusal(folder) if folder.exists() else None)
    if refusal:
        serves = "; what is built there serves" if built.is_dir() else ""
        found = f"nothing can be written in {context.folder}: {refusal}{serves}"
        return "error", found, MOVE_CACHE
    there = "can be written" if context.cache.exists() else "will be created"
    return "ok", f"{context.cache} {there}"


def check_layer(layer: Path, context: Context) -> Found:
    """Rights of a folder that builds are only read from."""
    if not layer.is_dir():
        return "warning", f"{layer} is no folder", "create it, or drop it from LOADER_CACHE_DIR"
    return _check_private(layer) or ("ok", f"{layer} is read")


def _check_private(cache: Path) -> Found | None:
    """A finding where others could put something into a cache: what lies there gets executed."""
    for folder in (cache / "store", cache / "work"):
        try:
            check_private(folder)
        except BuildError as error:
            found, _, cure = str(error).partition("; ")
            return "error", found, cure
        except OSError:
            continue  # not there, or not a folder: what tries to write says so
    for folder in (cache, *cache.parents):
        mode = folder.stat().st_mode if folder.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            found = (
                f"{folder} can be written by everybody, who may put their own {cache.name} there"
            )
            return "warning", found, f"$ chmod o-w {shlex.quote(str(folder))}"
    return None


def _refusal(folder: Path) -> str:
    """Why nothing can be written in a folder, found by trying; "" where it can."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".doctor-", dir=folder))
    except OSError as error:
        return f"{error.strerror} ({folder.name})"
    return ""


def check_disk(context: Context) -> Found:
    """Room for builds, a few MB each, with some to spare."""
    return _check_room(context.folder, MOVE_CACHE)


def check_temporary(context: Context) -> Found:
    """Room for the compilers' temporary files."""
    return _check_room(Path(tempfile.gettempdir()), "set TMPDIR to a folder that has some")


def _check_room(folder: Path, otherwise: str) -> Found:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize >> 20
    files = disk.f_favail if disk.f_files else 1 << 30  # some file systems have no limit
    found = f"{free:,} MB free in {folder}"
    found += f", for only {files} files" if files < 1000 else ""
    if free >= 1000 and files >= 1000:
        return "ok", found
    state = "error" if free < 100 or files < 100 else "warning"
    return state, found, f"make room there, or {otherwise}"


def check_flock(context: Context) -> Found:
    """Try that a lock shuts out others, and that they get it afterwards."""
    if context.refusal:
        return "warning", "not checked: the cache folder cannot be written"
    kind = file_system(context.probe, Path("/proc/self/mounts").read_text())
    path, fault = context.probe / "lock", None
    with open(path, "w") as first, open(path, "w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fault = "two can hold the same lock at once"
            except BlockingIOError:
                fcntl.flock(first, fcntl.LOCK_UN)
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fault = f"flock fails: {error.strerror}"
    return ("error", f"{fault} ({kind})", MOVE_CACHE) if fault else ("ok", f"flock works ({kind})")


def file_system(path: Path, mounts: str) -> str:
    """Type of the file system that a path is on, from the text of /proc/self/mounts."""
    kinds = {}
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        kinds[re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), place)] = kind
    path = path.resolve()
    return next((kinds[str(p)] for p in (path, *path.parents) if str(p) in kinds), "unknown")


def check_clock(context: Context) -> Found:
    """The clock of the cache's disk against this machine's: builds go by times of change."""
    if context.refusal:
        return "warning", "not checked: the cache folder cannot be written"
    file = context.probe / "clock"
    file.touch()
    ahead = file.stat().st_mtime - time.time()
    if abs(ahead) <= 2:
        return "ok", "that of the disk agrees with this machine's"
    found = f"that of the disk is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
    return "warning", f"{found} this machine's: edits may go unseen", "set both clocks by NTP"
