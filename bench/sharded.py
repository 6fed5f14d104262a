"""How much quicker do several GPUs sample a volume that is spread over them than one that holds it?

    python -m loader bench sharded [--ranks 2] [--device cuda] [--quick]

Each rank has rows of the volume and points drawn anywhere in it. One GPU that holds the whole
samples the points of all, for comparison, and results are compared first. Beside times: bytes that
each rank sends and its peak memory, each with the prediction of docs/sharded.md, and by a
trace the share of the time of communication in which kernels sampled.
"""

import functools

import processes
import tables
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import loader

CASES = {  # rows, columns, depth; channels; points of each rank
    "512^3 x 8": (512, 8, 8 << 20),
    "512^3 x 8, few points": (512, 8, 1 << 18),
    "256^3 x 16": (256, 16, 4 << 20),
}
_HOST, _NETWORK = 8, 50e6  # GPUs of a host; bytes in a millisecond from one host to another
QUICK = {"64^3 x 8": (64, 8, 1 << 16)}


def predicted(size: int, channels: int, points: int, ranks: int) -> dict[str, float]:
    """Bytes of points drawn evenly, float32, linear: docs/sharded.md has the formulas."""
    shard, row = size**3 // ranks * channels * 4, size**2 * channels * 4
    away = points * (ranks - 1) / ranks
    g, v = 12, 4 * channels  # a point, its values
    rounds = max(1, min(4, int(2 * away) >> 18))
    way = ((5 if rounds > 1 else 3) * v + 2 * g) * away / rounds
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


def measure(rank: int, options, size: int, channels: int, points: int) -> dict:
    """Figures of a case: of all ranks, and of rank 0 alone with the whole."""
    mesh, one = meshes(options.device, options.ranks)
    row, mine = spread(mesh, one, rank, options, size, channels, points)
    row |= {"size": size, "channels": channels, "points": points}
    row |= {"link": link(options), "copy": copy(options)}
    for name in [name for name in row if name.endswith(("_bytes", "_peak"))]:
        of_all = torch.tensor(float(row[name]), device=options.device)  # rank 0 sends no rows
        mean = name.endswith("_bytes")
        dist.all_reduce(of_all, dist.ReduceOp.SUM if mean else dist.ReduceOp.MAX)
        row[name] = float(of_all) / (options.ranks if mean else 1)
    everyone = torch.empty(options.ranks * mine.numel(), device=options.device)
    dist.all_gather_into_tensor(everyone, mine.reshape(-1))
    del mine
    return row | alone(options, size, channels, points, everyone) if rank == 0 else row


@functools.cache
def meshes(device: str, count: int):
    """All ranks, and this one alone."""
    both = init_device_mesh(device, (count, 1), mesh_dim_names=("all", "one"))
    return both["all"], both["one"]


def link(options) -> float:
    """Return how many bytes a rank sends in a millisecond while all send to all."""
    count = (1 << 26) // options.ranks
    x = torch.ones(count * options.ranks, device=options.device)
    y = torch.empty_like(x)
    ms = processes.together(options, lambda: dist.all_to_all_single(y, x))
    return 4 * count * (options.ranks - 1) / ms


def copy(options) -> float:
    """Return how many bytes a copy on the device reads and writes in a millisecond."""
    x = torch.ones(1 << 26, device=options.device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / processes.together(options, lambda: y.copy_(x))


def spread(mesh, one, rank, options, size, channels, points) -> tuple[dict, torch.Tensor]:
    """Figures of all ranks, of this one where they differ, and its values."""
    device, on_gpu = options.device, options.device == "cuda"
    shard, grid = tensors(size, channels, points, options.ranks, rank, device)

    def forward():
        return loader.distributed.sample_sharded(shard, grid, mesh)

    def both(sample=forward):
        shard.grad = grid.grad = None
        sample().backward(weights)

    def own():
        return loader.distributed.sample_sharded(shard, grid, one)

    row: dict = {"predicted": predicted(size, channels, points, options.ranks)}
    with Counter() as counter:
        forward()
        row["forward_bytes"] = counter.sent
    row["forward_ms"] = processes.together(options, forward)
    row["own_forward_ms"] = processes.together(options, own)
    if on_gpu:
        row["forward_peak"], row["forward_hidden"] = peak(forward), hidden(forward)
    weights = torch.ones(1, channels, 1, 1, points, device=device)
    shard.requires_grad_(), grid.requires_grad_()
    with Counter() as counter:
        both()
        row["backward_bytes"] = counter.sent - row["forward_bytes"]
    row["both_ms"] = processes.together(options, both)
    row["own_both_ms"] = processes.together(options, functools.partial(both, own))
    if on_gpu:
        row["both_peak"], row["both_hidden"] = peak(both), hidden(both)
    shard.grad = grid.grad = None
    return row, forward().detach()


def alone(options, size, channels, points, everyone) -> dict:
    """Times of one device that holds the whole, for the points of all; and whether all is equal."""
    device, count = options.device, options.ranks
    volume = tensors(size, channels, 0, 1, 0, device)[0]
    grids = [tensors(count, channels, points, count, r, device)[1] for r in range(count)]
    grid = torch.cat(grids, 3)
    del grids
    expected = loader.grid_sample(volume, grid)
    found = everyone.view(count, channels, points).transpose(0, 1).reshape(expected.shape)
    row = {"equal_bits": float((expected == found).float().mean())}
    row["largest_difference"] = float((expected - found).abs().max())
    del expected, found
    weights = torch.ones(1, channels, 1, 1, points * count, device=device)

    def both():
        volume.grad = grid.grad = None
        loader.grid_sample(volume, grid).backward(weights)

    row["whole_forward_ms"] = processes.alone(options, lambda: loader.grid_sample(volume, grid))
    volume.requires_grad_(), grid.requires_grad_()
    row["whole_both_ms"] = processes.alone(options, both)
    return row


def modelled(row: dict, way: str, ranks: int, link: float) -> float:
    """Milliseconds of a rank alone with its points, of sending, and of copies of what travels."""
    g, v = 12, 4 * row["channels"]
    away = row["points"] * (ranks - 1) / ranks
    guess = predicted(row["size"], row["channels"], row["points"], ranks)
    sent, moved = guess["forward_bytes"], 2 * away * (2 * g + 4 * v)
    if way == "both":
        sent, moved = sent + guess["backward_bytes"], moved + 2 * away * (4 * g + 3 * v)
    return row[f"own_{way}_ms"] + sent / link + moved / row["copy"]


def beyond(row: dict) -> list[str]:
    """Return a table of what the model says of more ranks than there were."""
    lines = ["", f"By the model, {row['case']} with {row['points']:,} points on each rank:"]
    lines += ["", "| ranks | over | forward | and backward |", "|---|---|---|---|"]
    for ranks in (1, 2, 4, 8, 16, 64, 256):
        link = row["link"] if ranks <= _HOST else _NETWORK
        way = f"{link / 1e6:.0f} GB/s" if ranks > 1 else ""
        ms = [modelled(row, way, ranks, link) for way in ("forward", "both")]
        lines.append(f"| {ranks} | {way} | {ms[0]:.1f} ms | {ms[1]:.1f} ms |")
    return lines


def table(record: dict) -> str:
    """Return the times beside one device that holds the whole, and what was predicted."""
    head = ["volume", "points a rank", "direction", "ranks", "one device", "speed-up"]
    head += ["by the model", "sent (predicted)", "peak memory (predicted)", "of it hidden"]
    lines = [
        f"{record['rows'][0]['ranks']} GPUs, float32, channels last, "
        f"{record['rows'][0]['link'] / 1e6:.0f} GB/s to the others. {tables.title(record)}",
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
            model = modelled(row, way, row["ranks"], row["link"])
            cells += [f"{whole / ms:.2f}", f"{model:.2f} ms"]
            cells += [f"{sent[k] / 1e6:.0f} ({all_sent[k] / 1e6:.0f}) MB"]
            found = row.get(f"{way}_peak")
            cells += [f"{found / 1e9:.2f} ({peaks[k] / 1e9:.2f}) GB" if found else ""]
            cells += [f"{row[f'{way}_hidden']:.0%}" if found else ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *beyond(record["rows"][0])]) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    cases = CASES, QUICK
    processes.main("sharded", "grid_sample", measure, cases, "one small volume", arguments)
