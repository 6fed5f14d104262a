"""(N, K, F) features of cells and a point in each: trilinear and bilinear interpolation."""

import torch

import loader

from . import (
    DTYPES,
    Task,
    agree,
    backward,
    choose,
    every_other,
    fetched,
    log_uniform,
    misaligned,
    padded,
)
from . import size as draw_size

LAYOUTS = {
    "plain": 10,
    "misaligned": 4,
    "rows apart": 2,  # a slice of wider rows
    "cells apart": 2,  # some corners of more
    "every other": 1,
    "corners last": 1,
}


def draw(random, largest, D):
    """Return a case: F narrow, wide or beside a power of two; N by the bytes."""
    dtype = choose(random, DTYPES)
    F = random.randint(1, 24) if random.random() < 0.3 else draw_size(random, 1, 4096)
    element = getattr(torch, dtype).itemsize
    N = max(1, log_uniform(random, 1 << 17, largest) // (2**D * F * element))
    layout = choose(random, LAYOUTS)
    shift = random.randint(1, 15) if layout in ("misaligned", "rows apart") else 0
    points = dtype if random.random() < 0.2 else "float32"
    return {
        "N": N,
        "F": F,
        "dtype": dtype,
        "points": points,
        "layout": layout,
        "shift": shift,
        "grad": choose(random, {"plain": 3, "misaligned": 1}),
    }


def formula(feats, points):
    """The interpolation as one writes it by hand in eager PyTorch."""
    axes = [x.to(feats.dtype) for x in ((points + 1) / 2).unbind(-1)]
    cells = feats.unflatten(1, (2,) * len(axes))
    if len(axes) == 2:  # of which the first is the fastest
        cells = cells.transpose(1, 2)
    for t in axes:
        share = t.view(-1, *[1] * (cells.dim() - 2))
        cells = (1 - share) * cells[:, 0] + share * cells[:, 1]
    return cells


def features(case, K, make):
    """Return (N, K, F) in the layout of the case."""
    dtype, shift = getattr(torch, case["dtype"]), case["shift"]
    plain = torch.empty(case["N"], K, case["F"], dtype=dtype, device=make["device"])
    plain.uniform_(-1, 1, generator=make["generator"])
    return {
        "plain": lambda: plain,
        "misaligned": lambda: misaligned(plain, shift),
        "rows apart": lambda: padded(plain, 2, shift // 2, shift - shift // 2),
        "cells apart": lambda: padded(plain, 1, 1, 1),
        "every other": lambda: every_other(plain),
        "corners last": lambda: plain.transpose(1, 2).contiguous().transpose(1, 2),
    }[case["layout"]]()


def read_of(case, feats):
    """Return how many bytes have to be read of it, with what shares a line of memory with them."""
    apart = case["layout"] in ("every other", "rows apart", "cells apart")
    return fetched(feats) if apart else feats.nbytes


def tasks(case, make, D, name):
    """Return forward, and the gradients to feats, to points and to both."""
    K, N, F = 2**D, case["N"], case["F"]
    feats = features(case, K, make)
    points = torch.rand(N, D, **make).mul_(2).sub_(1).to(getattr(torch, case["points"]))
    grad_out = torch.empty(N, F, dtype=feats.dtype, device=feats.device)
    grad_out.uniform_(-1, 1, generator=make["generator"])
    if case["grad"] == "misaligned":
        grad_out = misaligned(grad_out, 1)
    ours = getattr(loader, name)
    some = slice(0, 1024)
    expected = getattr(loader, f"{name}_reference")(feats[some].double(), points[some].double())
    agree(ours(feats, points)[some], expected, 16 * torch.finfo(feats.dtype).eps, case)
    read = read_of(case, feats)
    written, row, place, flops = feats.nbytes, grad_out.nbytes, points.nbytes, 2 * feats.numel()
    functions = {"loader": ours, "eager": formula}

    def back(*wanted):
        return {
            who: backward(f, [feats, points], [*wanted], grad_out) for who, f in functions.items()
        }

    forward = {who: lambda f=f: f(feats, points) for who, f in functions.items()}
    return {
        "forward": Task(forward, read + row + place, flops),
        "backward to feats": Task(back(0), written + row + place, flops),
        "backward to points": Task(back(1), read + row + 2 * place, flops),
        "backward to both": Task(back(0, 1), read + written + row + 2 * place, 2 * flops),
    }
