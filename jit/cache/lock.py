"""File locks: one process builds a unit while the others wait.

The system frees a flock when its last holder dies, so a kill leaves nothing to clear away. In the
file the holder says who it is and since when, and how a build ended that failed.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CacheError

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO)


class FileLock:
    """An exclusive lock on the file `path`, held inside a `with`; a forked child has it not."""

    def __init__(self, path: Path):
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)
        _open.add(self)

    def __enter__(self) -> "FileLock":
        """Wait for it and take it."""
        self.take(wait=True)
        return self

    def __exit__(self, *exception: object) -> None:
        """Free it."""
        self.close()

    def take(self, wait: bool = False) -> bool:
        """Get the lock, at once unless told to wait; True if it is held now."""
        return self._flock(fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def is_held(self) -> bool:
        """True if somebody else has the lock; any number may ask at once."""
        if not self._flock(fcntl.LOCK_SH | fcntl.LOCK_NB):
            return True
        self._flock(fcntl.LOCK_UN)
        return False

    def _flock(self, operation: int) -> bool:
        try:
            fcntl.flock(self.descriptor, operation)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise _no_locks(self.path.parent, str(error.strerror)) from None
            raise
        return True

    def note(self, **facts: object) -> None:
        """Write down who holds it, and what else those who wait may want to know."""
        known = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(known | facts).encode(), 0)

    def read(self) -> dict:
        """Return what the last holder noted; empty where it had not come to that."""
        try:
            noted = json.loads(os.pread(self.descriptor, 1 << 20, 0))
            return noted if isinstance(noted, dict) else {}
        except ValueError:
            return {}

    def close(self) -> None:
        """Free the lock and forget it; a forked child has done so already."""
        if self in _open:
            _open.discard(self)
            with contextlib.suppress(OSError):
                os.close(self.descriptor)


_open: set[FileLock] = set()  # of this process


def _close_all() -> None:
    for lock in [*_open]:
        lock.close()


os.register_at_fork(after_in_child=_close_all)


def lock_of(folder: Path) -> FileLock:
    """Return the lock of a work folder, not taken yet; it lies beside it."""
    return FileLock(Path(f"{folder}.lock"))


@contextlib.contextmanager
def gate(folder: Path) -> Iterator[None]:
    """Held for the moment in which a process takes all the locks that it can get.

    Without it processes that start together would share the units out among them, and compile on
    more cores than there are. Says so where locks do not lock, as in some network folders.
    """
    with FileLock(folder / ".gate") as door:
        with contextlib.closing(FileLock(door.path)) as second:
            if second.take():
                raise _no_locks(folder, "two were granted at once")
        yield


def _no_locks(folder: Path, why: str) -> CacheError:
    return CacheError(
        f"file locks do not work in {folder} ({why}), as in some network folders, and builds there "
        "could spoil each other; set LOADER_CACHE_DIR to a folder on a local disk"
    )
