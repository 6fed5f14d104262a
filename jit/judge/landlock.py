"""Landlock: this process may read, write and run what is named, and nothing else, for good.

https://docs.kernel.org/userspace-api/landlock.html has the rights, and what came when.
"""

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable

from .syscalls import call, no_new_privileges

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_ALL = (1 << 13) - 1  # of the first version; later ones added moving, truncating, devices' ioctl
_ADDED = {2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL}
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TCP = 3  # to bind and to connect, from version 4 on
_SCOPES = 3  # abstract unix sockets, signals to processes outside: from version 6 on


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the version of the kernel's Landlock; 0 where there is none."""
    with contextlib.suppress(OSError):
        return call("landlock_create_ruleset", None, 0, 1)
    return 0


def restrict(
    readable: Iterable[str], writable: Iterable[str], listable: Iterable[str] = ()
) -> list[str]:
    """Confine this process and all its children to these files and folders.

    Of what is only `listable` the names may be read.
    It can no longer trace processes outside either. Returns: what is in force, in words; empty
    without Landlock. Raises: OSError where the kernel refuses.
    """
    found = version()
    if not found:
        return []
    rights = _ALL
    for since, right in _ADDED.items():
        rights |= right if found >= since else 0
    rules = _Ruleset(rights, _TCP if found >= 4 else 0, _SCOPES if found >= 6 else 0)
    size = 24 if found >= 6 else 16 if found >= 4 else 8
    ruleset = call("landlock_create_ruleset", ctypes.byref(rules), size, 0)
    try:
        given = (readable, _READ), (writable, rights), (listable, _READ_DIR)
        for paths, allowed in given:
            for path in paths:
                _allow(ruleset, path, allowed & rights)
        no_new_privileges()
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    inside = ["files", "tracing"] + ["TCP"] * (found >= 4) + ["signals"] * (found >= 6)
    return inside


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what is not there needs no permission
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = _Beneath(rights, descriptor)
        call("landlock_add_rule", ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)
