"""Has an operator become slower on the CPU? What CI asks: `python -m loader bench guard`.

Small cases beside a peer in PyTorch. Each turn times both, one right after the other, on one thread
and by that thread's processor time, so that whatever else runs on the machine is not counted; the
median over the turns of ours / peer is a measurement. A case fails where it is 1.3 times the ratio
that is kept of this processor, or more, in three measurements one after the other, each with new
tensors. Of a processor of which none is kept it has to be 2 times the largest of any: between two
of different makers the same code lies up to 2 times apart, either way.

    python -m loader bench guard [--keep]

`--keep` writes the ratios of today for this processor to bench/results/guard_cpu.json.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import harness
import loader
from loader.jit.operators.node import NODE

WORSE, WORSE_ELSEWHERE, ATTEMPTS, TURNS, KEEP = 1.3, 2.0, 3, 41, 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them
FILE = harness.RESULTS / "guard_cpu.json"
Pair = tuple[Callable[[], object], Callable[[], object]]


def _interpolation(name: str, D: int, backward: bool) -> Pair:
    feats = torch.rand(2048, 2**D, 16, requires_grad=backward)
    points = (torch.rand(2048, D) * 2 - 1).requires_grad_(backward)
    both = getattr(loader, name), getattr(loader, f"{name}_reference")
    calls = [lambda f=f: f(feats, points) for f in both]
    return tuple(_backward(call(), feats, points) if backward else call for call in calls)


def _backward(out: torch.Tensor, *leaves: torch.Tensor) -> Callable[[], object]:
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _sampling(size: tuple[int, ...], mode: str, backward: bool) -> Pair:
    D = len(size)
    image = torch.rand(1, 8, *size).to(
        memory_format=torch.channels_last if D == 2 else torch.channels_last_3d
    )
    grid = torch.rand(1, *[1] * (D - 1), 20000, D) * 2 - 1
    image.requires_grad_(backward), grid.requires_grad_(backward)
    calls = [
        lambda f=f: f(image, grid, mode, "border", False)
        for f in (loader.grid_sample, F.grid_sample)
    ]
    return tuple(_backward(call(), image, grid) if backward else call for call in calls)


def _colours() -> Pair:
    image, lut = torch.rand(160, 160, 3), torch.rand(17, 17, 17, 3)
    volume, grid = lut.permute(3, 0, 1, 2)[None].contiguous(), (image.flip(-1) * 2 - 1)[None, None]
    theirs = lambda: F.grid_sample(volume, grid, padding_mode="border", align_corners=True)  # noqa: E731
    return lambda: loader.apply_lut3d(image, lut), theirs


def _hash_grid() -> Pair:
    points, table = torch.rand(4096, 3), torch.rand(4, 1 << 12, 2)
    return (
        lambda: loader.hash_grid_encoding(points, table),
        lambda: loader.hash_grid_encoding_reference(points, table),
    )


def _convolution() -> Pair:
    image, kernel = torch.rand(256, 256), torch.rand(5, 5)
    pixels, taps = image[None, None], kernel.flip(0, 1)[None, None]
    return lambda: loader.convolve2d(image, kernel), lambda: F.conv2d(pixels, taps, padding=2)


def _calls() -> Pair:
    x = torch.rand(8)

    def many(f):
        return lambda: [f(x) for _ in range(200)]

    return many(loader.square), many(lambda x: x + x)


CASES: dict[str, Callable[[], Pair]] = {
    "trilinear_interpolation, forward": lambda: _interpolation("trilinear_interpolation", 3, False),
    "trilinear_interpolation, backward": lambda: _interpolation("trilinear_interpolation", 3, True),
    "bilinear_interpolation, forward": lambda: _interpolation("bilinear_interpolation", 2, False),
    "grid_sample, volume": lambda: _sampling((32, 32, 32), "bilinear", False),
    "grid_sample, volume, backward": lambda: _sampling((32, 32, 32), "bilinear", True),
    "grid_sample, image, bicubic": lambda: _sampling((128, 128), "bicubic", False),
    "apply_lut3d": _colours,
    "hash_grid_encoding": _hash_grid,
    "convolve2d": _convolution,
    "square, a call": _calls,
}


def measured(case: str, turns: int = TURNS) -> float:
    """Return the median of ours / peer over so many turns."""
    ours, peer = CASES[case]()
    for run in (ours, peer) * 2:
        run()
    ratios = []
    for turn in range(turns):
        # Who comes first has the caches that the other left: they change places.
        taken = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            begun = time.thread_time()
            (ours, peer)[which]()
            taken[which] = time.thread_time() - begun
        ratios.append(taken[0] / taken[1])
    return statistics.median(ratios)


def check(
    kept: dict[str, tuple[float, float]], measure: Callable[[str], float] = measured
) -> list[str]:
    """Return what reached its bound in each of three measurements, of (ratio, bound) by case."""
    failed = []
    for case in CASES:
        if case not in kept:
            print(f"{case}: no ratio is kept; `python -m loader bench guard --keep` keeps one")
            continue
        before, bound = kept[case]
        for attempt in range(1, ATTEMPTS + 1):
            ratio = measure(case)
            worse = ratio / before
            again = "" if worse < bound or attempt == ATTEMPTS else ", measured again"
            found = f"{ratio:.3f} of the peer's time, kept {before:.3f}: {worse:.2f}x"
            print(f"{case}: {found}{again}", flush=True)
            if worse < bound:
                break
        else:
            failed.append(f"{case}: {bound}x the kept ratio or more")
    return failed


def baseline(rows: list[dict], device: str) -> dict[str, tuple[float, float]]:
    """Return by case the kept ratio, of this processor or the largest of any, and the bound."""
    kept = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        of = {row["device"]: row["ratio"] for row in rows if row["case"] == case}
        kept[case] = (of[device], WORSE) if device in of else (max(of.values()), WORSE_ELSEWHERE)
    if elsewhere := [case for case, (_, bound) in kept.items() if bound != WORSE]:
        which = "no ratios are kept" if len(elsewhere) == len(kept) else f"none of {elsewhere}"
        print(f"{which} of {device}: others' count, {WORSE_ELSEWHERE}x; --keep keeps its own")
    return kept


def _keep_memory() -> None:
    """Keep what is freed: mapped anew at some calls, a case takes up to 1.7 times as long."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every libc has it
    for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD) if mallopt else ():
        mallopt(threshold, 1 << 30)


def _facts() -> dict:
    """Return what rows say of a measurement; `device` with what torch finds a CPU to have."""
    facts = {name: harness.circumstances("cpu", [])[name] for name in ("device", "date", "torch")}
    facts["device"] += f", {torch.backends.cpu.get_cpu_capability()}"
    return facts


def _keep(file: Path, rows: list[dict], facts: dict) -> None:
    """Measure, and write the ratios of this processor in the place of those before."""
    others = [row for row in rows if row["device"] != facts["device"]]
    command = [sys.executable, "-m", "loader", "bench", "guard", "--once"]
    found = []
    for k in range(KEEP):  # in processes of their own, as a check is
        print(f"{k + 1} of {KEEP}", flush=True)
        done = subprocess.run(command, cwd=harness.ROOT, stdout=subprocess.PIPE, check=True)
        found.append(json.loads(done.stdout))
    for case in CASES:
        ratios = sorted(ratio[case] for ratio in found)
        print(f"{case}: {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")
        others.append({**facts, "case": case, "ratio": statistics.median(ratios)})
    file.write_text(json.dumps({"rows": others}, indent=1) + "\n")


def main(arguments=None) -> int:
    """Measure and compare, or keep; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loader bench guard")
    parser.add_argument("--keep", action="store_true", help="write the ratios of this processor")
    parser.add_argument("--once", action="store_true", help="print the ratios of one measurement")
    parser.add_argument("--results", type=Path, help="another file than guard_cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    _keep_memory()
    if error := NODE.build():  # without it a call costs more
        raise error
    file, facts = options.results or FILE, _facts()
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    if options.once:
        print(json.dumps({case: measured(case) for case in CASES}))
        return 0
    if options.keep:
        _keep(file, rows, facts)
        return 0
    if not rows:
        raise ValueError(f"bench guard: {file} has no ratios; --keep writes those of today")
    begun = time.perf_counter()
    failed = check(baseline(rows, facts["device"]))
    print(f"{time.perf_counter() - begun:.0f} s")
    for case in failed:
        print(f"SLOWER: {case}, {ATTEMPTS} times in a row")
    return int(bool(failed))
