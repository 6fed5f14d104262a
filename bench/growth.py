"""How does the cost of sampling a volume grow with the number of points and of channels?

Time per random point of grid_sample and F.grid_sample, float32, forward and backward to both:
against N points, 1e3 to 1e8, of a volume of 128^3 with 16 channels, and against C = 1 to 256
channels at N = 1e6 points (1e5 on the CPU). A few points leave a processor idle and cost what a
call costs; where the curves are level, it is the traffic of a point. A contender drops out where a
call would take longer than --most seconds, all where memory ends. The picture, docs/growth.png, is
of both devices' result files.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
import torch._functorch.config
import torch.nn.functional as F
from plots import digest, save

import loader
from harness import RESULTS, ROOT, Timer, each, finish

SIDE, CHANNELS = 128, 16
POINTS = [round(10 ** (k / 2)) for k in range(6, 17)]
WIDTHS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
FIXED = {"cuda": 10**6, "cpu": 10**5}
LAYOUTS = {"channels last": torch.channels_last_3d, "channels first": torch.contiguous_format}
PICTURE = ROOT / "docs" / "growth.png"
STYLES = {
    "loader, channels last": ("tab:blue", "grid_sample, channels last"),
    "F.grid_sample, channels last": ("tab:orange", "F.grid_sample, channels last"),
    "F.grid_sample, channels first": ("tab:red", "F.grid_sample, channels first"),
}


def memory(device):
    """Bytes that are free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))


def by_torch(volume, grid):
    """PyTorch's own."""
    return F.grid_sample(volume, grid, align_corners=False)


def contenders_of(volume):
    """Name to function and its volume."""
    volumes = {
        name: volume.contiguous(memory_format=format).requires_grad_()
        for name, format in LAYOUTS.items()
    }
    found = {"loader, channels last": (loader.grid_sample, volumes["channels last"])}
    return found | {f"F.grid_sample, {name}": (by_torch, x) for name, x in volumes.items()}


def measure(contenders, N, C, timer, within):
    """The medians in each direction, of the contenders that `within(direction, name)` lets in."""
    make = {"device": timer.device, "generator": torch.Generator(timer.device).manual_seed(0)}
    grid = (torch.rand(1, 1, 1, N, 3, **make) * 2 - 1).requires_grad_()
    some = {n: x for n, x in contenders.items() if within("forward", n)}
    runs = {
        name: lambda function=function, volume=volume: function(volume.detach(), grid.detach())
        for name, (function, volume) in some.items()
    }
    yield "forward", timer(runs) if runs else {}
    grad_out = torch.randn(1, C, 1, 1, N, **make)
    runs = {}
    for name, (function, volume) in contenders.items():
        if name in some and within("backward", name):
            out = function(volume, grid)
            runs[name] = lambda out=out, volume=volume: torch.autograd.grad(
                out, (volume, grid), grad_out, retain_graph=True
            )
            del out
    yield "backward", timer(runs) if runs else {}


def foreseen_within(most, taken, work, direction, who):
    """True if a call with so much work takes fewer seconds, going by the two before it."""
    *_, (w0, t0), (w1, t1) = [(0, 0), (0, 0), *taken.get((direction, who), [])]
    slope = (t1 - t0) / (w1 - w0) if w0 else 0
    return t1 + slope * (work - w1) < most


def sweep(name, cases, timer, most):
    """Rows for growing cases (N, C)."""
    taken, made = {}, None
    for N, C in cases:
        # Outputs of all contenders, and what one of them allocates; volumes and their gradients.
        need = 4 * (N * (6 * C + 9) + SIDE**3 * C * 5)
        if need > 0.9 * memory(timer.device):
            print(f"{name}: memory ends at N = {N}, C = {C}", flush=True)
            return
        within = partial(foreseen_within, most, taken, N * C)
        if made is None or made[0] != C:
            made = None
            make = {"device": timer.device}
            make["generator"] = torch.Generator(timer.device).manual_seed(0)
            made = C, contenders_of(torch.randn(1, C, SIDE, SIDE, SIDE, **make))
        for direction, us in measure(made[1], N, C, timer, within):
            if not us:
                continue
            for who, times in us.items():
                taken.setdefault((direction, who), []).append((N * C, times["median"] / 1e6))
            row = {"operator": "grid_sample", "sweep": name, "N": N, "C": C, "dtype": "float32"}
            row |= {"direction": direction, "us": us}
            ns = "  ".join(f"{who} {1e3 * t['median'] / N:.3f}" for who, t in us.items())
            print(f"{name}: N {N:<10} C {C:<4} {direction:<9} ns a point: {ns}", flush=True)
            yield row


def draw(folder, file):
    """Draw a row of panels for each device whose results a folder has: against N and against C."""
    found = [folder / f"growth_{device}.json" for device in ("cuda", "cpu")]
    records = [json.loads(path.read_text()) for path in found if path.exists()]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(records), 2, figsize=(11, 4.2 * len(records)), squeeze=False, sharey="row"
    )
    for record, pair in zip(records, axes, strict=True):
        for sweep, axis in zip("NC", pair, strict=True):
            rows = [row for row in record["rows"] if row["sweep"] == sweep]
            for name, (color, label) in STYLES.items():
                for direction, line in (("forward", "o-"), ("backward", "s--")):
                    some = [r for r in rows if r["direction"] == direction and name in r["us"]]
                    ns = [1e3 * r["us"][name]["median"] / r["N"] for r in some]
                    axis.loglog(
                        [r[sweep] for r in some], ns, line, color=color, markersize=4,
                        label=f"{label}, {direction}",
                    )  # fmt: skip
            other = f"{CHANNELS} channels" if sweep == "N" else f"{rows[0]['N']:,} points"
            axis.set_title(f"{record['device']}, {SIDE}$^3$ voxels, {other}", fontsize=10)
            axis.set_xlabel("random points" if sweep == "N" else "channels")
            axis.grid(alpha=0.3)
        pair[0].set_ylabel("ns per point")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    save(figure, file, digest([path.stem for path in found], folder))


def main(arguments=None):
    """Run both sweeps, keep the results, draw those of all devices."""
    parser = argparse.ArgumentParser(prog="python -m loader bench growth")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.1, help="most for all turns of one")
    parser.add_argument("--most", type=float, default=20, help="seconds of a call, as foreseen")
    parser.add_argument("--quick", action="store_true", help="every fourth size")
    parser.add_argument("--draw", action="store_true", help="from the result files there are")
    parser.add_argument("--results", type=Path, help="folder of the result files, and the picture")
    options = parser.parse_args(arguments)
    if not options.draw:
        torch._functorch.config.donated_buffer = False  # the graph is kept for the next repeat
        options.begun = time.perf_counter()
        timer = Timer(options.device, options.repeats, options.seconds)
        step, fixed = 4 if options.quick else 1, FIXED[options.device]
        sweeps = {
            "N": [(N, CHANNELS) for N in POINTS[::step]],
            "C": [(fixed, C) for C in WIDTHS[::step]],
        }
        cases = {
            name: partial(sweep, name, some, timer, options.most) for name, some in sweeps.items()
        }
        rows = each("growth", "grid_sample", options, cases)
        finish("growth", "grid_sample", rows, options)
    picture = options.results / PICTURE.name if options.results else PICTURE
    draw(options.results or RESULTS, picture)
    print(f"picture: {picture}")
