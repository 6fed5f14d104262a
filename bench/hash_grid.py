"""How close is hash_grid_encoding to what the caches hand out, and how do its peers compare?

What counts are 32-byte sectors: for a point and a level of D = 3, F = 2 float32 some 5, since two
corners along x share a sector in 3 of 4 cases; 1M points in 16 levels take 84M. Bytes that must
move in any case: points and out read and written once, N (4 D + L F s), and the table L T F s, as
far as points reach it. Peers: eager PyTorch and, of one volume and one image in float32 on a GPU,
where compiling takes a minute, torch.compile of the reference. Limit: a copy of these bytes.
"""

from functools import partial

import torch
import torch._functorch.config

import harness
import loader

GRIDS = {"base_resolution": 16, "per_level_scale": 1.447}
# N, D, L, T, F, the order of the points
CASES = [
    (1 << 20, 3, 16, 1 << 19, 2, "random"),
    (1 << 20, 3, 16, 1 << 19, 2, "rays"),
    (1 << 20, 3, 16, 1 << 17, 2, "random"),
    (1 << 20, 3, 8, 1 << 19, 4, "random"),
    (1 << 20, 2, 16, 1 << 19, 2, "random"),
    (1 << 17, 3, 16, 1 << 19, 2, "random"),
]
CPU_CASES = [
    (1 << 16, 3, 16, 1 << 19, 2, "random"),
    (1 << 16, 3, 16, 1 << 15, 2, "random"),
    (1 << 16, 2, 12, 1 << 14, 2, "random"),
]
COMPILED = [CASES[0], CASES[4], *CPU_CASES]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def points_of(N, D, order, make):
    """Points in the unit cube: anywhere, or 128 along each of many segments."""
    if order == "random":
        return torch.rand(N, D, **make)
    ends = torch.rand(2, N // 128, 1, D, **make)
    along = torch.linspace(0, 1, 128, device=make["device"])[:, None]
    return torch.lerp(ends[0], ends[1], along).reshape(N, D)


def reference(points, table):
    """The formula in plain PyTorch."""
    return loader.hash_grid_encoding_reference(points, table, **GRIDS)


def measure(case, dtype, timer, limit, peers):
    """One row for each direction."""
    N, D, L, T, F, order = case
    make = {"device": timer.device, "generator": torch.Generator(timer.device).manual_seed(0)}
    points = points_of(N, D, order, make)
    table = (torch.rand(L, T, F, **make) * 2 - 1).to(dtype).requires_grad_()
    grad_out = torch.randn(N, L * F, **make).to(dtype)
    functions = {"loader": lambda points, table: loader.hash_grid_encoding(points, table, **GRIDS)}
    if "eager" in peers:
        functions["eager"] = reference
    if "compile" in peers and dtype == torch.float32 and case in COMPILED:
        torch.compiler.reset()
        functions["compile"] = torch.compile(reference, dynamic=False)
    check(functions, points, table.detach())
    runs = {"forward": {}, "backward to table": {}, "backward to points": {}}
    for name, function in functions.items():
        runs["forward"][name] = lambda function=function: function(points, table.detach())
        for direction, leaf in (("backward to table", table), ("backward to points", points)):
            x = points.clone().requires_grad_() if leaf is points else points
            out = function(x, table if leaf is table else table.detach())
            wanted = table if leaf is table else x
            runs[direction][name] = lambda out=out, wanted=wanted: torch.autograd.grad(
                out, wanted, grad_out, retain_graph=True
            )
    runs["backward to table"]["deterministic"] = lambda: loader.hash_grid_encoding_bw(
        grad_out, points, table.detach(), deterministic=True, **GRIDS
    )
    size = points.numel() * 4 + (grad_out.numel() + table.numel()) * table.element_size()
    source = torch.ones(size // 2, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    for direction, contenders in runs.items():
        contenders["copy"] = lambda: target.copy_(source)
        row = {
            "operator": "hash_grid_encoding",
            "direction": direction,
            "case": f"N {N}, D {D}, L {L}, T {T}, F {F}, {order}",
            "shape": [N, D, L, T, F],
            "dtype": str(dtype)[6:],
            "bytes": size,
            "limit_us": size / limit,
            "us": timer(contenders),
        }
        show(row)
        yield row


def check(functions, points, table):
    """Every contender agrees with the reference in the first points before it is timed."""
    with torch.no_grad():
        expected = reference(points[:4096], table.float())
        for name, function in functions.items():
            # Coordinates of the finest level, some 4000, keep 2^-12 of a cell in float32.
            worst = (function(points, table)[:4096].float() - expected).abs().max().item()
            assert worst < 8 * max(torch.finfo(table.dtype).eps, 2**-12), (
                f"{name} is off by {worst}"
            )


def show(row):
    """One line for a case."""
    us = {name: times["median"] for name, times in row["us"].items()}
    ours = us["loader"]
    peers = "  ".join(f"{us[n] / ours:.2f}x {n}" for n in us if n != "loader")
    print(
        f"{row['direction']:<19} {row['case']:<46} {row['dtype']:<9}{ours:9.1f} us  {peers}",
        flush=True,
    )


def main(arguments=None):
    """Run the cases and keep the results."""
    parser = harness.parser("hash_grid", 20, "the first case, in float32")
    parser.add_argument("--peers", nargs="*", default=["eager", "compile"])
    parser.add_argument("--seconds", type=float, default=0.5, help="most for all turns of one")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    timer, limit = harness.start(options)
    cases = CASES if cuda else CPU_CASES
    made = {
        f"{case}, {dtype}": partial(measure, case, dtype, timer, limit, options.peers)
        for dtype in DTYPES[: 3 if cuda and not options.quick else 1]
        for case in cases[: 1 if options.quick else None]
    }
    rows = harness.each("hash_grid", "hash_grid_encoding", options, made)
    harness.finish("hash_grid", "hash_grid_encoding", rows, options, copy_bytes_per_us=limit)
