"""What got slower between two folders of results: `python -m loader bench --compare OLD NEW`.

A case of ours is compared by its ratio to each peer that was measured in the same run, the median
of these changes counting, so that a busier day or another clock cancels. Where there is no peer the
times themselves are compared, and only if both are of one device.
"""

import json
import math
import statistics
from pathlib import Path

THRESHOLD = 1.1
# What of a row is measured; all else says which case it is.
MEASURED = {
    *("us", "limit_us", "median", "least", "most", "low", "high", "compile", "runs", "seconds"),
    *("load", "compilers", "eager_us", "graph_us", "kernels_us", "outcomes", "mistakes"),
    *("median_seconds_of_a_good_edit", "bytes_an_edit"),
    *("busy", "binds", "kernels", "kernel", "share"),
}
Entries = dict[tuple, tuple[float, dict[str, float]]]


def entries(record: dict) -> Entries:
    """Return by case our time and those of the peers beside it."""
    found: Entries = {}
    for row in record["rows"]:
        case = tuple((k, json.dumps(v)) for k, v in sorted(row.items()) if k not in MEASURED)
        us = row.get("us")
        if isinstance(us, float):  # `counters`
            found[case] = us, {}
        elif us is None:
            time = next((row[k] for k in ("median", "seconds", "graph_us") if k in row), None)
            if time and row.get("who", "loader") == "loader":
                found[case] = time, {}
        elif "median" in us:  # each row is a contender: `overhead`
            if row["name"] not in ("x + x", "F.grid_sample"):
                found[case] = us["median"], _rivals(record, row)
        else:
            times = {name: value["median"] for name, value in us.items()}
            peers = {n: t for n, t in times.items() if not n.startswith(("loader", "determ"))}
            for name in times.keys() - peers.keys():
                found[(*case, ("", name))] = times[name], peers
    return found


def _rivals(record: dict, row: dict) -> dict[str, float]:
    return {
        other["name"]: other["us"]["median"]
        for other in record["rows"]
        if other["name"] in ("x + x", "F.grid_sample") and other["stage"] == row["stage"]
    }


def changes(old: dict, new: dict) -> list[tuple[float, tuple, str]]:
    """Return how many times as slow each case has become, the case, and by what that was told."""
    before, after, found = entries(old), entries(new), []
    for case in before.keys() & after.keys():
        (was, peers), (now, others) = before[case], after[case]
        common = peers.keys() & others.keys()
        if common:
            change = statistics.median(now / others[p] * peers[p] / was for p in common)
            found.append((change, case, f"beside {', '.join(sorted(common))}"))
        elif old["device"] == new["device"]:
            found.append((now / was, case, "by the clock"))
    return sorted(found, key=lambda each: (-each[0], each[1]))


def compare(old: Path, new: Path, threshold: float = THRESHOLD) -> int:
    """Print what got slower and faster; 1 if anything got slower."""
    slower = 0
    for name in sorted({f.name for f in old.glob("*.json")} | {f.name for f in new.glob("*.json")}):
        files = old / name, new / name
        if missing := [file for file in files if not file.exists()]:
            print(f"{name}: not compared: {missing[0]} is not there")
            continue
        first, second = (json.loads(file.read_text()) for file in files)
        if name.startswith("guard") or not (found := changes(first, second)):
            print(f"{name}: not compared: no case that both have, with a peer or on one device")
            continue
        if first["device"] != second["device"]:
            print(f"{name}: {first['device']} before, {second['device']} now")
        mean = math.exp(statistics.fmean(math.log(change) for change, _, _ in found))
        worse = [each for each in found if each[0] >= threshold]
        better = sum(change <= 1 / threshold for change, _, _ in found)
        print(
            f"{name}: {len(found)} cases, {mean:.2f}x the time (geometric mean); "
            f"{len(worse)} slower, {better} faster by {threshold:g}x or more"
        )
        for change, case, how in worse:
            print(f"    {change:.2f}x  {_said(case)}  ({how})")
        slower += len(worse)
    return int(slower > 0)


def _said(case: tuple) -> str:
    told = {"bytes", "flops", "operator"}
    if any(key == "case" for key, _ in case):  # which says these in words
        told |= {"shape", "K", "boundary", "points", "order"}
    words = [(k, json.loads(value) if k else value) for k, value in case if k not in told]
    texts = [value if isinstance(value, str) else f"{key} {value}" for key, value in words]
    return ", ".join(dict.fromkeys(texts))


def main(arguments: list[str]) -> int:
    """Compare two folders."""
    old, new = map(Path, arguments)
    for folder in (old, new):
        if not folder.is_dir():
            raise ValueError(f"bench --compare takes two folders of results, got {folder}")
    return compare(old, new)
