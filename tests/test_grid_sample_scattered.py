"""grid_sample of points that are scattered over fields which the L2 cache of a GPU does not hold.

Such fields are taken in slabs, where a look at the points finds them scattered. The same points in
the order of the pixels, which are not, give the same.
"""

import pytest
import torch
from sampling import places
from torch.testing import assert_close

import loader
from loader import grid_sample, grid_sample_bw

pytestmark = pytest.mark.cuda

VOLUME = 141, 330, 340
CASES = [  # size, points, dtype, mode, padding, format
    ((1, 1, *VOLUME), 12_000_001, torch.float32, "bilinear", "zeros", None),
    ((1, 1, *VOLUME), 16_000_001, torch.float32, "nearest", "border", None),
    ((2, 1, *VOLUME), 8_000_001, torch.float16, "bilinear", "reflection", None),
    ((2, 1, *VOLUME), 8_000_001, torch.float16, "nearest", "zeros", None),
    ((1, 3, 90, 201, 270), 12_000_001, torch.float32, "bilinear", "border", None),
    ((1, 3, 120, 201, 270), 12_000_001, torch.bfloat16, "bilinear", "zeros", None),
    ((1, 4, 110, 201, 170), 16_000_001, torch.float32, "bilinear", "reflection", "last"),
    ((1, 7, 80, 201, 170), 3_000_001, torch.float32, "bilinear", "zeros", "last"),
    ((1, 1, 4400, 4600), 24_000_001, torch.float32, "bilinear", "zeros", None),
    ((1, 2, 2600, 2601), 24_000_001, torch.float16, "bilinear", "border", None),
]


def in_order(grid, size):
    """Return the permutation that puts the points of each image in the order of the pixels."""
    flat = grid.float().flatten(1, -2).nan_to_num(-2, 2, -2).clamp(-2, 2)
    key = torch.zeros(flat.shape[:2], dtype=torch.int64, device=grid.device)
    for d, pixels in reversed(list(enumerate(reversed(size)))):
        key = key * (2 * pixels + 2) + ((flat[..., d] + 2) / 2 * pixels).long()
    return key.argsort(1)


def put(x, order, points_at):
    """Return `x` with its points, along this axis, in that order."""
    index = order[:, None] if points_at == 2 else order[..., None]
    return x.gather(points_at, index.expand(x.shape))


def looks(input, *arguments):
    """Whether a call, or that for the gradient to the input, looks for scattered points."""
    rows = loader.explain(grid_sample, input.detach().requires_grad_(), *arguments).rows
    return any(row[1] == "order of points" for row in rows)


@pytest.mark.parametrize("size, points, dtype, mode, padding, format", CASES)
def test_scattered_points_give_what_they_give_in_order(size, points, dtype, mode, padding, format):
    B, C, *pixels = size
    dims = len(pixels)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    input = torch.randn(size, device="cuda").to(dtype)
    if format:
        input = input.contiguous(memory_format=formats[input.dim()])
    grid = places("anywhere", B, points, dims, "cuda")
    order = in_order(grid, pixels)
    grid = grid.to(dtype)
    grad_out = torch.rand(B, C, points, device="cuda").to(dtype)
    assert looks(input, grid, mode, padding)
    gradients = [(True, False), (True, True)] + [(False, True)] * (mode != "nearest")

    def results(at, upstream):
        places = at.view(B, points, *[1] * (dims - 1), dims)
        yield "out", grid_sample(input, places, mode, padding).flatten(2)
        given = upstream.view(B, C, points, *[1] * (dims - 1))
        for mask in gradients:
            found = grid_sample_bw(given, input, places, mode, padding, output_mask=mask)
            found = found if isinstance(found, tuple) else (found,)
            for i, x in zip([i for i in (0, 1) if mask[i]], found, strict=True):
                yield ("to input", "to grid")[i], x if i == 0 else x.flatten(1, -2)

    flat = grid.flatten(1, -2)
    ordered = results(put(flat, order, 1), put(grad_out, order, 2))
    eps = torch.finfo(dtype).eps
    for (what, ours), (_, theirs) in zip(results(flat, grad_out), ordered, strict=True):
        if what == "out":
            ours = put(ours, order, 2)
        elif what == "to grid":
            ours = put(ours, order, 1)
        most = theirs.abs().nan_to_num(0).max().item()
        rtol = 1.01 * eps if dtype != torch.float32 else 2e-5
        assert_close(ours, theirs, rtol=rtol, atol=1e-5 * most, equal_nan=True)


def test_a_call_says_that_it_looks_for_scattered_points():
    grid = torch.rand(1, 12_000_000, 1, 1, 3, device="cuda")
    for side in (280, 100):
        field = torch.rand(1, 1, side, side, side, device="cuda")
        assert looks(field, grid) == (side == 280)


MANY_NEAREST = [  # size, points, dtype, format
    ((9, 1, 24, 26, 13), 2_400_001, torch.float32, None),
    ((5, 1, 52, 114), 3_000_001, torch.float16, None),
    ((1, 3, 2937, 3022), 9_000_001, torch.float32, None),
    ((9, 5, 40, 48), 1_000_001, torch.bfloat16, torch.channels_last),
]


@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize("size, points, dtype, format", MANY_NEAREST)
def test_many_nearest_points_of_which_a_look_tells(size, points, dtype, format, path):
    """Blocks of kernels that a look leaves idle are few, and those that work take several turns."""
    input = torch.zeros(size, device="cuda", dtype=dtype)
    input = input.contiguous(memory_format=format) if format else input
    grid = places(path, size[0], points, len(size) - 2, "cuda").nan_to_num(0.3, 2, -2).to(dtype)
    rows = loader.explain(grid_sample, input.detach().requires_grad_(), grid, "nearest").rows
    assert any("gradient" in row[1] and row[2] == "a look at the points" for row in rows)
    some = torch.randint(-1, 2, (*size[:2], *grid.shape[1:-1]), device="cuda").to(dtype)
    given = some.float(), input.float(), grid.float()
    torch.use_deterministic_algorithms(True)
    try:  # sums of whole numbers, and so exact
        expected = grid_sample_bw(*given, "nearest", output_mask=(True, False))
    finally:
        torch.use_deterministic_algorithms(False)
    found = grid_sample_bw(some, input, grid, "nearest", output_mask=(True, False))
    assert expected.any() and torch.equal(found, expected.to(dtype))
