"""Where tests' processes start one that stands by for trials, this program is started in its place.

Such a process imports torch and what torch brings lazily, three seconds of a core, with the guard
(jit/live/guard.cpp) preloaded; dozens of tests have one. Here it is forked from one of the session
that did the same with the same guard, and this program stands for it: it ends when that one does,
and that one when this is killed. So it is with what examples/three_ways starts for each of its
builds, without a guard. All that is not such a start is left to Python.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

# What Python and libraries read when they are started, and a fork therefore has of its parent; of
# those in _TAKEN_OVER warm.py sees to it.
_READ_AT_START = ("LD_", "PYTHON", "OMP_", "MKL_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TORCH_")
_TAKEN_OVER = (
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONWARNINGS"),
    *("OMP_NUM_THREADS", "TORCH_CUDA_ARCH_LIST"),
)
_OF_A_BUILD = (
    *("/three_ways/compare.py", "/three_ways/train.py"),
    "/pyproject_hooks/_in_process/_in_process.py",
)
_GUARD = re.compile(r"/proc/self/fd/(\d+)$")


def install(folder: Path) -> Path:
    """Make the program, for as long as the session of tests lasts; its path."""
    tests = os.path.dirname(os.path.abspath(__file__))
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder.mkdir(parents=True, exist_ok=True)
    program, draft = folder / "python", folder / f"draft-{os.getpid()}"
    head = f"#!{sys.executable} -IS\nTESTS, SESSION = {tests!r}, {session}\n"
    draft.write_text(head + Path(__file__).read_text())
    draft.chmod(0o755)
    draft.rename(program)  # another worker's is equal
    return program


def is_read_at_start(variable: str) -> bool:
    """True if a fork has its parent's value of it."""
    return variable.startswith(_READ_AT_START) and variable not in _TAKEN_OVER


def stands_by(words) -> bool:
    """True if these words start a Python that stands by for trials."""
    is_code = isinstance(words, list) and len(words) == 3 and words[1] == "-c"
    return is_code and "loader.jit.live.standby import" in words[2]


def is_of_a_build(words) -> bool:
    """True if these words start a Python that makes or uses one of three_ways' builds.

    Of these pip is one for what it starts, the hooks that run setup.py, which imports torch.
    """
    if not isinstance(words, list) or len(words) < 3:
        return False
    builds = words[1] == "-c" and words[2].startswith("import loader; loader.build(")
    return builds or words[1:3] == ["-m", "pip"] or str(words[1]).endswith(_OF_A_BUILD)


def code_of(words: list[str]) -> str:
    """What such a Python runs."""
    if words[1] == "-c":
        return words[2]
    if words[1] == "-m":
        return (
            f"import sys; sys.argv[:] = {words[2:]}; sys.path[0] = {os.getcwd()!r}\n"
            f"import runpy; runpy.run_module({words[2]!r}, run_name='__main__', alter_sys=True)"
        )
    return (
        f"import sys; sys.argv[:] = {words[1:]}; sys.path[0] = {os.path.dirname(words[1])!r}\n"
        f"import runpy; runpy.run_path({words[1]!r}, run_name='__main__')"
    )


def take_over(program: str) -> None:
    """Have this process start `program` wherever it starts such a Python."""
    begin, python = subprocess.Popen.__init__, sys.executable

    @functools.wraps(begin)
    def changed(self, args, *others, **options):
        meant = (stands_by(args) or is_of_a_build(args)) and args[0] == python
        begin(self, [program, *args[1:]] if meant else args, *others, **options)

    subprocess.Popen.__init__ = changed


def ask(guards: list[int]) -> socket.socket:
    """A connection to the process to be forked, which is started if there is none like it.

    `guards`: the guard's descriptor, or nothing.
    """
    facts = {
        name: value
        for name, value in os.environ.items()
        if is_read_at_start(name) and name != "LD_PRELOAD"
    }
    digest = hashlib.sha256(repr(sorted(facts.items())).encode())
    for guard in guards:
        digest.update(Path(f"/proc/self/fd/{guard}").read_bytes())
    name = digest.hexdigest()[:16]
    os.chdir(os.path.dirname(os.path.abspath(sys.argv[0])))  # the name of a socket has to be short
    with open(f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            connection.connect(name)
            return connection
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(name)
            listening.listen(64)
            given = listening.fileno(), SESSION  # noqa: F821  see `install`
            subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path.insert(0, {TESTS!r}); import warm; "  # noqa: F821
                 f"del sys.path[0]; warm.stand_by{given}"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[listening.fileno(), *guards], start_new_session=True,
            )  # fmt: skip
        connection.connect(name)  # and wait for it
        return connection


def main() -> None:
    words = [sys.executable, *sys.argv[1:]]
    preloaded = os.environ.get("LD_PRELOAD", "")
    guard = _GUARD.match(preloaded)
    if not (guard and stands_by(words)) and not (is_of_a_build(words) and not preloaded):
        os.execv(words[0], words)
    descriptors = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # of the listing itself
            if descriptor < 3 or os.get_inheritable(descriptor):
                descriptors.append(descriptor)
    task = {"code": code_of(words), "cwd": os.getcwd(), "env": {**os.environ}, "session": True}
    task["numbers"] = descriptors
    connection = ask([int(guard[1])] if guard else [])
    socket.send_fds(connection, [b"."], descriptors)
    connection.sendall(json.dumps(task).encode() + b"\n")
    for descriptor in descriptors:
        os.close(descriptor)
    status = os.waitstatus_to_exitcode(int(connection.recv(9) or signal.SIGKILL))
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
