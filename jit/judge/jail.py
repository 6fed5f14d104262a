"""A process that runs what nobody trusts, and the two that watch over it.

    whoever judges -- forks --> jailer, which makes namespaces
                                  '-- keeper, process 1 of them: mounts, waits, tells how it ended
                                        '-- prisoner: confined (confine.py), then runs the code

When keeper or jailer end, the kernel kills whatever they have below them. Judge and prisoner talk
by messages of JSON on a socket, with files in memory beside them; all that comes from the prisoner
is data, and its output is drained and counted here.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import confine
from .confine import Limits, Prison

_LONGEST = 1 << 17  # bytes of a message
_WATCH = 0.02  # seconds between looks at memory and processes
_KEPT = 1 << 14  # bytes of output, of its beginning and of its end


class Ended(Exception):
    """The prisoner gives no more answers; `reason` is a word for programs, the text says why."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


class Jail:
    """A prisoner, seen from outside."""

    def __init__(self, life: Callable[[socket.socket], None], prison: Prison, limits: Limits):
        """Fork it; `life(channel)` is what it runs, confined."""
        self.limits, self.printed, self._text = limits, 0, b""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status, status = os.pipe()
        self._output, output = os.pipe()
        self._told = b""
        self.peak = 0  # bytes of memory, as seen at the looks
        self.in_force: dict[str, Any] = {}
        self._pid = os.fork()
        if self._pid == 0:
            confine.jailer(life, theirs, status, output, prison, limits)
        theirs.close()
        os.close(status)
        os.close(output)
        os.set_blocking(self._output, False)
        self._poll = select.poll()
        for descriptor in (self._channel.fileno(), self._status, self._output):
            self._poll.register(descriptor, select.POLLIN)

    @property
    def alive(self) -> bool:
        """True until it has been ended, or found to have ended."""
        return bool(self._pid)

    def ask(self, message: dict, files: Sequence[int] = (), seconds: float | None = None) -> dict:
        """Send an order and return the answer; `answer["files"]` are descriptors to be closed.

        Raises: Ended.
        """
        self.send(message, files)
        return self.answer(seconds)

    def send(self, message: dict, files: Sequence[int] = ()) -> None:
        """Send an order. Raises: Ended."""
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], files)
        except OSError:
            raise self._how_it_ended() from None

    def answer(self, seconds: float | None = None) -> dict:
        """Wait for an answer. Raises: Ended."""
        limit = self.limits.seconds if seconds is None else seconds
        end, look = time.perf_counter() + limit, time.perf_counter() + _WATCH
        while True:
            ready = {fd for fd, _ in self._poll.poll(1e3 * _WATCH)}
            if self._channel.fileno() in ready:
                return self._received()
            if self._output in ready:
                self._drain()
            if self._status in ready and self._has_ended():
                raise self._how_it_ended()
            now = time.perf_counter()
            if now > look:
                self._look()
                look = time.perf_counter() + _WATCH
            if now > end:
                self.kill()
                raise Ended("hung", f"it gave no answer within {limit:g} s")

    def finish(self) -> int:
        """Tell it that nothing more is asked, and wait for its end; the exit status.

        Raises: Ended where it does not end.
        """
        self._channel.shutdown(socket.SHUT_WR)
        end = time.perf_counter() + self.limits.seconds
        self._forget(self._channel.fileno())
        while "exit" not in self.in_force and time.perf_counter() < end:
            ready = {fd for fd, _ in self._poll.poll(1e3 * _WATCH)}
            if self._output in ready:
                self._drain()
            if self._status in ready and self._has_ended():
                break
        self._drain()
        if "exit" not in self.in_force:
            self.kill()
            raise Ended("hung", f"it did not end within {self.limits.seconds:g} s")
        return int(self.in_force["exit"])

    def _received(self) -> dict:
        data: bytes = b""
        files: list[int] = []
        with contextlib.suppress(OSError):
            data, files, _, _ = socket.recv_fds(self._channel, _LONGEST, 8)
        if not data:
            for file in files:
                os.close(file)
            raise self._how_it_ended()
        try:
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError(f"a {type(message).__name__}")
        except (ValueError, RecursionError) as error:
            for file in files:
                os.close(file)
            self.kill()
            raise Ended("garbled", f"its answer is none: {error}") from None
        return message | {"files": files}

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 20)
            if not data:
                self._forget(self._output)
            self.printed += len(data)
            text = self._text + data
            self._text = text if len(text) <= 2 * _KEPT else text[:_KEPT] + text[-_KEPT:]
            if self.printed > self.limits.output:
                self.kill()
                raise Ended("flooded", f"it printed over {self.limits.output >> 20} MiB")

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)

    def _look(self) -> None:
        """End what uses too much."""
        pids = self.processes()
        memory = sum(map(_memory, pids))
        self.peak = max(self.peak, memory)
        if memory > self.limits.memory:
            self.kill()
            raise Ended(
                "memory", f"it used over {self.limits.memory >> 20} MiB; memory= allows more"
            )
        if len(pids) > self.limits.processes:
            self.kill()
            raise Ended("processes", f"it had over {self.limits.processes} processes")

    def processes(self) -> list[int]:
        """Return the processes below the keeper, as they are numbered here; the prisoner first."""
        found = [pid for keeper in _children(self._pid) for pid in _children(keeper)]
        for pid in found:
            found += [child for child in _children(pid) if child not in found]
        return found

    def signal(self, number: int) -> None:
        """Send a signal to each of its processes."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def filters(self) -> int:
        """Return how many seccomp filters each of its threads has at least; 0 for unknown."""
        counts = []
        for pid in self.processes():
            for thread in os.listdir(f"/proc/{pid}/task"):
                text = _read(f"/proc/{pid}/task/{thread}/status")
                found = text.partition("Seccomp_filters:")[2].split()
                counts.append(int(found[0]) if found else 0)
        return min(counts, default=0)

    def _has_ended(self) -> bool:
        data = os.read(self._status, 1 << 16)
        self._told += data
        for line in self._told.splitlines(keepends=True):
            if line.endswith(b"\n"):
                message = json.loads(line)
                self.in_force.update(message.get("in_force", {}))
                if "exit" in message:
                    self.in_force["exit"] = message["exit"]
        if not data:
            self._forget(self._status)
        return "exit" in self.in_force or not data

    def _how_it_ended(self) -> Ended:
        """Wait a moment for the keeper's word, and say what it was."""
        end = time.perf_counter() + 5
        while time.perf_counter() < end:
            ready = {fd for fd, _ in self._poll.poll(100)}
            if self._output in ready:
                self._drain()
            if self._status in ready and self._has_ended():
                break
        self.kill()
        status = self.in_force.get("exit")
        if status is None:
            said = self.output().strip().splitlines()[-1:]
            return Ended("ended", " ".join(["it closed the channel to the judge", *said]))
        if status >= 0:
            return Ended("exited", f"it ended the process with exit status {status}")
        name = signal.Signals(-status).name
        return Ended("crashed", f"it was ended by {name}{_MEANS.get(name, '')}")

    def used(self) -> int:
        """Return the most bytes of memory that all its processes were seen to have together."""
        self.peak = max(self.peak, sum(map(_memory, self.processes())))
        return self.peak

    def output(self) -> str:
        """Return what it printed, of much the beginning and the end."""
        with contextlib.suppress(Ended, OSError, ValueError):
            self._drain()
        return self._text.decode(errors="replace")

    def kill(self) -> None:
        """End all its processes."""
        if self._pid:
            for _ in range(100):  # without a namespace of their own they may fork meanwhile
                if not self.processes():
                    break
                self.signal(signal.SIGSTOP)
                self.signal(signal.SIGKILL)
            for keeper in _children(self._pid):
                with contextlib.suppress(OSError):
                    os.kill(keeper, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0

    def close(self) -> None:
        """End it and give back what it took here."""
        self.kill()
        self._channel.close()
        os.close(self._status)
        os.close(self._output)


_MEANS = {
    "SIGSEGV": ": it touched memory outside its tensors",
    "SIGBUS": ": it touched memory that is not there",
    "SIGFPE": ": it divided an integer by zero",
    "SIGILL": ": it ran into code that is none",
    "SIGXFSZ": ": it wrote too large a file",
}


def _children(pid: int) -> list[int]:
    found: list[int] = []
    if not pid:
        return found
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _memory(pid: int) -> int:
    """Bytes that a process has of its own or shares by files in memory."""
    total = 0
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) << 10
    return total


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
