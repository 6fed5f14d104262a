"""How close are trilinear and bilinear interpolation to the speed of memory, and to their peers?

Bytes that must move, for (N, F) and K corners, s bytes to an element and 4 to a coordinate:
forward and backward to feats N (K F s + F s + 4 D), backward to both N (2 K F s + F s + 8 D).
Peers: the tutorial's kernel, eager PyTorch, torch.compile of the same formula. Limits: a copy of as
many bytes, and the bandwidth of a large copy.
"""

from functools import partial
from pathlib import Path

import torch
import torch._functorch.config

import harness
import loader

CASES = [(65536, 256), (1 << 20, 32), (1 << 22, 4), (65536, 8)]
CPU_CASES = [(65536, 32), (65536, 256), (1 << 20, 4), (65536, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPERATORS = {"trilinear_interpolation": 3, "bilinear_interpolation": 2}


def tutorial_formula(feats, points):
    """Trilinear interpolation as one writes it by hand in eager PyTorch."""
    u, v, w = ((points + 1) / 2).to(feats.dtype)[:, None].unbind(-1)
    a, b, c, d = (1 - v) * (1 - w), (1 - v) * w, v * (1 - w), v * w
    f = feats.unbind(1)
    near = a * f[0] + b * f[1] + c * f[2] + d * f[3]
    return (1 - u) * near + u * (a * f[4] + b * f[5] + c * f[6] + d * f[7])


def textbook_formula(feats, points):
    """Bilinear interpolation as one writes it by hand in eager PyTorch."""
    u, v = ((points + 1) / 2).to(feats.dtype)[:, None].unbind(-1)
    f = feats.unbind(1)
    return (1 - u) * (1 - v) * f[0] + u * (1 - v) * f[1] + (1 - u) * v * f[2] + u * v * f[3]


def tutorial_kernel():
    """The tutorial's extension, built the ordinary way."""
    from torch.utils.cpp_extension import load

    return load("tutorial", [str(Path(__file__).parent / "peers" / "tutorial.cu")])


def measure(operator, D, N, F, dtype, timer, tutorial, limit):
    """One row for each direction."""
    generator = torch.Generator(timer.device).manual_seed(0)
    make = dict(device=timer.device, generator=generator)
    feats = torch.randn(N, 2**D, F, **make).to(dtype).requires_grad_()
    points = (torch.rand(N, D, **make) * 2 - 1).requires_grad_()
    grad_out = torch.randn(N, F, **make).to(dtype)
    formula = tutorial_formula if D == 3 else textbook_formula
    torch.compiler.reset()
    functions = {
        "loader": getattr(loader, operator),
        "eager": formula,
        "compile": torch.compile(formula, dynamic=False),
    }
    check(functions, feats, points, getattr(loader, operator + "_reference"))
    runs = {"forward": {}, "backward to feats": {}, "backward to both": {}}
    for name, function in functions.items():
        runs["forward"][name] = lambda function=function: function(feats.detach(), points.detach())
        for direction, leaves in (
            ("backward to feats", (feats,)),
            ("backward to both", (feats, points)),
        ):
            out = function(feats, points if len(leaves) == 2 else points.detach())
            runs[direction][name] = lambda out=out, leaves=leaves: torch.autograd.grad(
                out, leaves, grad_out, retain_graph=True
            )
    if tutorial:
        runs["forward"]["tutorial"] = lambda: tutorial.fw(feats.detach(), points.detach())
        runs["backward to feats"]["tutorial"] = lambda: tutorial.bw(grad_out, points.detach())
    once = N * (F * feats.element_size() * (2**D + 1) + 4 * D)
    both = N * (F * feats.element_size() * (2 * 2**D + 1) + 8 * D)
    for direction, contenders in runs.items():
        size = both if direction == "backward to both" else once
        source = torch.ones(size // 2, dtype=torch.uint8, device=timer.device)
        target = torch.empty_like(source)
        contenders["copy"] = lambda target=target, source=source: target.copy_(source)
        times = timer(contenders)
        row = {
            "operator": operator,
            "direction": direction,
            "N": N,
            "F": F,
            "dtype": str(dtype)[6:],
            "bytes": size,
            "limit_us": size / limit,
            "us": times,
        }
        show(row)
        yield row


def check(functions, feats, points, reference):
    """Every contender agrees with the reference before it is timed."""
    some = slice(0, 4096)
    expected = reference(feats[some].double(), points[some].double())
    eps = torch.finfo(feats.dtype).eps
    for name, function in functions.items():
        worst = (function(feats[some], points[some]).double() - expected).abs().max().item()
        assert worst < 200 * eps, f"{name} is off by {worst}"


def show(row):
    """One line for a case."""
    us = {name: times["median"] for name, times in row["us"].items()}
    ours = us["loader"]
    peers = "  ".join(f"{us[n] / ours:.2f}x {n}" for n in us if n not in ("loader", "copy"))
    print(
        f"{row['operator'][:9]} {row['direction']:<17} N={row['N']:<8} F={row['F']:<4}"
        f"{row['dtype']:<9}{ours:9.1f} us {row['bytes'] / 1e6:7.0f} MB "
        f"{row['bytes'] / ours / 1e6:6.3f} TB/s {100 * us['copy'] / ours:4.0f} % of a copy as large"
        f" {100 * row['limit_us'] / ours:4.0f} % of a large copy  {peers}",
        flush=True,
    )


def main(arguments=None):
    """Run the cases of each operator and keep its results."""
    parser = harness.parser("interpolation", 30, "float32, no tutorial kernel")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=[*OPERATORS])
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    timer, limit = harness.start(options)
    for operator in options.operators:
        with_tutorial = cuda and operator == "trilinear_interpolation" and not options.quick
        tutorial = tutorial_kernel() if with_tutorial else None
        cases = {
            f"{N} x {F}, {dtype}": partial(
                measure, operator, OPERATORS[operator], N, F, dtype, timer, tutorial, limit
            )
            for dtype in DTYPES[: 1 if options.quick else 3]
            for N, F in (CASES if cuda else CPU_CASES)
        }
        rows = harness.each(operator, operator, options, cases)
        harness.finish(operator, operator, rows, options, copy_bytes_per_us=limit)
