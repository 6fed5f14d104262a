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
    """An exclusive lock on `path`, not held at first; a descriptor that holds it may be adopted."""

    def __init__(self, path: Path, descriptor: int | None = None):
        self.path = path
        if descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
        self.descriptor = descriptor

    def take(self, wait: bool = False) -> bool:
        """Get the lock, at once unless told to wait; True if it is held now."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise _no_locks(self.path.parent, str(error.strerror)) from None
            raise
        return True

    def note(self, **facts: object) -> None:
        """Write down what those who wait may want to know."""
        text = json.dumps({"host": socket.gethostname(), "since": time.time(), **facts}).encode()
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text, 0)

    def read(self) -> dict:
        """Return what the last holder noted; empty where it had not come to that."""
        try:
            noted = json.loads(os.pread(self.descriptor, 1 << 16, 0))
            return noted if isinstance(noted, dict) else {}
        except ValueError:
            return {}

    def unlock(self) -> None:
        """Free the lock, for all who share it."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def release(self) -> None:
        """Free the lock, and forget it."""
        self.unlock()
        self.close()

    def close(self) -> None:
        """Forget the lock; a process that it was handed to goes on holding it."""
        os.close(self.descriptor)


@contextlib.contextmanager
def gate(folder: Path) -> Iterator[None]:
    """Held for the moment in which a process takes all the locks that it can get.

    Without it processes that start together would share the units out among them, and compile on
    more cores than there are. Says so where locks do not lock, as in some network folders.
    """
    door = FileLock(folder / ".gate")
    door.take(wait=True)
    try:
        second = FileLock(folder / ".gate")
        try:
            if second.take():
                raise _no_locks(folder, "two were granted at once")
        finally:
            second.close()
        yield
    finally:
        door.close()


def _no_locks(folder: Path, why: str) -> CacheError:
    return CacheError(
        f"file locks do not work in {folder} ({why}), as in some network folders, and builds there "
        "could spoil each other; set LOADER_CACHE_DIR to a folder on a local disk"
    )
