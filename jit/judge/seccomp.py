"""System calls that a process may no longer make: a filter in the kernel, there for good."""

import ctypes
import errno
import struct

from .syscalls import MACHINE, NUMBERS, call, no_new_privileges

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NEW_NAMESPACE = 0x7E020000  # of clone's flags: each kind of namespace
_THREAD = 0x00010000
_AF_UNIX = 1
_X32 = 0x40000000  # numbers of another interface on the same machine
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in what the filter sees

_NEVER = " ".join(
    (
        "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp perf_event_open bpf",
        "userfaultfd add_key request_key keyctl mount umount2 pivot_root chroot unshare setns",
        "open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr io_uring_setup",
        "io_uring_enter io_uring_register kexec_load kexec_file_load init_module finit_module",
        "delete_module reboot swapon swapoff settimeofday clock_settime adjtimex clock_adjtime",
        "sethostname setdomainname acct quotactl open_by_handle_at iopl ioperm syslog vhangup",
    )
)

# Memory in files that no process has mapped is seen in no process.
_HIDDEN_MEMORY = ("memfd_create", "memfd_secret", "shmget", "mq_open")

_Step = tuple[int, int, int, int]  # code, jump if true, jump if false, value


def forbid(unix_sockets: bool, files_in_memory: bool) -> None:
    """Forbid what reaches out of the process: tracing, mounting, sockets, namespaces, clocks.

    Raises: OSError where the kernel has no such filter.
    """
    steps = _when("clone3", [_refuse(errno.ENOSYS)])  # its flags cannot be looked at: use clone
    steps += _when("clone", [_argument(), (_ANY_BIT, 0, 1, _NEW_NAMESPACE), _refuse(), _allow()])
    allowed = [(_EQUAL, 0, 1, _AF_UNIX), _allow()] if unix_sockets else []
    steps += _when("socket", [_argument(), *allowed, _refuse()])
    for name in (*_NEVER.split(), *(() if files_in_memory else _HIDDEN_MEMORY)):
        steps += _when(name, [_refuse()])
    _install(steps)


def forbid_processes() -> None:
    """Forbid new processes and programs, in every thread: from now on it is what it is."""
    steps = _when("clone3", [_refuse(errno.ENOSYS)])
    steps += _when("clone", [_argument(), (_ANY_BIT, 1, 0, _THREAD), _refuse(), _allow()])
    for name in ("fork", "vfork", "execve", "execveat"):
        steps += _when(name, [_refuse()])
    _install(steps)


def _when(name: str, steps: list[_Step]) -> list[_Step]:
    """Do these steps for one system call, where this machine has it."""
    return [(_EQUAL, 0, len(steps), NUMBERS[name]), *steps] if name in NUMBERS else []


def _argument() -> _Step:
    return _LOAD, 0, 0, _FIRST_ARGUMENT


def _refuse(number: int = errno.EPERM) -> _Step:
    return _RETURN, 0, 0, _ERROR | number


def _allow() -> _Step:
    return _RETURN, 0, 0, _ALLOW


def _install(steps: list[_Step]) -> None:
    if MACHINE not in _ARCHITECTURE:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {MACHINE}")
    head: list[_Step] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHITECTURE[MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if MACHINE == "x86_64":
        head += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    program = [*head, *steps, _allow()]
    code = b"".join(struct.pack("HBBI", c, yes, no, k & 0xFFFFFFFF) for c, yes, no, k in program)
    text = ctypes.create_string_buffer(code, len(code))
    whole = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(text))
    )
    no_new_privileges()
    call("seccomp", 1, 1, ctypes.byref(whole))  # a filter, for every thread
