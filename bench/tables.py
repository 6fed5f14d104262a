"""The tables of README and docs, made from result files: `python -m loader bench tables`."""

import importlib
import json
import re
from pathlib import Path

import harness
from harness import RESULTS, ROOT

PEERS = ("eager", "compile", "tutorial")
_MARK = "<!-- `python -m loader bench tables` makes this: {} -->"
_END = "<!-- end -->"


def kernels() -> str:
    """A table for each operator and device: its cases, times as multiples of ours for the peers.

    What has a table of its own on a page is left out, and what has no case of ours alone.
    """
    own = {name for page in pages() for name in _marks().findall(page.read_text())}
    names = {path.stem.rpartition("_")[0] for path in RESULTS.glob("*.json")} - own
    found = [record for name in sorted(names, reverse=True) for record in _records(name)]
    return "\n".join(
        _kernels(record)
        for record in found
        if "loader" in record["rows"][0].get("us", ()) and "seeds" not in record
    )


def of_benchmark(name: str) -> str:
    """Return a benchmark's table: by its own `table(record)`, or in the form of `kernels`."""
    table = getattr(importlib.import_module(name), "table", _kernels)
    return "\n".join(map(table, _records(name)))


def _records(name: str) -> list[dict]:
    """A benchmark's result files, of a GPU first."""
    files = [RESULTS / f"{name}_{device}.json" for device in ("cuda", "cpu")]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def title(record: dict) -> str:
    """Return what stands above a table: operator, device, sources, and if they have changed."""
    (operator, measured), *_ = record["sources"].items()
    return f"`{operator}` on {circumstances_text(record)}, sources {measured}.{_stale(record)}"


def _stale(record: dict) -> str:
    return " **Its sources have changed since.**" if harness.changed(record) else ""


def time_text(us: float) -> str:
    """Return a time as a table has it."""
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def _kernels(record: dict) -> str:
    rows = record["rows"]
    names = dict.fromkeys(name for row in rows for name in row["us"])
    peers = [name for name in names if name not in ("loader", "copy")]
    directions = [*dict.fromkeys(row["direction"] for row in rows)]
    head = ["", "case", "dtype", "time", "GB/s", "of a copy", *peers]
    lines = [title(record), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda r: directions.index(r["direction"])):
        us = {name: times["median"] for name, times in row["us"].items()}
        ours = us["loader"]
        others = [f"{us[peer] / ours:.2f}x" if peer in us else "" for peer in peers]
        case = row.get("case") or f"{row['N']} x {row['F']}"
        share, bandwidth = f"{100 * us['copy'] / ours:.0f} %", f"{row['bytes'] / ours / 1e3:.0f}"
        cells = [row["direction"], case, row["dtype"], time_text(ours), bandwidth, share, *others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def circumstances_text(record: dict) -> str:
    """Return where and when a record was measured."""
    return (
        f"{record['device']} (torch {record['torch']}, {record['threads']} threads, "
        f"{record['date']})"
    )


def summary() -> str:
    """Trilinear interpolation on the GPU, in float32."""
    record = json.loads((RESULTS / "trilinear_interpolation_cuda.json").read_text())
    lines = [
        f"`trilinear_interpolation`, float32, {record['device']}, torch {record['torch']}, "
        f"{record['date']}; medians of one run, and how many times as long the others take."
        f"{_stale(record)}",
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
        lines = [f"Seconds on {circumstances_text(record)}:", ""]
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
            f"On {circumstances_text(record)}:",
            "",
            "| | median | least | most |",
            "|---|---|---|---|",
        ]
        for row in record["rows"]:
            times = [f"{row[name]:.3g} {row['unit']}" for name in ("median", "low", "high")]
            lines.append("| " + " | ".join([row["name"], *times]) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def sweeps() -> str:
    """How far random cases are from their limit, operator by operator."""
    names = sorted({path.stem.rpartition("_")[0] for path in RESULTS.glob("sweep_*.json")})
    if not names:
        return ""
    table = importlib.import_module("sweep").table
    plot = "![Random cases of each operator, their peers and the limit](plots/sweeps.png)\n\n"
    return plot + "\n".join(table(record) for name in names for record in _records(name))


# Those that are no benchmark's of kernels; the others are found by the benchmark's name.
TABLES = {
    f.__name__: f
    for f in (kernels, summary, edit_loop, edit_summary, inline, source_module, sweeps)
}


def pages() -> list[Path]:
    """Return those that have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _marks() -> re.Pattern:
    return re.compile(re.escape(_MARK).replace(r"\{\}", r"(\w+)"))


def filled(text: str) -> str:
    """Return a page with its tables as the result files have them."""
    pattern = _marks().pattern + r"\n.*?" + re.escape(_END)

    def table(found: re.Match) -> str:
        name = found[1]
        made = TABLES[name]() if name in TABLES else of_benchmark(name)
        return f"{_MARK.format(name)}\n{made}\n{_END}"

    return re.sub(pattern, table, text, flags=re.DOTALL)


def main(arguments=None) -> None:
    """Put the tables between their marks, on every page."""
    for page in pages():
        page.write_text(filled(page.read_text()))
