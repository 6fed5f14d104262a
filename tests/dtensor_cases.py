"""What tests/test_dtensor.py has ranks do: an operator on DTensors, and the same in this process."""

import random
import re

import torch
from ranks import mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import loader


def _points(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 2.2 - 1.1


def _values(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# By operator: its tensors, for sizes, and options.
MAKE = {
    "trilinear_interpolation": lambda N, F, *_: (_values(N, 8, F), _points(N, 3)),
    "bilinear_interpolation": lambda N, F, *_: (_values(N, 4, F), _points(N, 2)),
    "square": lambda N, F, H, W: (_values(N, F, H),),
    "add2": lambda N, F, H, W: (_values(N, F, H), _values(N, F, H)),
    "grid_sample": lambda N, F, H, W: (_values(N, F, H, W), _points(N, W, H, 2)),
    "grid_sample_volume": lambda N, F, H, W: (_values(N, F, H, 3, W), _points(N, 5, W, H, 3)),
    "apply_lut3d": lambda N, F, H, W: (torch.rand(N, H, 3).double(), _values(4, 4, 4, 3)),
    "hash_grid_encoding": lambda N, F, H, W: (torch.rand(N, 3).double(), _values(H, 64, F)),
    "hash_grid_encoding_even": lambda N, F, *_: (torch.rand(N, 2).double(), _values(4, 64, F)),
    "convolve2d": lambda N, F, H, W: (_values(N, H, W), _values(3, 2)),
    "convolve2d_one": lambda N, F, H, W: (_values(H, W), _values(2, 3)),
    "mine": lambda N, F, *_: (_values(N, F), _values(N)),
}
OPTIONS = {
    "grid_sample": lambda draw: (
        draw.choice(["bilinear", "nearest", "bicubic"]),
        draw.choice(["zeros", "border", "reflection"]),
        draw.random() < 0.5,
    ),
    "apply_lut3d": lambda draw: (draw.choice(["trilinear", "tetrahedral"]),),
    "convolve2d": lambda draw: (
        draw.choice(["same", "full", "valid"]),
        draw.choice(["zero", "reflect", "nearest"]),
    ),
}
OPTIONS |= {"grid_sample_volume": OPTIONS["grid_sample"], "convolve2d_one": OPTIONS["convolve2d"]}


@loader.operator(name="dtensor_cases::mine", sharding="(N, _), (N) -> (N, _)")
def mine(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of x to sum 1, and weighed."""
    return x.softmax(1) * weight[:, None]


def operator(name: str):
    """The public function of a row of MAKE."""
    if name == "mine":
        return mine
    return getattr(loader, re.sub("_(volume|one|even)$", "", name))


def arguments(name: str, seed: int):
    """Tensors and options of a case, the same in every rank; few sizes are divided by ranks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [draw.randint(4, 9), draw.randint(2, 6), draw.randint(4, 6), draw.randint(4, 7)]
    tensors = MAKE[name](*sizes)
    return tensors, OPTIONS.get(name, lambda draw: ())(draw), draw


def distributed(x: torch.Tensor, on, placements) -> DTensor:
    """A DTensor that is x, of parts too that add up to it."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    found = distribute_tensor(x.detach(), on, whole)
    shares = [i for i, p in enumerate(placements) if p.is_partial()]
    if shares:
        share = 1.0
        for i in shares:
            share *= (on.get_local_rank(i) + 1) / sum(range(1, on.size(i) + 1))
        part = found.to_local() * share
        how = {"run_check": False, "shape": x.shape, "stride": x.stride()}
        found = DTensor.from_local(part, on, placements, **how)
    return found


def derivatives(function, tensors, options, weight, double: bool) -> list:
    """The result, gradients to all tensors, and where wanted gradients of these."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors, *options)
    first = torch.autograd.grad((out * weight(out)).sum(), tensors, create_graph=double)
    results = [out, *first]
    if double and any(x.requires_grad for x in first):
        total = sum((x * x).sum() for x in first if x.requires_grad)
        second = torch.autograd.grad(total, tensors, allow_unused=True)
        results += [x for x in second if x is not None]
    return results


def _weight(out):
    torch.manual_seed(1)
    whole = _values(*out.shape)
    if not isinstance(out, DTensor):
        return whole
    return distribute_tensor(whole, out.device_mesh, [Replicate()] * out.device_mesh.ndim)


def compare(name: str, seed: int, sizes: tuple, placements=None, double=True, function=None):
    """Compare an operator on DTensors with the same in one process.

    Returns: as text, the placements of arguments, of result and gradients; and how many collectives
    the forward took. None in a rank outside of the mesh.
    """
    on = mesh(*sizes)
    tensors, options, draw = arguments(name, seed)
    if on is None:
        return None
    if placements is None:
        placements = [[_drawn(draw, x) for _ in sizes] for x in tensors]
    function = function or operator(name)
    expected = derivatives(function, tensors, options, _weight, double)
    parts = [distributed(x, on, p) for x, p in zip(tensors, placements, strict=True)]
    communication = CommDebugMode()
    if function is operator(name):  # under which torch.compile compiles nothing
        with communication:
            function(*parts, *options)
    found = derivatives(function, parts, options, _weight, double)
    assert all(isinstance(x, DTensor) for x in found)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.full_tensor(), y, msg=lambda m: f"{name} {placements}: {m}")
    shown = [" ".join(map(_letters, x.placements)) for x in (*parts, *found)]
    return shown, communication.get_total_counts()


def _letters(placement) -> str:
    return {"R": "R", "P": "P"}.get(str(placement)[0], f"S{getattr(placement, 'dim', '')}")


def _drawn(draw, x):
    kinds = [Replicate(), Partial(), *map(Shard, range(x.dim()))]
    return draw.choice(kinds)


def drawn(name: str, seeds: range, double: bool, meshes=((2,), (4,), (2, 2), (1,))) -> int:
    """Compare at random: sizes, placements, options, meshes; the number of those that had parts."""
    count = 0
    for seed in seeds:
        sizes = random.Random(seed).choice(meshes)
        found = compare(name, seed, sizes, double=double)
        count += found is not None and any("S" in x for x in found[0])
    return count


def compiled(name: str, sizes: tuple, placements) -> bool:
    """The same under torch.compile, forward and backward, in one graph."""
    function, on = operator(name), mesh(*sizes)
    if on is None:
        return False
    torch._dynamo.reset()
    graph = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    compare(name, 3, sizes, placements, double=False, function=graph)
    return True


def transformed() -> None:
    """torch.func.grad, and torch.vmap over a batch that is cut."""
    torch.manual_seed(0)
    tensors = _values(8, 3, 8, 2), _points(8, 3, 3)

    def loss(feats, points):
        return loader.trilinear_interpolation(feats.flatten(0, 1), points.flatten(0, 1)).sum()

    cases = [(torch.func.grad(loss, (0, 1)), tensors)]
    cases += [(torch.vmap(loader.trilinear_interpolation), tensors)]
    images, grids = torch.rand(8, 2, 3, 5, 4), torch.rand(8, 2, 6, 7, 2)
    cases += [(torch.vmap(loader.grid_sample), (images, grids))]
    cases += [(torch.vmap(loader.convolve2d), (images[:, 0], torch.rand(8, 3, 3)))]
    for function, tensors in cases:
        parts = [distribute_tensor(x, mesh(4), [Shard(0)]) for x in tensors]
        found, expected = function(*parts), function(*tensors)
        pairs = (
            zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        )
        for x, y in pairs:
            torch.testing.assert_close(x.full_tensor(), y)


def refused(sizes: tuple) -> None:
    """What raises by itself, in every rank."""
    on = mesh(*sizes)
    whole = [Replicate()]
    feats, points = _values(8, 8, 2), _points(9, 3)
    parts = distribute_tensor(feats, on, [Shard(0)]), distribute_tensor(points, on, whole)
    loader.trilinear_interpolation(*parts)


def other_mesh() -> None:
    """Arguments on two meshes."""
    feats = distribute_tensor(_values(8, 8, 2), mesh(4), [Shard(0)])
    points = distribute_tensor(_points(8, 3), mesh(2, 2), [Shard(0), Replicate()])
    loader.trilinear_interpolation(feats, points)


def mixed() -> None:
    """A plain tensor beside a DTensor."""
    feats = distribute_tensor(_values(8, 8, 2), mesh(4), [Shard(0)])
    loader.trilinear_interpolation(feats, _points(8, 3))


def die(rank: int) -> None:
    """One rank is killed, the others need its part."""
    import os
    import signal

    import torch.distributed as dist

    on = mesh(dist.get_world_size())
    x = distribute_tensor(_values(8, 3), on, [Shard(0)])
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    loader.square(x).full_tensor()
