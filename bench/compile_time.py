"""How long does a cold build take: of all operators, and until the first result of one?

    python -m loader bench compile_time [--cores 2 16] [--repeats 3] [--arch 9.0] [--objects]

Each run is a process of its own with an empty cache, torch imported and the GPU awake, on so many
cores: from `import loader` to the end of all builds, until every operator can be called (without
what few calls need), or to the first float32 result of one, for which the others wait. Beside it
the seconds of CPU of all compilers that had ended by then.
`--objects` compiles each source alone, one after the other. CUDA sources are compiled for this
machine's GPU, or for `--arch`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import loader
from harness import circumstances, keep, source_key

CHILD = """
import json, os, resource, sys, time
device, what, cores = sys.argv[1:]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
import torch
torch.zeros(1, device=device)
begun = time.perf_counter()
import loader
if what == "all":
    loader.build()
elif what == "every operator":
    for name in loader._session.units:
        getattr(loader, name)
elif what == "grid_sample":
    volume = torch.rand(1, 4, 8, 8, 8, device=device)
    loader.grid_sample(volume, torch.rand(1, 8, 8, 8, 3, device=device)).sum().item()
else:
    feats, points = torch.rand(64, 8, 4, device=device), torch.rand(64, 3, device=device)
    loader.trilinear_interpolation(feats, points).sum().item()
seconds, used = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"seconds": seconds, "compilers": used.ru_utime + used.ru_stime}))
"""
OBJECTS = """
import json, os, pathlib
import loader
from loader.jit.build.workshop import Workshop
from loader.jit.operators.recipe import OperatorRecipe
session = loader._session
work = session.store.path.parent / "work"
work.mkdir(parents=True, exist_ok=True)
for unit in session.units.values():
    with Workshop(work / unit.name) as shop:
        recipe = OperatorRecipe(unit, session.toolchain, session.store)
        for made in recipe.objects(shop, recipe.levels):
            kernels = made.said.count("Compiling entry function")
            name = f"{made.source} {made.variant}".strip()
            row = {"object": name, "seconds": made.seconds, "kernels": kernels}
            print(json.dumps(row), flush=True)
"""


def run(program: str, arguments: list[str], arch: str | None, **settings: str) -> list[dict]:
    """What a process with an empty cache prints, a JSON object a line."""
    if arch:
        settings["TORCH_CUDA_ARCH_LIST"] = arch
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=loader._root,
            env=os.environ | {"LOADER_CACHE_DIR": f"{folder}/cache"} | settings,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in process.stdout.splitlines()]


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    there = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m loader bench compile_time")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted({min(2, there), there}))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arch", help="as TORCH_CUDA_ARCH_LIST has it")
    parser.add_argument("--objects", action="store_true")
    parser.add_argument("--results", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    for cores in options.cores:
        for what in ("all", "every operator", "trilinear_interpolation", "grid_sample"):
            given = [device, what, str(cores)]
            runs = [
                run(CHILD, given, options.arch, LOADER_BUILD="background")[0]
                for _ in range(options.repeats)
            ]
            row = {"until": what, "cores": cores}
            row |= {key: statistics.median(each[key] for each in runs) for key in runs[0]}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.objects:
        found = run(OBJECTS, [], options.arch, LOADER_BUILD="lazy", MAX_JOBS="1")
        for row in found:
            print(f"{row['seconds']:6.2f} s {row['kernels']:3d} kernels  {row['object']}")
        print(f"{sum(row['seconds'] for row in found):6.2f} s in all")
        rows += found
    facts = circumstances(device, [])
    facts["sources"] = {name: source_key(name) for name in loader._session.units}  # of both devices
    facts["architectures"] = options.arch or loader._session.toolchain.architectures
    print(keep("compile_time", device, facts, rows, options.results))
