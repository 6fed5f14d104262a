"""What judging costs: candidates a minute, seconds of a core for each, memory, hostile ones too.

    python -m loader bench judge [--device cpu] [--candidates 24] [--jobs 2] [--results FOLDER]

Plain PyTorch candidates and one that builds an extension, the latter with seconds of its build and
of all else beside each other; then every hostile candidate of tests/hostile_candidates.py, or on a
GPU every one of tests/gpu_candidates.py, and the honest ones of tests/honest_candidates.py, with
how many verdicts were right. Seconds of a core are those of all processes, the judge's included.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import loader
from harness import ROOT, circumstances, keep

sys.path.insert(0, str(ROOT / "tests"))
from gpu_candidates import KERNELS
from gpu_candidates import REFERENCES as OF_KERNELS
from honest_candidates import FOR_THE_CPU, HONEST, INLINE, REFERENCES
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
    words = name, options.device, str(options.candidates), str(options.jobs)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "LOADER_BUILD": "lazy"}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"case": name, **json.loads(done.stdout.splitlines()[-1]), "cpu_s": cpu}


def case(name: str, device: str, candidates: int, jobs: int) -> dict:
    """Measure one row in this process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        reference = place / "ref.py"
        reference.write_text(REFERENCE)
        one = place / "warm.py"
        one.write_text(module(f"return {RIGHT}"))
        words = {"device": device, "jobs": jobs, "sanitizer": None if name == "tool" else False}
        warm = {"timed": False, "device": device, "sanitizer": False}
        loader.judge(one, reference, **warm)  # starts the warm process
        if name in ("hostile", "kernels", "honest"):
            return all_of(
                {"hostile": hostile, "kernels": kernels, "honest": honest}[name], place, words
            )
        paths = []
        for number in range({"extension": 2, "tool": 6}.get(name, candidates)):
            text = INLINE.replace("relu_times_sum", f"relu_times_sum_{number}")
            paths.append(place / f"candidate_{number}.py")
            paths[-1].write_text(text if name == "extension" else module(f"return {RIGHT}"))
        took, verdicts = judged(paths, reference, timed=name != "values", **words)
        right = sum(v.accepted for v in verdicts)
        return took | {"right": right, "court": court_memory()}


# Candidates by name, with True for those that are to be accepted; their reference; limits.
Group = tuple[dict[Path, bool], Path, dict]


def hostile(place: Path) -> Iterator[Group]:
    """Yield all hostile candidates."""
    for copy in (False, True):
        for slow in (False, True):
            names = [n for n, h in HOSTILE.items() if h.copy == copy and (n in SLOW) == slow]
            if names:
                paths, reference = written(place, names)
                harmless = [not HOSTILE[n].failed for n in names]
                limits = {"seconds": 1.5 if slow else 20, "memory": "1GiB"}
                yield dict(zip(paths, harmless, strict=True)), reference, limits


def kernels(place: Path) -> Iterator[Group]:
    """Yield all kernels for a GPU, right and wrong."""
    for kind, text in {"usual": REFERENCE, **OF_KERNELS}.items():
        reference = place / f"ref_{kind}.py"
        reference.write_text(text)
        for slow in (False, True):
            found = {n: k for n, k in KERNELS.items() if k.reference == kind and k.slow == slow}
            for name, kernel in found.items():
                (place / f"{name}.py").write_text(kernel.code)
            if found:
                due = {place / f"{n}.py": not k.failed for n, k in found.items()}
                yield due, reference, {"seconds": 3 if slow else 30}


def honest(place: Path) -> Iterator[Group]:
    """Yield all honest candidates that are for any device."""
    for kind, text in REFERENCES.items():
        reference = place / f"ref_{kind}.py"
        reference.write_text(text)
        names = [n for n, (k, _) in HONEST.items() if k == kind and n not in FOR_THE_CPU]
        for name in names:
            (place / f"{name}.py").write_text(HONEST[name][1])
        yield {place / f"{name}.py": True for name in names}, reference, {"timed": False}


def all_of(group: Callable[[Path], Iterator[Group]], place: Path, words: dict) -> dict:
    """Judge all of some groups."""
    rows, right, wrong = [], 0, []
    for due, reference, limits in group(place):
        took, verdicts = judged([*due], reference, **words, **limits)
        rows.append(took)
        for (path, accepted), verdict in zip(due.items(), verdicts, strict=True):
            right += verdict.accepted == accepted
            wrong += [path.stem] * (verdict.accepted != accepted)
    total, seconds = (sum(row[key] for row in rows) for key in ("candidates", "seconds"))
    return {
        **{"candidates": total, "jobs": words["jobs"], "seconds": seconds},
        "per_minute": 60 * total / seconds,
        "each_s": max(row["each_s"] for row in rows),
        "build_s": 0.0,
        "memory": max(row["memory"] for row in rows),
        **{"right": right, "wrong": wrong, "court": court_memory()},
    }


def main(arguments: list[str]) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m loader bench judge", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--candidates", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    last = ("tool", "honest", "kernels") if options.device == "cuda" else ("hostile",)
    for name in ("values", "timed", "extension", *last):
        rows.append(measured(name, options))
        print(json.dumps(rows[-1]), flush=True)
    facts = circumstances(options.device, ["jit/judge"]) | {"cores": os.cpu_count()}
    print(keep("judge", options.device, facts, rows, options.results))


NAMES = {
    "values": "plain PyTorch, not timed",
    "timed": "plain PyTorch, timed",
    "extension": "a C++ extension, built and timed",
    "hostile": "hostile",
    "tool": "plain PyTorch, timed, and under compute-sanitizer",
    "honest": "honest, not timed",
    "kernels": "kernels, right, wrong and hostile",
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
    print(json.dumps(case(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
