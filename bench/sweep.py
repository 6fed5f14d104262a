"""How far from its limit is an operator at sizes that nobody named, and how do its peers compare?

    python -m loader bench sweep OPERATOR [--seed S ...] [--cases K] [--only K]

Cases are drawn at random over the operator's whole space, `bench/spaces/OPERATOR.py`: sizes on a
log scale, odd ones on purpose, dtypes, layouts, alignment, modes, paths. Case K of seed S is always
the same. Ours, PyTorch's and a copy of as many bytes take turns in one run. The limit of a case is
the largest of: that copy's time; its operations over the rate of float32 (or float64); the sectors
of its random gathers over the L2 cache's rate; these rates measured in the same run. Bytes are
those of the lines of memory that the elements lie in. What is printed is the distribution:
geometric mean, 10th percentile and the worst cases, of the share of the limit and of each peer's
time over ours.
"""

import importlib
import random
import statistics
from functools import partial

import torch
from spaces.limits import Limits

import harness

OPERATORS = sorted(
    file.stem
    for file in (harness.ROOT / "bench" / "spaces").glob("*.py")
    if (harness.ROOT / "ops" / f"{file.stem}.py").exists()
)
LARGE = 50_000_000  # bytes: cases above are looked at on their own too
LARGEST = {"cuda": 600_000_000, "cpu": 40_000_000}  # bytes that a case moves, about
WORST = 5


def measure(space, name, case, timer, limits, options):
    """One row for each direction of a case."""
    values = torch.Generator(timer.device).manual_seed(case["key"][1])
    tasks = space.tasks(case, {"device": timer.device, "generator": values})
    if case["key"][1] < options.compile:
        torch.compiler.reset()
    for direction, task in tasks.items():
        if options.directions and direction not in options.directions:
            continue
        contenders = dict(task.runs)
        if case["key"][1] < options.compile and direction == "forward":
            peer = next((x for x in ("eager", "F.grid_sample", "conv2d") if x in contenders), None)
            if peer:
                contenders["compile"] = torch.compile(contenders[peer], dynamic=False)
        source = torch.ones(max(1, int(task.bytes / 2)), dtype=torch.uint8, device=timer.device)
        target = torch.empty_like(source)
        contenders["copy"] = partial(target.copy_, source)
        us = timer(contenders)
        limit, binds = limits.of(task, case["dtype"], us["copy"]["median"])
        row = {
            "operator": name,
            "direction": direction,
            "case": said(case),
            "key": case["key"],
            "dtype": case["dtype"],
            "bytes": round(task.bytes),
            "limit": binds,
            "limit_us": limit,
            "us": us,
        }
        show(row)
        yield row


def said(case: dict) -> str:
    """Return the arguments of a case in one line."""
    return ", ".join(f"{k} {v}" for k, v in case.items() if k not in ("key", "dtype"))


def share(row: dict) -> float:
    """Return the limit's time over ours."""
    return row["limit_us"] / row["us"]["loader"]["median"]


def against(row: dict, peer: str) -> float | None:
    """Return a peer's time over ours; None where it did not take part."""
    return row["us"][peer]["median"] / row["us"]["loader"]["median"] if peer in row["us"] else None


def best(row: dict) -> float | None:
    """Return the time of the quickest peer over ours."""
    peers = [against(row, name) for name in row["us"] if name not in ("loader", "copy")]
    return min(peers, default=None)


def show(row: dict) -> None:
    """One line for a direction of a case."""
    us = {name: times["median"] for name, times in row["us"].items()}
    peers = "  ".join(
        f"{us[name] / us['loader']:.2f}x {name}" for name in us if name not in ("loader", "copy")
    )
    print(
        f"{row['direction']:<18} {row['bytes'] / 1e6:7.1f} MB {us['loader']:9.1f} us "
        f"{100 * share(row):4.0f} % of {row['limit']:<8}{peers}  "
        f"[{':'.join(map(str, row['key']))}] {row['dtype']}, {row['case']}",
        flush=True,
    )


def summary(values: list[float]) -> tuple[float, float, float]:
    """Return geometric mean, 10th percentile and least."""
    low = (
        statistics.quantiles(values, n=10, method="inclusive")[0] if len(values) > 1 else values[0]
    )
    return statistics.geometric_mean(values), low, min(values)


def groups(rows: list[dict]) -> dict[tuple[str, str], list[tuple[float, dict]]]:
    """Return direction and measure to the values, each with its row."""
    found = {}
    peers = dict.fromkeys(n for row in rows for n in row["us"] if n not in ("loader", "copy"))
    for direction in dict.fromkeys(row["direction"] for row in rows):
        some = [row for row in rows if row["direction"] == direction]
        found[direction, "of the limit"] = [(share(row), row) for row in some]
        large = [(share(row), row) for row in some if row["bytes"] > LARGE]
        found[direction, f"of the limit, over {LARGE // 10**6} MB"] = large
        for peer in peers:
            rated = [(against(row, peer), row) for row in some if peer in row["us"]]
            found[direction, f"{peer} / ours"] = rated
        if len(peers) > 1:
            rated = [(best(row), row) for row in some if best(row)]
            found[direction, "the best peer / ours"] = rated
    return {key: values for key, values in found.items() if values}


def conclude(rows: list[dict]) -> None:
    """Print the distributions, and the worst cases with what repeats each."""
    for (direction, measured), values in groups(rows).items():
        mean, low, least = summary([value for value, _ in values])
        below = sum(value < 1 for value, _ in values)
        tail = f", below 1 in {below}" if measured.endswith("ours") else ""
        print(
            f"{direction}, {measured}: geometric mean {mean:.3f}, 10 % below {low:.3f}, "
            f"worst {least:.3f}, {len(values)} cases{tail}"
        )
        for value, row in sorted(values, key=lambda pair: pair[0])[:WORST]:
            seed, k = row["key"]
            print(
                f"    {value:.3f}  {row['us']['loader']['median']:.1f} us, {row['dtype']}, "
                f"{row['case']}; --seed {seed} --only {k}"
            )


def table(record: dict) -> str:
    """Return the distributions of one operator on one device."""
    from tables import title

    seeds = ", ".join(map(str, record["seeds"]))
    lines = [f"{title(record)} {record['count']} cases each of seeds {seeds}.", ""]
    lines += ["| | | geometric mean | 10 % below | worst | cases |", "|---|---|---|---|---|---|"]
    for (direction, measured), values in groups(record["rows"]).items():
        three = [f"{x:.2f}" for x in summary([value for value, _ in values])]
        lines.append("| " + " | ".join([direction, measured, *three, str(len(values))]) + " |")
    return "\n".join(lines) + "\n"


def main(arguments=None):
    """Draw the cases, measure them, print the distribution and keep the results."""
    parser = harness.parser("sweep", 7, "20 cases")
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", type=int, default=200, help="of each seed")
    parser.add_argument("--only", type=int, nargs="+", help="these cases alone; nothing is kept")
    parser.add_argument("--directions", nargs="+", help='these alone, e.g. "backward to feats"')
    parser.add_argument("--largest", type=int, help="bytes that a case may move, about")
    parser.add_argument(
        "--compile", type=int, default=0, help="so many cases of each seed with torch.compile too"
    )
    parser.add_argument("--seconds", type=float, default=0.03, help="most for all turns of one")
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases = min(options.cases, 20)
    timer, copy = harness.start(options)
    if timer.device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # F.conv2d is to compute what is asked for
    limits = Limits(timer)
    print(limits, flush=True)
    space = importlib.import_module(f"spaces.{options.operator}")
    largest = options.largest or LARGEST[timer.device.type]
    made = {}
    for seed in options.seed:
        for k in options.only or range(options.cases):
            case = {**space.draw(random.Random(f"{seed} {k}"), largest), "key": [seed, k]}
            made[f"{seed}:{k}, {said(case)}"] = partial(
                measure, space, options.operator, case, timer, limits, options
            )
    name = f"sweep_{options.operator}"
    if options.only:
        for case in made.values():
            for _ in case():
                pass
        return
    rows = harness.each(name, options.operator, options, made)
    conclude(rows)
    rates = {str(dtype)[6:]: rate for dtype, rate in limits.flops.items()}
    facts = {"copy_bytes_per_us": copy, "flops_per_us": rates, "sectors_per_us": limits.sectors}
    facts["line"] = limits.line
    facts |= {"seeds": options.seed, "count": options.cases, "largest": largest}
    harness.finish(name, options.operator, rows, options, **facts)
