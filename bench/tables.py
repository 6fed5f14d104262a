"""The performance tables of docs, made from result files: `python -m loader bench tables`."""

import json

import loader
from harness import RESULTS, source_key

PAGE = loader._root / "docs" / "performance.md"
BEGIN, END = "<!-- made by `python -m loader bench tables` -->", "<!-- end -->"
DIRECTIONS = ("forward", "backward to feats", "backward to both")
PEERS = ("eager", "compile", "tutorial")


def tables() -> str:
    """The tables in Markdown, one for each result file."""
    return "\n".join(table(path) for path in sorted(RESULTS.glob("*.json"), reverse=True))


def table(path) -> str:
    """One result file: a line for each case, with times as multiples of ours for the peers."""
    record = json.loads(path.read_text())
    (operator, measured), *_ = record["sources"].items()
    stale = "" if measured == source_key(operator) else " **Its sources have changed since.**"
    peers = [peer for peer in PEERS if any(peer in row["us"] for row in record["rows"])]
    versions = f"torch {record['torch']}, {record['threads']} threads, {record['date']}"
    head = ["", "N x F", "dtype", "time", "GB/s", "of a copy", *peers]
    lines = [
        f"`{operator}` on {record['device']} ({versions}, sources {measured}).{stale}",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for row in sorted(record["rows"], key=lambda r: DIRECTIONS.index(r["direction"])):
        us = {name: times["median"] for name, times in row["us"].items()}
        ours = us["loader"]
        time = f"{ours:.1f} us" if ours < 1000 else f"{ours / 1000:.2f} ms"
        share = f"{100 * us['copy'] / ours:.0f} %"
        others = [f"{us[peer] / ours:.2f}x" if peer in us else "" for peer in peers]
        size, bandwidth = f"{row['N']} x {row['F']}", f"{row['bytes'] / ours / 1e3:.0f}"
        cells = [row["direction"], size, row["dtype"], time, bandwidth, share, *others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary() -> str:
    """The README's table: trilinear interpolation on the GPU, in float32."""
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


def main(arguments=None) -> None:
    """Put the tables between their marks, on their page and in the README."""
    for page, text in ((PAGE, tables()), (loader._root / "README.md", summary())):
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
