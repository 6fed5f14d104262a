"""Trying a library in a process of its own, against the operator's reference, before it is used.

A process that has imported torch, which takes 2 s, stands by (standby.py). For each trial it forks
a child that makes itself ready while the compiler still runs: it is there before the library is.
Whatever the library does, crash, hang, write where it should not, happens in the child. On the CPU
every tensor of the child lies between pages that may not be touched (guard.cpp). What is compared,
and how closely: compare.py.
"""

import contextlib
import hashlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..cache.store import make_private
from ..errors import BuildError
from ..machine.sources import HOME
from ..operators import schemas
from ..operators.session import Session

_GUARD = Path(__file__).with_name("guard.cpp")

_START_LIMIT = 60.0  # seconds for importing torch and waking a GPU

_START = (
    "import sys; sys.path[:] = {sys_path}; import loader; "
    "from loader.jit.live.standby import stand_by; stand_by({channel})"
)


@dataclass
class Verdict:
    """How a trial ended.

    Attributes:
        outcome: `right`, `wrong`, `crashed`, `hung`, `raised`, or `untried` where there is nothing
            to compare.
        text: what is wrong, for people.
        difference: the largest from the reference by dtype, as a share of the largest value.
        notes: what could not be compared, and why.
        microseconds: of the operator's benchmark, on a GPU.
    """

    outcome: str
    text: str = ""
    difference: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    microseconds: float | None = field(default=None, compare=False)

    def alarms(self, before: dict[str, float]) -> list[str]:
        """Say where it differs a hundred times as much as the code before it did."""
        return [
            f"the largest difference from the reference was {before[dtype]:.1e} ({dtype}) with the "
            f"code before, and is {share:.1e} now: within rounding, but "
            f"{share / before[dtype]:.0f} times as large"
            for dtype, share in self.difference.items()
            if 0 < 100 * before.get(dtype, 0) < share
        ]


def guard_library(cache: Path) -> Path | None:
    """guard.cpp's, compiled where it is not there yet; None where that fails."""
    text = _GUARD.read_bytes()
    library = cache / "work" / f"guard-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if library.exists():
        return library
    draft = library.with_name(f"{library.name}-{os.getpid()}")
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    command = [*compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    try:
        make_private(library.parent)
        subprocess.run(
            [*command, str(_GUARD), "-ldl", "-o", str(draft)], check=True, capture_output=True
        )
        os.replace(draft, library)
    except (BuildError, OSError, subprocess.CalledProcessError):
        return None
    return library


class Trials:
    """The process that stands by; started when first needed, in the background."""

    def __init__(self, guard: Path | None):
        """`guard` is the library of guard.cpp; None does without."""
        self._guard = guard
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._complaints = os.memfd_create("loader")  # what the process prints, should it fail

    def start(self) -> None:
        """Have the process stand by, without waiting for it."""
        with self._lock:
            if self._process and self._process.poll() is None:
                return
            self.stop()
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            parent = HOME if (HOME / "loader.py").exists() else HOME.parent
            code = _START.format(sys_path=[str(parent), *sys.path], channel=theirs.fileno())
            variables = dict(os.environ)
            variables["LOADER_BUILD"] = "never"  # what is tried is built already
            descriptors = [theirs.fileno()]
            try:
                if self._guard:
                    handle = os.open(self._guard, os.O_RDONLY | os.O_CLOEXEC)
                    descriptors.append(handle)
                    variables["LD_PRELOAD"] = " ".join(
                        filter(None, [f"/proc/self/fd/{handle}", os.environ.get("LD_PRELOAD")])
                    )
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._complaints,
                    env=variables,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            finally:
                theirs.close()
                for handle in descriptors[1:]:
                    os.close(handle)

    def stop(self) -> None:
        """End the process that stands by."""
        if self._control:
            self._control.close()
        if self._process and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._control = None

    def prepare(self, session: Session, unit: str, devices: list[str]) -> "Trial":
        """A child that makes itself ready to try a library of `unit` on these devices."""
        known = schemas.known_to_torch(lambda public: session.owner(public) == unit)
        order = {"unit": unit, "root": str(session.root), "devices": devices, "schemas": known}
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):
                self.start()
                with self._lock, contextlib.suppress(OSError):  # it died: once more
                    socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
                    break
        return Trial(ours, self._last_words)

    def _last_words(self) -> str:
        text = os.pread(self._complaints, 1 << 20, 0).decode(errors="replace")
        lines = text.strip().split("\n")
        return "the process that tries edits could not do so: " + (lines[-1] or "it ended early")


class Trial:
    """One child, waiting for the library that it shall try."""

    def __init__(self, channel: socket.socket, last_words: Callable[[], str]):
        self._channel, self._lines = channel, channel.makefile("r")
        self._last_words = last_words
        self._pid: int | None = None

    def run(self, library: Path, is_swap: bool, limit: float, timed: bool) -> Verdict:
        """Try a library, one of the store or for a swap.

        `limit`: seconds for each call of the operator and its reference, once all is ready.
        """
        order = {"library": str(library), "is_swap": is_swap, "timed": timed}
        try:
            if "pid" not in (self._next(_START_LIMIT) or {}):
                return Verdict("raised", self._last_words())
            self._channel.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            return Verdict("raised", self._last_words())
        result, ended = None, time.monotonic() + limit
        while True:
            message = self._next(ended - time.monotonic())
            if message is None:
                return result or Verdict("hung", f"it did not end within {limit:g} s")
            if "alive" in message:
                ended = time.monotonic() + limit
            if "outcome" in message:
                result = Verdict(**message)
                if not timed or result.outcome != "right":
                    return result
            if "microseconds" in message:
                result.microseconds = message["microseconds"]
                return result
            if "exit" in message:
                return result or Verdict("crashed", _how_it_ended(message["exit"]))

    def cancel(self) -> None:
        """End the child."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
        self._channel.close()

    def _next(self, seconds: float) -> dict | None:
        """The child's next message; None where none came in time."""
        if not select.select([self._channel], [], [], max(0.0, seconds))[0]:
            return None
        line = self._lines.readline()
        message = json.loads(line) if line else {"exit": 0}
        self._pid = None if "exit" in message else message.get("pid", self._pid)
        return message


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name
    what = {
        "SIGSEGV": "it touched memory outside its tensors",
        "SIGBUS": "it touched memory that is not there",
        "SIGFPE": "it divided an integer by zero",
        "SIGILL": "it ran into code that is none",
    }
    return f"it was ended by {name}" + (f": {what[name]}" if name in what else "")
