"""Kernels from a string, by the clock: cold, warm, and what a launch costs the host.

    python -m loader bench source_module [--keep]

Cold and warm are the first calls in fresh processes, CUDA up and running: compile (or find) and
load a kernel of ten lines; on a GPU server a warm one is to take 5 ms at most. Launches, which are
to cost 10 us at most, are timed on the host, a thousand at a time, beside those of torch: an
in-place add, `torch.cuda._compile_kernel`, and NVIDIA's cuda.core where it is installed. Without a
GPU the kernel is compiled for sm_90, and nothing is launched.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import loader
from harness import ROOT, circumstances, keep

SOURCE = """
extern "C" __global__ void scale(float* out, const float* x, float factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * x[i];
}
"""
FRESH = """
import json, sys, time
sys.path.insert(0, {root!r})
import torch, loader
if torch.cuda.is_available():
    torch.ones(1, device="cuda").sum().item()
start = time.perf_counter()
{body}
print(json.dumps(1e3 * (time.perf_counter() - start)))
"""
OURS = "loader.source_module({source!r}, **{options}).get_function('scale')"
TORCH = "torch.cuda._compile_kernel({source!r}, 'scale')"
CORE = """
from cuda.core{experimental} import Device, Program, ProgramOptions
device = Device(); device.set_current()
arch = "sm_" + "".join(map(str, device.compute_capability))
program = Program({source!r}, "c++", ProgramOptions(std="c++17", arch=arch))
program.compile("cubin").get_kernel("scale")
"""


def fresh(body: str, cache: Path, **environment) -> float:
    """Milliseconds that some lines take in a process of their own; RuntimeError if they fail."""
    code = FRESH.format(root=str(ROOT), body=body)
    env = {**os.environ, "LOADER_CACHE_DIR": str(cache), "LOADER_BUILD": "lazy", **environment}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or Python compiles our own modules each time
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def first_calls(repeats: int) -> list[dict]:
    """Cold and warm times of ours, cold ones of the peers."""
    there = torch.cuda.is_available()
    options = {} if there else {"device": "cuda", "arch": "9.0"}
    ours = OURS.format(source=SOURCE, options=options)
    on_cpu = OURS.format(source=SOURCE, options={"device": "cpu"})
    with tempfile.TemporaryDirectory() as folder:  # byte code
        fresh(ours, Path(folder))
    rows, all_bodies = [], {"NVRTC": ours, "on the CPU": on_cpu}
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder, str(i)) for i in range(repeats)]
        for name, body in all_bodies.items():
            cold = [fresh(body, cache) for cache in caches]
            warm = [fresh(body, caches[0]) for _ in caches]
            rows += [row(f"{name}, cold", cold, "ms"), row(f"{name}, warm", warm, "ms")]
        peers = {"torch.cuda._compile_kernel": TORCH.format(source=SOURCE)} if there else {}
        if there and (experimental := _core()) is not None:
            peers["cuda.core"] = CORE.format(source=SOURCE, experimental=experimental)
        for name, body in peers.items():
            try:
                rows.append(row(f"{name}, cold", [fresh(body, caches[0]) for _ in caches], "ms"))
            except RuntimeError as error:
                print(f"{name}: {error}")
    return rows


def _core() -> str | None:
    """Where cuda.core has its names; None where it is not installed."""
    import importlib

    for experimental in ("", ".experimental"):
        try:
            if hasattr(importlib.import_module(f"cuda.core{experimental}"), "Program"):
                return experimental
        except ImportError:
            continue
    return None


def launches(repeats: int) -> list[dict]:
    """Microseconds of the host for one launch; a thousand in a row fit into the GPU's queue."""
    x = torch.rand(256, device="cuda")
    out = torch.empty_like(x)
    scale = loader.source_module(SOURCE).get_function("scale")
    contenders = {
        "scale(...)": lambda: scale(out, x, 2.0, 256, grid=1, block=256),
        "torch.add(out=)": lambda: torch.add(x, x, out=out),
    }
    theirs = torch.cuda._compile_kernel(SOURCE, "scale")

    def by_torch():
        theirs((1, 1, 1), (256, 1, 1), [out, x, 2, 256])

    contenders["torch.cuda._compile_kernel"] = by_torch
    if (experimental := _core()) is not None:
        contenders["cuda.core launch()"] = _by_core(experimental, out, x)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(500):
                run()
            samples[name].append(1e6 * (time.perf_counter() - start) / 500)
    torch.cuda.synchronize()
    scale(out, x, 2.0, 256, grid=1, block=256)
    assert torch.equal(out, 2 * x)
    return [row(f"launch: {name}", values, "us") for name, values in samples.items()]


def _by_core(experimental: str, out: torch.Tensor, x: torch.Tensor):
    """A launch of the same kernel by NVIDIA's Python library."""
    import ctypes
    import importlib

    core = importlib.import_module(f"cuda.core{experimental}")
    device = core.Device()
    device.set_current()
    arch = "sm_" + "".join(map(str, device.compute_capability))
    program = core.Program(SOURCE, "c++", core.ProgramOptions(std="c++17", arch=arch))
    kernel = program.compile("cubin").get_kernel("scale")
    stream, config = device.create_stream(), core.LaunchConfig(grid=1, block=256)
    factor, n = ctypes.c_float(2), ctypes.c_int(256)
    return lambda: core.launch(stream, config, kernel, out.data_ptr(), x.data_ptr(), factor, n)


def row(name: str, values: list[float], unit: str) -> dict:
    """One line of the result, printed."""
    middle = statistics.median(values)
    print(f"{name:<40}{middle:9.2f} {unit}   ({min(values):.2f} to {max(values):.2f})", flush=True)
    return {"name": name, "unit": unit, "median": middle, "low": min(values), "high": max(values)}


def main(arguments=None) -> None:
    """Measure and print; `--keep` writes the results."""
    parser = argparse.ArgumentParser(prog="python -m loader bench source_module")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="write the results")
    parser.add_argument("--results", type=Path, help="where to, instead of bench/results/")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = first_calls(options.repeats)
    if device == "cuda":
        rows += launches(4 * options.repeats)
    if options.keep:
        print(keep("source_module", device, circumstances(device, []), rows, options.results))
