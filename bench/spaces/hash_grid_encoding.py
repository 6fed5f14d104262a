"""Points in hashed tables of any size.

Neighbours along x share a sector or lie beside each other: a point needs 2^(D-1) runs of two
entries of the L2 cache in each level that is larger than an L1 cache.
"""

import torch

import loader

from . import DTYPES, L1, Task, backward, choose, log_uniform, sectors_of
from . import size as draw_size

MOST_EAGER = {True: 1 << 24, False: 1 << 20}  # corners, on a GPU and on the CPU


def draw(random, largest):
    """Return a case as in NeRF and SDF training, and others."""
    D, levels = random.choice((2, 3, 3)), random.choice((16, 16, random.randint(1, 20)))
    features = random.choice((2, 2, 4, 8, 1, random.randint(1, 12)))
    dtype = choose(random, DTYPES)
    per = levels * features * getattr(torch, dtype).itemsize
    entries = log_uniform(random, 1 << 10, max(1 << 11, min(1 << 21, largest // (4 * per))))
    power = 1 << entries.bit_length() - 1
    return {
        "N": max(1, min(log_uniform(random, 1 << 16, largest) // per, 1 << 22)),
        "D": D,
        "L": levels,
        "T": power if random.random() < 0.8 else entries,
        "F": features,
        "dtype": dtype,
        "path": choose(random, {"uniform": 4, "rays": 4, "clustered": 2}),
        "base_resolution": random.choice((16, draw_size(random, 2, 64))),
        "per_level_scale": round(random.uniform(1.2, 2.0), 3),
    }


def points_of(case, make):
    """Return (N, D): anywhere, 64 along each of many segments, or in 16 clouds."""
    N, D = case["N"], case["D"]
    if case["path"] == "uniform":
        return torch.rand(N, D, **make)
    if case["path"] == "rays":
        ends = torch.rand(2, -(-N // 64), 1, D, **make)
        along = torch.linspace(0, 1, 64, device=make["device"])[:, None]
        return torch.lerp(*ends, along).reshape(-1, D)[:N].contiguous()
    middles, which = torch.rand(16, D, **make), torch.randint(16, (N,), **make)
    return (middles[which] + 0.02 * torch.randn(N, D, **make)).clamp_(0, 1)


def tasks(case, make):
    """Return forward, and the gradients to the table, to the points and to both."""
    options = {key: case[key] for key in ("base_resolution", "per_level_scale")}
    N, D, L, T, F = (case[key] for key in "NDLTF")
    points = points_of(case, make)
    table = (torch.rand(L, T, F, **make) * 2 - 1).to(getattr(torch, case["dtype"]))
    functions = {"loader": lambda x, table: loader.hash_grid_encoding(x, table, **options)}
    if MOST_EAGER[points.is_cuda] >= N * L * 2**D * F:
        functions["eager"] = lambda x, table: loader.hash_grid_encoding_reference(
            x, table, **options
        )
    grad_out = torch.empty(N, L * F, dtype=table.dtype, device=table.device)
    grad_out.uniform_(-1, 1, generator=make["generator"])
    entry = F * table.element_size()
    used, sectors = 0, 0
    for level in range(L):
        side = case["base_resolution"] * case["per_level_scale"] ** level + 1
        entries = min(T, side**D)
        used += min(entries, N * 2**D) * entry
        if case["path"] == "uniform" and entries * entry > L1:
            sectors += N * 2 ** (D - 1) * sectors_of(2 * entry, entry)
    places, out = points.numel() * 4, grad_out.numel() * table.element_size()
    flops = 2 * grad_out.numel() * 2**D

    def back(*wanted):
        return {
            who: backward(f, [points, table], [*wanted], grad_out) for who, f in functions.items()
        }

    whole = table.numel() * table.element_size()
    forward = {who: lambda f=f: f(points, table) for who, f in functions.items()}
    return {
        "forward": Task(forward, used + places + out, flops, sectors),
        "backward to table": Task(back(1), whole + places + out, flops, sectors),
        "backward to points": Task(back(0), used + 2 * places + out, flops, sectors),
        "backward to both": Task(
            back(0, 1), used + whole + 2 * places + out, 2 * flops, 2 * sectors
        ),
    }
