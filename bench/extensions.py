"""How other people's extensions build: `load_inline` of loader's and of torch's, file by file.

    python -m loader bench extensions FOLDER... [--files 300] [--theirs 60] [--seed 0] [--jobs N]

Each FOLDER is a git checkout, or a part of one, of Python files that call `load_inline`, such as a
leaderboard's solutions. A file is executed with that function replaced by one that takes its
arguments down, so that nothing is built and no model is run: name only collections that you trust.
Calls with the same arguments count once. Of all a seed draws `--files`, which loader builds, and of
these the first `--theirs` torch.utils.cpp_extension builds too, for one architecture, without a
GPU: whether it builds, seconds, and seconds of CPU that the compilers took. Each is built in a
process of its own that has imported torch, which is not counted: one after the other, with all
cores; with `--jobs` so many at once, loader's among torch's, each on a core of its own. A run that
was ended, as `--stop` ends it after so many seconds, goes on where it was. A FOLDER may also be a
file that `--take` has written the calls into, so that a machine needs neither checkout nor git.
"""

import argparse
import hashlib
import inspect
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from children import forked, side_by_side
from torch.utils import cpp_extension

import harness
import loader
from loader.jit.extension import arguments
from loader.jit.extension.flags import argv, host_flags
from loader.jit.extension.halves import halves

# With mends off, since a source that torch refuses is to be refused.
SETTINGS = {"LOADER_BUILD": "lazy", "LOADER_MENDS": "off", "TORCH_CUDA_ARCH_LIST": "9.0"}


def calls_of(file: Path) -> dict:
    """Execute a file; return the calls that it makes on being imported, with their arguments."""
    calls: list[dict] = []
    given = inspect.signature(cpp_extension.load_inline)

    class Module(ModuleType):
        def __getattr__(self, name: str) -> Callable:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *arguments, **named: None

    def noted(*values: object, **named: object) -> Module:
        calls.append(dict(given.bind(*values, **named).arguments))
        return Module("noted")

    cpp_extension.load_inline = noted
    module = ModuleType("collected")
    module.__file__ = str(file)
    sys.modules["collected"] = module
    error = ""
    with tempfile.TemporaryDirectory(prefix="octet-bench-") as folder:
        os.chdir(folder)
        try:
            exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
        except BaseException as raised:  # what came before it counts
            error = f"{type(raised).__name__}: {raised}"
    return {"calls": calls, "error": error}


def collected(folder: Path) -> tuple[dict, list[dict]]:
    """Return what a collection is, by name and commit, and the calls of its files."""
    if folder.is_file():
        return tuple(json.loads(folder.read_text()))
    found, files = [], 0
    for file in sorted(folder.rglob("*.py")):
        if "load_inline" not in file.read_text(errors="replace"):
            continue
        files += 1
        taken = forked(partial(calls_of, file), 60).result()
        for number, call in enumerate(taken.get("calls", ())):
            call.pop("build_directory", None)
            call.pop("verbose", None)
            found.append({"where": f"{file.relative_to(folder)} {number}", "call": call})

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    url = git("config", "--get", "remote.origin.url").removesuffix(".git")
    name = "/".join(url.replace(":", "/").split("/")[-2:]) or folder.name
    facts = {"name": name, "commit": git("rev-parse", "HEAD"), "files": files, "calls": len(found)}
    return facts, found


def key_of(call: dict) -> str:
    """Return a digest of all arguments but the name."""
    facts = {name: value for name, value in call.items() if name != "name"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def is_split(call: dict) -> bool | None:
    """Return whether the text of a call's CUDA source is split; None where it has none."""
    given = inspect.signature(loader.load_inline).bind(**call)
    given.apply_defaults()
    asked = arguments.of_strings(dict(given.arguments))
    cuda = [source for source in asked.sources if source.cuda]
    if not cuda:
        return None
    flags = host_flags(argv(asked.cuda_cflags))
    return flags is not None and all(halves(s.text, s.name) for s in cuda)


def built(ours: bool, call: dict) -> dict:
    """Build one; the verdict, and what it took."""
    row: dict = {"verdict": "built"}
    begun = time.perf_counter()
    try:
        made = (loader if ours else cpp_extension).load_inline(**call)
    except (RuntimeError, ImportError) as error:  # a BuildError, or torch's
        if getattr(error, "kind", "") == "machine":  # which says nothing of the source
            return {"error": str(error)}
        row |= {"verdict": "refused", "raised": type(error).__name__}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    row["seconds"] = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row["cpu"] = used.ru_utime + used.ru_stime
    if ours and row["verdict"] == "built":
        manifest = Path(made.__file__).parent / "manifest.json"
        row["levels"] = json.loads(manifest.read_text())["levels"]
    return row


def row_of(drawn: dict, who: str, jobs: int, answer: dict) -> dict:
    """Return the row of what was drawn, of the answer that its build gave, and print it."""
    row = {"where": drawn["where"], "who": who, "jobs": jobs, **answer}
    row.setdefault("verdict", row.pop("error", ""))
    took = f"{row.get('cpu', 0):6.1f} s of CPU, {row.get('seconds', 0):6.1f} s"
    print(f"{who:7} {row['verdict']:8} {took}  {row['where']}", flush=True)
    return row


def cases_of(drawn: list[dict], options: argparse.Namespace) -> dict[str, tuple[dict, str]]:
    """Return what is to be built by whom, by a name: torch's spread among loader's."""
    drawn, cases = drawn[: options.files], {}
    apart = max(1, len(drawn) // max(1, options.theirs))
    for k, each in enumerate(drawn):
        how = ", a core each" if options.jobs else ""
        cases[f"{key_of(each['call'])} loader{how}"] = each, "loader"
        if k % apart == 0 and k // apart < options.theirs:
            theirs = drawn[k // apart]
            cases[f"{key_of(theirs['call'])} torch{how}"] = theirs, "torch"
    return cases


def run(
    cases: dict[str, tuple[dict, str]], cache: Path, options: argparse.Namespace
) -> Iterator[tuple[str, list[dict]]]:
    """Yield each case's row as it is built."""
    until = time.monotonic() + options.stop

    def build(name: str) -> dict:
        each, who = cases[name]
        with tempfile.TemporaryDirectory(dir=cache) as place:
            os.environ["TORCH_EXTENSIONS_DIR"] = place
            return built(who == "loader", each["call"])

    tasks = {name: partial(build, name) for name in cases}
    answers = (
        side_by_side(tasks, options.jobs, options.limit, until)
        if options.jobs
        else ((n, forked(t, options.limit).result()) for n, t in tasks.items())
    )
    for name, answer in answers:
        yield name, [row_of(*cases[name], options.jobs, answer)]
        if time.monotonic() > until:
            return


def shares(rows: list[dict]) -> dict:
    """Return how the two compare."""
    ours = {row["where"]: row for row in rows if row["who"] == "loader"}
    theirs = {row["where"]: row for row in rows if row["who"] == "torch"}
    both = [(ours[w], theirs[w]) for w in theirs if w in ours]
    built = [(o, t) for o, t in both if o["verdict"] == t["verdict"] == "built"]
    facts: dict = {
        "built": sum(row["verdict"] == "built" for row in ours.values()),
        "other verdicts": [o["where"] for o, t in both if o["verdict"] != t["verdict"]],
    }
    for who, which in (("loader", [o for o, _ in built]), ("torch", [t for _, t in built])):
        for unit in ("cpu", "seconds") if len(which) > 1 else ():
            values = [row[unit] for row in which]
            facts[f"{who} {unit}"] = {
                "median": statistics.median(values),
                "p90": statistics.quantiles(values, n=10, method="inclusive")[-1],
            }
    return facts


def table(record: dict) -> str:
    """Return the result as text and a table."""
    rows, split = record["rows"], record["split"]
    ours = [row for row in rows if row["who"] == "loader"]
    theirs = [row for row in rows if row["who"] == "torch"]
    facts, made = shares(rows), [row for row in ours if row["verdict"] == "built"]
    names = ", ".join(
        f"{c['name']} at {c['commit'][:12]} ({c['calls']} calls)" for c in record["collections"]
    )
    quick = [row for row in made if any(level == "kernels" for level in row["levels"])]
    slow = [row for row in made if any(level.startswith("cuda ") for level in row["levels"])]
    other = ", ".join(facts["other verdicts"]) or "none"
    given = (
        f"torch {record['torch']}, {record['date']}, sources {record['sources']['jit/extension']}"
    )
    share = f"{split['split']} ({split['split'] / max(1, split['calls']):.1%})"
    jobs = sorted({row.get("jobs", 0) for row in rows} - {0})
    how = (
        f"{' or '.join(map(str, jobs))} builds at once, each on a core of its own"
        if jobs
        else f"{record['cores']} cores shared with other work"
    )
    lines = [
        f"{record['device']}, {how}, {given}: {names}. Of "
        f"{split['calls']} calls with CUDA that differ, {share} are split by their text. "
        f"{len(ours)} were drawn with seed {record['seed']}; loader built {len(made)}, "
        f"{len(quick)} of them in two halves and {len(slow)} whole. torch was given "
        f"{len(theirs)} of the same; with another verdict: {other}.",
        "",
        "| of those that both built | loader | torch | |",
        "|---|---|---|---|",
    ]
    for unit, text in (("cpu", "seconds of CPU"), ("seconds", "seconds")):
        for part, name in (("median", "median"), ("p90", "90th percentile")):
            pair = [facts.get(f"{who} {unit}", {}).get(part) for who in ("loader", "torch")]
            if all(pair):
                ratio = f"{pair[1] / pair[0]:.1f}x"
                lines.append(f"| {text}, {name} | {pair[0]:.1f} | {pair[1]:.1f} | {ratio} |")
    return "\n".join(lines) + "\n"


def asked(given: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    options = harness.parser("extensions", 1, "no files of torch's, and ten of ours")
    options.add_argument("folders", type=Path, nargs="*", help="or COLLECTIONS, parted by colons")
    options.add_argument("--files", type=int, default=300, help="how many loader builds")
    options.add_argument("--theirs", type=int, default=60, help="how many torch builds too")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=0, help="how many at once, on a core each")
    options.add_argument("--limit", type=float, default=900, help="seconds for one build")
    options.add_argument("--stop", type=float, default=math.inf, help="seconds for this run")
    options.add_argument("--cache", type=Path, help="folder to build in, kept afterwards")
    options.add_argument("--take", type=Path, help="write the calls to this file, build nothing")
    parser, options = options, options.parse_args(given)
    named = os.environ.get("COLLECTIONS", "").split(os.pathsep)
    options.folders = options.folders or [Path(folder) for folder in named if folder]
    if not options.folders:
        parser.error("name folders with files that call load_inline, or set COLLECTIONS")
    if options.take and len(options.folders) > 1:
        parser.error("--take takes the calls of one folder")
    if options.quick:
        options.files, options.theirs = 10, 0
    options.device, options.begun = "cpu", time.perf_counter()  # nothing of it runs on a GPU
    return options


def main(given=None) -> None:
    """Take calls down, draw, build, keep."""
    options = asked(given)
    if missing := {name: value for name, value in SETTINGS.items() if name not in os.environ}:
        command = [sys.executable, "-m", "loader", "bench", "extensions", *given]
        os.execve(sys.executable, command, os.environ | missing)  # loader reads them on import
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    found = [collected(folder.resolve()) for folder in options.folders]
    if options.take:
        options.take.write_text(json.dumps(found[0]))
        return
    unique = {key_of(each["call"]): each for _, calls in found for each in calls}
    drawn = [unique[key] for key in sorted(unique)]
    random.Random(options.seed).shuffle(drawn)
    told = [is_split(each["call"]) for each in drawn]
    facts = {
        "collections": [facts for facts, _ in found],
        "split": {"calls": sum(s is not None for s in told), "split": sum(s is True for s in told)},
        "seed": options.seed,
        "architectures": os.environ["TORCH_CUDA_ARCH_LIST"],
        "cores": len(os.sched_getaffinity(0)),
        "cuda_compiler": torch.version.cuda,
    }
    print(f"{len(drawn)} calls that differ: {facts['split']}", flush=True)
    cases = cases_of(drawn, options)
    with tempfile.TemporaryDirectory(prefix="octet-bench-") as folder:
        cache = options.cache or Path(folder)
        (cache / "ours").mkdir(parents=True, exist_ok=True)
        loader._session.caches = (cache / "ours",)
        build = partial(run, cache=cache, options=options)
        rows = harness.each("extensions", "jit/extension", options, cases, build)
    if len(rows) == len(cases):
        harness.finish("extensions", "jit/extension", rows, options, **facts)
    else:
        print(f"{len(rows)} of {len(cases)} are kept; the same command goes on there", flush=True)
        print(table({**harness.circumstances("cpu", ["jit/extension"]), **facts, "rows": rows}))


if __name__ == "__main__":
    main()
