"""How much slower is a build for any CPU (LOADER_NATIVE=0) than one for this machine's?

    python -m loader bench portable [OPERATOR ...] [--seed S] [--cases K] [--level 1 3]

Cases are those of `bench sweep`, drawn at random over each operator's space, on the CPU. A process
with each build takes its turn at a case; what counts is the least time of the processor's that a
call took, on one thread, so other work on the machine matters little. `--level` has the portable
build open what a CPU of these levels of x86-64 would, beside this one's own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from sweep import OPERATORS

import loader
from harness import ROOT, circumstances, keep

WORKER = """
import importlib, json, os, random, sys, time
sys.path[:0] = [{root!r}, {root!r} + "/bench"]
import torch
import torch._functorch.config
import loader
torch._functorch.config.donated_buffer = False  # the graph is kept for the next repeat
torch.set_num_threads(1)
if level := int(sys.argv[1]):
    from loader.jit.machine import levels
    levels.here = lambda: level
print("ready", flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if "case" in ask:
        operator, seed, k = ask["case"]
        space = importlib.import_module("spaces." + operator)
        case = {{**space.draw(random.Random(f"{{seed}} {{k}}"), {largest}), "key": [seed, k]}}
        values = torch.Generator().manual_seed(k)
        tasks = space.tasks(case, {{"device": torch.device("cpu"), "generator": values}})
        said = ", ".join(f"{{name}} {{value}}" for name, value in case.items() if name != "key")
        print(json.dumps([said, [*tasks]]), flush=True)
        continue
    run, calls, spent, best = tasks[ask["time"]].runs["loader"], 1, 0.0, float("inf")
    while spent < {seconds}:
        begun = time.process_time()
        for _ in range(calls):
            run()
        taken = time.process_time() - begun
        spent, best = spent + taken, min(best, taken / calls)
        calls *= 2 if taken < 5e-4 else 1
    print(json.dumps(best), flush=True)
"""
LARGEST, SECONDS, TURNS = 4_000_000, 0.01, 3  # bytes of a case; of a turn; turns


class Worker:
    """A process with one build; its cache is this one's."""

    def __init__(self, native: bool, level: int = 0):
        code = WORKER.format(root=str(ROOT), largest=LARGEST, seconds=SECONDS)
        changes = {
            "LOADER_NATIVE": str(int(native)),
            "OMP_NUM_THREADS": "1",
            "LOADER_BUILD": "lazy",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(level)],
            env=os.environ | changes,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process.stdout.readline()

    def ask(self, **question):
        """Return the answer to a question."""
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self):
        """Let it end."""
        self._process.stdin.close()
        self._process.wait()


def build() -> None:
    """Build all in both ways, in processes of their own."""
    for native in "10":
        command = [sys.executable, "-m", "loader", "build"]
        subprocess.run(command, env=os.environ | {"LOADER_NATIVE": native}, cwd=ROOT, check=True)


def measured(workers: dict[str, Worker], operator: str, options: argparse.Namespace):
    """One row for each direction of each case of an operator: microseconds by build."""
    for k in range(options.cases):
        answers = [w.ask(case=[operator, options.seed, k]) for w in workers.values()]
        said, directions = answers[0]
        for direction in directions:
            turns = [
                {name: 1e6 * w.ask(time=direction) for name, w in workers.items()}
                for _ in range(TURNS)
            ]
            us = {name: min(turn[name] for turn in turns) for name in workers}
            row = {"operator": operator, "direction": direction, "key": [options.seed, k]}
            yield {**row, "case": said, "us": us}


def conclude(rows: list[dict]) -> None:
    """Print each operator's and direction's distribution of portable time over native."""
    for name in [*rows[0]["us"]][1:]:
        for group in dict.fromkeys((row["operator"], row["direction"]) for row in rows):
            some = [r["us"] for r in rows if (r["operator"], r["direction"]) == group]
            ratios = [us[name] / us["native"] for us in some]
            mean = statistics.geometric_mean(ratios)
            least, most = min(ratios), max(ratios)
            print(f"{', '.join(group)}: {name} {mean:.2f} of native ({least:.2f} to {most:.2f})")
        ratios = [row["us"][name] / row["us"]["native"] for row in rows]
        print(f"all: {name} {statistics.geometric_mean(ratios):.3f} of native, {len(ratios)} rows")


def main(arguments: list[str]) -> None:
    """Build, measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m loader bench portable", description=__doc__)
    parser.add_argument("operators", nargs="*", default=OPERATORS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--level", type=int, nargs="+", default=[])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    build()
    workers = {"native": Worker(True), "portable": Worker(False)}
    workers |= {f"level {level}": Worker(False, level) for level in options.level}
    rows = [row for name in options.operators for row in measured(workers, name, options)]
    for worker in workers.values():
        worker.end()
    conclude(rows)
    facts = circumstances("cpu", [*loader._session.units])
    facts |= {"threads": 1, "seed": options.seed, "count": options.cases}
    print(keep("portable", "cpu", facts, rows, options.results))
