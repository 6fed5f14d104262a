"""The process that stands by, with torch in it, and its children, one for each trial.

It forks a child for each order that comes; the child makes itself ready while the compiler still
runs, waits for the library, tries it (compare.py), tells, and ends.
"""

import contextlib
import functools
import inspect
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path


def stand_by(channel: int) -> None:
    """Fork a child for each order that comes; end when nobody can send one any more."""
    # What the children share; torch.autograd.grad would import the former, for half a second.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    from . import compare  # noqa: F401

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
        idle = None if "torch._dynamo.config" in sys.modules else 0.3
        ready = select.select([control, awake], [], [], idle)[0]
        if not ready:
            _import_for_fakes()
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


def _import_for_fakes() -> None:
    """Import what torch's fake tensors need, which takes a second."""
    import torch._dynamo.config  # noqa: F401


def _send(channel: socket.socket, **message) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _live(channel: socket.socket, order: dict) -> None:
    """The life of a child: get ready, wait for the library, try it, tell, end."""
    try:
        import torch

        import loader

        from .compare import compare

        _import_for_fakes()
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
        alive = functools.partial(_send, channel, alive=True)
        _send(channel, **vars(compare(module, unit, task["devices"], alive)))
        if task["timed"]:
            _send(channel, microseconds=_time(module, unit))
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        with contextlib.suppress(OSError):
            _send(channel, outcome="raised", text=text)
    finally:
        os._exit(0)


def _time(module, unit: str) -> float | None:
    """Microseconds of the operator's benchmark on the GPU; None where it cannot be had."""
    from ..machine.timing import time

    try:
        arguments = module.benchmark("cuda")
        operator = getattr(module, unit)
        return 1e3 * time(lambda: operator(*arguments), device="cuda", repeats=20)
    except (AttributeError, RuntimeError):  # it has none, or the GPU has no room for it
        return None
