"""The store: finished libraries under their keys, `store/<unit>-<key>/`, immutable once there.

A library is built elsewhere, copied into a staging folder, digested, flushed to disk and renamed
into place in one step, so a reader sees a whole entry or none, whoever is killed when. Its digest
is checked before it is loaded: a truncated library would crash the process, a flipped bit would
load silently.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

from .errors import BuildError

LIBRARY = "library.so"
MANIFEST = "manifest.json"


class Store:
    """Entries below `cache/store`. Reading needs no lock and writes nothing."""

    def __init__(self, cache: Path):
        self.path = cache / "store"

    def entry(self, unit: str, key: str) -> Path:
        """Where the entry of this key is, or would be."""
        return self.path / f"{unit}-{key}"

    def has(self, unit: str, key: str) -> bool:
        """Whether there is such an entry; its library may still prove damaged."""
        return os.path.exists(self.entry(unit, key) / MANIFEST)

    def has_all(self, keys: dict[str, str]) -> bool:
        """Whether there are entries for all of these, by unit; at the cost of one listing."""
        return {f"{unit}-{key}" for unit, key in keys.items()} <= {*os.listdir(self.path)}

    def find_like(self, wanted: dict, unknown: tuple[str, ...]) -> str | None:
        """The key of an entry that equals the manifest `wanted`, but for what `unknown` names.

        For a machine without a compiler or nvcc, whose identity cannot be told there.
        """
        prefix = wanted["unit"] + "-"
        if not self.path.is_dir():
            return None
        for name in sorted(os.listdir(self.path)):
            if not name.startswith(prefix):
                continue
            try:
                stored = json.loads((self.path / name / MANIFEST).read_text())["inputs"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            toolchain = dict(stored["toolchain"])
            toolchain |= {f: wanted["toolchain"][f] for f in unknown if f in toolchain}
            if {**stored, "toolchain": toolchain} == wanted:
                return name[len(prefix) :]
        return None

    def verified(self, unit: str, key: str) -> Path | None:
        """The library of an entry, its digest checked; None where it is missing or damaged."""
        entry = self.entry(unit, key)
        try:
            check_private(self.path)
            recorded = json.loads((entry / MANIFEST).read_text())
            library = entry / LIBRARY
            if recorded["sha256"] == file_digest(library):
                return library
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def publish(self, library: Path, inputs: dict, key: str) -> Path:
        """Make a finished library visible in one step; the first builder of a key wins.

        A crash inside leaves a staging folder, which nobody reads and `make clean` removes.
        """
        make_private(self.path)
        final = self.entry(inputs["unit"], key)
        staging = self.path / f".staging-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            staging.mkdir(mode=0o700)
            shutil.copyfile(library, staging / LIBRARY)
            record = {"inputs": inputs, "key": key, "sha256": file_digest(staging / LIBRARY)}
            (staging / MANIFEST).write_text(json.dumps(record, indent=1))
            for path in (staging / LIBRARY, staging / MANIFEST, staging):
                _flush(path)
            if self.verified(inputs["unit"], key) is None:
                self.discard(inputs["unit"], key)
            os.rename(staging, final)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        _flush(self.path)
        return final

    def discard(self, unit: str, key: str) -> None:
        """Take a damaged entry out of the way, in one step."""
        doomed = self.path / f".damaged-{os.urandom(8).hex()}"
        try:
            os.rename(self.entry(unit, key), doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Create a folder, and those above it, for this user alone, or check that it is."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"the build cache {folder} cannot be created: {error.strerror}; "
            "set LOADER_CACHE_DIR to a folder of yours on a disk that can be written"
        ) from None
    check_private(folder)


def check_private(folder: Path) -> None:
    """BuildError unless the folder is a real one that only its owner, this user or root, can write.

    What lies in it gets executed: whoever can write there could run code as this user.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise BuildError(f"the build cache {folder} must be a folder and no link; remove it")
    if found.st_uid not in (os.geteuid(), 0):
        raise BuildError(
            f"the build cache {folder} belongs to user {found.st_uid}, not to you "
            f"({os.geteuid()}); set LOADER_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & 0o022:
        raise BuildError(
            f"the build cache {folder} can be written by others (mode {found.st_mode & 0o777:o}); "
            "what lies there gets executed: chmod 700 it, or remove it if somebody may have written"
        )


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
