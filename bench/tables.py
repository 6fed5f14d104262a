"""The tables of README and docs, made from result files: `python -m loader bench tables`."""

import json
import re
from pathlib import Path

import loader
from harness import RESULTS, source_key

PEERS = ("eager", "compile", "tutorial")
OWN = ("lut3d", "hash_grid", "grid_sample", "growth")  # result files that `kernels` leaves out
_MARK = "<!-- `python -m loader bench tables` makes this: {} -->"
_END = "<!-- end -->"


def kernels() -> str:
    """A table for each operator and device: its cases, times as multiples of ours for the peers."""
    names = {path.stem.rpartition("_")[0] for path in RESULTS.glob("*.json")} - {*OWN}
    found = [record for name in sorted(names, reverse=True) for record in _records(name)]
    return "\n".join(_kernels(record) for record in found if "us" in record["rows"][0])


def lut3d() -> str:
    """Colours through tables."""
    return "\n".join(map(_kernels, _records("lut3d")))


def hash_grid() -> str:
    """The hash encoding."""
    return "\n".join(map(_kernels, _records("hash_grid")))


def grid_sample() -> str:
    """Both our layouts, each beside F.grid_sample in the same and in its best; then the means."""
    return "\n".join(map(_grid_sample, _records("grid_sample")))


def _grid_sample(record: dict) -> str:
    import grid_sample as bench

    rows = record["rows"]
    apart = (*bench.OURS, *bench.THEIRS, "copy")
    others = [n for n in dict.fromkeys(n for row in rows for n in row["us"]) if n not in apart]
    columns = [x for layout in bench.LAYOUTS for x in (layout, "same", "best")]
    head = ["", "case", "dtype", *columns, "of a copy", *others]
    lines = [_title(record), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    directions = [*dict.fromkeys(row["direction"] for row in rows)]
    for row in sorted(rows, key=lambda r: directions.index(r["direction"])):
        us = {name: times["median"] for name, times in row["us"].items()}
        cells = [row["direction"], row["case"], row["dtype"]]
        for ours, (same, best) in zip(bench.OURS, bench.factors(row).values(), strict=True):
            cells += [_time(us[ours]), f"{same:.2f}x", f"{best:.2f}x"]
        ours = min(us[name] for name in bench.OURS)
        cells.append(f"{100 * us['copy'] / ours:.0f} %")
        cells += [f"{us[name] / ours:.2f}x" if name in us else "" for name in others]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Geometric means:",
        "",
        "| | dtype | layout | same | best |",
        "|---|---|---|---|---|",
    ]
    for group, found in bench.means(rows).items():
        lines.append("| " + " | ".join([*group, *(f"{x:.2f}x" for x in found)]) + " |")
    return "\n".join(lines) + "\n"


def _records(name: str) -> list[dict]:
    """A benchmark's result files, of a GPU first."""
    files = [RESULTS / f"{name}_{device}.json" for device in ("cuda", "cpu")]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _title(record: dict) -> str:
    (operator, measured), *_ = record["sources"].items()
    stale = "" if measured == source_key(operator) else " **Its sources have changed since.**"
    return f"`{operator}` on {_circumstances(record)}, sources {measured}.{stale}"


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _kernels(record: dict) -> str:
    rows = record["rows"]
    names = dict.fromkeys(name for row in rows for name in row["us"])
    peers = [name for name in names if name not in ("loader", "copy")]
    directions = [*dict.fromkeys(row["direction"] for row in rows)]
    head = ["", "case", "dtype", "time", "GB/s", "of a copy", *peers]
    lines = [_title(record), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda r: directions.index(r["direction"])):
        us = {name: times["median"] for name, times in row["us"].items()}
        ours = us["loader"]
        others = [f"{us[peer] / ours:.2f}x" if peer in us else "" for peer in peers]
        case = row.get("case") or f"{row['N']} x {row['F']}"
        share, bandwidth = f"{100 * us['copy'] / ours:.0f} %", f"{row['bytes'] / ours / 1e3:.0f}"
        cells = [row["direction"], case, row["dtype"], _time(ours), bandwidth, share, *others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _circumstances(record: dict) -> str:
    return (
        f"{record['device']} (torch {record['torch']}, {record['threads']} threads, "
        f"{record['date']})"
    )


def summary() -> str:
    """Trilinear interpolation on the GPU, in float32."""
    record = json.loads((RESULTS / "trilinear_interpolation_cuda.json").read_text())
    lines = [
        f"`trilinear_interpolation`, float32, {record['device']}, torch {record['torch']}, "
        f"{record['date']}; medians of one run, and how many times as long the others take:",
        "",
        "| N x F | | time | of a copy of as many bytes | eager | torch.compile | tutorial |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["dtype"] != "float32" or row["N"] * row["F"] < 1 << 24:
            continue
        us = {name: times["median"] for name, times in row["us"].items()}
        ours = us["loader"]
        others = [f"{us[peer] / ours:.1f}x" if peer in us else "" for peer in PEERS]
        size, share = f"{row['N']} x {row['F']}", f"{100 * us['copy'] / ours:.0f} %"
        lines.append(
            f"| {' | '.join([size, row['direction'], f'{ours:.0f} us', share, *others])} |"
        )
    return "\n".join(lines)


def edit_loop() -> str:
    """From a saved edit to the first result, and what random edits did to a process."""
    parts = []
    for path in sorted(RESULTS.glob("edit_loop_*.json")):
        record = json.loads(path.read_text())
        lines = [
            f"On {record['device']}, {record['cores']} cores (torch {record['torch']}, "
            f"{record['date']}); seconds, medians:",
            "",
            "| | | median | least | most | of it the compiler | runs |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in record["rows"]:
            times = [f"{row[name]:.2f}" for name in ("median", "least", "most")]
            compiler = f"{row['compile']:.2f}" if "compile" in row else ""
            cells = [row["who"], row["case"], *times, compiler, str(row["runs"])]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    for path in sorted(RESULTS.glob("edits_*.json")):
        record = json.loads(path.read_text())
        (row,) = record["rows"]
        outcomes = ", ".join(f"{count} {what}" for what, count in row["outcomes"].items())
        parts.append(
            f"{row['count']} random edits of the CPU kernel of `square` in one process "
            f"({record['device']}, {record['date']}): {outcomes}; "
            f"{len(row['mistakes'])} ended as they should not; {row['bytes_an_edit'] / 1024:.0f} "
            "KiB of memory an edit.\n"
        )
    return "\n".join(parts)


def edit_summary() -> str:
    """The medians alone."""
    records = {p: json.loads(p.read_text()) for p in sorted(RESULTS.glob("edit_loop_*.json"))}
    devices = [f"{record['device']}, {record['cores']} cores" for record in records.values()]
    lines = ["| seconds, medians | | " + " | ".join(devices) + " |"]
    lines.append("|---" * (2 + len(devices)) + "|")
    times = [{(r["who"], r["case"]): r["median"] for r in v["rows"]} for v in records.values()]
    for who, case in dict.fromkeys(key for record in times for key in record):
        cells = [f"{t[who, case]:.2f}" if (who, case) in t else "" for t in times]
        lines.append("| " + " | ".join([who, case, *cells]) + " |")
    return "\n".join(lines)


def inline() -> str:
    """`load_inline` beside torch's own."""
    parts = []
    for path in sorted(RESULTS.glob("inline_*.json")):
        record = json.loads(path.read_text())
        lines = [f"Seconds on {_circumstances(record)}:", ""]
        lines += ["| snippet | | loader | torch | |", "|---|---|---|---|---|"]
        times = {(r["snippet"], r["stage"], r["who"]): r["seconds"] for r in record["rows"]}
        for (snippet, stage, who), ours in times.items():
            if who != "loader":
                continue
            theirs = times.get((snippet, stage, "torch"))
            others = [f"{theirs:.3g}", f"{theirs / ours:.0f}x"] if theirs else ["", ""]
            lines.append("| " + " | ".join([snippet, stage, f"{ours:.3g}", *others]) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def source_module() -> str:
    """Kernels from a string."""
    parts = []
    for path in sorted(RESULTS.glob("source_module_*.json")):
        record = json.loads(path.read_text())
        lines = [
            f"On {_circumstances(record)}:",
            "",
            "| | median | least | most |",
            "|---|---|---|---|",
        ]
        for row in record["rows"]:
            times = [f"{row[name]:.3g} {row['unit']}" for name in ("median", "low", "high")]
            lines.append("| " + " | ".join([row["name"], *times]) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


TABLES = {
    f.__name__: f
    for f in (
        kernels,
        grid_sample,
        lut3d,
        hash_grid,
        summary,
        edit_loop,
        edit_summary,
        inline,
        source_module,
    )
}


def pages() -> list[Path]:
    """Those that have tables."""
    return [loader._root / "README.md", *sorted((loader._root / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """A page with its tables as the result files have them."""
    pattern = re.escape(_MARK).replace(r"\{\}", r"(\w+)") + r"\n.*?" + re.escape(_END)

    def table(found: re.Match) -> str:
        return f"{_MARK.format(found[1])}\n{TABLES[found[1]]()}\n{_END}"

    return re.sub(pattern, table, text, flags=re.DOTALL)


def main(arguments=None) -> None:
    """Put the tables between their marks, on every page."""
    for page in pages():
        page.write_text(filled(page.read_text()))
