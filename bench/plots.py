"""The plots of docs/performance.md, made from result files: `python -m loader bench plots`."""

import hashlib
import io
import json
import math
from collections import defaultdict
from pathlib import Path

from harness import RESULTS, ROOT

FOLDER = ROOT / "docs" / "plots"
COLOURS = ("tab:orange", "tab:red", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:gray")
# What a result file has that is no peer: limits, and forms of our own.
OURS = ("loader", "loader, channels last", "loader, channels first", "copy", "deterministic")
NAMES = {"compile": "torch.compile", "eager": "eager PyTorch", "tutorial": "tutorial's kernel"}


def records(names: list[str], device: str) -> dict[str, dict]:
    """Return the result files there are of these benchmarks on a device."""
    paths = {name: RESULTS / f"{name}_{device}.json" for name in names}
    return {name: json.loads(p.read_text()) for name, p in paths.items() if p.exists()}


def ratios(record: dict) -> dict[str, list[float]]:
    """Return how many times as long as ours each peer takes, case by case."""
    found = defaultdict(list)
    for row in record["rows"]:
        us = {name: times["median"] for name, times in row["us"].items()}
        ours = min((us[name] for name in OURS[:3] if name in us), default=None)
        for name, time in us.items():
            if ours and name not in OURS:
                found[name.partition(",")[0] if "F.grid" in name else name].append(time / ours)
    return found


KERNELS = [
    *("trilinear_interpolation", "bilinear_interpolation", "grid_sample", "lut3d"),
    *("hash_grid", "convolve2d"),
]


def peers(pyplot):
    """Each case of each operator as a dot: how many times as long a peer takes."""
    figure, axes = pyplot.subplots(2, 1, figsize=(8, 8.4), sharex=True)
    handles = {}
    for axis, device in zip(axes, ("cuda", "cpu"), strict=True):
        found = records(KERNELS, device)
        place, ticks = 0.0, []
        for record in found.values():
            for name, values in sorted(ratios(record).items()):
                label = NAMES.get(name, name)
                colour = handles[label][1] if label in handles else COLOURS[len(handles) % 7]
                line = axis.plot(values, [place] * len(values), "o", color=colour, ms=4, alpha=0.35)
                mean = math.exp(sum(map(math.log, values)) / len(values))
                axis.plot([mean], [place], "|", color="black", ms=13, mew=2)
                handles.setdefault(label, (line[0], colour))
                ticks.append((place, f"{record['rows'][0]['operator']}: {label}"))
                place -= 1
            place -= 0.6
        some = next(iter(found.values()))
        axis.set_yticks([p for p, _ in ticks], [text for _, text in ticks], fontsize=7)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.axvline(1, color="black", lw=0.8)
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(f"{some['device']}, torch {some['torch']}", fontsize=9)
    axes[1].set_xlabel("times as long as ours (1: as fast); bars: geometric means", fontsize=9)
    return figure


SHARES = {"loader": "tab:blue", "compile": COLOURS[0], "eager": COLOURS[1]}


def share(pyplot):
    """How much of a copy's speed the interpolations reach, by size and direction."""
    record = records(["trilinear_interpolation"], "cuda")["trilinear_interpolation"]
    rows = [row for row in record["rows"] if row["dtype"] == "float32"]
    cases = [*dict.fromkeys((row["N"], row["F"]) for row in rows)]
    directions = [*dict.fromkeys(row["direction"] for row in rows)]
    figure, axis = pyplot.subplots(figsize=(8.2, 3))
    for k, direction in enumerate(directions):
        for which, (name, colour) in enumerate(SHARES.items()):
            found = [row for row in rows if row["direction"] == direction]
            shares = [
                100 * row["us"]["copy"]["median"] / row["us"][name]["median"] for row in found
            ]
            places = [k * 5 + c + 0.27 * (which - 1) for c in range(len(cases))]
            label = NAMES.get(name, name) if k == 0 else None
            axis.bar(places, shares, 0.25, color=colour, label=label)
    ticks = [k * 5 + c for k in range(len(directions)) for c in range(len(cases))]
    texts = [f"{n}\nx {f}" for _ in directions for n, f in cases]
    axis.set_xticks(ticks, texts, fontsize=5.5)
    for k, direction in enumerate(directions):
        axis.text(k * 5 + 1.5, 122, direction, ha="center", fontsize=8)
    axis.axhline(100, color="black", lw=0.8)
    axis.set_ylim(0, 138)
    axis.set_ylabel("% of a copy's speed", fontsize=8)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.set_title(
        f"trilinear_interpolation, float32, {record['device']}, torch {record['torch']}", fontsize=9
    )
    return figure


def edits(pyplot):
    """Seconds from a saved edit to the first result."""
    found = [r for d in ("cpu", "cuda") for r in records(["edit_loop"], d).values()]
    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.2), sharex=True, layout="constrained")
    for axis, record in zip(axes, found, strict=True):
        rows = record["rows"][::-1]
        colours = ["tab:blue" if row["who"] == "loader" else "tab:gray" for row in rows]
        axis.barh(range(len(rows)), [row["median"] for row in rows], color=colours)
        short = [
            row["case"] if row["who"] == "loader" else row["who"].partition(",")[0] for row in rows
        ]
        axis.set_yticks(range(len(rows)), short, fontsize=7)
        for k, row in enumerate(rows):
            axis.text(row["median"] * 1.1, k, f"{row['median']:.2f}", va="center", fontsize=7)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(0.005, 60)
        axis.set_xlabel("seconds, median", fontsize=8)
        axis.set_title(f"{record['device']}, {record['cores']} cores", fontsize=9)
    return figure


def calls(pyplot):
    """What one call costs the host."""
    stages = ("forward", "graph", "backward")
    names = ("x + x", "F.grid_sample", "grid_sample", "trilinear_interpolation", "square")
    found = [r for d in ("cuda", "cpu") for r in records(["overhead"], d).values()]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
    for axis, record in zip(axes, found, strict=True):
        us = {(r["name"], r["stage"]): r["us"]["median"] for r in record["rows"]}
        for k, stage in enumerate(stages):
            places = [n + 0.27 * (k - 1) for n in range(len(names))]
            heights = [us[name, stage] for name in names]
            axis.bar(places, heights, 0.25, label=("no gradient", "with one", "backward")[k])
        axis.set_xticks(range(len(names)), [n.replace("_i", "_\ni") for n in names], fontsize=7)
        axis.set_title(f"{record['device']}, torch {record['torch']}", fontsize=9)
    axes[0].set_ylabel("us a call", fontsize=8)
    axes[1].legend(fontsize=7)
    return figure


def sweeps(pyplot):
    """Random cases of each operator: time by the bytes that must move, peers and limit beside."""
    found = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in SWEEPS}
    high = -(-len(found) // 3)
    figure, axes = pyplot.subplots(
        high, 3, figsize=(11, 3.2 * high), layout="constrained", squeeze=False
    )
    for axis, record in zip(axes.flat, found.values(), strict=False):
        rows = record["rows"]
        peer = [
            (row["bytes"], min(us for name, us in medians(row).items() if name not in OURS))
            for row in rows
            if medians(row).keys() - {*OURS}
        ]
        axis.plot(*zip(*peer, strict=True), ".", color=COLOURS[0], ms=3, alpha=0.4)
        ours = [(row["bytes"], medians(row)["loader"]) for row in rows]
        axis.plot(*zip(*ours, strict=True), ".", color="tab:blue", ms=3, alpha=0.6)
        limit = [(row["bytes"], row["limit_us"]) for row in rows]
        axis.plot(*zip(*limit, strict=True), ".", color="black", ms=1.5)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.tick_params(which="both", labelsize=7)
        axis.xaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
        axis.set_title(f"{rows[0]['operator']}, {record['device']}", fontsize=8)
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel("us", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("bytes that must move", fontsize=8)
    names = ("the quickest peer", "ours", "the limit")
    figure.legend(axes[0, 0].lines, names, loc="outside lower right", ncols=3, fontsize=8)
    return figure


def medians(row: dict) -> dict[str, float]:
    """Return each contender's time."""
    return {name: times["median"] for name, times in row["us"].items()}


SWEEPS = sorted(file.stem for file in RESULTS.glob("sweep_*.json"))
PLOTS = {
    peers: [f"{name}_{device}" for name in KERNELS for device in ("cuda", "cpu")],
    share: ["trilinear_interpolation_cuda"],
    edits: ["edit_loop_cpu", "edit_loop_cuda"],
    calls: ["overhead_cuda", "overhead_cpu"],
    **({sweeps: SWEEPS} if SWEEPS else {}),
}


def digest(names: list[str], folder: Path = RESULTS) -> str:
    """Of the result files that a plot is made from; it is kept inside of the picture."""
    found = hashlib.sha256()
    for name in names:
        path = folder / f"{name}.json"
        found.update(path.read_bytes() if path.exists() else b"")
    return found.hexdigest()[:16]


def made_from(file: Path) -> str:
    """Return the digest that a picture holds."""
    from PIL import Image

    with Image.open(file) as picture:
        return picture.info.get("Source", "")


def save(figure, file: Path, source: str) -> None:
    """Write a figure in a palette of few colours, which makes it a third of the size."""
    from PIL import Image, PngImagePlugin

    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=110)
    said = PngImagePlugin.PngInfo()
    said.add_text("Source", source)
    image = Image.open(pixels).convert("RGB").quantize(48, dither=Image.Dither.NONE)
    image.save(file, optimize=True, pnginfo=said)


def main(arguments=None) -> None:
    """Draw all plots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for plot, names in PLOTS.items():
        figure = plot(pyplot)
        if figure.get_layout_engine() is None:
            figure.tight_layout()
        file = FOLDER / f"{plot.__name__}.png"
        save(figure, file, digest(names))
        pyplot.close(figure)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1024:.0f} kB")
