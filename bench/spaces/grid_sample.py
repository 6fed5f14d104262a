"""Images and volumes, sampled along paths as people sample them.

Random gathers: a cell's neighbours along x lie side by side; a point needs 2^(D-1) such runs of the
L2 cache, with channels first of each channel, where the input is larger than an L1 cache.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

import loader

from . import L1, Task, choose, log_uniform, sectors_of
from . import backward as run_backward
from . import size as draw_size

DTYPES = {"float32": 8, "float16": 5, "bfloat16": 3, "float64": 1}
PATHS = {"warp": 6, "rays": 4, "uniform": 4, "clustered": 2, "outliers": 2}
REACH = {"bilinear": 2, "nearest": 1, "bicubic": 4}


def draw(random, largest):
    """Return a case; three channels and one are frequent, as among people's images."""
    D = random.choice((2, 2, 2, 3, 3))
    dtype = choose(random, DTYPES)
    C = random.choice((1, 3, 3)) if random.random() < 0.4 else draw_size(random, 1, 96)
    per = C * getattr(torch, dtype).itemsize
    batch = random.choice((1, 1, 1, draw_size(random, 1, 32)))
    pixels, points = (
        max(4, min(log_uniform(random, 1 << 14, largest) // per, 1 << 25) // batch)
        for _ in range(2)
    )
    path = choose(random, PATHS)
    if path == "warp" and random.random() < 0.6:
        points = pixels  # as many as there are: registration, distortion
    sides = [math.exp(random.uniform(-0.5, 0.5)) for _ in range(D)]
    scale = (pixels / math.prod(sides)) ** (1 / D)
    mode = choose(random, {"bilinear": 14, "nearest": 3, "bicubic": 3 if D == 2 else 0})
    return {
        "input": [batch, C, *(max(1, round(scale * side)) for side in sides)],
        "points": points,
        "path": path,
        "dtype": dtype,
        "mode": mode,
        "padding_mode": random.choice(("zeros", "zeros", "border", "reflection")),
        "align_corners": random.random() < 0.4,
        "layout": choose(random, {"channels last": 8, "channels first": 8, "a slice": 2}),
        "turn": round(random.uniform(0.02, 0.6), 3),
    }


def grid_of(case, make):
    """Return (N, [Do,] Ho, Wo, D): a smooth warp in rows and columns, rays, or no order."""
    batch, _, *sizes = case["input"]
    D, points = len(sizes), case["points"]
    sides = [max(1, round(n * (points / math.prod(sizes)) ** (1 / D))) for n in sizes]
    if case["path"] in ("warp", "outliers"):
        ticks = [torch.linspace(-1, 1, n, device=make["device"]) for n in sides]
        places = torch.stack(torch.meshgrid(*ticks, indexing="ij")[::-1], -1)
        turned, (a, b) = places.clone(), (math.cos(case["turn"]), math.sin(case["turn"]))
        turned[..., 0] = a * places[..., 0] + b * places[..., 1]
        turned[..., 1] = a * places[..., 1] - b * places[..., 0]
        turned += 0.03 * torch.sin(7 * places.flip(-1))
        if case["path"] == "outliers":
            far = torch.rand(turned.shape[:-1], **make) < 1e-3
            turned[far] = 4 * torch.rand(int(far.sum()), D, **make) - 2
        return 0.95 * turned.expand(batch, *turned.shape).contiguous()
    shape = (batch, *[1] * (D - 2), max(1, points // 64), 64)
    if case["path"] == "rays":
        ends = torch.rand(2, *shape[:-1], 1, D, **make) * 2 - 1
        return torch.lerp(*ends, torch.linspace(0, 1, 64, device=make["device"])[:, None])
    grid = torch.rand(*shape, D, **make) * 2 - 1
    if case["path"] == "clustered":  # about the middles of 16 clouds
        middles = torch.rand(16, D, **make) * 2 - 1
        which = torch.randint(16, shape, **make)
        grid = middles[which] + 0.05 * torch.randn(*shape, D, **make)
    return grid


def input_of(case, make):
    """Return the input in the layout of the case."""
    x = torch.empty(case["input"], dtype=getattr(torch, case["dtype"]), device=make["device"])
    x.uniform_(-1, 1, generator=make["generator"])
    if case["layout"] == "channels last":
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return x.contiguous(memory_format=formats[x.dim()])
    if case["layout"] == "a slice":
        room = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
        return room[..., 2:-1].copy_(x)
    return x


def reached(case, grid):
    """Return how many pixels have a part in any of the samples."""
    batch, _, *sizes = case["input"]
    ones = torch.ones(batch, 1, *sizes, device=grid.device, requires_grad=True)
    options = case["mode"], case["padding_mode"], case["align_corners"]
    F.grid_sample(ones, grid.float(), *options).sum().backward()
    return int((ones.grad != 0).sum())


def by_torch(x, grid, options):
    """PyTorch's own; on the CPU in float32, since in 16 bits it writes outside of its buffers."""
    if x.is_cuda or x.element_size() > 2:
        return F.grid_sample(x, grid, *options)
    return F.grid_sample(x.float(), grid.float(), *options).to(x.dtype)


def check(case, function, x, grid, grad_out, options):
    """Raise where values or gradients are far from PyTorch's in float64, by their norms.

    Far, because a last bit of a place decides which pixel is nearest and on which side of a pixel
    the slope is taken, of one point or two; and because sums in 16 bits lose small terms. Of a
    warp a whole plane of points may lie so: slopes may be those of PyTorch in float32 instead.
    """
    double = [t.double() for t in (x, grid)]
    peer = partial(by_torch, options=options)
    found = function(x, grid), *run_backward(function, [x, grid], [0, 1], grad_out)()
    expected = peer(*double), *run_backward(peer, double, [0, 1], grad_out.double())()
    points = grid.numel() // grid.shape[-1]
    for what, ours, theirs in zip(("out", "input", "grid"), found, expected, strict=True):
        most = max(1e-3, 4 * torch.finfo(x.dtype).eps)
        if case["mode"] == "nearest" or what == "grid":
            most = 0.1 + 2 / points**0.5
        elif what == "input" and x.is_cuda and x.element_size() == 2:
            most = 0.3
        off = (ours.double() - theirs).norm().item()
        if what == "grid" and off > most * theirs.norm().item() and x.dtype != torch.float64:
            single = [t.float() for t in (x, grid)]
            (slopes,) = run_backward(peer, single, [1], grad_out.float())()
            off = (ours.double() - slopes.double()).norm().item()
        if not off <= most * theirs.norm().item():
            raise AssertionError(f"{case}: {what} is off by {off:.1e} of {theirs.norm():.1e}")


def tasks(case, make):
    """Return forward, and the gradients to the input, to the grid and to both."""
    options = case["mode"], case["padding_mode"], case["align_corners"]
    x, grid = input_of(case, make), grid_of(case, make)
    used = reached(case, grid) * x.shape[1] * x.element_size()
    grid = grid.to(x.dtype)
    functions = {
        "loader": lambda x, grid: loader.grid_sample(x, grid, *options),
        "F.grid_sample": lambda x, grid: by_torch(x, grid, options),
    }
    grad_out = torch.empty_like(functions["loader"](x, grid))
    grad_out.uniform_(-1, 1, generator=make["generator"])
    check(case, functions["loader"], x, grid, grad_out, options)
    D, C, s = grid.shape[-1], x.shape[1], x.element_size()
    places, out = grid.numel() * s, grad_out.numel() * s
    points, whole, reach = grid.numel() // D, x.numel() * s, REACH[case["mode"]]
    flops = 2 * grad_out.numel() * reach**D
    sectors = 0
    if case["path"] == "uniform" and whole > L1:
        last = case["layout"] == "channels last"
        run = reach * s * (C if last else 1)
        sectors = points * reach ** (D - 1) * sectors_of(run, s) * (1 if last else C)

    def back(*wanted):
        return {
            who: run_backward(f, [x, grid], [*wanted], grad_out) for who, f in functions.items()
        }

    forward = {who: lambda f=f: f(x, grid) for who, f in functions.items()}
    found = {
        "forward": Task(forward, used + places + out, flops, sectors),
        "backward to input": Task(back(0), whole + places + out, flops, sectors),
        "backward to both": Task(
            back(0, 1), used + whole + 2 * places + out, 2 * flops, 2 * sectors
        ),
    }
    if case["mode"] != "nearest":  # whose gradient to the grid is nothing
        found["backward to grid"] = Task(back(1), used + 2 * places + out, flops, sectors)
    return found
