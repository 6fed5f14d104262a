"""Which of a GPU's limits binds each operator, by its hardware counters?

    python -m loader bench counters [OPERATOR ...] [--seed S] [--cases K]

What an earlier run kept of other operators, all but its day alike, stays: a run may be of one at a
time.
Cases are those of `bench sweep`, drawn at random; of each operator the first K that move at least
`--least` bytes. NVIDIA's `ncu` measures every kernel of a call: how busy memory, the L2 cache, the
load and store units, the issue slots and the arithmetic pipes were, in percent of what they could
do, and how many of the warps that fit were there; with caches flushed and clocks as they are. A
call's figures are its kernels', each weighted by its time. What is busiest binds where it is busy
for at least 60 %; below that nothing does, and warps wait: for memory's latency, or each other.
"""

import csv
import importlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sweep import OPERATORS, said

import harness
import loader
from loader.jit.tools.exercise import last_lines, prepare
from loader.jit.tools.profile import CURES, GET_NCU

NS = "gpu__time_duration.sum"
PERCENT = {  # ncu's names, and what the table calls them
    "DRAM": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "LSU": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "FP32": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "integer": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "FP64": "sm__pipe_fp64_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor cores": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
BUSY = 60  # percent, from where NVIDIA's guide too says that a unit binds
MARK = "marks_a_call"  # a kernel of ours before each call, by which its kernels are told apart
_CURE = "the GPU's counters cannot be read here"


def work(operator: str, options: dict, told: str) -> None:
    """Run the calls, in the process that ncu watches, and write what they were to a file."""
    torch._functorch.config.donated_buffer = False  # the graph is kept for the next call
    space = importlib.import_module(f"spaces.{operator}")
    mark = loader.source_module(f"__global__ void {MARK}(int* x) {{ *x = 1; }}")
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    calls, k = [], 0
    while len({call["key"][1] for call in calls}) < options["cases"] and k < 100:
        drawn = random.Random(f"{options['seed']} {k}")
        case = {**space.draw(drawn, options["largest"]), "key": [options["seed"], k]}
        values = torch.Generator("cuda").manual_seed(k)
        k += 1
        tasks = space.tasks(case, {"device": torch.device("cuda"), "generator": values})
        if min(task.bytes for task in tasks.values()) < options["least"]:
            continue
        for direction, task in tasks.items():
            run = task.runs["loader"]
            run()
            torch.cuda.synchronize()
            with torch.cuda.profiler.profile():
                mark.get_function(MARK)(word, grid=1, block=1)
                run()
                torch.cuda.synchronize()
            known = {"operator": operator, "direction": direction, "key": case["key"]}
            call = known | {"dtype": case["dtype"], "case": said(case), "bytes": round(task.bytes)}
            calls.append(call)
    Path(told).write_text(json.dumps(calls))


def metrics(ncu: str) -> list[str]:
    """Return those of the counters above that this GPU has, by ncu's own list."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    has = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    wanted = [NS, *PERCENT.values()]
    known = [name for name in wanted if name.partition(".")[0] in has]
    return known if NS in known else wanted  # a list in another form says nothing


def kernels(text: str) -> list[dict]:
    """Return ncu's table, a kernel to a row: its name, time in ns and percentages.

    The line after the names has the units. What is no number is left out.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = csv.DictReader(io.StringIO("\n".join(lines)))
    found = []
    for row in rows:
        kernel = {"kernel": row.get("Kernel Name") or "", "ns": _number(row.get(NS))}
        if kernel["kernel"] and kernel["ns"] is not None:
            shares = {name: _number(row.get(metric)) for name, metric in PERCENT.items()}
            found.append(kernel | {n: share for n, share in shares.items() if share is not None})
    return found


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def by_call(calls: list[dict], found: list[dict]) -> list[dict]:
    """Return the calls with their kernels' figures; RuntimeError where the marks do not fit."""
    groups: list[list[dict]] = []
    for kernel in found:
        if MARK in kernel["kernel"]:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    if len(groups) != len(calls):
        raise RuntimeError(f"ncu saw {len(groups)} marks of {len(calls)} calls")
    return [call | summed(group) for call, group in zip(calls, groups, strict=True) if group]


def summed(group: list[dict]) -> dict:
    """Return the figures of a call: those of its kernels, each by its share of the time."""
    ns = sum(kernel["ns"] for kernel in group)
    names = [n for n in PERCENT if all(n in kernel for kernel in group)]
    busy = {n: round(sum(k[n] * k["ns"] for k in group) / ns, 1) for n in names}
    first = max(group, key=lambda kernel: kernel["ns"])
    about = {"kernel": first["kernel"], "share": round(first["ns"] / ns, 2)}
    return {"us": ns / 1e3, "kernels": len(group), **about, "busy": busy, "binds": binding(busy)}


def binding(busy: dict[str, float]) -> str:
    """Return what binds a call: the busiest unit; `latency` where none is busy enough."""
    units = {name: share for name, share in busy.items() if name != "warps"}
    most = max(units, key=units.__getitem__)
    return most if units[most] >= BUSY else "latency"


def measure(ncu: str, operator: str, options, wanted: list[str]) -> list[dict]:
    """Run an operator's cases under ncu; a row for each call. RuntimeError with ncu's cure."""
    asked = {n: getattr(options, n) for n in ("seed", "cases", "least", "largest")}
    with tempfile.TemporaryDirectory() as folder:
        told = str(Path(folder, "calls.json"))
        code = "import sys; sys.path[:0] = sys.argv[1:3]; import counters, json"
        code += "; counters.work(sys.argv[3], json.loads(sys.argv[4]), sys.argv[5])"
        paths = [str(harness.ROOT), str(harness.ROOT / "bench")]
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--profile-from-start", "off", "--clock-control", "none"]
        command += ["--target-processes", "all", "--metrics", ",".join(wanted)]
        command += [sys.executable, "-c", code, *paths, operator, json.dumps(asked), told]
        done = subprocess.run(
            command, env=os.environ, capture_output=True, text=True, cwd=harness.ROOT, check=False
        )
        text = done.stdout + done.stderr
        for sign, cure in CURES.items():
            if sign in text:
                raise RuntimeError(f"{operator}: {_CURE} ({sign}): {cure}")
        if done.returncode or not Path(told).exists():
            raise RuntimeError(
                f"{operator}: ncu ended with exit status {done.returncode}:\n{last_lines(text)}"
            )
        rows = by_call(json.loads(Path(told).read_text()), kernels(done.stdout))
    if not all(row["busy"] for row in rows):
        raise RuntimeError(f"{operator}: {_CURE}: ncu gave times and no percentages")
    return rows


def show(row: dict) -> None:
    """One line for a call."""
    busy = "  ".join(f"{name} {share:.0f}" for name, share in row["busy"].items())
    print(
        f"{row['operator']}, {row['direction']:<18} {row['bytes'] / 1e6:6.1f} MB "
        f"{row['us']:8.1f} us  {row['binds']:<8} {busy}  [{':'.join(map(str, row['key']))}] "
        f"{row['dtype']}, {row['case']}",
        flush=True,
    )


def table(record: dict) -> str:
    """Return, for each operator and direction, medians of all calls and what binds how many."""
    command = ["python -m loader bench counters", *record["sources"]]
    command += [f"--seed {record['seed']} --cases {record['cases']}"]
    days = " and ".join(sorted({record["date"], *record.get("dates", {}).values()}))
    told = f"{record['device']}, torch {record['torch']}, {days}, `{' '.join(command)}`"
    if changed := harness.changed(record):
        told += f"; **sources of {', '.join(changed)} have changed since**"
    names = [name for name in PERCENT if any(name in row["busy"] for row in record["rows"])]
    lines = [f"{told}; medians over random cases, in percent of what each unit can do.", ""]
    lines += ["| operator | direction | " + " | ".join(names) + " | binds |"]
    lines += ["|---" * (len(names) + 3) + "|"]
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in record["rows"]:
        groups.setdefault((row["operator"], row["direction"]), []).append(row)
    for (operator, direction), rows in groups.items():
        shares = [[row["busy"][n] for row in rows if n in row["busy"]] for n in names]
        cells = [f"{statistics.median(some):.0f}" if some else "" for some in shares]
        binds = [row["binds"] for row in rows]
        count = {name: binds.count(name) for name in dict.fromkeys(binds)}
        ordered = sorted(count, key=count.__getitem__, reverse=True)
        cells.append(", ".join(f"{name} in {count[name]} of {len(rows)}" for name in ordered))
        lines.append("| " + " | ".join([f"`{operator}`", direction, *cells]) + " |")
    return "\n".join(lines) + "\n"


def beside(facts: dict, rows: list[dict], path: Path) -> tuple[dict, list[dict]]:
    """Add what a run of other operators has kept there, if it was alike in all else."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    if any(kept.get(name) != facts[name] for name in facts.keys() - {"sources", "date"}):
        return facts, rows
    others = {name: key for name, key in kept["sources"].items() if name not in facts["sources"]}
    rows = [row for row in kept["rows"] if row["operator"] in others] + rows
    days = {name: kept.get("dates", {}).get(name, kept["date"]) for name in others}
    days |= dict.fromkeys(facts["sources"], facts["date"])
    return {**facts, "sources": others | facts["sources"], "dates": days}, rows


def main(arguments=None) -> None:
    """Build, measure, print and keep."""
    parser = harness.parser("counters", 1, "2 cases of each")
    parser.add_argument("operators", nargs="*", default=OPERATORS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=5, help="of each operator")
    parser.add_argument("--least", type=int, default=10_000_000, help="bytes that a case moves")
    parser.add_argument("--largest", type=int, default=150_000_000, help="the same, about")
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases = min(options.cases, 2)
    if unknown := set(options.operators) - {*OPERATORS}:
        parser.error(f"no operator: {', '.join(sorted(unknown))}")
    try:
        _, ncu = prepare(loader, options.operators, None, "ncu", GET_NCU)
        wanted = metrics(ncu)
        rows = []
        for operator in options.operators:
            for row in measure(ncu, operator, options, wanted):
                show(row)
                rows.append(row)
    except RuntimeError as error:
        sys.exit(f"counters: {error}")
    facts = harness.circumstances("cuda", options.operators)
    facts |= {name: getattr(options, name) for name in ("seed", "cases", "least", "largest")}
    facts, rows = beside(facts, rows, (options.results or harness.RESULTS) / "counters_cuda.json")
    print(f"kept in {harness.keep('counters', 'cuda', facts, rows, options.results)}")
