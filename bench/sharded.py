"""How much quicker do several GPUs sample a volume that is spread over them than one that holds it?

    python -m loader bench sharded [--ranks 2] [--device cuda] [--quick]

Each rank has rows of the volume and points drawn anywhere in it. One GPU that holds the whole
samples the points of all, for comparison, and results are compared first. Beside times: bytes that
each rank sends and its peak memory, each with the prediction of docs/sharded.md, and by a
trace the share of the time of communication in which kernels sampled.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import harness
import loader

CASES = {  # rows, columns, depth; channels; points of each rank
    "512^3 x 8": (512, 8, 8 << 20),
    "512^3 x 8, few points": (512, 8, 1 << 18),
    "256^3 x 16": (256, 16, 4 << 20),
}
QUICK = {"64^3 x 8": (64, 8, 1 << 16)}


def predicted(size: int, channels: int, points: int, ranks: int) -> dict[str, float]:
    """Bytes of points drawn evenly, float32, linear: docs/sharded.md has the formulas."""
    shard, row = size**3 // ranks * channels * 4, size**2 * channels * 4
    away = points * (ranks - 1) / ranks
    g, v = 12, 4 * channels  # a point, its values
    rounds = max(1, min(4, int(2 * away) >> 18))
    way = (2 * v + g) * 2 * away / rounds * (2 if rounds > 1 else 1)
    held = shard + 2 * row + points * (g + v + 8)
    return {
        "forward_bytes": away * (g + v) + row * (ranks - 1) / ranks,
        "backward_bytes": away * (2 * g + v) + row * (ranks - 1) / ranks,
        "forward_peak": held + 8 * away + way,
        "backward_peak": held + shard + row * 2 + points * (v + g + 8) + points * (3 * g + 2 * v),
    }


class Counter:
    """Counts the bytes that this rank sends to others."""

    def __init__(self):
        self.sent, self._real = 0, dist.all_to_all_single

    def __enter__(self):  # noqa: D105
        def counted(out, x, due, sent, **named):
            self.sent += sum(n for r, n in enumerate(sent) if r != dist.get_rank())
            return self._real(out, x, due, sent, **named)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *exception):  # noqa: D105
        dist.all_to_all_single = self._real


def timed(device: str, repeats: int, run) -> float:
    """Median milliseconds, each of the slowest rank."""
    taken = []
    for turn in range(repeats + 2):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        last = torch.tensor(time.perf_counter() - begun, device=device)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        if turn > 1:
            taken.append(float(last) * 1e3)
    return statistics.median(taken)


def peak(run) -> int:
    """Bytes of GPU memory at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def hidden(run) -> float:
    """The share of the time of NCCL's kernels in which others ran too."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as trace:
        run()
        torch.cuda.synchronize()
    of = {True: [], False: []}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range.start, event.time_range.end
            of["nccl" in event.name.lower()].append(span)
    both = sum(
        max(0, min(end, stop) - max(begin, start))
        for begin, end in _merged(of[True])
        for start, stop in _merged(of[False])
    )
    return both / max(1e-9, sum(end - begin for begin, end in _merged(of[True])))


def _merged(spans):
    found = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([begin, end])
    return found


def tensors(size: int, channels: int, points: int, ranks: int, rank: int, device: str):
    """A rank's rows and points; a row is the same whoever makes it."""
    rows = [size * (r + 1) // ranks - size * r // ranks for r in range(ranks)]
    shape = 1, channels, rows[rank], size, size
    shard = torch.empty(shape, device=device, memory_format=torch.channels_last_3d)
    first = sum(rows[:rank])
    for row in range(rows[rank]):
        make = torch.Generator(device).manual_seed(first + row)
        shard[:, :, row] = torch.randn(1, channels, size, size, device=device, generator=make)
    make = torch.Generator(device).manual_seed(-1 - rank)
    grid = torch.rand(1, 1, 1, points, 3, device=device, generator=make) * 2 - 1
    return shard, grid


def rank_of(rank: int, ranks: int, port: str, options, cases: dict, results) -> None:
    """Be one rank."""
    on_gpu = options.device == "cuda"
    torch.set_num_threads(max(1, os.cpu_count() // ranks))
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{port}", rank=rank, world_size=ranks
    )
    both = init_device_mesh(options.device, (ranks, 1), mesh_dim_names=("all", "one"))
    mesh = both["all"]
    rate = link(options, ranks)
    for name, (size, channels, points) in cases.items():
        row, mine = measure(mesh, both["one"], rank, ranks, options, size, channels, points)
        everyone = torch.empty(ranks * mine.numel(), device=options.device)
        dist.all_gather_into_tensor(everyone, mine.reshape(-1))
        del mine
        if rank == 0:
            row |= alone(options, size, channels, points, ranks, everyone)
        del everyone
        dist.barrier()
        if rank == 0:
            results.put({"case": name, "ranks": ranks, "points": points, "link": rate} | row)
    dist.destroy_process_group()


def link(options, ranks: int) -> float:
    """Return how many bytes a rank sends in a millisecond while all send to all."""
    count = (1 << 26) // ranks
    x = torch.ones(count * ranks, device=options.device)
    y = torch.empty_like(x)
    ms = timed(options.device, options.repeats, lambda: dist.all_to_all_single(y, x))
    return 4 * count * (ranks - 1) / ms


def measure(mesh, one, rank, ranks, options, size, channels, points) -> tuple[dict, torch.Tensor]:
    """Figures of a case, of rank 0 where ranks differ, and this rank's values."""
    device, on_gpu = options.device, options.device == "cuda"
    shard, grid = tensors(size, channels, points, ranks, rank, device)

    def forward():
        return loader.distributed.sample_sharded(shard, grid, mesh)

    def both():
        shard.grad = grid.grad = None
        forward().backward(weights)

    row: dict = {"predicted": predicted(size, channels, points, ranks)}
    with Counter() as counter:
        forward()
        row["forward_bytes"] = counter.sent
    row["forward_ms"] = timed(device, options.repeats, forward)
    row["no_exchange_ms"] = timed(
        device, options.repeats, lambda: loader.distributed.sample_sharded(shard, grid, one)
    )
    if on_gpu:
        row["forward_peak"], row["forward_hidden"] = peak(forward), hidden(forward)
    weights = torch.ones(1, channels, 1, 1, points, device=device)
    shard.requires_grad_(), grid.requires_grad_()
    with Counter() as counter:
        both()
        row["backward_bytes"] = counter.sent - row["forward_bytes"]
    row["both_ms"] = timed(device, options.repeats, both)
    if on_gpu:
        row["both_peak"], row["both_hidden"] = peak(both), hidden(both)
    shard.grad = grid.grad = None
    return row, forward().detach()


def alone(options, size, channels, points, ranks, everyone) -> dict:
    """Times of one device that holds the whole, for the points of all; and whether all is equal."""
    device = options.device
    volume = tensors(size, channels, 0, 1, 0, device)[0]
    grids = [tensors(ranks, channels, points, ranks, r, device)[1] for r in range(ranks)]
    grid = torch.cat(grids, 3)
    del grids
    expected = loader.grid_sample(volume, grid)
    found = everyone.view(ranks, channels, points).transpose(0, 1).reshape(expected.shape)
    row = {"equal_bits": float((expected == found).float().mean())}
    row["largest_difference"] = float((expected - found).abs().max())
    del expected, found
    weights = torch.ones(1, channels, 1, 1, points * ranks, device=device)

    def both():
        volume.grad = grid.grad = None
        loader.grid_sample(volume, grid).backward(weights)

    row["whole_forward_ms"] = by_itself(options, lambda: loader.grid_sample(volume, grid))
    volume.requires_grad_(), grid.requires_grad_()
    row["whole_both_ms"] = by_itself(options, both)
    return row


def by_itself(options, run) -> float:
    """Median milliseconds of this rank alone."""
    taken = []
    for _ in range(options.repeats + 2):
        begun = time.perf_counter()
        run()
        if options.device == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken[2:])


def table(record: dict) -> str:
    """Return the times beside one device that holds the whole, and what was predicted."""
    head = ["volume", "points a rank", "direction", "ranks", "one device", "speed-up"]
    head += ["sent (predicted)", "peak memory (predicted)", "of it hidden"]
    lines = [
        f"{record['device']} (torch {record['torch']}, {record['date']}), float32, channels last, "
        f"{record['rows'][0]['link'] / 1e6:.0f} GB/s to the others:",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for row in record["rows"]:
        guess = row["predicted"]
        sent = row["forward_bytes"], row["forward_bytes"] + row["backward_bytes"]
        all_sent = guess["forward_bytes"], guess["forward_bytes"] + guess["backward_bytes"]
        peaks = guess["forward_peak"], guess["backward_peak"]
        for k, way in enumerate(("forward", "both")):
            ms, whole = row[f"{way}_ms"], row[f"whole_{way}_ms"]
            cells = [row["case"].partition(",")[0], f"{row['points']:,}"]
            cells += ["and backward" if k else "forward", f"{ms:.2f} ms", f"{whole:.2f} ms"]
            cells += [f"{whole / ms:.2f}", f"{sent[k] / 1e6:.0f} ({all_sent[k] / 1e6:.0f}) MB"]
            found = row.get(f"{way}_peak")
            cells += [f"{found / 1e9:.2f} ({peaks[k] / 1e9:.2f}) GB" if found else ""]
            cells += [f"{row[f'{way}_hidden']:.0%}" if found else ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    parser = harness.parser("sharded", 10, "one small volume")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        sys.exit(f"{options.ranks} GPUs are needed, {torch.cuda.device_count()} are here")
    options.begun = time.perf_counter()
    cases = QUICK if options.quick or options.device == "cpu" else CASES
    loader.grid_sample  # noqa: B018  # built once, before there are ranks
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "store"))
        running = torch.multiprocessing.spawn(
            rank_of,
            (options.ranks, place, options, cases, queue),
            nprocs=options.ranks,
            join=False,
        )
        rows = []
        while len(rows) < len(cases):
            rows.append(queue.get())
            print(rows[-1], flush=True)
        running.join()
    harness.finish("sharded", "grid_sample", rows, options)
