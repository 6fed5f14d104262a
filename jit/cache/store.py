"""The store: finished libraries under their keys, `store/<unit>-<key>/`, immutable once there.

A library is built elsewhere, copied into a staging folder, digested and renamed into place in one
step, so a reader sees a whole entry or none, whoever is killed when. Its digest is checked before
it is loaded: a truncated library, as a power cut leaves one, would crash the process, a flipped bit
would load silently. What is in use is locked (shared), so that nothing that makes room removes it.

An entry may have its library for several levels of x86-64, of which a machine opens the best that
its CPU has. They are whole libraries, and not kernels of one: functions that two files of C++ have
in common, such as the standard library's templates, are there once in a library, and the linker
could take them from a file with AVX-512 for all.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import BuildError, CacheError
from ..machine import files, levels, settings
from ..machine.sources import HOME, Sources, Unit, listed
from ..machine.toolchain import Toolchain
from .key import key as key_of
from .key import serves

LIBRARY = "library.so"  # that any CPU can run which the entry is for
MANIFEST = "manifest.json"
# What a wheel brings along. Whoever can write there can change loader itself, which lies beside it.
BROUGHT = HOME / settings.PREBUILT / "store"

# What to do about a disk that takes nothing more, beside another folder.
DISK = {
    errno.ENOSPC: "free some space, or ",
    errno.EDQUOT: "free some of your quota, or ",
    errno.EROFS: "mount it for writing, or ",
    errno.EACCES: "get the right to write there, or ",
}
_DAMAGED = OSError, ValueError, KeyError, TypeError, BuildError


class Store:
    """Entries below `cache/store` of each cache; the last is written to, those before it are read.

    Reading needs no lock and no right to write.
    """

    def __init__(self, caches: Sequence[Path]):
        self.layers = [cache / "store" for cache in caches]
        self.path = self.layers[-1]

    def has(self, unit: str, key: str) -> bool:
        """True if there is such an entry; its library may still prove damaged."""
        return any(os.path.exists(layer / f"{unit}-{key}" / MANIFEST) for layer in self.layers)

    def entries(self, unit: str = "") -> Iterator[tuple[Path, dict]]:
        """Folder and manifest of every sound entry (of one unit), layer by layer."""
        for layer in self.layers:
            with contextlib.suppress(OSError):
                for name in listed(layer):
                    if name[0] != "." and unit in ("", name.rpartition("-")[0]):
                        with contextlib.suppress(*_DAMAGED):
                            yield layer / name, _manifest(layer / name)

    def serving(
        self, unit: Unit, inputs: dict, toolchain: Toolchain, sources: Sources
    ) -> dict | None:
        """Return what the entry is made of that is one of `inputs`, or serves as well."""
        if self.has(unit.name, key_of(inputs)):
            return inputs
        serving = [
            recorded["inputs"]
            for entry, recorded in self.entries(unit.name)
            if serves(recorded["inputs"], unit, toolchain, sources, entry.parent == BROUGHT)
        ]

        return max(serving, key=lambda made: bool(made["toolchain"]["architectures"]), default=None)

    def manifest(self, unit: str, key: str) -> dict | None:
        """The manifest of an entry; None where there is none that can be read."""
        for layer in self.layers:
            with contextlib.suppress(*_DAMAGED):
                return _manifest(layer / f"{unit}-{key}")
        return None

    def verified(self, unit: str, key: str) -> Path | None:
        """The library of an entry that suits this CPU, its digest checked; None where it is missing
        or damaged.
        """
        for layer in self.layers:
            entry = layer / f"{unit}-{key}"
            if os.path.lexists(entry):
                if layer != BROUGHT:
                    check_private(layer)
                with contextlib.suppress(*_DAMAGED):
                    if layer != BROUGHT:
                        check_private(entry)
                    file, digest = _suiting(_manifest(entry))
                    if file_digest(entry / file) == digest:
                        return entry / file
        return None

    def hold(self, library: Path) -> int | None:
        """Mark an entry as in use, and used now, until this process ends; None where it is gone.

        The mark is a shared lock on the entry's LIBRARY, under the descriptor returned. Where files
        cannot be locked nothing is marked, and nothing is ever removed there either.
        """
        library = library.with_name(LIBRARY)
        try:
            descriptor = _opened(library)
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a network folder, or one that is not ours to write
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(library.parent / MANIFEST)
        if os.path.exists(library):
            return descriptor
        os.close(descriptor)
        return None

    def publish(self, libraries: Mapping[int, Path], inputs: dict, **facts: object) -> Path:
        """Make a finished library visible in one step; the first builder of a key wins.

        `libraries` has it by level of CPU, for 1 in any case. `facts` are kept beside what made it.
        A crash inside leaves a staging folder, which nobody reads and `tidy` removes.
        """
        make_private(self.path)
        key = key_of(inputs)
        final = self.path / f"{inputs['unit']}-{key}"
        staging = self.path / f".staging-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            staging.mkdir(mode=0o700)
            digests = {}
            for level, library in libraries.items():
                made = shutil.copyfile(library, staging / _file_of(level))
                digests[level] = file_digest(made)
            record = {"inputs": inputs, "sha256": digests.pop(1), **facts}
            if digests:
                record["sha256_by_level"] = digests
            (staging / MANIFEST).write_text(json.dumps({**record, "made": time.time()}, indent=1))
            if self.verified(inputs["unit"], key) is None:
                self.discard(final)
            os.rename(staging, final)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        return final

    def discard(self, entry: Path) -> None:
        """Take an entry out of the way, in one step."""
        doomed = self.path / f".damaged-{os.urandom(8).hex()}"
        try:
            os.rename(entry, doomed)
        except (FileNotFoundError, NotADirectoryError):
            return
        remove(doomed)


def remove(path: Path) -> None:
    """Remove a folder, as far as that can be done, or whatever else there is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _manifest(entry: Path) -> dict:
    """Return what is recorded of an entry; ValueError where that is not what made this key."""
    with open(_opened(entry / MANIFEST), encoding="utf-8") as file:
        recorded = json.load(file)
    if f"{recorded['inputs']['unit']}-{key_of(recorded['inputs'])}" != entry.name:
        raise ValueError(f"{entry} does not hold what its name says")
    return recorded


def _file_of(level: int) -> str:
    return f"library.{levels.name(level)}.so" if level > 1 else LIBRARY


def _suiting(recorded: dict) -> tuple[str, str]:
    """Return the file of an entry that is for the highest level which this CPU has; its digest."""
    found = recorded.get("sha256_by_level", {})
    digests = {1: recorded["sha256"], **{int(level): found[level] for level in found}}
    best = max(level for level in digests if level == 1 or level <= levels.here())
    return _file_of(best), digests[best]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content; OSError where it is a link."""
    digest = hashlib.sha256()
    with open(_opened(path), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def make_private(folder: Path) -> None:
    """Create a folder, and those above it, that this user alone can write, or check that it is."""
    try:
        files.make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    check_private(folder)


def cannot_write(folder: Path, error: OSError) -> CacheError:
    """Return the error of a cache that cannot be written."""
    cure = DISK.get(error.errno or 0, "")
    return CacheError(
        f"the build cache {folder} cannot be written: {error.strerror}; {cure}"
        "set LOADER_CACHE_DIR to a folder of yours on a disk that can be written"
    )


def check_writable(folder: Path) -> None:
    """BuildError where a file of a few pages cannot be written in a folder."""
    probe = folder / f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        files.write(probe, bytes(1 << 16))
        probe.unlink()
    except OSError as error:
        raise cannot_write(folder, error) from None


def check_private(folder: Path) -> None:
    """BuildError unless the folder is a real one that only its owner, this user or root, can write.

    What lies in it gets executed: whoever can write there could run code as this user. The same
    goes for whoever could put another folder in its place.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError(f"the build cache {folder} must be a folder and no link; remove it")
    if found.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"the build cache {folder} belongs to user {found.st_uid}, not to you "
            f"({os.geteuid()}); set LOADER_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & 0o022:
        raise CacheError(
            f"the build cache {folder} can be written by others (mode {found.st_mode & 0o777:o}); "
            "what lies there gets executed: chmod 700 it, or remove it if somebody may have written"
        )
    for above in Path(os.path.realpath(folder)).parents:
        mode = os.stat(above).st_mode
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise CacheError(
                f"the build cache {folder} lies in {above}, where anybody can rename it and put "
                f"another in its place (mode {mode & 0o777:o}); chmod o-w that folder, or set "
                "LOADER_CACHE_DIR to a folder below your home"
            )
