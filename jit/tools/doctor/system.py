"""Checks of GPUs and their driver, of settings and sources, of the disk and the cache on it."""

import os
import shlex
import tempfile
import time
from pathlib import Path

from ...cache.lock import gate
from ...cache.store import Store, check_private, check_writable
from ...machine import gpus, settings
from ...machine.sources import Sources, unit_of
from ...machine.toolchain import FLAGS, LINK_FLAGS
from .context import MOVE_CACHE, Check, Context, Found, version

UNWRITTEN = "not checked: the cache folder cannot be written"


def _driver(context: Context) -> Found:
    try:
        major, minor = gpus.driver_cuda()
    except FileNotFoundError:
        devices = sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
        if not devices:
            return "ok", "none, and no GPU"
        found = f"{devices[0]} is there, but the driver's libnvidia-ml.so.1 is not"
        cure = "in a container: start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return "warning", found, cure
    except OSError as error:
        cure = "reload the driver or reboot; restart a container"
        return "warning", f"does not start: {error}", cure
    found = f"supports CUDA {major}.{minor}"
    if context.cuda and major < version(context.cuda)[0]:
        found += f", torch needs {context.cuda}: the GPU cannot be used"
        return "warning", found, f"install a newer driver, or a torch built for CUDA {major}"
    return "ok", found


def _gpu(context: Context) -> Found:
    found = ", ".join(f"compute capability {c}" for c in gpus.capabilities())
    if not found:
        return "ok", "none: operators run on the CPU"
    hidden = gpus.hidden()
    if hidden is not None:
        found += f", hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        return "warning", found, "$ unset CUDA_VISIBLE_DEVICES"
    if not context.cuda:
        return "warning", f"{found}, but torch is built without CUDA", "install one built for CUDA"
    return "ok", found


def _settings(_: Context) -> Found:
    """Look for environment variables with values that are refused or ignored."""
    for setting in settings.SETTINGS:
        try:
            settings.value(setting.name)
        except ValueError as error:
            return "error", str(error), f"$ unset {setting.name}"
    for name in ("CXX", "CC", "PYTORCH_NVCC", *FLAGS, *LINK_FLAGS):
        try:
            shlex.split(os.environ.get(name, ""))
        except ValueError as error:
            found = f"{name} must be words as in a shell, got {os.environ[name]!r}: {error}"
            return "error", found, f"$ unset {name}"
    jobs = os.environ.get("MAX_JOBS", "1")
    if not (jobs.isdigit() and int(jobs)):
        found = f"MAX_JOBS must be a positive number, got {jobs!r}: it is ignored"
        return "warning", found, "$ unset MAX_JOBS"
    return "ok", "none has a value that is refused"


def _sources(context: Context) -> Found:
    """Look for sources from the future: they count as newer than what is made of them, for ever."""
    rooms = [context.root / room for room in ("ops", "kernels", "include", "jit")]
    there = [file for room in rooms for file in sorted(room.rglob("*")) if file.is_file()]
    found = [file for file in there if file.suffix != ".pyc"]
    late = [str(file) for file in found if file.stat().st_mtime > time.time() + 2]
    if not late:
        return "ok", f"{len(found)} files, none with a time in the future"
    which = f"a time in the future, {len(late)} files, {late[0]} among them: looked at every time"
    return "warning", which, "$ touch " + " ".join(map(shlex.quote, late))


def _room(folder: Path, otherwise: str) -> Found:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize >> 20
    files = disk.f_favail if disk.f_files else 1 << 30  # some file systems have no limit
    found = f"{free:,} MB free in {folder}"
    found += f", for only {files} files" if files < 1000 else ""
    if free >= 1000 and files >= 1000:
        return "ok", found
    state = "error" if free < 100 or files < 100 else "warning"
    return state, found, f"make room there, or {otherwise}"


def _flock(context: Context) -> Found:
    if context.refusal:
        return "warning", UNWRITTEN
    with gate(context.probe):
        return "ok", "flock works"


def _clock(context: Context) -> Found:
    """Compare the clock of the cache's disk with this machine's: builds go by times of change."""
    if context.refusal:
        return "warning", UNWRITTEN
    file = context.probe / "clock"
    file.touch()
    ahead = file.stat().st_mtime - time.time()
    if abs(ahead) <= 2:
        return "ok", "that of the disk agrees with this machine's"
    found = f"that of the disk is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
    return "warning", f"{found} this machine's: edits may go unseen", "set both clocks by NTP"


def _cache(context: Context) -> Found:
    """Look at the rights of the folder that builds go to."""
    cache, built = context.cache, context.cache / "store"
    there = [folder for folder in (built, cache / "work") if os.path.lexists(folder)]
    for folder in (*there, context.probe):
        check_private(folder)
    if context.refusal:
        serves = "; what is built there serves" if built.is_dir() else ""
        found = f"nothing can be written in {context.folder}: {context.refusal}{serves}"
        return "error", found, MOVE_CACHE
    for folder in there:
        check_writable(folder)
    return "ok", f"{cache} {'can be written' if cache.exists() else 'will be created'}"


def prebuilt(context: Context) -> Found:
    """Look at what a wheel brought along, whether it is for this CUDA and of these sources."""
    assert context.brought
    made = [recorded["inputs"] for _, recorded in Store([context.brought.parent]).entries()]
    if not made:
        found = f"{context.brought} holds nothing that can be read"
        return (
            "warning",
            found,
            "install the wheel again\n$ pip install --force-reinstall --no-deps",
        )
    sources = Sources(context.root)
    changed = {
        m["unit"] for m in made for f in m["files"] if sources.closure(f).get(f) != m["files"][f]
    }
    if changed:
        found = f"the sources of {', '.join(sorted(changed))} were edited: they are built here"
        return "warning", found, "to have the wheel's, install it again"
    runtimes = {m["toolchain"].get("cuda_runtime") for m in made} - {None}
    found = f"{', '.join(sorted({unit_of(m['unit']) for m in made}))}: without CUDA"
    if runtimes:
        (listed,) = {m["toolchain"]["architectures"] for m in made} - {""}
        found += f" and with CUDA {', '.join(runtimes)} for {listed}"
        if context.cuda and str(version(context.cuda)[0]) not in runtimes and gpus.capabilities():
            found += f", but torch has {context.cuda}: they run on the CPU alone"
            return "warning", found, "install a wheel for that CUDA, or nvcc: it is built here then"
    return "ok", found


def layer(folder: Path, _: Context) -> Found:
    """Look at the rights of a folder that builds are only read from."""
    if not folder.is_dir():
        return "warning", f"{folder} is no folder", "create it, or drop it from LOADER_CACHE_DIR"
    for room in filter(os.path.lexists, (folder / "store", folder / "work")):
        check_private(room)
    return "ok", f"{folder} is read"


CHECKS: dict[str, Check] = {
    "driver": _driver,
    "GPU": _gpu,
    "settings": _settings,
    "sources": _sources,
    "disk": lambda context: _room(context.folder, MOVE_CACHE),
    "temporary files": lambda _: _room(
        Path(tempfile.gettempdir()), "set TMPDIR to a folder that has some"
    ),
    "file locks": _flock,
    "clock": _clock,
    "cache": _cache,
}
