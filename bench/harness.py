"""How every benchmark here measures, and how it keeps what it measured."""

import argparse
import json
import math
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch._functorch.config

from loader.jit.errors.cxx import blanked
from loader.jit.machine.sources import Sources, discover
from loader.jit.machine.timing import Clock

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


class Timer:
    """Medians in microseconds of contenders that take turns, with cold caches.

    On a GPU the L2 cache is overwritten before each call. That also keeps work queued ahead, so
    that what gets timed is the GPU and not the host that launches. With `seconds`, a slow contender
    gets no more turns than fit into so long, but at least three; where one call takes ten times as
    long, that call's is its time. Where a median is over twice the 10th percentile, or over twice
    what a call of a GPU took while it was warmed up, host and all, something else ran on the
    machine: all are timed again, up to three times, and the quietest time counts.
    """

    def __init__(self, device: str, repeats: int, seconds: float | None = None):
        self.device, self.repeats, self.seconds = torch.device(device), repeats, seconds
        self._clock = Clock(self.device)

    def __call__(self, contenders: dict[str, Callable]) -> dict[str, dict[str, float]]:
        """Median, 10th and 90th percentile of each contender."""
        known = {name: self._warm_up(run) for name, run in contenders.items()}
        quickest = {name: least for name, (*_, least) in known.items()}

        def unrest(found: dict[str, dict[str, float]]) -> float:
            return max(us["median"] / min(us["p10"], quickest[name]) for name, us in found.items())

        quietest = self._take_turns(contenders, known)
        for _ in range(3):
            if unrest(quietest) <= 2:
                break
            time.sleep(0.1)
            quietest = min(quietest, self._take_turns(contenders, known), key=unrest)
        return quietest

    def _take_turns(self, contenders, known) -> dict[str, dict[str, float]]:
        taken = {name: [] for name in contenders}
        order, shuffle = [*contenders.items()], random.Random(0).shuffle
        for turn in range(max(turns for turns, *_ in known.values())):
            shuffle(order)  # each finds what the one before it left: threads that still wait, say
            for name, run in order:
                if turn < known[name][0]:
                    taken[name].append(self._clock.once(run))
        return {
            name: _summary(slow or [1e3 * ms for ms in self._clock.results(taken[name])])
            for name, (_, slow, _) in known.items()
        }

    def _warm_up(self, run: Callable) -> tuple[int, list[float], float]:
        """Compile, allocate, fill caches; return how many turns follow, or what slow calls take,
        and the microseconds of a GPU's quickest call.
        """
        turns, once = self.repeats, math.inf
        for call in range(3):
            start = time.perf_counter()
            run()
            if self.seconds:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                once = min(once, time.perf_counter() - start)
                if call and once > 10 * self.seconds:
                    return 0, [1e6 * once] * 2, math.inf
                turns = max(3, min(self.repeats, int(self.seconds / once)))
                if call and once > self.seconds:
                    break
        return turns, [], 1e6 * once if self.device.type == "cuda" else math.inf

    def copy_bandwidth(self) -> float:
        """Bytes read and written per microsecond by `y.copy_(x)` on a large tensor: the limit."""
        size = 1 << 31 if self.device.type == "cuda" else 1 << 28
        x = torch.ones(size, dtype=torch.uint8, device=self.device)
        y = torch.empty_like(x)
        return 2 * size / self({"copy": lambda: y.copy_(x)})["copy"]["median"]


def _summary(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": cuts[0], "p90": cuts[-1]}


def circumstances(device: str, operators: list[str]) -> dict:
    """Return what a figure needs beside it: device, versions and keys of the sources measured."""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sources": {name: source_key(name, device) for name in operators},
    }
    if device == "cuda":
        facts["cuda"] = torch.version.cuda
    return facts


def source_key(operator: str, device: str | None = None) -> str:
    """Return the digest of an operator's C++ and CUDA code and the headers it reaches.

    For a `device`, "cpu" or "cuda", of those that its results come from: not the other's kernels.
    Comments, indentation and empty lines do not count. For a folder of this checkout, such as
    `jit/extension`, that of its Python files.
    """
    import hashlib

    if (folder := ROOT / operator).is_dir():
        texts = [file.read_bytes() for file in sorted(folder.glob("*.py"))]
        return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    unit, sources = discover(ROOT)[operator], Sources(ROOT)
    files = {
        path: _code(ROOT / path)
        for source in unit.sources
        if not (device == "cpu" and source.endswith(".cu"))
        and not (device == "cuda" and "_cpu." in source)
        for path in sources.closure(source)
        if not (device == "cuda" and path.endswith("_cpu.h"))
    }
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _code(file: Path) -> list[str]:
    """Return the lines of a C++ or CUDA source, without comments and blanks that say nothing."""
    lines = (
        " ".join(line.split()) for line in blanked(file.read_text(), strings=False).splitlines()
    )
    return [line for line in lines if line]


def changed(record: dict) -> list[str]:
    """Return the operators of a result whose sources have changed since."""
    device = "cuda" if "cuda" in record else "cpu"
    return [
        name
        for name, key in record.get("sources", {}).items()
        if key not in (source_key(name, device), source_key(name))
    ]


def _cpu_name() -> str:
    """Return its name and its generation: a virtual machine's name may be the maker's alone."""
    text = Path("/proc/cpuinfo").read_text()
    known = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", text, re.MULTILINE))
    name = known.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in known and "model" in known:
        name += f", family {known['cpu family']}, model {known['model']}"
    return name


def one_by_one(cases: dict[str, Callable]) -> Iterable[tuple[str, list[dict]]]:
    """Yield the rows of each case."""
    for case, measured in cases.items():
        yield case, [*measured()]


def each(
    name: str,
    operator: str,
    options: argparse.Namespace,
    cases: dict[str, Callable],
    run: Callable[[dict], Iterable[tuple[str, list[dict]]]] = one_by_one,
) -> list[dict]:
    """Return the rows of all cases, each kept as soon as it is measured.

    A run that was ended is gone on with, where device, versions, sources and options are the same:
    what it has measured is not measured again. Each of `cases` is a function that gives rows;
    `run` calls them, in its own order, and may leave some out.
    """
    file, same = _part(name, options), _same(operator, options)
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        kept = {}
    done = kept["cases"] if kept.get("of") == same else {}
    if found := [case for case in cases if case in done]:
        print(f"{len(found)} of {len(cases)} cases are kept from a run before", flush=True)
    begun = time.perf_counter()
    left = {case: cases[case] for case in cases if case not in done}
    try:
        for k, (case, rows) in enumerate(run(left), 1):
            done[case] = rows
            _write(file, {"of": same, "cases": done})
            rest = duration((time.perf_counter() - begun) / k * (len(left) - k))
            print(f"-- {len(found) + k} of {len(cases)}: {case}, about {rest} left", flush=True)
    except KeyboardInterrupt:
        kept = sum(case in done for case in cases)
        print(f"\nended: {kept} of {len(cases)} cases are kept; the same command goes on there")
        raise
    return [row for case in cases if case in done for row in done[case]]


def duration(seconds: float) -> str:
    """Return a time as one says it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _part(name: str, options: argparse.Namespace) -> Path:
    """The file of a run that has not come to its end."""
    return (options.results or RESULTS) / f".{name}_{options.device}.part.json"


def _same(operator: str, options: argparse.Namespace) -> dict:
    """What has to be equal for a case of another run to count."""
    facts = {**circumstances(options.device, [operator]), "date": None}
    return facts | {"repeats": options.repeats, "quick": options.quick}


def _write(file: Path, record: dict) -> None:
    """All of it or nothing, whenever the run is ended."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.replace(file)


def rows_of(code: str, folder: str, environment: dict[str, str]) -> list[dict]:
    """Run Python code in a process of its own; return the rows that it prints as JSON."""
    rows = []
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        for line in process.stdout:
            if line[:1] == "{":
                print(line, end="", flush=True)
                rows.append(json.loads(line))
    if process.returncode:
        sys.exit(f"{code}: ended with exit status {process.returncode}")
    return rows


def keep(name: str, device: str, facts: dict, rows: list[dict], folder: Path | None = None) -> Path:
    """Write the results as `results/<name>_<device>.json`."""
    path = (folder or RESULTS) / f"{name}_{device}.json"
    _write(path, {**facts, "rows": rows})
    return path


def parser(name: str, repeats: int, quick: str) -> argparse.ArgumentParser:
    """Return the options that benchmarks of kernels share; `quick` says what is left then."""
    options = argparse.ArgumentParser(prog=f"python -m loader bench {name}")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=repeats)
    options.add_argument("--quick", action="store_true", help=quick)
    options.add_argument("--results", type=Path, help="folder of the result files")
    return options


def start(options: argparse.Namespace) -> tuple[Timer, float]:
    """Return a run's timer, and the bytes that a copy moves in a microsecond: the limit."""
    torch._functorch.config.donated_buffer = False  # the graph is kept for the next repeat
    options.begun = time.perf_counter()
    timer = Timer(options.device, options.repeats, getattr(options, "seconds", None))
    limit = timer.copy_bandwidth()
    print(f"copy: {limit / 1e6:.3f} TB/s", flush=True)
    return timer, limit


def finish(
    name: str, operator: str, rows: list[dict], options: argparse.Namespace, **facts
) -> None:
    """Keep a run's rows beside the circumstances and these facts; say where, and what it took."""
    facts = {**circumstances(options.device, [operator]), **facts}
    if options.quick:
        facts["quick"] = True
    path = keep(name, options.device, facts, rows, options.results)
    _part(name, options).unlink(missing_ok=True)
    print(f"kept in {path}, {time.perf_counter() - options.begun:.0f} s", flush=True)
