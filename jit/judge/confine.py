"""Becoming a prisoner: namespaces, mounts, limits, Landlock, seccomp, and no capability left.

Each of these is used where the kernel and the rights of this process allow it; the keeper tells the
judge which were (`in_force`).
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

from . import landlock, seccomp, syscalls

_USER, _PID, _NET, _IPC, _MOUNT = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000
_PRIVATE, _NO_SUID, _NO_DEVICES, _NO_PROGRAMS = (1 << 18) | (1 << 14), 2, 4, 8
_BIND = 4096
_HERE, _RECURSIVE, _READ_ONLY = -100, 0x8000, 1
_SHARED = "/dev/shm"
_PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Limits(NamedTuple):
    """What a prisoner may use."""

    seconds: float = 60.0  # for one answer
    memory: int = 8 << 30  # bytes, of all its processes
    processes: int = 256  # threads and processes at once
    disk: int = 1 << 30  # bytes in its own folder
    output: int = 64 << 20  # bytes printed


class Prison(NamedTuple):
    """What a prisoner finds: its folder, and what else it may read and write."""

    folder: str
    readable: tuple[str, ...]
    writable: tuple[str, ...] = ()
    listable: tuple[str, ...] = ()  # folders of which it may see the names
    unix_sockets: bool = False  # the driver of a GPU may want them
    files_in_memory: bool = False  # which count as nobody's memory
    bounded_data: bool = True  # CUDA reserves more than there is
    drivers: bool = False  # CUDA's names its threads in /proc, and makes files in /dev/shm


def jailer(
    life: Callable[[socket.socket], None],
    channel: socket.socket,
    status: int,
    output: int,
    prison: Prison,
    limits: Limits,
) -> None:
    """Live as the process between judge and keeper; never returns."""
    with _to_the_end():
        syscalls.die_with_parent()
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file, number)
        _close_all_but(0, 1, 2, channel.fileno(), status)
        in_force = _namespaces()
        if os.fork() == 0:
            with _to_the_end():
                _keeper(life, channel, status, prison, limits, in_force)
        channel.close()
        os.close(status)
        os.wait()


def _keeper(
    life: Callable[[socket.socket], None],
    channel: socket.socket,
    status: int,
    prison: Prison,
    limits: Limits,
    in_force: dict,
) -> None:
    """Live as the prisoner's parent, and say how it ended."""
    syscalls.die_with_parent()
    syscalls.adopt_orphans()
    if in_force["mounts"]:
        in_force |= _mounts(prison, limits, in_force["processes"])
    in_force["capabilities dropped"] = _works(syscalls.drop_capabilities)
    reading, writing = os.pipe()
    prisoner = os.fork()
    if prisoner == 0:
        with _to_the_end():
            os.close(status)
            os.close(reading)
            _limits(limits, prison)
            own = (prison.folder, *prison.writable, *_PLAIN_DEVICES)
            if prison.drivers:
                whole = in_force.get("read-only /proc but for processes")
                own += _SHARED, "/proc" if whole else "/proc/self/task"
            done: dict = {"landlock": landlock.restrict(prison.readable, own, prison.listable)}
            done["landlock version"] = landlock.version()
            done["seccomp"] = _works(
                lambda: seccomp.forbid(prison.unix_sockets, prison.files_in_memory)
            )
            os.write(writing, json.dumps(done).encode())
            os.close(writing)
            life(channel)
    os.close(writing)
    channel.close()
    in_force |= json.loads(os.read(reading, 1 << 16) or b"{}")
    os.write(status, json.dumps({"in_force": in_force}).encode() + b"\n")
    while True:
        pid, how = os.wait()
        if pid == prisoner:
            break
    os.write(status, json.dumps({"exit": os.waitstatus_to_exitcode(how)}).encode() + b"\n")


class _to_the_end(contextlib.AbstractContextManager):
    """Whatever happens within, this process ends there and runs nothing of its parent's."""

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if isinstance(error, BaseException) and not isinstance(error, SystemExit):
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{error!r}\n")
                sys.stderr.flush()
        code = error.code if isinstance(error, SystemExit) else 1 if error else 0
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _works(step: Callable[[], object]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def _unshare(flags: int) -> bool:
    return _works(lambda: syscalls.call("unshare", flags))


def _namespaces() -> dict:
    """Leave the network, the other processes and the mounts behind, as far as that is allowed."""
    user, group = os.geteuid(), os.getegid()
    everything = _PID | _NET | _IPC | _MOUNT
    own_user = False
    if not _unshare(everything):
        own_user = _unshare(_USER | everything)
        if not own_user:
            return {"network": _unshare(_NET), "processes": False, "mounts": False}
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return {"network": True, "processes": True, "mounts": True, "own user": own_user}


def _mounts(prison: Prison, limits: Limits, own_processes: bool) -> dict:
    """See own processes alone, read everything, write to a folder of limited size alone."""
    done: dict[str, bool] = {}
    if not _works(lambda: syscalls.mount("none", "/", "", _PRIVATE)):
        return {"mounts": False}
    flags = _NO_SUID | _NO_DEVICES | _NO_PROGRAMS
    done["own /proc"] = own_processes and _works(
        lambda: syscalls.mount("proc", "/proc", "proc", flags)
    )
    if done["own /proc"]:
        done["number of processes"] = _works(lambda: _most_processes(limits.processes))
    if prison.drivers and done["own /proc"]:
        done["read-only /proc but for processes"] = _works(_all_but_processes)
    done["read-only mounts"] = _works(lambda: _attributes("/", _RECURSIVE, _READ_ONLY, 0))
    if done.get("read-only /proc but for processes"):
        _works(lambda: _attributes("/proc", 0, 0, _READ_ONLY))
    size = f"size={limits.disk},mode=700"
    done["folder of limited size"] = _works(
        lambda: syscalls.mount("tmpfs", prison.folder, "tmpfs", _NO_SUID | _NO_DEVICES, size)
    )
    if prison.drivers:
        done["own /dev/shm"] = _works(
            lambda: syscalls.mount("tmpfs", _SHARED, "tmpfs", flags, size)
        )
    return done


def _attributes(path: str, how: int, given: int, taken: int) -> None:
    """Give a mount attributes, and take others away."""
    words = (ctypes.c_uint64 * 4)(given, taken)
    syscalls.call("mount_setattr", _HERE, path.encode(), how, ctypes.byref(words), 32)


def _all_but_processes() -> None:
    """Have what in /proc is the machine's be mounts of their own, which stay read-only."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() and not entry.is_symlink():
            mode = entry.stat().st_mode
            if entry.is_dir() or mode & 0o222:
                syscalls.mount(entry.path, entry.path, "", _BIND)


def _most_processes(count: int) -> None:
    """Bound the numbers of processes; before Linux 6.14 that would be the whole machine's."""
    version = tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2])
    if version < (6, 14):
        raise OSError("namespaces share their largest number")
    with open("/proc/sys/kernel/pid_max", "w") as file:
        file.write(str(max(count, 400)))


def _limits(limits: Limits, prison: Prison) -> None:
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.memory if prison.files_in_memory else limits.disk),
        (resource.RLIMIT_NOFILE, 1024),
        *([(resource.RLIMIT_DATA, limits.memory)] if prison.bounded_data else []),
        (resource.RLIMIT_STACK, 64 << 20),
    ):
        hard = resource.getrlimit(what)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _close_all_but(*kept: int) -> None:
    last = 0
    for number in sorted(kept):
        if number > last:  # of an empty range Python makes all there are
            os.closerange(last, number)
        last = number + 1
    os.closerange(last, max(4096, *map(int, os.listdir("/proc/self/fd"))) + 1)
