"""Does a captured training step take longer than its kernels?

    python -m loader bench training_step [--repeats 50]

A field of a hash grid and a network of two hidden layers, and a volume sampled at positions that
are learnt too: forward, backward and Adam's step. Eager, replayed from a CUDA graph, and the sum of
what its kernels take in a replay, as torch.profiler has them. Without flushing caches: one step
follows the other.
"""

import argparse
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import loader
from harness import circumstances, keep

BATCH, HIDDEN, SIDE = 1 << 16, 64, 64


class Field(nn.Module):
    """Hash grid encoding and network; (N, 3) -> (N, 1)."""

    operators = ("hash_grid_encoding",)

    def __init__(self):
        super().__init__()
        self.encoding = loader.nn.HashGridEncoding(3, table_size=1 << 17, per_level_scale=1.447)
        self.network = nn.Sequential(
            nn.Linear(self.encoding.out_features, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, points):
        """Values at points in [0, 1]."""
        return self.network(self.encoding(points))


class Volume(nn.Module):
    """A volume and positions in it, both learnt."""

    operators = ("grid_sample",)

    def __init__(self):
        super().__init__()
        volume = torch.randn(1, 16, SIDE, SIDE, SIDE)
        self.volume = nn.Parameter(volume.to(memory_format=torch.channels_last_3d))
        self.moved = nn.Parameter(torch.zeros(BATCH, 3))

    def forward(self, points):
        """Values at points in [0, 1], each moved by what was learnt."""
        grid = (2 * points - 1 + self.moved).view(1, 1, 1, -1, 3)
        return loader.grid_sample(self.volume, grid, align_corners=False)


def step_of(model):
    """One step of training."""
    points, target = torch.rand(BATCH, 3, device="cuda"), None
    optimizer = torch.optim.Adam(model.parameters(), capturable=True, fused=True)
    with torch.no_grad():
        target = torch.rand_like(model(points))

    def step():
        optimizer.zero_grad(set_to_none=False)
        (model(points) - target).square().mean().backward()
        optimizer.step()

    return step


def captured(step):
    """The same as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def each(run, repeats: int) -> list[float]:
    """Microseconds of each of several runs."""
    for _ in range(5):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]


def kernels(run, repeats: int) -> tuple[float, int]:
    """Microseconds and number of the kernels of one run, the mean of several."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in events) / repeats, len(events) // repeats


def main(arguments=None):
    """Measure both models and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m loader bench training_step")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--results", type=Path, help="folder of the result file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("training_step: no GPU: torch.cuda.is_available() is false")
    rows = []
    for kind in (Field, Volume):
        torch.manual_seed(0)
        step = step_of(kind().cuda())
        replay = captured(step)
        eager, graph = each(step, options.repeats), each(replay, options.repeats)
        total, count = kernels(replay, options.repeats)
        row = {
            "model": kind.__name__,
            "batch": BATCH,
            "eager_us": statistics.median(eager),
            "graph_us": statistics.median(graph),
            "kernels_us": total,
            "kernels": count,
        }
        print(
            f"{row['model']}: eager {row['eager_us']:.0f} us, graph {row['graph_us']:.0f} us, its "
            f"{count} kernels {total:.0f} us: {row['graph_us'] / total:.2f}x",
            flush=True,
        )
        rows.append(row)
    facts = circumstances("cuda", [name for kind in (Field, Volume) for name in kind.operators])
    print(f"kept in {keep('training_step', 'cuda', facts, rows, options.results)}")
