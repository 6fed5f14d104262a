"""A warm Python: a process that has imported torch and forks a child for each piece of code.

`import torch` takes over a second of a core, and the tests run code in hundreds of processes. A
child begins where that import has ended, and else is what `python -c` would be: environment,
folder, streams, `__main__`, the message and status of an exception, its own process number.

Two things it is not. What a program reads when it is started, such as LD_PRELOAD, is its parent's
(`fits`), and modules and static objects are not taken down at its end.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import standby

# Hundreds of processes run the same sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

FLAGS = ["-W", "error::UserWarning"]


class WarmProcess:
    """A child of the warm Python, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, code: str, channel: socket.socket, out: int, err: int):
        self.args, self.returncode, self._channel = code, None, channel
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._texts, self._readers = {}, []
        self.pid = int(channel.recv(9))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; its status, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self._channel.recv(9)))
            self._channel.close()
        return self.returncode

    def poll(self) -> int | None:
        """The status, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it writes, until it and whoever has its streams has ended."""
        end = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return end and max(0, end - time.monotonic())

        def read(stream):
            with stream:
                self._texts[stream] = stream.read()

        if not self._readers:
            for stream in (self.stdout, self.stderr):
                self._readers.append(threading.Thread(target=read, args=(stream,), daemon=True))
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(left())
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(left())
        return self._texts[self.stdout], self._texts[self.stderr]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = WarmProcess | subprocess.Popen


class WarmPython:
    """The parent, started at its first use; `close` ends it."""

    def __init__(self):
        own = ("PYTHONPATH", "PYTHONWARNINGS")  # of each child
        self._environment = {k: v for k, v in os.environ.items() if k not in own}
        self._lock, self._process = threading.Lock(), None

    def _begin(self) -> None:
        self._requests, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import warm; "
            f"del sys.path[0]; warm.serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, *FLAGS, "-c", code],
            env=self._environment | {"OPENBLAS_NUM_THREADS": "1"},  # has no threads to be forked
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # as a child's: not a terminal
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def fits(self, environment: dict) -> bool:
        """True if a child can have this environment, that is, what is read at the start is equal."""
        both = self._environment.keys() | environment.keys()
        changed = {k for k in both if self._environment.get(k) != environment.get(k)}
        if "OMP_NUM_THREADS" in changed and "OMP_NUM_THREADS" not in environment:
            return False
        return not any(map(standby.is_read_at_start, changed))

    def start(
        self, code: str, cwd: Path, env: dict, start_new_session: bool, stdin: int = 0
    ) -> WarmProcess:
        with self._lock:
            if self._process is None:
                self._begin()
        channel, theirs = socket.socketpair()
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        given = theirs.fileno(), stdin, their_out, their_err
        with self._lock:
            socket.send_fds(self._requests, [b"."], given)
        theirs.close()
        os.close(their_out)
        os.close(their_err)
        task = {"code": code, "cwd": str(cwd), "env": env, "session": start_new_session}
        task["numbers"] = [0, 1, 2]
        channel.sendall(json.dumps(task).encode() + b"\n")
        return WarmProcess(code, channel, out, err)

    def close(self) -> None:
        if self._process is not None:
            self._requests.close()
            self._process.wait(timeout=20)
            self._process.stdout.close()
            self._process = None


python = WarmPython()


# In the warm process


def serve(number: int) -> None:
    """Fork a keeper for each request, until nobody is left to ask."""
    import torch

    know_patterns()
    gc.freeze()  # or each child looks through all of torch's objects, and copies them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need not be waited for
    requests = socket.socket(fileno=number)
    while True:
        message, given, *_ = socket.recv_fds(requests, 1, 4)
        if not message:
            os._exit(0)
        assert not torch.cuda.is_initialized()
        if os.fork() == 0:
            requests.close()
            keep(*given)
        for descriptor in given:
            os.close(descriptor)


def know_patterns() -> None:
    """Compile the regular expressions of loader's modules: half of the time of importing those.

    A child of this process imports them, and tells them.
    """
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        found, compile_one = [], re._compile

        def noting(pattern, flags):
            if isinstance(pattern, str):
                found.append((pattern, int(flags)))
            return compile_one(pattern, flags)

        with contextlib.suppress(BaseException):
            re._compile = noting
            sys.path.insert(0, str(Path(__file__).parent.parent))
            os.environ["LOADER_BUILD"] = "lazy"
            import loader

            for room in ("build", "cache", "errors", "extension", "live", "source"):
                for file in sorted(
                    Path(loader.__file__).with_name("jit").joinpath(room).glob("*.py")
                ):
                    importlib.import_module(f"loader.jit.{room}.{file.stem}")
        with os.fdopen(tell, "w") as stream:
            json.dump(found, stream)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as stream:
        for pattern, flags in json.load(stream):
            re.compile(pattern, flags)
    os.waitpid(pid, 0)


def stand_by(listening: int, session: int) -> None:
    """Have imported what a process that stands by for trials does, and fork one for whoever asks.

    That is standby.py, in the place of such a process; end when the process `session` does.
    """
    import torch
    import torch._dynamo.config
    import torch.fx.experimental.symbolic_shapes

    inspect.getmodule(sys._getframe())
    know_patterns()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests, end = socket.socket(fileno=listening), os.pidfd_open(session)
    while end not in select.select([requests, end], [], [])[0]:
        channel, _ = requests.accept()
        _, given, *_ = socket.recv_fds(channel, 1, 64)
        assert not torch.cuda.is_initialized()
        if os.fork() == 0:
            requests.close()
            os.close(end)
            keep(channel.detach(), *given, by_its_asker=True)
        channel.close()
        for descriptor in given:
            os.close(descriptor)
    os._exit(0)


def keep(number: int, *given: int, by_its_asker: bool = False) -> None:
    """Fork the child, say its number, wait for it and say its status.

    `by_its_asker`: it ends when whoever asked for it does, who needs no number.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel = socket.socket(fileno=number)
    with channel.makefile("r") as asked:
        task = json.loads(asked.readline())
    pid = os.fork()
    if pid == 0:
        channel.close()
        live(task, given)
    for descriptor in given:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        if not by_its_asker:
            channel.send(b"%9d" % pid)
        elif channel in select.select([channel, os.pidfd_open(pid)], [], [])[0]:
            for kill in (os.kill, os.killpg):  # it may not have a group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        channel.send(b"%9d" % os.waitpid(pid, 0)[1])
    os._exit(0)


def live(task: dict, given: tuple[int, ...]) -> None:
    """Be `python -c` from its first line to its end."""
    if task["session"]:
        os.setsid()
    # Those given may have numbers that others are to get.
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for number, descriptor in zip(task["numbers"], away, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(task["cwd"])
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(task["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if os.environ.get("OMP_NUM_THREADS", threads) != threads:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main = sys.modules["__main__"].__dict__
    for name in ("sys", "warm"):
        main.pop(name, None)
    for name in ("warm", "standby"):
        sys.modules.pop(name, None)
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if options := [text for text in os.environ.get("PYTHONWARNINGS", "").split(",") if text]:
        sys.warnoptions[:0] = options
        warnings._processoptions(sys.warnoptions)
    if program := os.environ.get("OCTET_STANDBY"):
        standby.take_over(program)
    status = 0
    try:
        exec(compile(task["code"], "<string>", "exec", dont_inherit=True), main)
    except SystemExit as stop:
        status = stop.code
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finish(status)


def finish(status) -> None:
    """End as Python does, but without taking down what `import torch` has made: half a second."""
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # these two are what ends a child of `multiprocessing`
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)
