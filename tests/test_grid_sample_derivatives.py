"""grid_sample's gradients, and the derivatives of these."""

import itertools
import math

import pytest
import torch
from battery import DTYPES
from sampling import (
    KINDS,
    LAST,
    MODES,
    PADDINGS,
    all_of,
    by_torch,
    check,
    mostly_close,
    places,
    sample,
    second_of,
)
from torch.testing import assert_close

from loader import grid_sample, grid_sample_bw, grid_sample_reference


def test_gradient_to_the_input_at_strange_coordinates(device):
    """A point without a place adds nothing; one at infinity adds to the border."""
    input = torch.zeros(1, 1, 4, 5, device=device)
    for bad, padding, total in (
        (math.nan, "zeros", 0), (math.inf, "zeros", 0), (math.nan, "border", 0), (math.inf, "border", 1),
        (-math.inf, "border", 1), (math.nan, "reflection", 0), (math.inf, "reflection", 0),
    ):  # fmt: skip
        grid = torch.tensor([bad, 0.0], device=device).view(1, 1, 1, 2)
        grad_out = torch.ones(1, 1, 1, 1, device=device)
        for mode in ("bilinear", "nearest"):
            grads = grid_sample_bw(grad_out, input, grid, mode, padding, output_mask=(True, True))
            assert grads[0].sum() == total and torch.equal(grads[1], torch.zeros_like(grid))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("C", [2, 4, 5, 8, 33])
@pytest.mark.parametrize("dims", [2, 3])
def test_gradient_to_the_grid_of_few_points_that_threads_share(dims, C, dtype):
    """From one point to more than threads share, whatever the layout; by PyTorch in float64."""
    for points, last, slice_ in itertools.product((1, 33, 700, 9000), (False, True), (False, True)):
        input = torch.rand(3, C, *(17, 13, 21)[:dims], device="cuda").to(dtype)
        input = input.contiguous(memory_format=LAST[dims]) if last else input
        input = input[..., 1:-2] if slice_ else input
        grid = places("anywhere", 3, max(points, 6), dims, "cuda")[:, :points].to(dtype)
        grad_out = torch.rand(3, C, points, *[1] * (dims - 1), device="cuda").to(dtype)
        found = grid_sample_bw(grad_out, input, grid, output_mask=(False, True))
        expected = by_torch(grad_out, input, grid, "zeros", "bilinear")[1]
        mostly_close(found, expected if dtype == torch.double else expected.float(), 21)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_volumes(mode, padding, device):
    inputs = sample((2, 2, 4, 3, 5), (2, 1, 3), device)
    inputs = [x.requires_grad_() for x in inputs]

    def function(input, grid):
        return grid_sample(input, grid, mode, padding, True)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("C, last", [(1, False), (5, False), (20, True)])
@pytest.mark.parametrize("mode, dims", KINDS)
def test_second_derivatives_equal_the_references(mode, dims, C, last, device):
    input, grid = sample((2, C, 4, 6, 5)[: dims + 2], (3, 40, 3)[:dims], device)
    input = input.contiguous(memory_format=LAST[dims]) if last else input
    for wanted in ((0,), (1,), (0, 1)):
        results = []
        for function in (grid_sample, grid_sample_reference):
            leaves = [x.detach().requires_grad_() for x in (input, grid)]
            out = function(*leaves, mode, "reflection", False)
            first = torch.autograd.grad(
                out.pow(3).sum(), [leaves[i] for i in wanted], create_graph=True
            )
            loss = sum(x.pow(2).sum() for x in first)
            results.append(torch.autograd.grad(loss, leaves))
        assert_close(*results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [2, 3])
def test_second_derivatives_of_bicubic(dims, dtype, device):
    """Each padding and layout; channels in vectors of 8, of 4 and alone; on pixels exactly, where
    the weights' formulas meet.
    """
    work = torch.promote_types(dtype, torch.float32)
    fine = torch.finfo(work).eps
    for C, padding, last in itertools.product((1, 3, 6, 13), PADDINGS, (False, True)):
        input, grid = sample((2, C, 4, 5, 5)[: dims + 2], (2, 5, 3)[:dims], device, dtype)
        grid.flatten(1, -2)[:, :3] = torch.tensor([-1.0, 0.0, 0.5]).to(grid)[:, None]
        input = input.contiguous(memory_format=LAST[dims]) if last else input
        ours = second_of(grid_sample, input, grid, "bicubic", padding, True)
        wide = [x.to(work) for x in (input, grid)]
        theirs = second_of(grid_sample_reference, *wide, "bicubic", padding, True)
        for x, y in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            # What arrives is rounded too, and multiplied by slopes of up to 3 a pixel.
            own = max(16 * torch.finfo(dtype).eps, 1000 * fine)
            assert_close(x.to(work), y, rtol=own, atol=own * max(1, float(y.abs().max())))


def test_third_derivative_of_bicubic_volumes():
    results = []
    for function in (grid_sample, grid_sample_reference):
        leaves = [x.requires_grad_() for x in sample((1, 2, 4, 5, 4), (1, 2, 3))]
        value = function(*leaves, "bicubic", "border", True).pow(3).sum()
        for _ in range(3):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(grad.pow(2).sum() for grad in grads)
        results.append(grads)
    assert_close(*results)


@pytest.mark.parametrize("C, last", [(1, False), (5, False), (8, True), (16, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bicubic_volumes_of_a_size(dtype, C, last, device):
    """Many points to a pixel and few; where sums in the order of the machine and in a fixed one are
    both within rounding, and the latter have the same bits in every run.
    """
    few = (2, 3, 5) if dtype.itemsize > 2 else (7, 8, 9)  # fewer are summed in 16 bits on a GPU
    for size, points in (((9, 10, 11), (6, 9, 13)), ((30, 31, 33), few)):
        input, grid = sample((2, C, *size), points, device, dtype)
        input = input.contiguous(memory_format=LAST[3]) if last else input
        check(input, grid, "bicubic", "border")
        torch.use_deterministic_algorithms(True)
        try:
            check(input, grid, "bicubic", "zeros", True, fixed=device == "cuda")
            runs = [all_of(grid_sample, input, grid, "bicubic") for _ in range(3)]
            assert all(all(map(torch.equal, runs[0], run)) for run in runs)
            runs = [
                [*itertools.chain(*second_of(grid_sample, input, grid, "bicubic"))] for _ in runs
            ]
            assert all(all(map(torch.equal, runs[0], run)) for run in runs)
        finally:
            torch.use_deterministic_algorithms(False)


def test_eikonal_loss(device):
    """A signed distance grid trained to have slope 1, the use of the second derivative."""
    grads = []
    for function in (grid_sample, grid_sample_reference):
        volume, points = sample((1, 1, 8, 9, 10), (1, 1, 500), device, torch.float32, reach=0.9)
        volume.requires_grad_(), points.requires_grad_()
        distance = function(volume, points, align_corners=True)
        (slope,) = torch.autograd.grad(distance.sum(), points, create_graph=True)
        loss = (slope.norm(dim=-1) - 1).square().mean() + distance.abs().mean()
        grads.append(torch.autograd.grad(loss, (volume, points)))
    assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", [(True, False), (False, True)])
def test_gradients_that_are_not_asked_for_take_no_memory(mask):
    leaves = sample((1, 2, 5, 6), (3, 4))
    raw = torch.ops.octet.grid_sample_backward(
        grid_sample(*leaves), *leaves, 0, 0, False, *mask, False
    )
    assert [x.numel() > 0 for x in raw] == [*mask]


def test_transforms_of_second_derivatives():
    """Of batches along another axis, and of single images."""
    images, grids = sample((3 * 2, 2, 5, 6), (3, 4))
    images, grids = images.unflatten(0, (3, 2)), grids.unflatten(0, (3, 2))

    def loss(input, grid):
        return grid_sample(input, grid, "bilinear", "border").pow(3).sum()

    grad = torch.func.grad(loss, argnums=(0, 1))

    def twice(input, grid):
        return torch.func.grad(lambda *x: sum(g.square().sum() for g in grad(*x)))(input, grid)

    for dims in ((0, 0), (0, None), (None, 0), (2, 0)):
        args = [
            x[0] if d is None else x.movedim(0, d)
            for x, d in zip((images, grids), dims, strict=True)
        ]
        each = [
            [x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)]
            for i in range(3)
        ]
        for function in (grid_sample, twice):
            ours = torch.vmap(function, dims)(*args)
            assert_close(ours, torch.stack([function(*a) for a in each]))
    nested = torch.vmap(torch.vmap(lambda x, g: grid_sample(x[None], g[None])))(images, grids)
    assert_close(nested[:, :, 0], torch.vmap(grid_sample)(images, grids))
