"""Building what the store lacks: a worker process compiles, here are progress and errors."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from .errors import BuildError, first_errors
from .key import built_sources
from .store import make_private
from .toolchain import Toolchain
from .units import Unit

# The worker gets the package `loader` without its body, which would build in turn.
_START = (
    "import sys, types; package = types.ModuleType('loader'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['loader'] = package; from loader.jit.worker import main; main()"
)


def build(
    units: list[Unit], toolchain: Toolchain, root: Path, cache: Path
) -> dict[str, BuildError]:
    """Compile `units` side by side within this machine's cores; the errors of those that failed.

    Each unit that succeeds is in the store afterwards. Safe to call from any number of processes.
    """
    if toolchain.cxx is None:
        command = os.environ.get("CXX") or "c++"
        error = BuildError(
            f"no C++ compiler: `{command}` is not on PATH; "
            "install one (Debian, Ubuntu: apt install g++) or set CXX to one that supports C++17"
        )
        return {unit.name: error for unit in units}
    try:
        make_private(cache / "store")
    except BuildError as error:
        return {unit.name: error for unit in units}
    # The longest first, so that no core idles at the end.
    units = sorted(
        units, key=lambda unit: -sum(_size(unit, s) for s in built_sources(unit, toolchain))
    )
    cores = _cores()
    order = {
        "units": [{"name": unit.name, "sources": unit.sources} for unit in units],
        "toolchain": asdict(toolchain),
        "root": str(root),
        "cache": str(cache),
        "sys_path": sys.path,
        "side_by_side": min(cores, len(units)),
        "jobs": max(1, -(-cores // len(units))),
    }
    started = time.perf_counter()
    with (
        subprocess.Popen(
            [sys.executable, "-c", _START, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as worker,
        _Progress([unit.name for unit in units], cache) as progress,
    ):
        errors, ended = {}, set()
        try:
            worker.stdin.write(json.dumps(order))
            worker.stdin.close()
            for line in worker.stdout:
                event = json.loads(line)
                progress.show(event)
                if event["state"] in ("done", "failed"):
                    ended.add(event["unit"])
                if event["state"] == "failed":
                    errors[event["unit"]] = _error(event)
            complaint = worker.stderr.read()
        finally:
            worker.kill()
        progress.end(len(ended) - len(errors), time.perf_counter() - started)
    for unit in units:
        if unit.name not in ended:
            last = (
                "\n".join(complaint.strip().splitlines()[-5:]) or f"exit status {worker.returncode}"
            )
            errors[unit.name] = BuildError(
                f"{unit.name}: the build process ended early:\n{last}", unit.name
            )
    return errors


def _size(unit: Unit, source: str) -> int:
    """A guess at the work in a source: nvcc takes longest."""
    return (unit.root / source).stat().st_size + (100_000 if source.endswith(".cu") else 0)


def _cores() -> int:
    """Cores this process may use; MAX_JOBS bounds them."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    most = os.environ.get("MAX_JOBS", "")
    return min(cores, int(most)) if most.isdigit() and int(most) > 0 else cores


def _error(event: dict) -> BuildError:
    unit, log = event["unit"], event["log"]
    text = event["error"]
    if log:
        text = Path(log).read_text(errors="replace")
    where = f"\nThe whole output is in {log}" if log else ""
    return BuildError(f"{unit} could not be built:\n{first_errors(text)}{where}", unit, log)


class _Progress:
    """On a terminal a live line for each unit, on stderr; elsewhere one line in all."""

    def __init__(self, names: list[str], cache: Path):
        self._names, self._cache, self._live = names, cache, None
        if sys.stderr is not None and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
            except ImportError:
                return
            columns = SpinnerColumn(), TextColumn("{task.fields[unit]:<28}{task.description}")
            self._live = Progress(
                *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
            )
            self._tasks = {
                name: self._live.add_task("queued", unit=name, start=False) for name in names
            }

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def show(self, event: dict) -> None:
        """A unit's new state."""
        if not self._live:
            return
        text = event["state"]
        if text == "waiting":
            text = f"waiting for process {event['holder'] or '?'}, which is building it"
        task = self._tasks[event["unit"]]
        self._live.start_task(task)
        self._live.update(task, description=text)
        if event["state"] in ("done", "failed"):
            self._live.stop_task(task)

    def end(self, built: int, seconds: float) -> None:
        """Say once what was done."""
        if self._live:
            self._live.stop()
        if sys.stderr is not None:
            of = f"{len(self._names)} ({', '.join(self._names)})"
            text = f"loader: built {built} of {of} in {seconds:.1f} s into {self._cache}"
            print(text, file=sys.stderr)

    def __exit__(self, *exception) -> None:
        if self._live:
            self._live.stop()
