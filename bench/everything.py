"""Every benchmark that this machine can run, one after the other: `python -m loader bench --all`.

    python -m loader bench --all [--quick] [--results FOLDER] [--again]

One that is measured already, on this device with this torch and these sources, is left out, and one
that was ended goes on after its last case; so whatever ended a run, the next goes on. `--again`
measures all anew. Then tables and plots are made of the results.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import sweep
import torch

import harness
from loader.jit.machine import toolchain
from loader.jit.tools import exercise


class Benchmark(NamedTuple):
    """Its module, the results that it writes, and what has to be there."""

    name: str
    writes: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # "GPU", variables, or packages
    quick: bool = True  # whether it takes --quick


_KNOWN = (
    *(
        Benchmark("interpolation", name, ("--operators", name))
        for name in ("trilinear_interpolation", "bilinear_interpolation")
    ),
    Benchmark("convolve2d", "convolve2d"),
    Benchmark("grid_sample", "grid_sample"),
    Benchmark("lut3d", "lut3d", (), ("skimage",)),
    Benchmark("hash_grid", "hash_grid"),
    Benchmark("growth", "growth"),
    Benchmark("overhead", "overhead"),
    Benchmark("training_step", "training_step", (), ("GPU",), False),
    Benchmark("source_module", "source_module", ("--keep",), (), False),
    Benchmark("inline", "inline", (), ("ninja",), False),
    Benchmark("extensions", "extensions", (), ("COLLECTIONS", "ninja")),
    Benchmark("edit_loop", "edit_loop", (), ("tvm_ffi", "warp"), False),
    Benchmark("edits", "edits", (), (), False),
    Benchmark("crowd", "crowd", (), (), False),
    Benchmark("compile_time", "compile_time", (), (), False),
    Benchmark("judge", "judge", (), (), False),
    Benchmark("leaderboard", "leaderboard", (), ("GPU", "LEADERBOARD"), False),
    Benchmark("portable", "portable", ("--level", "3"), (), False),
    Benchmark("sharded", "sharded", (), ("2 GPUs",)),
    Benchmark("data_parallel", "data_parallel", (), ("2 GPUs", "skimage")),
    Benchmark("counters", "counters", (), ("GPU", "ncu")),
    Benchmark("install", "install", (), (), False),
    Benchmark("viewer_frames", "viewer_frames", (), ("PySide6",), False),
    *(Benchmark("sweep", f"sweep_{name}", (name,)) for name in sweep.OPERATORS),
)
ALL = [b for b in _KNOWN if (harness.ROOT / "bench" / f"{b.name}.py").exists()]


def why_not(benchmark: Benchmark, options: argparse.Namespace) -> str:
    """Return why a benchmark is left out; "" if it is to be run."""
    for need in benchmark.needs:
        if need == "GPU":
            if not torch.cuda.is_available():
                return "needs a GPU"
        elif need == "LEADERBOARD":
            if not os.environ.get(need):
                return "needs a leaderboard's files, in a folder named in LEADERBOARD"
        elif need == "2 GPUs":
            if torch.cuda.device_count() < 2:
                return "needs two GPUs"
        elif need == "ncu":
            if not exercise.path_of(need, toolchain.cuda_home()):
                return "needs NVIDIA's ncu, on PATH or beside nvcc"
        elif need == "COLLECTIONS":
            if not os.environ.get(need):
                return "needs folders of other people's extensions, named in COLLECTIONS"
        elif importlib.util.find_spec(need) is None:
            return f"needs the package {need}"
    if options.quick and not benchmark.quick:
        return "has no quick form"
    if (date := measured(benchmark, options)) and not options.again:
        return f"measured on {date}, on this device, with this torch and these sources"
    return ""


def measured(benchmark: Benchmark, options: argparse.Namespace) -> str:
    """Return the date of a result that is still good; "" where there is none."""
    for kind in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        file = (options.results or harness.RESULTS) / f"{benchmark.writes}_{kind}.json"
        if not file.exists():
            continue
        record, now = json.loads(file.read_text()), harness.circumstances(kind, [])
        same = all(record.get(key) == now[key] for key in ("device", "torch", "python"))
        if same and not harness.changed(record) and (options.quick or not record.get("quick")):
            return record["date"]
    return ""


def run(benchmark: Benchmark, options: argparse.Namespace) -> str:
    """Run one in a process of its own, whose output goes on here; "" or how it ended."""
    command = [sys.executable, "-m", "loader", "bench", benchmark.name, *benchmark.arguments]
    if options.results:
        command += ["--results", str(options.results)]
    if options.quick:
        command.append("--quick")
    done = subprocess.run(command, cwd=harness.ROOT, env=os.environ, check=False)
    return "" if done.returncode == 0 else f"ended with exit status {done.returncode}"


def times(options: argparse.Namespace) -> Path:
    """Return the file that says how long each took here, for the next run's estimate."""
    return (options.results or harness.RESULTS) / ".times.json"


def left(names: list[str], known: dict[str, float]) -> str:
    """Return how long these will take, as far as runs before tell."""
    told = [known[name] for name in names if name in known]
    if not told:
        return "how long is not known yet"
    rest = sum(told) + (len(names) - len(told)) * sum(told) / len(told)
    return f"about {harness.duration(rest)} left"


def main(arguments=None) -> int:
    """Run them; the exit status is 1 if one failed, 130 after a Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m loader bench --all")
    parser.add_argument("--quick", action="store_true", help="fewer cases of each")
    parser.add_argument("--again", action="store_true", help="what is measured already, too")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        options.results = options.results.resolve()
    file, todo, failed = times(options), [], []
    known = json.loads(file.read_text()) if file.exists() else {}
    for benchmark in ALL:
        if why := why_not(benchmark, options):
            print(f"{benchmark.writes}: left out: {why}", flush=True)
        else:
            todo.append(benchmark)
    try:
        for k, benchmark in enumerate(todo):
            rest = left([b.writes for b in todo[k:]], known)
            print(f"=== {k + 1} of {len(todo)}: {benchmark.writes}, {rest}", flush=True)
            begun = time.perf_counter()
            if how := run(benchmark, options):
                failed.append(f"{benchmark.writes} {how}")
            known[benchmark.writes] = time.perf_counter() - begun
            file.write_text(json.dumps(known))
    except KeyboardInterrupt:
        print("\nended; what is measured is kept, and the same command goes on from there")
        return 130
    for what in failed:
        print(what)
    if not options.results:
        import plots
        import tables

        tables.main()
        plots.main()
    return int(bool(failed))
