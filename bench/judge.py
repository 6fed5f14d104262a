"""What judging costs: candidates a minute, seconds of a core for each, memory, hostile ones too.

    python -m loader bench judge [--candidates 24] [--jobs 2] [--results FOLDER]

Plain PyTorch candidates and one that builds an extension, the latter with seconds of its build and
of all else beside each other; then every hostile candidate of tests/hostile_candidates.py, with how
many verdicts were right. Seconds of a core are those of all processes, the judge's included.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import loader
from harness import ROOT, circumstances, keep

sys.path.insert(0, str(ROOT / "tests"))
from honest_candidates import INLINE
from hostile_candidates import HOSTILE, REFERENCE, RIGHT, SLOW, module, written


def judged(paths: list[Path], reference: Path, **words) -> tuple[dict, list]:
    """Judge candidates; what it took, and the verdicts."""
    begun = time.perf_counter()
    verdicts = loader.judge(paths, reference, **words)
    seconds = time.perf_counter() - begun
    took = {
        "candidates": len(paths),
        "jobs": words.get("jobs", 1),
        "seconds": seconds,
        "per_minute": 60 * len(paths) / seconds,
        "each_s": statistics.median(v.data["seconds"] for v in verdicts),
        "build_s": statistics.median(v.data.get("load_seconds", 0.0) for v in verdicts),
        "memory": max(v.data["peak_memory"] for v in verdicts),
    }
    return took, [*verdicts]


def court_memory() -> int:
    """Bytes that the warm process has of its own."""
    found = 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for line in Path(f"/proc/{child}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                found = max(found, int(line.split()[1]) << 10)
    return found


def measured(name: str, options: argparse.Namespace) -> dict:
    """One row, in a process of its own, so that all its children's seconds are known."""
    command = [sys.executable, __file__, name, str(options.candidates), str(options.jobs)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "LOADER_BUILD": "lazy"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"case": name, **json.loads(done.stdout.splitlines()[-1]), "cpu_s": cpu}


def case(name: str, candidates: int, jobs: int) -> dict:
    """Measure one row in this process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        reference = place / "ref.py"
        reference.write_text(REFERENCE)
        one = place / "warm.py"
        one.write_text(module(f"return {RIGHT}"))
        loader.judge(one, reference, timed=False)  # starts the warm process
        if name == "hostile":
            return hostile(place, jobs)
        paths = []
        for number in range(2 if name == "extension" else candidates):
            text = INLINE.replace("relu_times_sum", f"relu_times_sum_{number}")
            paths.append(place / f"candidate_{number}.py")
            paths[-1].write_text(text if name == "extension" else module(f"return {RIGHT}"))
        took, verdicts = judged(paths, reference, jobs=jobs, timed=name != "values")
        right = sum(v.accepted for v in verdicts)
        return took | {"right": right, "court": court_memory()}


def hostile(place: Path, jobs: int) -> dict:
    """Judge all hostile candidates."""
    rows, right = [], 0
    for copy in (False, True):
        for slow in (False, True):
            names = [n for n, h in HOSTILE.items() if h.copy == copy and (n in SLOW) == slow]
            if names:
                paths, reference = written(place, names)
                limits = {"seconds": 1.5 if slow else 20, "memory": "1GiB"}
                took, verdicts = judged(paths, reference, jobs=jobs, **limits)
                rows.append(took)
                right += sum(
                    v.accepted == (not HOSTILE[n].failed)
                    for n, v in zip(names, verdicts, strict=True)
                )
    total, seconds = (sum(row[key] for row in rows) for key in ("candidates", "seconds"))
    return {
        **{"candidates": total, "jobs": jobs, "seconds": seconds},
        "per_minute": 60 * total / seconds,
        "each_s": max(row["each_s"] for row in rows),
        "build_s": 0.0,
        "memory": max(row["memory"] for row in rows),
        **{"right": right, "court": court_memory()},
    }


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m loader bench judge", description=__doc__)
    parser.add_argument("--candidates", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for name in ("values", "timed", "extension", "hostile"):
        rows.append(measured(name, options))
        print(json.dumps(rows[-1]), flush=True)
    facts = circumstances("cpu", ["square"]) | {"cores": os.cpu_count()}
    print(keep("judge", "cpu", facts, rows, options.results))


NAMES = {
    "values": "plain PyTorch, not timed",
    "timed": "plain PyTorch, timed",
    "extension": "a C++ extension, built and timed",
    "hostile": "hostile",
}


def table(record: dict) -> str:
    """Return the rows as Markdown."""
    lines = [
        f"On {record['device']}, {record['cores']} cores, torch {record['torch']}, "
        f"{record['date']}; {record['rows'][0]['jobs']} candidates at once:",
        "",
        "| candidates | right verdicts | a minute | build, each | judged in all, each | "
        "core seconds, each | a candidate's memory | the warm process's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        build = f"{row['build_s']:.2f} s" if row["build_s"] else ""
        lines.append(
            f"| {row['candidates']} {NAMES[row['case']]} | {row['right']} | "
            f"{row['per_minute']:.0f} | {build} | {row['each_s']:.2f} s | "
            f"{row['cpu_s'] / row['candidates']:.2f} s | {row['memory'] / 1e6:.0f} MB | "
            f"{row['court'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(case(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
