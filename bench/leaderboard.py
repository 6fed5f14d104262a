"""A public leaderboard's kernels judged on a GPU: verdicts, reasons, times.

    python -m loader bench leaderboard ASSETS [--files 50] [--seed 17] [--stop 90] [--build]

ASSETS is the folder docs/assets of https://github.com/anneouyang/KernelBenchLeaderboard: solutions
of language models to KernelBench's problems, and those. A seed draws `--files` of the solutions,
each of which is judged against its problem, with its own arguments; `--build` builds them all
beforehand, for which no GPU is needed. What took longest last time comes first; what is not done
`--stop` seconds after the beginning is noted as not finished.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import loader
from harness import RESULTS, ROOT, circumstances, keep

_TEXT = 500  # characters of a reason


def drawn(assets: Path, files: int, seed: int) -> list[dict]:
    """Draw solutions whose problem is known, in an order of chance."""
    known = []
    for title, solutions in json.loads((assets / "data.json").read_text()).items():
        level, number = re.match(r"Level (\d+): (\d+)_", title).groups()
        problem = assets / "problems" / f"l{level}_p{number}.py"
        for solution in solutions:
            path = assets / "solutions" / f"{solution['file']}.py"
            if path.exists() and problem.exists():
                known.append({"file": path, "reference": problem, "problem": title})
    known.sort(key=lambda row: row["file"])
    return random.Random(seed).sample(known, min(files, len(known)))


def build(path: Path, seconds: float) -> tuple[str, float]:
    """Build a solution's extensions into the cache; what came out, and the seconds it took."""
    code = "import sys, runpy, torch, loader\nloader.accelerate_extensions()\n"
    command = [sys.executable, "-c", f"{code}runpy.run_path(sys.argv[1])", path]
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "not done in time", time.perf_counter() - begun
    said = done.stderr.strip().splitlines()[-1:] if done.returncode else ["built"]
    return " ".join(said)[:_TEXT], time.perf_counter() - begun


def serve(seconds: float, device: str, compiled: bool) -> None:
    """Judge one after another, as standard input names them."""
    for line in sys.stdin:
        candidate, reference = json.loads(line)
        words = {"device": device, "compiled": compiled, "sanitizer": False, "memory": "48GiB"}
        try:
            answer = loader.judge(candidate, reference, seconds=seconds, **words).data
        except Exception as error:
            answer = {"unusable": f"{type(error).__name__}: {error}"[: 4 * _TEXT]}
        print(json.dumps(answer), flush=True)


def row(found: dict, answer: dict) -> dict:
    """Return what a verdict comes to."""
    kept = {"file": found["file"].stem, "problem": found["problem"]}
    if "verdict" not in answer:
        return {**kept, "verdict": "none", "failed": [], "because": answer["unusable"]}
    checks = {c["name"]: c["text"] for c in answer["checks"] if c["outcome"] == "failed"}
    kept |= {key: answer.get(key) for key in ("verdict", "failed", "seconds", "load_seconds")}
    kept["because"] = "; ".join(text.strip()[-_TEXT:] for text in checks.values())
    kept["share_of_tolerance"] = answer.get("share_of_tolerance")
    if worst := answer.get("worst"):
        kept["worst"] = {k: v for k, v in worst.items() if k != "neighbourhood"}
    if took := answer.get("time"):
        for name in {"candidate", "reference", "compiled"} & took.keys():
            kept[f"{name}_ms"] = took[name]["median_ms"]
        kept["share_of_limit"] = took["share_of_limit"]
    return kept


def longest_first(found: list[dict], device: str) -> list[dict]:
    """Put first what took longest, or was not done, when results were kept last."""
    took = {}
    with contextlib.suppress(OSError):
        for known in json.loads((RESULTS / f"leaderboard_{device}.json").read_text())["rows"]:
            took[known["file"]] = known.get("seconds") or 1e9
    return sorted(found, key=lambda one: -took.get(one["file"].stem, 1e9))


def judged(found: list[dict], options: argparse.Namespace) -> list[dict]:
    """Judge them all, so many at once, until time is up."""
    waiting = collections.deque(longest_first(found, options.device))
    rows, workers = {}, []
    end = time.monotonic() + options.stop
    command = [
        sys.executable,
        __file__,
        str(options.seconds),
        options.device,
        str(options.compiled),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "LOADER_BUILD": "lazy"}

    def work() -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        worker = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        workers.append(worker)
        while waiting and time.monotonic() < end:
            one = waiting.popleft()
            worker.stdin.write(json.dumps([str(one["file"]), str(one["reference"])]) + "\n")
            worker.stdin.flush()
            if not (line := worker.stdout.readline()):
                return
            rows[one["file"]] = row(one, json.loads(line))
            print(json.dumps(rows[one["file"]]), flush=True)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for worker in workers:
        worker.kill()
    late = {"verdict": "not finished", "failed": [], "because": f"after {options.stop:g} s"}
    names = [{"file": one["file"].stem, "problem": one["problem"], **late} for one in found]
    return [rows.get(one["file"], other) for one, other in zip(found, names, strict=True)]


def main(arguments: list[str]) -> None:
    """Build, or judge, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m loader bench leaderboard", description=__doc__)
    named = os.environ.get("LEADERBOARD", "")
    parser.add_argument("assets", type=Path, nargs="?", default=Path(named), help="or LEADERBOARD")
    parser.add_argument("--files", type=int, default=50)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--stop", type=float, default=90, help="seconds that all of them may take")
    parser.add_argument("--seconds", type=float, default=15, help="that one answer may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true", help="time torch.compile too")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    if not (options.assets / "data.json").is_file():
        parser.error(f"{options.assets} has no data.json; name the leaderboard's docs/assets")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    found = drawn(options.assets.resolve(), options.files, options.seed)
    if options.build:
        with ThreadPoolExecutor(options.jobs) as pool:
            built = pool.map(lambda one: build(one["file"], options.stop), found)
            for one, (said, seconds) in zip(found, built, strict=True):
                print(f"{one['file'].stem} {seconds:.1f} s {said}", flush=True)
        return
    begun = time.perf_counter()
    rows = judged(found, options)
    facts = circumstances(options.device, ["jit/judge"]) | {
        "seed": options.seed,
        "jobs": options.jobs,
    }
    facts |= {"seconds": time.perf_counter() - begun, "cores": os.cpu_count()}
    print(keep("leaderboard", options.device, facts, rows, options.results))


def table(record: dict) -> str:
    """Return what came out as Markdown: a sentence, and whom it refused and why."""
    rows = record["rows"]
    counts = collections.Counter(r["verdict"] for r in rows)
    timed = [r for r in rows if r.get("candidate_ms")]
    lines = [
        f"On {record['device']}, torch {record['torch']}, {record['date']}; {len(rows)} drawn with "
        f"seed {record['seed']}, {record['jobs']} at once, in {record['seconds']:.0f} s: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        + ".",
    ]
    if timed:
        faster = statistics.median(r["reference_ms"] / r["candidate_ms"] for r in timed)
        lines.append(
            f"Of those that were timed the median is {faster:.2f} times as fast as PyTorch."
        )
    lines += ["", "| problem | file | refused for | because |", "|---|---|---|---|"]
    for r in rows:
        if r["verdict"] != "accepted":
            why = (r["because"].splitlines() or [""])[-1].replace("|", "\\|")[:200]
            failed = ", ".join(f"`{name}`" for name in r["failed"]) or r["verdict"]
            title = r["problem"].replace("_", " ").strip()
            lines.append(f"| {title} | {r['file'][:8]} | {failed} | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(float(sys.argv[1]), sys.argv[2], sys.argv[3] == "True")
