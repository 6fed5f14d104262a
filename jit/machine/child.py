"""Starting programs: also another Python that imports what this one would and calls a function."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from .forks import Lock
from .sources import HOME

_MOMENTARY = errno.EFAULT, errno.EAGAIN, errno.ENOMEM
# One at a time: it takes a millisecond or two. A child forked meanwhile would keep the pipe open by
# which subprocess learns that the program has started, and the parent would wait for that child.
_starting = Lock(delays_forks=True)

_START = """
import importlib, json, sys
path, home, module, function, arguments = json.loads(sys.argv[1])
sys.path[:] = path
if home:
    sys.modules["loader"] = type(sys)("loader")
    sys.modules["loader"].__path__ = [home]
getattr(importlib.import_module(module), function)(*arguments)
"""


# Of a process that ignores SIGCHLD: what stands between it and a program.
_BETWEEN = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
tell, program, *words = sys.argv[1:]
os.set_inheritable(int(tell), False)
if (pid := os.fork()) == 0:
    try:
        os.execv(program, words)
    except OSError as error:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
    os._exit(127)
os.write(int(tell), b"%d" % os.waitpid(pid, 0)[1])
"""


class _Told(subprocess.Popen):
    """A program whose end is told through a pipe: the system does not, where SIGCHLD is ignored.

    Popen then takes it for a success. A server may ignore it, and all that it starts inherit that.
    """

    def __init__(self, command: list[str], executable: str, pass_fds: Any = (), **options: Any):
        telling, tell = os.pipe()
        words = [sys.executable, "-I", "-S", "-c", _BETWEEN, str(tell), executable, *command]
        try:
            super().__init__(words, pass_fds=[*pass_fds, tell], **options)
        except BaseException:
            os.close(telling)
            raise
        finally:
            os.close(tell)
        self._telling: int | None = telling

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return None if super().poll() is None else self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; how it ended, killed where nobody was left to tell."""
        super().wait(timeout)
        if self._telling is not None:
            with open(self._telling, "rb") as telling:
                told, self._telling = telling.read(), None
            self.returncode = os.waitstatus_to_exitcode(int(told)) if told else -signal.SIGKILL
        return self.returncode


def command(function: str, *arguments: object, body: bool = True) -> list[str]:
    """Return the words that start a Python which calls `function`, such as "live.trial.stand_by".

    It has this process's `sys.path`; neither the environment nor the current folder changes what it
    imports before that is set. JSON carries the arguments. Without `body` it has the package
    `loader` without its body, which imports torch, looks for operators and builds them.
    """
    # An installed loader is the folder HOME itself, a checkout has loader.py in it.
    place = HOME if (HOME / "loader.py").exists() else HOME.parent
    module, _, name = f"loader.jit.{function}".rpartition(".")
    path = [str(place), *map(os.fspath, sys.path)]
    order = [path, None if body else str(HOME), module, name, arguments]
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, "-c", _START, json.dumps(order)]


def start(command: list[str], tries: int = 3, **options: Any) -> subprocess.Popen:
    """Start a program; again where a crowded machine, or EFAULT of a sandbox's, refuses it.

    It is looked for here: os.get_exec_path, which Popen asks of a bare name, sets and puts back the
    filters of warnings, and from another thread undoes those that a caller sets meanwhile.
    """
    places = (options.get("env") or os.environ).get("PATH", os.defpath)
    found = shutil.which(command[0], path=places)
    if found and os.path.isabs(found):
        options.setdefault("executable", found)
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    is_told = ignored and sys.executable and "executable" in options
    try:
        with _starting:
            return (_Told if is_told else subprocess.Popen)(command, **options)
    except OSError as error:
        if error.errno not in _MOMENTARY or tries == 1:
            raise
    time.sleep(0.1)
    return start(command, tries - 1, **options)
