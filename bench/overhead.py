"""What does a call cost the host, where there is next to nothing to compute?

Every operator with a few elements, beside `x + x` and F.grid_sample: without a gradient wanted,
with one (a graph is made), and the backward of both inputs, by torch.autograd.grad. All take turns
in one run; a turn is a number of calls one after the other, timed by the host's clock, and a GPU
is waited for between turns. `by Python`: what serves until the C++ of jit/operators/node.py is
there, and everything unusual always.

And in a function that torch.compile (inductor) has compiled, where torch's own entry comes on top:
of one call, and by how much each of eight further ones, on tensors of their own, prolongs it.
Inductor writes `x + x` and F.grid_sample of images out in C++ of its own; of volumes it calls the
operator, as it calls ours.
"""

import statistics
import time
import types

import torch
import torch.nn.functional as F

import harness
import loader
from loader.jit.operators.node import NODE

CALLS = 20  # in a turn: far less than a GPU's queue takes
MORE = 8  # calls in a compiled function, beside the first
RIVALS = ("x + x", "F.grid_sample", "F.grid_sample of volumes")
STAGES = {"forward": "without a gradient", "graph": "with one", "backward": "backward"}
COMPILED = {"compiled": "compiled", "further": "each further call there"}
_OF_COMPILED = (
    '"Compiled" is a function of that one call under `torch.compile`, whose own entry takes most '
    'of it; "each further call there" is by how much eight more prolong it. Inductor makes `x + x` '
    "and `F.grid_sample` of images part of its own C++, and calls torch's operator for volumes as "
    "it calls ours."
)


def contenders(device) -> dict:
    """A function and its tensors, by name."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}

    def rand(*shape):
        return torch.rand(shape, **make)

    image, grid, x = rand(1, 1, 4, 4), rand(1, 2, 2, 2), rand(8)
    volume = rand(1, 1, 2, 2, 2), rand(1, 1, 2, 2, 3)
    return {
        "x + x": (lambda x: x + x, x),
        "F.grid_sample": (lambda *a: F.grid_sample(*a, align_corners=False), image, grid),
        "F.grid_sample of volumes": (lambda *a: F.grid_sample(*a, align_corners=False), *volume),
        "grid_sample": (lambda *a: loader.grid_sample(*a, align_corners=False), image, grid),
        "trilinear_interpolation": (loader.trilinear_interpolation, rand(2, 8, 3), rand(2, 3)),
        "bilinear_interpolation": (loader.bilinear_interpolation, rand(2, 4, 3), rand(2, 2)),
        "apply_lut3d": (loader.apply_lut3d, rand(4, 3), rand(2, 2, 2, 3)),
        "hash_grid_encoding": (loader.hash_grid_encoding, rand(2, 2), rand(1, 16, 2)),
        "convolve2d": (loader.convolve2d, rand(4, 4), rand(3, 3)),
        "square": (loader.square, x),
        "add2": (loader.add2, x, x.clone()),
    }


def stages(call, *tensors) -> dict:
    """The functions that are timed."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = call(*leaves)
    grad_out = torch.ones_like(out)
    return {
        "forward": lambda: call(*tensors),
        "graph": lambda: call(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True),
    }


def compiled(call, tensors) -> dict:
    """A compiled function of one call and one of several, each of its own calls alone."""

    def every(sets):
        return [call(*tensors) for tensors in sets]

    made = {}
    for stage, count in (("compiled", 1), ("several", 1 + MORE)):
        sets = [[x.clone() for x in tensors] for _ in range(count)]
        # By their code Dynamo knows functions, and tries all that it has compiled for one.
        copy = types.FunctionType(
            every.__code__.replace(), globals(), "every", (), every.__closure__
        )
        run = torch.compile(copy, fullgraph=True, dynamic=False)
        made[stage] = lambda run=run, sets=sets: run(sets)
    return made


def measured(device: str, turns: int) -> list[dict]:
    """Microseconds a call, of each stage and contender."""
    rows, made = [], {}
    for way, wanted in (("", True), (" by Python", False)):
        NODE.use(wanted)
        for name, (call, *tensors) in contenders(device).items():
            if wanted or name not in RIVALS:
                made[name, way] = stages(call, *tensors)
            if wanted:
                made[name, way] |= compiled(call, tensors)
    for turns_of in (("forward",), ("graph",), ("backward",), ("compiled", "several")):
        taken = {(*key, s): [] for key, runs in made.items() for s in turns_of if s in runs}
        for turn in range(-3, turns):  # the first to warm up
            for (name, way, stage), times in taken.items():
                NODE.use(not way)
                run = made[name, way][stage]
                begun = time.perf_counter()
                for _ in range(CALLS):
                    run()
                ended = time.perf_counter()
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn >= 0:
                    times.append((ended - begun) / CALLS * 1e6)
        for (name, way, stage), times in taken.items():
            cuts = statistics.quantiles(times, n=10, method="inclusive")
            us = {"median": statistics.median(times), "p10": cuts[0], "p90": cuts[-1]}
            rows.append({"name": name + way, "stage": stage, "us": us})
    NODE.use(True)
    return rows


def table(record: dict) -> str:
    """Return each contender's times, and how many times as long as F.grid_sample's they are."""
    us = {(row["name"], row["stage"]): row["us"]["median"] for row in record["rows"]}
    for name, stage in [*us]:
        if stage == "several":
            us[name, "further"] = (us[name, stage] - us[name, "compiled"]) / MORE
    has_compiled = ("x + x", "further") in us
    shown = STAGES | (COMPILED if has_compiled else {})
    lines = [
        f"Host time of one call on {record['device']} (torch {record['torch']}, "
        f"{record['threads']} thread, {record['date']}), and how many times F.grid_sample's:",
        "",
        "| | " + " | ".join(shown.values()) + " |",
        "|---" * (1 + len(shown)) + "|",
    ]
    if has_compiled:
        lines[1:1] = ["", _OF_COMPILED]
    for name in dict.fromkeys(row["name"] for row in record["rows"]):
        times = [(us.get((name, stage)), us["F.grid_sample", stage]) for stage in shown]
        cells = [f"{ours:.2f} us, {ours / theirs:.2f}x" if ours else "" for ours, theirs in times]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def main(arguments=None):
    """Measure, print and keep the results."""
    options = harness.parser("overhead", repeats=300, quick="fewer turns").parse_args(arguments)
    torch.set_num_threads(1)  # which do not take part in so little
    if error := NODE.build():
        raise error
    rows = measured(options.device, 20 if options.quick else options.repeats)
    facts = harness.circumstances(options.device, ["grid_sample"])
    path = harness.keep("overhead", options.device, facts, rows, options.results)
    print(table({**facts, "rows": rows}))
    print(f"kept in {path}")
