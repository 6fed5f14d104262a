"""Trying a library in a process of its own, against the operator's reference, before it is used.

A process that has imported torch stands by (standby.py) and forks a child for each trial, which
makes itself ready while the compiler runs. Whatever the library does, crash, hang, write where it
should not, happens there; on the CPU every tensor lies between pages that may not be touched
(guard.cpp). What is compared, and how closely: compare.py.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import BuildError
from ..machine.child import start
from ..machine.sources import HOME
from ..operators import schemas
from ..operators.session import Session
from .rebuild import own_part

_GUARD = Path(__file__).with_name("guard.cpp")

_START_LIMIT = 60.0  # seconds for importing torch and waking a GPU

_START = (
    "import sys; sys.path[:] = {sys_path}; import loader; "
    "from loader.jit.live.standby import stand_by; stand_by({channel})"
)
_ENDED_BY = {
    "SIGSEGV": ": it touched memory outside its tensors",
    "SIGBUS": ": it touched memory that is not there",
    "SIGFPE": ": it divided an integer by zero",
    "SIGILL": ": it ran into code that is none",
}


@dataclass
class Verdict:
    """How a trial ended: `right`, `wrong`, `crashed`, `hung`, `raised`, or `untried`.

    The last where there is nothing to compare.
    """

    outcome: str
    text: str = ""  # what is wrong, for people
    # By dtype the largest from the reference, as a share of the largest value.
    difference: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what could not be compared, and why
    microseconds: float | None = field(default=None, compare=False)  # of its benchmark on a GPU

    def alarms(self, before: dict[str, float]) -> list[str]:
        """Say where it differs a hundred times as much as the code before it did."""
        return [
            f"the largest difference from the reference was {before[dtype]:.1e} ({dtype}) with the "
            f"code before, and is {share:.1e} now: within rounding, but "
            f"{share / before[dtype]:.0f} times as large"
            for dtype, share in self.difference.items()
            if 0 < 100 * before.get(dtype, 0) < share
        ]


class Trials:
    """The process that stands by; started when first needed, in the background."""

    def __init__(self, session: Session):
        """The guard's library lies in the session's cache; without a compiler there is none."""
        self._guard: Path | None = None
        with contextlib.suppress(BuildError, OSError):
            self._guard = own_part(session, _GUARD, link=True)
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._complaints = os.memfd_create("loader")  # what the process prints, should it fail

    def start(self) -> socket.socket:
        """Have the process stand by, without waiting for it; what its orders are sent by."""
        with self._lock, contextlib.ExitStack() as ours:
            if self._control and self._process and self._process.poll() is None:
                return self._control
            self.stop()
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            descriptors = [ours.enter_context(theirs).fileno()]
            parent = HOME if (HOME / "loader.py").exists() else HOME.parent
            code = _START.format(sys_path=[str(parent), *sys.path], channel=theirs.fileno())
            variables = {**os.environ}
            variables["LOADER_BUILD"] = "never"  # what is tried is built already
            if self._guard:
                guard = os.open(self._guard, os.O_RDONLY | os.O_CLOEXEC)
                ours.callback(os.close, guard)
                descriptors.append(guard)
                preload = f"/proc/self/fd/{guard} {os.environ.get('LD_PRELOAD', '')}"
                variables["LD_PRELOAD"] = preload.strip()
            self._process = start(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                env=variables,
                pass_fds=descriptors,
                start_new_session=True,
            )
            self._control = control
            return control

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
        """Return a child that makes itself ready to try a library of `unit` on these devices."""
        known = schemas.known_to_torch(lambda public: session.owner(public) == unit)
        order = {"unit": unit, "root": str(session.root), "devices": devices, "schemas": known}
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):
                control = self.start()
                with self._lock, contextlib.suppress(OSError):  # it died: once more
                    socket.send_fds(control, [json.dumps(order).encode()], [theirs.fileno()])
                    break
        return Trial(ours, self._last_words)

    def _last_words(self) -> str:
        text = os.pread(self._complaints, 1 << 20, 0).decode(errors="replace")
        lines = text.strip().split("\n")
        return "the process that tries edits could not do so: " + (lines[-1] or "it ended early")


class Trial:
    """One child, waiting for the library that it shall try."""

    def __init__(self, channel: socket.socket, last_words: Callable[[], str]):
        self._channel, self._last_words = channel, last_words
        self._received = b""
        self._pid: int | None = None

    def run(self, libraries: list[Path], is_swap: bool, limit: float, timed: bool) -> Verdict:
        """Try libraries of the store, or one for a swap.

        `limit`: seconds for each call of the operator and its reference, once all is ready.
        """
        order = {"libraries": [*map(str, libraries)], "is_swap": is_swap, "timed": timed}
        try:
            if "pid" not in (self._next(_START_LIMIT) or {}):
                return Verdict("raised", self._last_words())
            self._channel.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            return Verdict("raised", self._last_words())
        result = None
        while message := self._next(limit):
            if "outcome" in message:
                result = Verdict(**message)
            if "exit" in message:
                return result or Verdict("crashed", _how_it_ended(message["exit"]))
            if "microseconds" in message and result:
                result.microseconds = message["microseconds"]
            if result and ("microseconds" in message or not timed or result.outcome != "right"):
                return result
        return result or Verdict("hung", f"it did not end within {limit:g} s")

    def cancel(self) -> None:
        """End the child."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
        self._channel.close()

    def _next(self, seconds: float) -> dict | None:
        """Return the child's next message; None where none came in time."""
        while b"\n" not in self._received:
            if not select.select([self._channel], [], [], seconds)[0]:
                return None
            data = b""
            with contextlib.suppress(OSError):  # it ended without a word
                data = self._channel.recv(1 << 16)
            self._received += data or b'{"exit": 0}\n'
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        self._pid = None if "exit" in message else message.get("pid", self._pid)
        return message


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"it was ended by {name}{_ENDED_BY.get(name, '')}"
