"""Calls of the Linux kernel that Python has no function for, through ctypes."""

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)

MACHINE = platform.machine()
# Numbers below 424 differ between architectures; those from there on are the same on all.
NUMBERS = {
    "x86_64": {
        **{"socket": 41, "connect": 42, "clone": 56, "fork": 57, "vfork": 58, "execve": 59},
        **{"ptrace": 101, "syslog": 103, "vhangup": 153, "pivot_root": 155, "adjtimex": 159},
        **{"chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166},
        **{"swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170},
        **{"setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175},
        **{"delete_module": 176, "quotactl": 179, "clock_settime": 227, "kexec_load": 246},
        **{"add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272},
        **{"perf_event_open": 298, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308},
        **{"process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313},
        **{"seccomp": 317, "kexec_file_load": 320, "bpf": 321, "execveat": 322},
        **{"userfaultfd": 323, "capset": 126, "memfd_create": 319, "shmget": 29, "mq_open": 240},
    },
    "aarch64": {
        **{"umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58},
        **{"quotactl": 60, "acct": 89, "capset": 91, "unshare": 97, "kexec_load": 104},
        **{"init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116},
        **{"ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162},
        **{"settimeofday": 170, "adjtimex": 171, "socket": 198, "connect": 203, "add_key": 217},
        **{"request_key": 218, "keyctl": 219, "clone": 220, "execve": 221, "swapon": 224},
        **{"swapoff": 225, "perf_event_open": 241, "open_by_handle_at": 265},
        **{"clock_adjtime": 266, "setns": 268, "process_vm_readv": 270},
        **{"process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "seccomp": 277},
        **{"memfd_create": 279, "shmget": 194, "mq_open": 180, "bpf": 280, "execveat": 281},
        **{"userfaultfd": 282, "kexec_file_load": 294},
    },
}.get(MACHINE, {}) | {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428},
    **{"move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433},
    **{"clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442, "landlock_create_ruleset": 444},
    **{"landlock_add_rule": 445, "landlock_restrict_self": 446, "memfd_secret": 447},
}

_SET_NO_NEW_PRIVS, _SET_PDEATHSIG, _SET_SUBREAPER = 38, 1, 36
_SET_SECCOMP, _CAPBSET_DROP, _SET_SECUREBITS = 22, 24, 28
_NO_ROOT_LOCKED = 0b11_11_11  # SECUREBITS: user 0 gains nothing by exec; cannot be undone


def call(name: str, *arguments: object) -> int:
    """Make a system call. Raises: OSError, also where this machine's number is not known."""
    if name not in NUMBERS:
        raise OSError(38, f"{name}: not known on {MACHINE}")
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(NUMBERS[name]), *words), name)


def prctl(option: int, value: int = 0) -> None:
    """Set one property of this process. Raises: OSError."""
    _checked(_libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3), "prctl")


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    prctl(_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end."""
    prctl(_SET_SUBREAPER, 1)


def no_new_privileges() -> None:
    """Give up what set-user-ID programs would give, for this process and its children."""
    prctl(_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability, for good: user 0 is then a user like others. Raises: OSError."""
    for capability in range(64):
        try:
            prctl(_CAPBSET_DROP, capability)
        except OSError:  # the first that the kernel does not know, or nothing to give up
            break
    if os.geteuid() == 0:
        try:
            prctl(_SET_SECUREBITS, _NO_ROOT_LOCKED)
        except OSError as error:
            if error.errno != 1:  # without CAP_SETPCAP there is nothing to lock
                raise
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system. Raises: OSError."""
    words = [text.encode() for text in (source, target, kind)]
    result = _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {target}")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)
