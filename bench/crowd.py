"""How much longer does the last of many processes wait that import at once than one alone?

    python -m loader bench crowd [--processes 32] [--repeats 3]

Each starts `import loader` with torch imported and an empty cache: one compiles, the others wait.
What counts is the ratio of the slowest of them to one process alone, taken in turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import loader
from harness import circumstances, keep

WAITING = """
import pathlib, os, sys, time, torch
gate = pathlib.Path(sys.argv[1])
(gate / str(os.getpid())).touch()
while not (gate / "go").exists():
    time.sleep(0.01)
begun = time.perf_counter()
import loader
loader.square, loader.trilinear_interpolation
print(time.perf_counter() - begun)
"""


def slowest(count: int) -> float:
    """Seconds that the slowest of so many processes takes to import and open two operators."""
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder, "gate")
        gate.mkdir()
        changes = {"LOADER_CACHE_DIR": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                [sys.executable, "-c", WAITING, gate],
                cwd=loader._root,
                env=os.environ | changes,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        while len(os.listdir(gate)) < count:
            time.sleep(0.05)
        (gate / "go").touch()
        seconds = [float(process.communicate()[0]) for process in running]
    return max(seconds)


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m loader bench crowd", description=__doc__)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for _ in range(options.repeats):
        alone, last = slowest(1), slowest(options.processes)
        rows.append({"alone": alone, "slowest": last, "ratio": last / alone})
        print(json.dumps(rows[-1]))
    facts = circumstances("cpu", [*loader._session.units]) | {"processes": options.processes}
    print(keep("crowd", "cpu", facts, rows, options.results))
