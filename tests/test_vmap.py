"""torch.vmap over each tensor of each operator: how many calls of the kernels it makes."""

import pytest
import torch
from battery import masks, several
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import loader

B = 3
# Shapes of a member's tensors. hash_grid_encoding's points gather more rows than a table has.
SHAPES = {
    "trilinear_interpolation": ((9, 8, 5), (9, 3)),
    "bilinear_interpolation": ((9, 4, 5), (9, 2)),
    "grid_sample": ((2, 3, 6, 7), (2, 4, 5, 2)),
    "apply_lut3d": ((6, 7, 3), (5, 5, 5, 3)),
    "convolve2d": ((8, 9), (3, 3)),
    "hash_grid_encoding": ((40, 3), (2, 64, 3)),
    "square": ((4, 5),),
    "add2": ((4, 5), (4, 5)),
}
# Calls of operator and backward with the tensors batched that are marked; of all else one each. To
# the points of tables, and to a table from each member's points, there is a call for each member.
IN_TURNS = {
    ("hash_grid_encoding", (True, False)): (1, 1 + B),
    ("hash_grid_encoding", (False, True)): (1, 1 + B),
    ("hash_grid_encoding", (True, True)): (B, B),
}
CASES = [
    (name, mask) for name, shapes in SHAPES.items() for mask in masks(len(shapes)) if any(mask)
]


class Calls(TorchDispatchMode):
    """Counts those of an operator and of its backward."""

    def __init__(self, name):
        super().__init__()
        self.names, self.counts = (f"octet::{name}", f"octet::{name}_backward"), [0, 0]

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() in self.names:
            self.counts[self.names.index(op.name())] += 1
        return op(*args, **(kwargs or {}))


def arguments(name, mask, device):
    """Tensors, of which those marked are batches; places lie inside."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    shapes = zip(SHAPES[name], mask, strict=True)
    return [torch.rand(*(B,) * many, *shape, **make) * 0.9 for shape, many in shapes]


@pytest.mark.parametrize("name, mask", CASES, ids=str)
def test_a_batch_is_one_call(name, mask, device):
    """Forward and all gradients of members that share a tensor or share none, and their values."""
    operator, args = getattr(loader, name), arguments(name, mask, device)
    dims = tuple(0 if many else None for many in mask)

    def gradients(*tensors):
        def loss(*tensors):
            return operator(*tensors).square().sum()

        return torch.func.grad(loss, argnums=tuple(range(len(tensors))))(*tensors)

    one = 1, int(name != "add2")  # whose gradients are grad_out
    forward, backward = IN_TURNS.get((name, mask), one)
    for function, counts in ((operator, [forward, 0]), (gradients, [forward, backward])):
        with Calls(name) as calls:
            ours = several(torch.vmap(function, dims)(*args))
        members = [
            several(function(*(x[i] if many else x for x, many in zip(args, mask, strict=True))))
            for i in range(B)
        ]
        expected = [torch.stack(x) for x in zip(*members, strict=True)]
        assert_close([*ours], expected, rtol=1e-4, atol=1e-4)
        assert calls.counts == counts


def test_batches_anywhere(device):
    """Whichever dimension is the batch; tables in a batch of batches."""
    points, table = arguments("hash_grid_encoding", (False, True), device)
    image, lut = arguments("apply_lut3d", (False, True), device)
    for function, other, tables in (
        (loader.hash_grid_encoding, points, table),
        (loader.apply_lut3d, image, lut),
    ):
        expected = torch.stack([function(other, x) for x in tables])
        for dim in range(tables.dim()):
            ours = torch.vmap(function, (None, dim))(other, tables.movedim(0, dim))
            assert_close(ours, expected)
        twice = torch.vmap(torch.vmap(function, (None, 0)), (None, 0))
        assert_close(twice(other, torch.stack([tables, 2 * tables])), torch.stack([expected, 2 * expected]))  # fmt: skip


def test_tables_of_uint8_images(device):
    _, lut = arguments("apply_lut3d", (False, True), device)
    image = torch.randint(0, 256, (B, 5, 7, 3), device=device, dtype=torch.uint8)
    expected = torch.stack([loader.apply_lut3d(x, y) for x, y in zip(image, lut, strict=True)])
    assert torch.equal(torch.vmap(loader.apply_lut3d)(image, lut), expected)
    with pytest.raises(RuntimeError, match=r"lut must be \(S, S, S, 3\), indexed \[r, g, b\], got"):
        loader.apply_lut3d(image, lut)
    with pytest.raises(RuntimeError, match="image must have the first dimension of lut"):
        torch.ops.octet.apply_lut3d(image[:2], lut, "trilinear")
