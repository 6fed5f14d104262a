"""Cases of `loader.distributed.sample_sharded` and `encode_sharded`, as each rank runs them."""

import os
import random
import signal
import warnings

import torch
import torch.distributed as dist
from ranks import mesh
from torch.testing import assert_close

import loader

FAR = float("nan"), float("inf"), -float("inf"), 1e30, -7.3, 40.0


def draw(seed: int, world: int) -> dict:
    """A case drawn at random."""
    dice = random.Random(seed)
    axes = dice.choice((2, 3))
    sizes = [dice.randint(1, 9) for _ in range(axes)]
    dim = dice.randrange(axes)
    sizes[dim] = dice.randint(1, 24)
    ends = sorted(dice.randint(0, sizes[dim]) for _ in range(world - 1))
    return {
        "sizes": sizes,
        "rows": [b - a for a, b in zip([0, *ends], [*ends, sizes[dim]], strict=True)],
        "dim": dim + 2,
        "images": dice.choice((1, 1, 2)),
        "channels": dice.choice((1, 3, 4, 5, 16)),
        "dtype": dice.choice(("float32", "float64", "float16", "bfloat16")),
        "grid_dtype": dice.choice(("float32", "float32", "float64", "float16")),
        "mode": dice.choice(("nearest", "bilinear", "bicubic")),
        "padding": dice.choice(("zeros", "border", "reflection")),
        "corners": dice.random() < 0.5,
        "last": dice.random() < 0.5,
        "counts": [dice.choice((0, 1, 17, 200)) for _ in range(world)],
        "spread": dice.choice((0.9, 1.3, 3.0)),
        "one_place": dice.random() < 0.2,
        "strange": dice.random() < 0.3,
        "needs": dice.choice(((1, 1), (1, 0), (0, 1))),
        "limit": dice.choice((1 << 30, 1 << 30, 20000)),
        "seed": seed,
    }


def points_of(case: dict, rank: int, world: int):
    """A rank's points: on whole pixels, between, beyond; and what arrives for their values."""
    make = torch.Generator().manual_seed(case["seed"] * 64 + rank + 1)
    axes, n = len(case["sizes"]), case["counts"][rank]
    shape = case["images"], *[1] * (axes - 1), n, axes
    grid = (torch.rand(shape, generator=make, dtype=torch.float64) * 2 - 1) * case["spread"]
    sizes = torch.tensor(case["sizes"][::-1], dtype=torch.float64)
    whole = ((grid + 1) * sizes / 2).round()
    step = (sizes - 1).clamp(min=1)
    on_pixels = whole / step * 2 - 1 if case["corners"] else (whole * 2 + 1) / sizes - 1
    grid = torch.where(torch.rand(shape, generator=make) < 0.2, on_pixels, grid)
    if case["one_place"]:
        grid = grid * 0.01 + 0.5
    grid = grid.to(getattr(torch, case["grid_dtype"]))
    if case["strange"] and n > 6 and case["mode"] != "bicubic":
        for k, x in enumerate(FAR):
            grid[:, ..., k, k % axes] = torch.tensor(x).to(grid.dtype)  # or float16 refuses 1e30
    weights = torch.randn(case["images"], case["channels"], *shape[1:-1], generator=make)
    return grid, weights.to(getattr(torch, case["dtype"]))


def check(case: dict, world: int, device="cpu", here=None) -> None:
    """Compare with `grid_sample` of the whole: values, and both gradients."""
    if (here := here or mesh(world)) is None:
        return
    rank = dist.get_rank()
    make = torch.Generator().manual_seed(case["seed"])
    shape = case["images"], case["channels"], *case["sizes"]
    volume = torch.randn(shape, generator=make, dtype=torch.float64)
    volume = volume.to(device, getattr(torch, case["dtype"]))
    if case["last"]:
        last = torch.channels_last if volume.dim() == 4 else torch.channels_last_3d
        volume = volume.contiguous(memory_format=last)
    options = case["mode"], case["padding"], case["corners"]
    parts = volume.split(case["rows"], case["dim"])
    shard = parts[rank].clone().requires_grad_(bool(case["needs"][0]))
    every = [[x.to(device) for x in points_of(case, r, world)] for r in range(world)]
    grid, weights = every[rank]
    grid = grid.clone().requires_grad_(bool(case["needs"][1]))
    out = loader.distributed.sample_sharded(
        shard, grid, here, *options, dim=case["dim"], limit=case["limit"]
    )
    out.backward(weights)
    whole = volume.requires_grad_()
    grids = torch.cat([g for g, _ in every], -2).requires_grad_()
    expected = loader.grid_sample(whole, grids, *options)
    summed = torch.cat([w for _, w in every], -1)
    expected.backward(summed, retain_graph=True)
    at = sum(case["counts"][:rank])
    mine = slice(at, at + case["counts"][rank])
    eps = torch.finfo(volume.dtype).eps
    near = {"rtol": 4 * eps, "atol": 4 * eps, "equal_nan": True}
    if case["mode"] == "nearest":
        near |= {"rtol": 0, "atol": 0}
    assert_close(out, expected[..., mine], **near)
    if case["needs"][1]:
        eps = max(eps, torch.finfo(grid.dtype).eps)
        scale = max(case["sizes"]) * case["channels"] * 8
        assert_close(
            grid.grad, grids.grad[..., mine, :], rtol=8 * eps, atol=scale * eps, equal_nan=True
        )
    if case["needs"][0]:
        begin = sum(case["rows"][:rank])
        wanted = whole.grad.narrow(case["dim"], begin, case["rows"][rank])
        eps = torch.finfo(volume.dtype).eps  # sums in another order, of parts rounded each
        (sizes,) = torch.autograd.grad(expected, whole, summed.abs())  # of what is summed
        most = max(1.0, float(sizes.double().nan_to_num(0).abs().max()))
        assert_close(shard.grad, wanted, rtol=8 * eps, atol=8 * eps * most, equal_nan=True)


def draws(seed: int, count: int, world: int, device="cpu") -> None:
    """Check cases drawn at random, all of them, so that ranks stay in step; raise what was found."""
    wrong = []
    for number in range(seed, seed + count):
        case = draw(number, world)
        try:
            with torch.device("cpu"):  # where all are drawn
                check(case, world, device)
        except Exception as error:
            wrong.append(f"{error}\nof seed {number}, {world} ranks: {case}")
    assert not wrong, f"{len(wrong)} of {count}: {wrong[0]}"


def encode(
    levels: list[int], counts: list[int], dtype: str, seed: int, needs=(1, 1), device="cpu"
) -> None:
    """Compare `encode_sharded` with `hash_grid_encoding` with the whole table."""
    if (here := mesh(len(levels))) is None:
        return
    rank, make = dist.get_rank(), torch.Generator(device).manual_seed(seed)
    drawn = {"generator": make, "device": device}
    table = torch.randn(sum(levels), 600, 3, **drawn).to(getattr(torch, dtype))
    options = {"base_resolution": 5, "per_level_scale": 1.45}
    every = [torch.rand(n, 3, **drawn).double() for n in counts]
    weights = torch.randn(sum(counts), 3 * sum(levels), **drawn).to(table.dtype)
    shard = table.split(levels)[rank].clone().requires_grad_(bool(needs[1]))
    points = every[rank].clone().requires_grad_(bool(needs[0]))
    out = loader.distributed.encode_sharded(points, shard, here, **options)
    whole, whole_points = table.requires_grad_(), torch.cat(every).requires_grad_()
    expected = loader.hash_grid_encoding(whole_points, whole, **options)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    assert torch.equal(out, expected[mine])
    out.backward(weights[mine])
    expected.backward(weights)
    if needs[0]:
        eps, wanted = torch.finfo(table.dtype).eps, whole_points.grad[mine]
        most = float(wanted.abs().max()) if len(wanted) else 0.0
        assert_close(points.grad, wanted, rtol=0, atol=4 * eps * most)  # one rounding a rank
    if needs[1]:
        found, wanted = shard.grad, whole.grad.split(levels)[rank]
        if device == "cpu":
            assert torch.equal(found, wanted)
        else:  # sums in no certain order
            eps, most = (
                torch.finfo(table.dtype).eps,
                float(wanted.abs().max()) if len(wanted) else 0,
            )
            assert_close(found, wanted, rtol=0, atol=8 * eps * most)


def compiled() -> None:
    """A graph that is broken around it gives the same."""
    here = mesh(4)
    volume = torch.randn(1, 2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    grid = torch.rand(1, 1, 1, 50, 3) * 2 - 1

    def loss(volume):
        return loader.distributed.sample_sharded(volume * 2, grid, here).sin().sum()

    found = []
    for way in (loss, torch.compile(loss, backend="eager")):
        shard = volume.clone().requires_grad_()
        with warnings.catch_warnings():  # dynamo looks at .grad of what is no leaf
            warnings.simplefilter("ignore", UserWarning)
            way(shard).backward()
        found.append(shard.grad)
    assert torch.equal(*found)


def refuse(wrong: str, world: int) -> str:
    """Call with a fault that one rank has; what this rank raises."""
    here, two = mesh(world), mesh(2, world // 2)  # made by all ranks, as each has to be
    if here is None:
        return ""
    rank = dist.get_rank()
    volume, grid, more = torch.ones(1, 2, 6, 5, 4), torch.zeros(1, 1, 1, 9, 3), {}
    if rank == 1:
        match wrong:
            case "channels":
                volume = volume[:, :1]
            case "dtype":
                volume = volume.double()
            case "missing":
                volume = None
            case "grid":
                grid = grid[..., :2]
            case "mode":
                more["mode"] = "cubic"
            case "other mode":
                more["mode"] = "nearest"
            case "device":
                grid = grid.to("meta")
            case "gradient":
                volume.requires_grad_()
            case "limit":
                more["limit"] = 999
    if wrong == "small limit":
        grid, more["limit"] = torch.rand(1, 1, 1, 9, 3) * 2 - 1, 100
    if wrong == "no rows":
        volume = volume[:, :, :0]
    if wrong == "two dimensions":
        here = two
    if wrong == "no mesh":
        here = dist.group.WORLD
    try:
        loader.distributed.sample_sharded(volume, grid, here, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def outsider() -> str:
    """Call with a mesh that this rank is not in."""
    from torch.distributed.device_mesh import DeviceMesh

    here = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        return ""
    try:
        loader.distributed.sample_sharded(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 1, 2), here)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def abandoned() -> None:
    """Call again and again, until rank 1 is killed."""
    here = mesh(2)
    for call in range(1000):
        if call == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1, 2, 6, 5, 4, requires_grad=True)
        grid = torch.rand(1, 1, 1, 99, 3) * 2 - 1
        loader.distributed.sample_sharded(x, grid, here).sum().backward()


def skewed(limit: int) -> int:
    """Sample points that all lie in rank 0's rows; the most bytes that an exchange has here."""
    here, most = mesh(4), 0
    real = dist.all_to_all_single

    def measured(out, x, *arguments, **named):
        nonlocal most
        most = max(most, out.nbytes + x.nbytes)
        return real(out, x, *arguments, **named)

    shard = torch.ones(1, 2, 2, 3, 3, requires_grad=True)
    grid = torch.rand(1, 1, 1, 3000, 3) * 0.1
    grid[..., 2] = -0.9
    dist.all_to_all_single = measured
    try:
        out = loader.distributed.sample_sharded(shard, grid.requires_grad_(), here, limit=limit)
        out.sum().backward()
    finally:
        dist.all_to_all_single = real
    return most


def absent() -> str:
    """Rank 1 does not call; what rank 0 raises once the group's time-out is over."""
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() != 0:
        return ""
    here = DeviceMesh.from_group(group, "cpu")
    try:
        loader.distributed.sample_sharded(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 1, 2), here)
    except RuntimeError as error:
        return str(error)
    return "nothing"
