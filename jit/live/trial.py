"""Trying a library in a process of its own, against the operator's reference, before it is used.

A process that has imported torch, which takes 2 s, stands by. For each trial it forks a child that
makes itself ready while the compiler still runs: it is there before the library is. Whatever the
library does, crash, hang, write where it should not, happens in the child. On the CPU every tensor
of the child lies between pages that may not be touched (guard.cpp).

What is compared: `X(*arguments)` and its gradients with `X_reference(*arguments)` in float64, for
the arguments that `samples(device)` in `ops/X.py` yields.
"""

import contextlib
import ctypes
import hashlib
import inspect
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
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..cache.store import make_private
from ..errors import BuildError
from ..machine.sources import HOME

_GUARD = Path(__file__).with_name("guard.cpp")

# The largest difference from the reference, as a share of its largest value, that is rounding.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}

_START_LIMIT = 60.0  # seconds for importing torch and waking a GPU

_START = (
    "import sys; sys.path[:] = {sys_path}; import loader; "
    "from loader.jit.live.trial import stand_by; stand_by({channel})"
)


@dataclass
class Verdict:
    """How a trial ended.

    Attributes:
        outcome: `right`, `wrong`, `crashed`, `hung`, `raised`, or `untried` where there is nothing
            to compare.
        text: what is wrong, for people.
        difference: the largest from the reference by dtype, as a share of the largest value.
        microseconds: of the operator's benchmark, on a GPU.
    """

    outcome: str
    text: str = ""
    difference: dict[str, float] = field(default_factory=dict)
    microseconds: float | None = field(default=None, compare=False)


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

    def prepare(self, unit: str, root: Path, cuda: bool) -> "Trial":
        """A child that makes itself ready to try a library of `unit`, whose files lie in `root`."""
        order = json.dumps({"unit": unit, "root": str(root), "cuda": cuda}).encode()
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):
                self.start()
                with self._lock, contextlib.suppress(OSError):  # it died: once more
                    socket.send_fds(self._control, [order], [theirs.fileno()])
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

    def run(
        self, library: Path, is_swap: bool, devices: list[str], limit: float, timed: bool
    ) -> Verdict:
        """Try a library, one of the store or for a swap; `limit` in seconds, once all is ready."""
        order = {"library": str(library), "is_swap": is_swap, "devices": devices, "timed": timed}
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


# The rest runs in the process that stands by, and in its children.


def stand_by(channel: int) -> None:
    """Fork a child for each order that comes; end when nobody can send one any more."""
    # What the children share; torch.autograd.grad would import the former, for half a second.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    inspect.getmodule(sys._getframe())  # a look at every module, which torch.library would take

    control = socket.socket(fileno=channel)
    control.set_inheritable(False)
    children: dict[int, socket.socket] = {}
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    while True:
        ready = select.select([control, awake], [], [])[0]
        if awake in ready:
            awake.recv(1 << 12)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                theirs = children.pop(pid)
                with contextlib.suppress(OSError):
                    _send(theirs, exit=os.waitstatus_to_exitcode(status))
                theirs.close()
        if control in ready:
            order, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not order:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            theirs = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                control.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in children.values():
                    other.close()
                _live(theirs, json.loads(order))
            children[pid] = theirs


def _send(channel: socket.socket, **message) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _live(channel: socket.socket, order: dict) -> None:
    """The life of a child: get ready, wait for the library, try it, tell, end."""
    try:
        import torch

        import loader

        if order["cuda"]:
            torch.zeros(1, device="cuda")
        _send(channel, pid=os.getpid())
        line = channel.makefile("r").readline()
        if not line:
            os._exit(0)
        task = json.loads(line)
        unit, session = order["unit"], loader._session
        if str(session.root) != order["root"]:
            session = loader.Library(order["root"])._session
        if task["is_swap"]:
            from .swap import Swap

            Swap(unit, Path(task["library"])).commit()
        else:
            torch.ops.load_library(task["library"])
        session.loaded[unit] = "on trial"
        module = session.module(unit)
        _send(channel, **vars(_compare(module, unit, task["devices"])))
        if task["timed"]:
            _send(channel, microseconds=_time(module, unit))
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        with contextlib.suppress(OSError):
            _send(channel, outcome="raised", text=text)
    finally:
        os._exit(0)


def _compare(module, unit: str, devices: list[str]) -> Verdict:
    """An operator and its gradients beside those of its reference."""
    operator = getattr(module, unit)
    reference = getattr(module, f"{unit}_reference", None)
    if not hasattr(module, "samples") or reference is None:
        missing = "samples(device)" if reference else f"{unit}_reference"
        return Verdict("untried", f"nothing to compare: its ops/*.py has no {missing}")
    worst: dict[str, float] = {}
    for device in devices:
        with _guarded(device == "cpu") as written_outside:
            for i, arguments in enumerate(module.samples(device)):
                text, dtype, difference = _difference(operator, reference, arguments)
                worst[dtype] = max(worst.get(dtype, 0.0), difference)
                if text:
                    return Verdict("wrong", f"sample {i} on {device}: {text}", worst)
            if outside := written_outside():
                return Verdict("wrong", f"on {device} it {outside}", worst)
    return Verdict("right", difference=worst)


@contextlib.contextmanager
def _guarded(wanted: bool):
    """Guard tensors on the CPU inside; gives a function that says what was written beside."""
    process = ctypes.CDLL(None)
    if not wanted or not hasattr(process, "octet_guard"):
        yield lambda: ""
        return
    process.octet_guard_check.restype = ctypes.c_char_p
    process.octet_guard(1)
    try:
        yield lambda: process.octet_guard_check().decode()
    finally:
        process.octet_guard(0)


def _difference(operator, reference, arguments: tuple) -> tuple[str, str, float]:
    """What is wrong ("" where nothing is), the coarsest dtype, the largest difference in it."""
    import torch

    def prepared(x, dtype=None):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        x = x.detach()
        return (x.to(dtype) if dtype else x).requires_grad_()

    inputs = [prepared(x) for x in arguments], [prepared(x, torch.float64) for x in arguments]
    outputs = operator(*inputs[0]), reference(*inputs[1])
    if not isinstance(outputs[0], tuple):
        outputs = (outputs[0],), (outputs[1],)
    names = ["the output"] if len(outputs[0]) == 1 else [f"output {k}" for k in range(99)]
    pairs = [(name, x, y) for name, x, y in zip(names, *outputs, strict=False)]
    tensors = [(i, x) for i, x in enumerate(inputs[0]) if isinstance(x, torch.Tensor)]
    numbers = [i for i, x in tensors if x.requires_grad]
    leaves = [(inputs[0][i], inputs[1][i]) for i in numbers]
    makes = [(x, y) for _, x, y in pairs if x.requires_grad and y.requires_grad]
    if makes and leaves:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x, _ in makes]
        to_ours = [w.to(x) for w, (x, _) in zip(weights, makes, strict=True)]
        to_theirs = [w.to(y) for w, y in zip(to_ours, (y for _, y in makes), strict=True)]
        grads = [
            torch.autograd.grad(
                [pair[k] for pair in makes], [leaf[k] for leaf in leaves], to, allow_unused=True
            )
            for k, to in ((0, to_ours), (1, to_theirs))
        ]
        pairs += [
            (f"the gradient to argument {i}", x, y) for i, x, y in zip(numbers, *grads, strict=True)
        ]
    dtypes = [str(x.dtype).removeprefix("torch.") for _, x in tensors if x.is_floating_point()]
    coarsest = max(dtypes, key=lambda dtype: TOLERANCE.get(dtype, 0), default="float32")
    most, worst = TOLERANCE.get(coarsest, 1e-4), 0.0
    for name, ours, theirs in pairs:
        if ours is None or theirs is None:
            if (ours is None) != (theirs is None):
                which = "missing" if ours is None else "none of the reference's"
                return f"{name} is {which}", coarsest, 1.0
            continue
        if ours.shape != theirs.shape:
            shapes = f"{tuple(ours.shape)}, expected {tuple(theirs.shape)}"
            return f"{name} has shape {shapes}", coarsest, 1.0
        got, expected = ours.detach().double(), theirs.detach().double().to(ours.device)
        same = (got == expected) | (got.isnan() & expected.isnan())
        apart = torch.where(same, 0.0, (got - expected).abs()).nan_to_num(torch.inf, torch.inf)
        scale = max(1e-30, float(expected.nan_to_num(0, 0, 0).abs().max()) if got.numel() else 1.0)
        share = float(apart.max()) / scale if got.numel() else 0.0
        worst = max(worst, share)
        if share > most:
            at = torch.unravel_index(apart.argmax(), apart.shape)
            at = tuple(int(index) for index in at)
            count = int((apart > most * scale).sum())
            text = (
                f"{name} differs from the reference at {count} of {got.numel()} places, by most "
                f"at {at}: {float(got[at]):.6g}, expected {float(expected[at]):.6g}"
            )
            return text, coarsest, share
    return "", coarsest, worst


def _time(module, unit: str) -> float | None:
    """Microseconds of the operator's benchmark on the GPU; None where it cannot be had."""
    from ..machine.timing import time

    try:
        arguments = module.benchmark("cuda")
        operator = getattr(module, unit)
        return 1e3 * time(lambda: operator(*arguments), device="cuda", repeats=20)
    except (AttributeError, RuntimeError):  # it has none, or the GPU has no room for it
        return None
