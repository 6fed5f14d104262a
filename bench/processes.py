"""The processes of a benchmark that takes several, one a device."""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import harness
import loader


def main(
    name: str,
    operator: str,
    work: Callable[..., dict],
    cases: tuple[dict[str, tuple], dict[str, tuple]],
    quick: str,
    arguments: list[str],
) -> None:
    """Measure, print and keep: `cases` in full, and what `--quick` and a CPU do, said by `quick`.

    Ends the program where there are too few GPUs for it.
    """
    parser = harness.parser(name, 10, quick)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and torch.cuda.device_count() < given.ranks:
        sys.exit(f"{given.ranks} GPUs are needed, {torch.cuda.device_count()} are here")
    given.begun = time.perf_counter()
    getattr(loader, operator)  # built once, before there are ranks
    chosen = cases[given.quick or given.device == "cpu"]
    harness.finish(name, operator, rows(work, chosen, given), given)


def rows(work: Callable[..., dict], cases: dict[str, tuple], given: argparse.Namespace) -> list:
    """Have every rank call `work(rank, given, *case)`; return what rank 0 returns, case by case."""
    queue = torch.multiprocessing.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        running = torch.multiprocessing.spawn(
            _be, (str(Path(folder, "store")), work, cases, given, queue), given.ranks, join=False
        )
        found: list = []
        while len(found) < len(cases):
            running.join(timeout=0.2)  # raises what a rank has raised
            while not queue.empty():
                found.append(queue.get())
                print(found[-1], flush=True)
        while not running.join():
            pass
    return found


def _be(rank: int, store: str, work, cases, given, queue) -> None:
    """Be one rank."""
    on_gpu = given.device == "cuda"
    torch.set_num_threads(max(1, os.cpu_count() // given.ranks))
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=given.ranks,
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )
    for name, case in cases.items():
        row = work(rank, given, *case)
        dist.barrier()
        if rank == 0:
            queue.put({"case": name, "ranks": given.ranks} | row)
    dist.destroy_process_group()


def together(given: argparse.Namespace, run: Callable) -> float:
    """Median milliseconds, each of the slowest rank; all ranks call it."""
    taken = []
    for turn in range(given.repeats + 2):
        dist.barrier()
        ms = torch.tensor(_once(given, run), device=given.device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        if turn > 1:
            taken.append(float(ms))
    return statistics.median(taken)


def alone(given: argparse.Namespace, run: Callable) -> float:
    """Median milliseconds of this rank, while the others wait."""
    return statistics.median([_once(given, run) for _ in range(given.repeats + 2)][2:])


def _once(given, run) -> float:
    if given.device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    if given.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3
