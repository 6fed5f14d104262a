"""The process that stands by, with torch in it, and its children, one for each trial.

It forks a child for each order that comes. The child finds out all that it can (compare.py) while
the compiler runs, waits for the library, tries it, tells, and ends.
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
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def stand_by(channel: int) -> None:
    """Fork a child for each order that comes; end when nobody can send one any more."""
    # What the children share; torch.autograd.grad would import the former, for half a second, and
    # fake tensors the latter, for a second.
    import torch._dynamo.config
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    from . import compare  # noqa: F401

    inspect.getmodule(sys._getframe())  # a look at every module, which torch.library would take

    control = socket.socket(fileno=channel)
    control.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is forgotten
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not order:
            os.killpg(0, signal.SIGKILL)
        with socket.socket(fileno=descriptors[0]) as theirs:
            if os.fork() == 0:
                control.close()
                _tell_of(theirs, functools.partial(_live, theirs, json.loads(order)))


def _tell_of(channel: socket.socket, live: Callable[[], None]) -> None:
    """Fork once more, and tell how the child ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        live()
    with contextlib.suppress(OSError):
        _send(channel, exit=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _send(channel: socket.socket, **message: object) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _live(channel: socket.socket, order: dict) -> None:
    """The life of a child: get ready, wait for the library, try it, tell, end."""
    try:
        import torch

        import loader

        from ..operators import schemas
        from .compare import Comparison
        from .swap import Swap

        if "cuda" in order["devices"]:
            torch.zeros(1, device="cuda")
        _send(channel, pid=os.getpid())
        unit, session = order["unit"], loader._session
        if str(session.root) != order["root"]:
            session = loader.Library(order["root"])._session
        session.loaded[unit] = "on trial"

        def compared() -> Comparison:
            alive = functools.partial(_send, channel, alive=True)
            return Comparison(session.module(unit), unit, order["devices"], alive)

        comparison = None
        with contextlib.suppress(Exception, SystemExit):  # it comes again, with the library
            schemas.declare({unit: order["schemas"]}, session.module)
            comparison = compared()
            comparison.prepare(lambda: bool(select.select([channel], [], [], 0)[0]))
        line = channel.makefile("r").readline()
        if not line:
            os._exit(0)
        task = json.loads(line)
        schemas.withdraw(unit)
        for library in task["libraries"]:
            if task["is_swap"]:
                os.environ.pop(schemas.DECLARED, None)  # it is to say which arguments it takes
                Swap(unit, Path(library)).commit()
            else:
                torch.ops.load_library(library)
        _send(channel, **vars((comparison or compared()).verdict()))
        if task["timed"]:
            _send(channel, microseconds=_time(session.module(unit), unit))
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        with contextlib.suppress(OSError):
            _send(channel, outcome="raised", text=text)
    finally:
        os._exit(0)


def _time(module: ModuleType, unit: str) -> float | None:
    """Microseconds of the operator's benchmark on the GPU; None where it cannot be had."""
    from ..machine.timing import time

    try:
        arguments = module.benchmark("cuda")
        operator = getattr(module, unit)
        return 1e3 * time(lambda: operator(*arguments), device="cuda", repeats=20)
    except (AttributeError, RuntimeError):  # it has none, or the GPU has no room for it
        return None
