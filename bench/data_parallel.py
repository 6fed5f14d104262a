"""How many samples a second do several GPUs learn by, beside one?

    python -m loader bench data_parallel [--ranks 2] [--device cuda] [--quick]

The steps of examples/fit_image.py, a hash grid and a small network: on one GPU alone, then on all
under DDP and under FSDP2, each with a batch of the same size. Steps are queued as in training; the
clock stops once the GPUs have done ten of them.
"""

import functools
import sys

import processes
import tables
import torch
from torch.distributed.device_mesh import init_device_mesh

import harness

sys.path.insert(0, str(harness.ROOT / "examples"))

CASES = {f"{1 << n:,}": (1 << n,) for n in (13, 16, 18, 20)}  # samples a step on each GPU
QUICK = {"1,024": (1 << 10,)}
STEPS = 10


@functools.cache
def mesh(device: str, size: int):
    """All ranks."""
    return init_device_mesh(device, (size,))


def measure(rank: int, options, batch: int) -> dict:
    """Milliseconds of a step alone, and together in both ways."""
    import fit_image
    import together
    from skimage import data

    photo = torch.tensor(data.astronaut(), device=options.device) / 255
    everyone, row = mesh(options.device, options.ranks), {"batch": batch}
    for how in ("", "ddp", "fsdp"):
        if how == "" and rank > 0:
            continue
        among = together.Together(options.device, everyone if how else None, how)
        field, _, step = fit_image.learner(photo, 10_000, among, batch * among.size)

        def steps(step=step):
            for _ in range(STEPS):
                step()

        way = processes.together if how else processes.alone
        row[f"{how or 'alone'}_ms"] = way(options, steps) / STEPS
        del field, step
    return row


def table(record: dict) -> str:
    """Return samples a second beside one GPU's."""
    lines = [
        f"{record['rows'][0]['ranks']} GPUs, samples a second. {tables.title(record)}",
        "",
        "| batch on each | one GPU | DDP | FSDP2 |",
        "|---|---|---|---|",
    ]
    for row in record["rows"]:
        one = row["batch"] / row["alone_ms"] * 1e3
        cells = [f"{row['batch']:,}", f"{one / 1e6:.1f} M"]
        for how in ("ddp", "fsdp"):
            rate = row["batch"] * row["ranks"] / row[f"{how}_ms"] * 1e3
            cells.append(f"{rate / 1e6:.1f} M, {rate / one:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    cases = CASES, QUICK
    processes.main(
        "data_parallel", "hash_grid_encoding", measure, cases, "one small batch", arguments
    )
