"""The facts that checks look at, and the means to try something out."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...machine import settings, toolchain
from ...machine.child import start

TIMEOUT = 20  # seconds that a tool may take
MOVE_CACHE = "set LOADER_CACHE_DIR to a folder of your own on a local disk"


@dataclass(frozen=True)
class Context:
    """The facts that checks look at."""

    root: Path
    cache: Path  # the folder that builds go to
    folder: Path  # that one, or its nearest parent that exists
    probe: Path  # for trials: in `folder`, or where nothing can be written there in the system's
    refusal: str | None  # why nothing can be written in `folder`
    architectures: str  # that a build would compile CUDA sources for, as Toolchain has them
    facts: Callable[[], dict[str, Any]]  # what torch says of itself

    @property
    def brought(self) -> Path | None:
        """The store that a wheel brought along; None where there is none."""
        store = self.root / settings.PREBUILT / "store"
        return store if store.is_dir() else None

    @property
    def nvcc(self) -> list[str]:
        """The command that a build would run for CUDA sources; empty where it is not there."""
        home = toolchain.cuda_home()
        if not home and not os.environ.get("PYTORCH_NVCC"):
            return []
        command = toolchain.command("PYTORCH_NVCC", home)
        return command if toolchain.identity(shlex.join(command)) else []

    @property
    def cuda(self) -> str | None:
        """The version of CUDA that torch is built for; None where it has none."""
        facts = self.facts()
        if "torch" not in facts:
            raise TorchMissing
        return facts["cuda"]


class TorchMissing(Exception):
    """A check cannot tell without torch."""


Found = tuple[str, str] | tuple[str, str, str]  # state, found, cure
Check = Callable[[Context], Found]


def run(command: list[str], patience: int = 1, **environment: str) -> tuple[bool, str]:
    """Run a command; return True if it ends well, and all that it says."""
    if _over.is_set():
        return False, "error: the doctor was interrupted"
    try:
        with start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C", **environment},
            start_new_session=True,
        ) as process:
            _running.add(process)
            if _over.is_set():  # while it was started
                end_all()
            try:
                said, _ = process.communicate(timeout=patience * TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the programs that it started
                return False, f"error: it does not end within {patience * TIMEOUT} s"
            finally:
                _running.discard(process)
    except OSError as error:
        return False, f"error: {error.strerror}"
    if process.returncode < 0:
        said += f"\nerror: killed by {signal.Signals(-process.returncode).name}"
    return process.returncode == 0, said


_running: set[subprocess.Popen] = set()
_over = threading.Event()


def begin() -> None:
    """Let commands be run again, after `end_all`."""
    _over.clear()


def end_all() -> None:
    """End the commands that are running and start no more, for a doctor that is interrupted."""
    _over.set()
    for process in [*_running]:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def first_error(said: str) -> str:
    """Return the line of a compiler's output that says why it failed."""
    lines = [line for line in said.splitlines() if line.strip()] or ["it says nothing"]
    signs = re.compile(r"\b(error|fatal|undefined|cannot find)\b")
    return next((line for line in lines if signs.search(line)), lines[0])[:300]


def last_line(said: str) -> str:
    """Return the last line of an output, which says why a program ended."""
    return (said.strip() or "it says nothing").splitlines()[-1]


def version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
