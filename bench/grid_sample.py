"""How far is grid_sample from the traffic that must move, and how does F.grid_sample compare?

Bytes that must move for P points of D coordinates of g bytes and C channels of s bytes: forward
P (D g + C s) + V C s, where V counts the voxels that any point reaches; backward to both
P (2 D g + C s) + V C s, and all voxels written once. Random points share no sector, so that each
moves 2^D rows of C s bytes, in sectors of 32 bytes, through the L2 cache: more than counted here.
Peers: F.grid_sample, the input with channels first and last; for images its forward under
torch.compile, which makes a kernel of it (of volumes, and backward, torch.compile calls the same
kernels); the eager reference where it is small enough; on the CPU scipy.ndimage.map_coordinates.
Limits: a copy of as many bytes, and the bandwidth of a large copy. Not float16 on the CPU, where
F.grid_sample rounds the places of the pixels to float16 and its values are wrong.
"""

import math
from functools import partial
from statistics import geometric_mean

import torch
import torch._functorch.config
import torch.nn.functional as F

import harness
import loader

M = 1 << 20
# C, sizes of the input, points, their order
CASES = [
    (C, (side,) * 3, points, order)
    for C, side in ((16, 128), (32, 128), (4, 256))
    for points in (M, 4 * M)
    for order in ("random", "rays")
] + [(C, (2048, 2048), 4 * M, order) for C in (3, 64) for order in ("random", "warp")]
CPU_CASES = [
    (C, (side,) * 3, points, order)
    for C, side, points in ((16, 64, 1 << 16), (16, 128, 1 << 18), (4, 128, 1 << 18))
    for order in ("random", "rays")
] + [(C, (512, 512), 1 << 18, order) for C in (3, 64) for order in ("random", "warp")]
DTYPES = [torch.float32, torch.float16]
LAYOUTS = ("channels last", "channels first")
OURS, THEIRS = [[f"{name}, {x}" for x in LAYOUTS] for name in ("loader", "F.grid_sample")]
MOST_EAGER = {"cuda": 1 << 25, "cpu": 1 << 20}  # elements of the output


def points_of(D, points, order, make):
    """(1, ..., D): anywhere; along rays through the volume; or a turned image."""
    if order == "random":
        shape = (1, 1, 1) if D == 3 else (1, math.isqrt(points))
        return torch.rand(*shape, points // math.prod(shape), D, **make) * 2 - 1
    side = math.isqrt(points)
    ticks = torch.linspace(-1, 1, side, device=make["device"])
    if order == "warp":
        y, x = torch.meshgrid(ticks, ticks, indexing="ij")
        turn = 0.2
        y, x = math.cos(turn) * y + math.sin(turn) * x, math.cos(turn) * x - math.sin(turn) * y
        return 0.9 * torch.stack([x, y], -1)[None]
    ends = torch.rand(2, side, 1, D, **make) * 2 - 1
    return torch.lerp(*ends, (ticks[:, None] + 1) / 2).reshape(1, 1, 1, -1, D)


def input_of(C, sizes, dtype, layout, make):
    """(1, C, ...) in a layout."""
    last = torch.channels_last if len(sizes) == 2 else torch.channels_last_3d
    format = last if layout == "channels last" else torch.contiguous_format
    return torch.randn(1, C, *sizes, **make).to(dtype).contiguous(memory_format=format)


def reached(sizes, grid):
    """How many voxels have a weight in any of the samples."""
    ones = torch.ones(1, 1, *sizes, device=grid.device, requires_grad=True)
    F.grid_sample(ones, grid.float(), align_corners=False).sum().backward()
    return int((ones.grad != 0).sum())


def by_scipy(input, grid):
    """Sampling a volume in scipy, which takes the CPU's arrays, channel after channel."""
    from scipy import ndimage

    sizes = torch.tensor(input.shape[2:])
    places = (((grid.flatten(0, -2).flip(-1) + 1) * sizes - 1) / 2).T.numpy()
    channels = [
        torch.from_numpy(ndimage.map_coordinates(x.numpy(), places, order=1, mode="grid-constant"))
        for x in input[0]
    ]
    return torch.stack(channels).view(1, -1, *grid.shape[1:-1])


def contenders_of(inputs, grid, eager, compiled):
    """Name to (function, input); the function takes input and grid."""
    functions = {}
    for layout, input in zip(LAYOUTS, inputs, strict=True):
        functions[f"loader, {layout}"] = loader.grid_sample, input
        functions[f"F.grid_sample, {layout}"] = by_torch, input
        if compiled:
            functions[f"compile, {layout}"] = compiled, input
    if eager:
        functions["eager"] = loader.grid_sample_reference, inputs[1]
    return functions


def by_torch(input, grid):
    """PyTorch's own."""
    return F.grid_sample(input, grid, align_corners=False)


def check(functions, grid):
    """Our values and gradients at some of the points are the reference's, or it ends here.

    Of a peer that differs more than by rounding it is said.
    """
    D, middle = grid.shape[-1], grid[0].numel() // grid.shape[-1] // 2
    some = grid.flatten(1, -2)[:, middle : middle + 4096].view(1, *(1,) * (D - 1), -1, D).detach()
    work = torch.float64 if grid.dtype == torch.float32 else torch.float32
    input = functions[OURS[0]][1].detach()
    grad_out = torch.randn(1, input.shape[1], *some.shape[1:-1], device=grid.device)
    grad_out = grad_out.to(grid.dtype)
    expected = results(
        loader.grid_sample_reference, input.to(work), some.to(work), grad_out.to(work)
    )
    # A place among n voxels is rounded to n eps, and the values there with it.
    share = 8 * max(*input.shape[2:]) * torch.finfo(torch.float32).eps
    share += 32 * torch.finfo(grid.dtype).eps
    for name, (function, its_input) in functions.items():
        if name.startswith("compile"):
            continue  # for one shape only
        if not its_input.requires_grad:
            found = (function(its_input, some),)
        else:
            found = results(function, its_input.detach(), some, grad_out)
        for what, a, b in zip(("value", "grad_input", "grad_grid"), found, expected, strict=False):
            off = (a.to(work) - b).abs() / b.abs().max()
            # Where a place is rounded over a voxel's border the slope is that of the next cell.
            if what == "grad_grid":
                off = off.flatten().kthvalue(int(0.99 * off.numel())).values
            wrong = f"{name}: {what} is off by {off.max():.1e} of its range"
            assert off.max() < share or not name.startswith("loader"), wrong
            if not off.max() < share:
                print(wrong)


def results(function, input, grid, grad_out):
    """Value and both gradients."""
    input, grid = (x.detach().requires_grad_() for x in (input, grid))
    out = function(input, grid)
    return out.detach(), *torch.autograd.grad(out, (input, grid), grad_out)


def measure(case, dtype, timer, limit, compiled):
    """One row for each direction."""
    C, sizes, points, order = case
    make = {"device": timer.device, "generator": torch.Generator(timer.device).manual_seed(0)}
    grid = points_of(len(sizes), points, order, make).to(dtype).requires_grad_()
    inputs = [input_of(C, sizes, dtype, x, make).requires_grad_() for x in LAYOUTS]
    inputs[1].data.copy_(inputs[0].data)
    eager = dtype == torch.float32 and points * C <= MOST_EAGER[timer.device.type]
    functions = contenders_of(inputs, grid, eager, compiled if len(sizes) == 2 else None)
    check(functions, grid)
    grad_out = torch.randn(1, C, *grid.shape[1:-1], **make).to(dtype)
    runs = {"forward": {}, "backward to both": {}}
    for name, (function, input) in functions.items():
        runs["forward"][name] = lambda function=function, input=input: function(
            input.detach(), grid.detach()
        )
        if name.startswith("compile"):
            continue
        out = function(input, grid)
        runs["backward to both"][name] = lambda out=out, input=input: torch.autograd.grad(
            out, (input, grid), grad_out, retain_graph=True
        )
    if timer.device.type == "cpu" and len(sizes) == 3:
        runs["forward"]["scipy"] = lambda: by_scipy(inputs[1].detach(), grid.detach())
    used = reached(sizes, grid.detach()) * C
    once = grad_out.numel() + grid.numel() + used
    moved = {"forward": once, "backward to both": once + grid.numel() + inputs[0].numel()}
    for direction, contenders in runs.items():
        size = moved[direction] * grid.element_size()
        source = torch.ones(size // 2, dtype=torch.uint8, device=timer.device)
        target = torch.empty_like(source)
        contenders["copy"] = lambda target=target, source=source: target.copy_(source)
        row = {
            "operator": "grid_sample",
            "direction": direction,
            "case": f"{' x '.join(map(str, (*sizes, C)))}, {points // 1024} K points, {order}",
            "shape": [C, *sizes],
            "points": points,
            "order": order,
            "dtype": str(dtype)[6:],
            "bytes": size,
            "limit_us": size / limit,
            "us": timer(contenders),
        }
        show(row)
        yield row


def factors(row):
    """How many times as long F.grid_sample takes, for each of our layouts.

    In the same layout, and in the one that suits it best.
    """
    us = {name: times["median"] for name, times in row["us"].items()}
    best = min(us[name] for name in THEIRS)
    return {
        layout: (us[theirs] / us[ours], best / us[ours])
        for layout, ours, theirs in zip(LAYOUTS, OURS, THEIRS, strict=True)
    }


def show(row):
    """One line for a case."""
    us = {name: times["median"] for name, times in row["us"].items()}
    against = "  ".join(
        f"{layout.split()[1]} {us[ours]:.1f} us, {same:.2f}x same, {best:.2f}x best"
        for ours, (layout, (same, best)) in zip(OURS, factors(row).items(), strict=True)
    )
    others = "  ".join(
        f"{name} {time:.0f}" for name, time in us.items() if name not in (*OURS, "copy")
    )
    print(
        f"{row['direction'][:8]:<8} {row['case']:<42} {row['dtype']:<7} {against}  "
        f"copy {us['copy']:.1f} us, limit {row['limit_us']:.1f};  {others}",
        flush=True,
    )


def means(rows):
    """Direction, dtype and layout to the geometric means of `factors`."""
    groups = {}
    for row in rows:
        for layout, found in factors(row).items():
            groups.setdefault((row["direction"], row["dtype"], layout), []).append(found)
    return {
        group: [geometric_mean(column) for column in zip(*found, strict=True)]
        for group, found in groups.items()
    }


def conclude(rows):
    """Geometric means against F.grid_sample in the layout that suits it best, and the worst."""
    for (direction, dtype, layout), (same, best) in means(rows).items():
        print(
            f"{direction:<17} {dtype:<8} {layout:<15} geometric means: {best:6.2f}x "
            f"F.grid_sample's best layout, {same:6.2f}x the same"
        )
    worst = [
        (min(found), i, layout)
        for i, row in enumerate(rows)
        for layout, found in factors(row).items()
    ]
    least, i, layout = min(worst)
    row = rows[i]
    print(f"worst: {least:.2f}x, {row['direction']}, {row['case']}, {row['dtype']}, {layout}")


def table(record: dict) -> str:
    """Return our layouts, each beside F.grid_sample in the same and its best; then the means."""
    from tables import time_text, title

    rows = record["rows"]
    apart = (*OURS, *THEIRS, "copy")
    others = [n for n in dict.fromkeys(n for row in rows for n in row["us"]) if n not in apart]
    columns = [x for layout in LAYOUTS for x in (layout, "same", "best")]
    head = ["", "case", "dtype", *columns, "of a copy", *others]
    lines = [title(record), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    directions = [*dict.fromkeys(row["direction"] for row in rows)]
    for row in sorted(rows, key=lambda r: directions.index(r["direction"])):
        us = {name: times["median"] for name, times in row["us"].items()}
        cells = [row["direction"], row["case"], row["dtype"]]
        for ours, (same, best) in zip(OURS, factors(row).values(), strict=True):
            cells += [time_text(us[ours]), f"{same:.2f}x", f"{best:.2f}x"]
        ours = min(us[name] for name in OURS)
        cells.append(f"{100 * us['copy'] / ours:.0f} %")
        cells += [f"{us[name] / ours:.2f}x" if name in us else "" for name in others]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Geometric means:",
        "",
        "| | dtype | layout | same | best |",
        "|---|---|---|---|---|",
    ]
    for group, found in means(rows).items():
        lines.append("| " + " | ".join([*group, *(f"{x:.2f}x" for x in found)]) + " |")
    return "\n".join(lines) + "\n"


def main(arguments=None):
    """Run the cases and keep the results."""
    parser = harness.parser("grid_sample", 15, "every third case, no torch.compile")
    parser.add_argument("--seconds", type=float, default=0.25, help="most for all turns of one")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    timer, limit = harness.start(options)
    cases = (CASES if cuda else CPU_CASES)[:: 3 if options.quick else 1]
    compiled = None
    if not options.quick:
        compiled = torch.compile(by_torch, dynamic=False)
        torch._dynamo.config.recompile_limit = 16  # dtypes, layouts and channels of the images
    made = {
        f"{case}, {dtype}": partial(measure, case, dtype, timer, limit, compiled)
        for dtype in DTYPES[: 2 if cuda else 1]
        for case in cases
    }
    rows = harness.each("grid_sample", "grid_sample", options, made)
    conclude(rows)
    harness.finish("grid_sample", "grid_sample", rows, options, copy_bytes_per_us=limit)
