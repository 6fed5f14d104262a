"""grid_sample beside torch.nn.functional.grid_sample, SciPy and plain PyTorch."""

import importlib.util
import itertools
import math
import sys
import types
import unittest
import warnings

import pytest
import torch
import torch.nn.functional as F
from battery import DTYPES, OperatorTests
from torch.testing import assert_close

import loader
from loader import grid_sample, grid_sample_bw, grid_sample_fw, grid_sample_reference

PADDINGS = ["zeros", "border", "reflection"]
MODES = ["bilinear", "nearest", "bicubic"]
KINDS = [*itertools.product(MODES, (2, 3))]
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=LAST[x.dim() - 2]),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
    "cropped": lambda x: F.pad(x, (2, 3, 1, 4))[..., 1:-4, 2:-3],
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def sample(size, points, device="cpu", dtype=torch.float64, grid_dtype=None, reach=1.5):
    """An image or volume, and points in it and beyond its borders."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(sum(size))}
    grid = (
        torch.rand(size[0], *points, len(points), **make, dtype=torch.float64) * 2 * reach - reach
    )
    input = torch.randn(size, **make, dtype=torch.float64)
    return input.to(dtype), grid.to(grid_dtype or dtype)


def torchs(input, grid, mode="bilinear", padding="zeros", align_corners=False):
    """F.grid_sample; of bicubic volumes, which torch has from 2.15 on, what it makes of their images
    and then of the column of results.
    """
    if mode != "bicubic" or input.dim() == 4:
        return F.grid_sample(input, grid, mode, padding, align_corners)
    N, C, D = input.shape[:3]
    points = grid.flatten(1, -2)
    P = points.shape[1]
    options = mode, padding, align_corners
    rows = F.grid_sample(input.flatten(1, 2), points[:, None, :, :2], *options)
    columns = rows.view(N, C, D, P).movedim(3, 1).reshape(N * P, C, D, 1)
    heights = F.pad(points[..., 2:], (1, 0)).view(N * P, 1, 1, 2)
    out = F.grid_sample(columns, heights, *options).view(N, P, C)
    return out.transpose(1, 2).reshape(N, C, *grid.shape[1:-1])


def all_of(function, input, grid, *options):
    """The output and the gradients to input and grid, of the same grad_out each time."""
    leaves = [x.detach().requires_grad_() for x in (input, grid)]
    out = function(*leaves, *options)
    make = {"device": out.device, "generator": torch.Generator(out.device).manual_seed(1)}
    grad_out = torch.randn(out.shape, **make).bfloat16().to(out.dtype)  # the same in every type
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def check(input, grid, *options, fixed=False):
    """All results lie within rounding of the reference in a wider type.

    Coordinates in pixels have rounding errors of the size times eps, in 16-bit types of float32; a
    result sums up to 16 taps and C channels, a gradient to the input up to P points. `fixed`: sums
    of 64 bits for the largest that there may be, whose last one is worth more than float64's.
    """
    work = torch.promote_types(input.dtype, torch.float32)
    ours = all_of(grid_sample, input, grid, *options)
    theirs = all_of(grid_sample_reference, input.to(work), grid.to(work), *options)
    for x, y in zip(ours, theirs, strict=True):
        fine, own = torch.finfo(work).eps, torch.finfo(x.dtype).eps
        scale = float(y.abs().max()) if y.numel() else 0.0
        fine = max(200 * fine, own * 2**-10, 2.0**-36 if fixed else 0)
        assert_close(x.to(y.dtype), y, rtol=own, atol=fine * max(scale, 1))


class TestGridSample(OperatorTests):
    name = "grid_sample"
    grows = {1: 1}
    options = {"mode": "bilinear", "padding_mode": "border"}
    variants = tuple(
        {"mode": mode, "padding_mode": padding, "align_corners": True}
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in PADDINGS
    )
    gradcheck = {"fast_mode": True}
    inductor = {}  # with C++ for what surrounds it
    backward_refuses = (
        (lambda grad: grad[:1], "grad_out must have shape (2, 2, 3, 4), got (1, 2, 3, 4)"),
        (lambda grad: grad[0], "grad_out must have shape (2, 2, 3, 4), got (2, 3, 4)"),
        (lambda grad: grad.double(), "grad_out must have the dtype of input, float32, got float64"),
    )

    def small(self, device="cpu", dtype=torch.float64, seed=0):
        input, grid = sample((2, 2, 4, 5), (3, 4), device, dtype)
        return [(1 - 0.1 * seed) * input, (1 - 0.2 * seed) * grid]

    def more_memory(self, tensors):
        """An image with its channels first is turned, as is the sum of its gradient."""
        return 2 * 4 * tensors[0].numel()

    def large(self, device):
        return [
            [*sample((1, 9, 12, 13, 14), (10, 40, 50), device, d)] for d in (DTYPES[0], DTYPES[2])
        ]

    def loss(self, input, grid):
        """Under autocast too, as a model is compiled."""
        with torch.autocast(input.device.type, dtype=torch.bfloat16):
            return self.call(input, grid).square().sum()

    def cases(self, tensors):
        grid = tensors[1]
        to_leaves = [torch.ones_like(x) for x in tensors]
        grad_out = torch.ones(2, 2, 3, 4, device=grid.device, dtype=grid.dtype).requires_grad_()
        flags = True, True, True, False
        yield "", (*tensors, 0, 1, False)
        yield "_backward", (grad_out, *tensors, 0, 1, False, True, True, False)
        yield "_backward_backward", (*to_leaves, grad_out, *tensors, 0, 1, False, *flags)
        half = [x.detach().half() for x in (grad_out, *tensors)]
        yield "_backward", (*half, 2, 0, True, True, False, False)
        yield "_backward_backward", (half[1], None, *half, 0, 1, False, True, False, True, False)

    def bad_input(self):
        input, grid = torch.rand(2, 3, 4, 5), torch.rand(2, 6, 7, 2)
        return (
            ((input[0], grid), {}, RuntimeError, "input must be (N, C, H, W) or (N, C, D, H, W), got (3, 4, 5)"),
            ((input, grid[0]), {}, RuntimeError, "grid must be (N, H_out, W_out, 2) for an input of 4 dimensions, got (6, 7, 2)"),
            ((input[:, :, None], grid), {}, RuntimeError, "grid must be (N, D_out, H_out, W_out, 3) for an input of 5 dimensions, got (2, 6, 7, 2)"),
            ((input, torch.rand(2, 6, 7, 3)), {}, RuntimeError, "grid must be (N, H_out, W_out, 2) for an input of 4 dimensions, got (2, 6, 7, 3)"),
            ((input, grid[:1]), {}, RuntimeError, "grid must have the batch size of input, 2, got (1, 6, 7, 2); expand it, e.g. grid.expand(2, -1, -1, -1)"),
            ((input[..., :0], grid), {}, RuntimeError, "input must have at least one pixel along each axis, got (2, 3, 4, 0)"),
            ((input, grid), {"mode": "linear"}, ValueError, "mode must be 'bilinear', 'nearest' or 'bicubic', got 'linear'"),
            ((input, grid), {"padding_mode": "edge"}, ValueError, "padding_mode must be 'zeros', 'border' or 'reflection', got 'edge'"),
            ((input, grid), {"padding_mode": None}, ValueError, "padding_mode must be 'zeros', 'border' or 'reflection', got None"),
        )  # fmt: skip

    def test_torch_refuses_the_same(self):
        """With an exception of the same kind."""
        for arguments, options, kind, _ in self.bad_input():
            with pytest.raises((kind, NotImplementedError)):
                F.grid_sample(*arguments, **options, align_corners=False)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode, dims", KINDS)
def test_equals_torch(mode, dims, padding, device):
    """In float64; channels by planes, by rows of 4 and 16, in both layouts, with and without many
    more points than pixels.
    """
    for align_corners, C, last in itertools.product((False, True), (1, 2, 3, 4, 21), (False, True)):
        for B, points in ((1, (3, 5, 1)), (2, (9, 20, 2))):
            input, grid = sample((B, C, 9, 11, 7)[: 2 + dims], points[:dims], device)
            input = input.contiguous(memory_format=LAST[dims]) if last else input
            options = mode, padding, align_corners
            theirs = all_of(torchs, input, grid, *options)
            for ours, expected in zip(
                all_of(grid_sample, input, grid, *options), theirs, strict=True
            ):
                assert_close(ours, expected, rtol=1e-10, atol=1e-10)
            if C == 3 and not last:
                reference = all_of(grid_sample_reference, input, grid, *options)
                assert_close(reference, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["nn.functional.grid_sample", "grid_sampler_2d", "grid_sampler_3d"]
)
def test_torchs_own_samples(name, dtype, device, monkeypatch):
    """Of 16-bit types the float32 result, rounded: torch computes pixel indices in that type."""
    if not importlib.util.find_spec("expecttest"):  # torch's samples import its test cases too
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch's samples import, numba for one
        from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == name)
    count = 0
    work = torch.promote_types(dtype, torch.float32)
    for case in info.sample_inputs(device, dtype, requires_grad=False):
        options = list(case.args[1:]) + list(case.kwargs.values())
        if name != "nn.functional.grid_sample":
            mode, padding, align_corners = options
            options = ("bilinear", "nearest", "bicubic")[mode], PADDINGS[padding], align_corners
        else:
            options = [case.kwargs[k] for k in ("mode", "padding_mode", "align_corners")]
        ours = all_of(grid_sample, case.input, case.args[0], *options)
        theirs = all_of(F.grid_sample, case.input.to(work), case.args[0].to(work), *options)
        eps = torch.finfo(dtype).eps
        for x, y in zip(ours, theirs, strict=True):
            scale = max(float(y.abs().max()), 1)
            assert_close(x.to(work), y, rtol=eps, atol=200 * torch.finfo(work).eps * scale)
        count += 1
    assert count >= 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode, dims", KINDS)
def test_strange_coordinates(mode, dims, padding, dtype, device):
    """Not finite, huge, exactly at borders and centres; images of one pixel.

    torch's forward is the judge where it is defined, but on the CPU it disagrees with its own CUDA
    kernels about NaN and about reflecting what is far away, and its backward may crash: there the
    reference is.
    """
    special = [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9, -3e9, 1e5, -1e5, 1.0, -1.0, 0.0]
    special += [1 + 1 / 7, -1 - 1 / 7, 6 / 7, -6 / 7, 2.0, -2.0, 3.0, -3.0, 5.0, 1 / 3, 40.25]
    values = torch.tensor(special, dtype=dtype, device=device)
    rows = [torch.stack([values.roll(i * k) for k in range(dims)], -1) for i in range(len(special))]
    grid = torch.cat(rows).view(1, *(1,) * (dims - 2), len(special), -1, dims)
    for size, align_corners in itertools.product((7, 1), (False, True)):
        input, _ = sample((1, 5) + (size,) * dims, (1,) * dims, device, dtype)
        for image in (input, input.contiguous(memory_format=LAST[dims])):
            options = mode, padding, align_corners
            ours = all_of(grid_sample, image, grid, *options)
            expected = all_of(grid_sample_reference, image, grid, *options)
            small = grid.abs().amax(-1) < 1e4  # elsewhere a rounding decides between two pixels
            chosen = small | ~grid.abs().amax(-1).isfinite()
            for x, y in (
                (ours[0].movedim(1, -1), expected[0].movedim(1, -1)),
                (ours[2], expected[2]),
            ):
                assert_close(x[chosen], y[chosen], rtol=1e-4, atol=1e-4, equal_nan=True)
            with torch.backends.cudnn.flags(enabled=False):  # cuDNN has rules of its own for NaN
                theirs = torchs(image, grid, *options)
            # A column of images is not asked beyond its ends, whatever its images give.
            judged = small if device == "cpu" or (mode, dims) == ("bicubic", 3) else chosen
            assert_close(
                ours[0].movedim(1, -1)[judged], theirs.movedim(1, -1)[judged],
                rtol=1e-4, atol=1e-4, equal_nan=True,
            )  # fmt: skip
            assert torch.equal(grid_sample_fw(image, grid, *options).isnan(), ours[0].isnan())


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


def test_a_pixel_outside_does_not_spoil_what_is_not_finite(device):
    """Taps outside count as nothing, not as 0 times the first pixel; one of weight 0 inside does."""
    input, grid = sample((1, 6, 8, 8), (9, 9), device, torch.float32)
    input[0, :, 0, 0] = math.nan
    volume, places = sample((1, 6, 6, 7, 8), (3, 5, 5), device, torch.float32)
    volume[0, :, 0, 0, 0] = math.inf
    for image, points in ((input, grid), (volume, places)):
        for last, mode in itertools.product((False, True), ("bilinear", "bicubic")):
            image = image.contiguous(memory_format=LAST[points.dim() - 2]) if last else image
            results = [all_of(f, image, points, mode) for f in (grid_sample, grid_sample_reference)]
            assert_close(*results, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_images_thousands_of_pixels_wide(dtype, device):
    """As in float32, rounded once; torch 2.11's CPU kernels are off by whole pixels there."""
    for C in (1, 5):
        input, grid = sample((1, C, 3, 4000), (40, 50), device, dtype, torch.float32)
        for mode in ("bilinear", "nearest", "bicubic"):
            ours = all_of(grid_sample, input, grid, mode)
            theirs = all_of(F.grid_sample, input.float(), grid, mode, "zeros", False)
            assert torch.equal(ours[0], theirs[0].to(dtype)) or device != "cpu" or mode != "nearest"
            for x, y in zip(ours, theirs, strict=True):
                eps = torch.finfo(x.dtype).eps
                assert_close(x.float(), y, rtol=eps, atol=1e-3 * max(1, float(y.abs().max())))
    same = grid.to(dtype)  # and a grid of 16 bits
    assert_close(
        grid_sample(input, same).float(), F.grid_sample(input.float(), same.float(), align_corners=False),
        rtol=torch.finfo(dtype).eps, atol=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("grid_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtypes(dtype, grid_dtype, device):
    for mode, dims in KINDS:
        for C in (3, 20):
            input, grid = sample(
                (2, C, 5, 6, 7)[: dims + 2], (3, 4, 8)[-dims:], device, dtype, grid_dtype
            )
            for image in (input, input.contiguous(memory_format=LAST[dims])):
                out = grid_sample(image, grid, mode)
                grads = grid_sample_bw(out, image, grid, mode, output_mask=(True, True))
                assert [x.dtype for x in (out, *grads)] == [dtype, dtype, grid_dtype]
                check(image, grid, mode, "border", True)


@pytest.mark.parametrize("mode, dims", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, mode, dims, device):
    for C in (3, 18):
        input, grid = sample((2, C, 5, 6, 7)[: dims + 2], (3, 4, 9)[-dims:], device)
        image = LAYOUTS[layout](input)
        points = LAYOUTS[layout](grid.movedim(-1, 1)).movedim(1, -1)
        out = grid_sample(image, points, mode, "border")
        assert out.is_contiguous()
        assert_close(out, torchs(image, points, mode, "border", False))
        grad_out = LAYOUTS[layout](out)
        leaves = [x.detach().requires_grad_() for x in (image, points)]
        theirs = torch.autograd.grad(torchs(*leaves, mode, "border", False), leaves, grad_out)
        for mask in ((True, True), (True, False), (False, True)):
            ours = grid_sample_bw(grad_out, image, points, mode, "border", output_mask=mask)
            ours = ours if all(mask) else [ours]
            for x, y in zip(ours, itertools.compress(theirs, mask), strict=True):
                assert_close(x, y)
        like = torch.empty_like(image).stride()
        assert grid_sample_bw(grad_out, image, points, mode).stride() == like


def test_agrees_with_scipy():
    """A volume at 5000 places, in pixels; the border is repeated there as here."""
    from scipy import ndimage

    volume, grid = sample((1, 1, 20, 30, 25), (1, 1, 5000))
    sizes = torch.tensor([25, 30, 20], dtype=torch.float64)
    at = ((grid + 1) / 2 * (sizes - 1)).view(-1, 3).flip(1).T
    for mode, order, padding, theirs in (
        ("bilinear", 1, "border", "nearest"),
        ("bilinear", 1, "reflection", "mirror"),
        ("nearest", 0, "border", "nearest"),
    ):
        expected = ndimage.map_coordinates(
            volume[0, 0].numpy(), at.numpy(), order=order, mode=theirs
        )
        ours = grid_sample(volume, grid, mode, padding, True)
        assert_close(ours.flatten(), torch.from_numpy(expected), rtol=0, atol=1e-12)


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


def second_of(function, input, grid, *options):
    """Gradients of the first derivatives to grad_out, input and grid, of what arrives for each."""
    leaves = [x.detach().requires_grad_() for x in (input, grid)]
    out = function(*leaves, *options)
    leaves.insert(0, torch.linspace(-1, 1, out.numel()).view_as(out).to(out).requires_grad_())
    first = torch.autograd.grad(out, leaves[1:], leaves[0], create_graph=True)
    for wanted in ((0,), (1,), (0, 1)):
        loss = sum(first[i].pow(2).sum() for i in wanted)
        yield torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)


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


@pytest.mark.parametrize("mode, dims", KINDS)
def test_empty_inputs(mode, dims, device):
    """No images, channels or points give an empty output, and gradients of 0."""
    for B, C, points in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        input, grid = sample((B, C, 5, 6, 7)[: dims + 2], (points,) * dims, device)
        out = grid_sample(input, grid, mode)
        assert out.shape == (B, C) + (points,) * dims
        grads = grid_sample_bw(out, input, grid, mode, output_mask=(True, True))
        assert_close([*grads], [torch.zeros_like(x) for x in (input, grid)])


def test_large_enough_for_several_threads(device):
    """The work is split by points, images, channels or slabs of an axis: the same results."""
    for size, points in (
        ((1, 1, 40, 300), (200, 400)), ((1, 3, 50, 60), (150, 150)), ((3, 2, 50, 60), (100, 150)),
        ((1, 16, 20, 21, 22), (20, 30, 30)), ((1, 40, 30, 30), (50, 60)), ((5, 4, 30, 30), (40, 60)),
    ):  # fmt: skip
        input, grid = sample(size, points, device, torch.float32, reach=1.1)
        for dtype, last in itertools.product(DTYPES[::2], (False, True)):
            image = input.to(dtype)
            image = image.contiguous(memory_format=LAST[len(points)]) if last else image
            check(image, grid, "bilinear", "border")
        for mode in ("bilinear", "bicubic") if device == "cpu" else ():
            results = [all_of(grid_sample, input, grid, mode)]
            threads = torch.get_num_threads()
            for count in (1, 3):
                torch.set_num_threads(count)
                results.append(all_of(grid_sample, input, grid, mode))
                torch.set_num_threads(threads)
                assert all(map(torch.equal, results[0], results[-1]))


def test_scattered_or_not(device):
    """Large images of many channels are read otherwise where neighbouring points are far apart."""
    for size, points in (((1, 5, 40, 40, 40), (20, 40, 40)), ((1, 17, 400, 400), (300, 300))):
        input, grid = sample(size, points, device, torch.float32)
        near = torch.eye(len(points), len(points) + 1)[None]
        near = F.affine_grid(near, (1, 1, *points), align_corners=False)
        check(input, grid, "bilinear", "zeros")
        check(input, near.to(device), "bilinear", "zeros")


FEW = [
    (1, "zeros", None), (3, "reflection", "channels last"), (8, "border", "channels last"),
    (3, "zeros", "transposed"), (2, "border", "every other"), (5, "reflection", None),
]  # fmt: skip


@pytest.mark.parametrize("C, padding, layout", FEW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode, dims", KINDS)
def test_few_points_of_a_large_field_in_16_bits(mode, dims, dtype, C, padding, layout, device):
    """Sums in float32, rounded once, of the pixels that points touch; zero elsewhere. Most points
    lie beside each other, where sums in 16 bits would lose what is added. (On a GPU those of fewer
    points are in 16 bits.)
    """
    size = {2: (150, 160), 3: (36,) * 3} if device == "cpu" else {2: (15, 21), 3: (6, 7, 7)}
    points = (1,) * (dims - 1) + (40,)
    input, grid = sample((2, C, *size[dims]), points, device, dtype, None, 1.1)
    input = LAYOUTS[layout](input) if layout else input
    flat = grid.view(2, 40, dims)
    flat[:, 15:] = flat[:, 15:16] + (flat[:, 15:] - flat[:, 15:16]) * 1e-3
    strange = torch.tensor([1.0, -1.0, 0.0, math.nan, math.inf, -3.0], device=device)
    flat[:, : len(strange), 0] = strange.to(dtype)
    grad_out = (torch.rand(2, C, *points, device=device) + 1).to(dtype)
    upstream = [grad_out, torch.randn(grid.shape, device=device).to(dtype)]

    def gradients(image, at, both):
        """To the input, and those of a gradient to the grid."""
        given, mask = [x.to(image.dtype) for x in upstream], (True, both)
        found = grid_sample_bw(given[0], image, at, mode, padding, output_mask=mask)
        yield found[0] if both else found
        if mode == "nearest":
            return
        leaves = [x.detach().requires_grad_() for x in (image, at)]
        out = grid_sample(*leaves, mode, padding)
        (to_grid,) = torch.autograd.grad(out, leaves[1], given[0], create_graph=True)
        yield from torch.autograd.grad(to_grid, leaves[0], given[1])

    expected = [*gradients(input.float(), grid.float(), True)]
    for both in (True, False):
        for ours, theirs in zip(gradients(input, grid, both), expected, strict=True):
            close = {"rtol": 1.01 * torch.finfo(dtype).eps, "atol": 1e-5, "equal_nan": True}
            assert_close(ours, theirs.to(dtype), **close)
            assert (ours[theirs == 0] == 0).all()


@pytest.mark.parametrize("mode, shape, points", [
    ("bilinear", (3, 4, 1000, 800), 3000), ("nearest", (1, 3, 150, 160, 170), 300),
    ("bilinear", (1, 8, 110, 100, 110), 30_000), ("bicubic", (1, 8, 110, 100, 110), 3000),
])  # fmt: skip
def test_sums_of_more_than_a_process_keeps_are_made_slab_by_slab(mode, shape, points):
    """On the CPU; 38 to 49 MB of them here, of which 16 at once, in the order of points as ever."""
    batch, channels, *size = shape
    torch.manual_seed(0)
    image = torch.randn(shape, dtype=torch.float16)
    grid = torch.rand(batch, *[1] * (len(size) - 1), points, len(size)) * 2.2 - 1.1
    grad_out = torch.rand(batch, channels, *[1] * (len(size) - 1), points).half() - 0.5
    for order in (grid, grid.sort(-2).values):
        for layout in (torch.contiguous_format, LAST[len(size)]):
            at = image.contiguous(memory_format=layout)
            found = grid_sample_bw(grad_out, at, order, mode, output_mask=(True, False))[0]
            single = grid_sample_bw(
                grad_out.float(), at.float(), order, mode, output_mask=(True, False)
            )[0]
            assert_close(found, single.half(), rtol=1.01 * 2**-10, atol=1e-6)


def mostly_close(ours, theirs, pixels):
    """But for a few values, where a rounded place is another pixel's or cell's."""
    work = theirs.dtype
    tolerance = 4 * torch.finfo(ours.dtype).eps + 64 * pixels * torch.finfo(work).eps
    off = (ours.to(work) - theirs).abs() > tolerance * theirs.abs().max()
    assert off.float().mean() < 0.01


def places(path, B, points, dims, device):
    """(B, points, 1[, 1], dims): anywhere, beside each other, or nearly all in one place; some at
    borders, beyond them and nowhere.
    """
    at = torch.rand(B, points, dims, device=device) * 2.2 - 1.1
    if path == "in order":
        at = at.sort(1).values
    if path == "crowded":
        at[:, points // 16 :] = 0.3 + 0.01 * at[:, points // 16 :]
    strange = torch.tensor([1.0, -1.0, 0.0, math.nan, math.inf, -3.0], device=device)
    at[:, torch.arange(len(strange)) * (points // len(strange)), 0] = strange
    return at.view(B, points, *[1] * (dims - 1), dims)


def check_gradients(input, grid, padding, expected_by, mode="bilinear"):
    """Both gradients, alone and together, against those that `expected_by` gives."""
    grad_out = torch.rand(*input.shape[:2], *grid.shape[1:-1], device=input.device).to(input.dtype)
    expected = expected_by(grad_out, input, grid, padding, mode)
    for mask in ((True, False), (True, True)):
        found = grid_sample_bw(grad_out, input, grid, mode, padding, output_mask=mask)
        to_input = found[0] if mask[1] else found
        rtol = 2e-5 if input.dtype == torch.float32 else 1.01 * torch.finfo(input.dtype).eps
        assert_close(to_input.to(expected[0]), expected[0], rtol=rtol, atol=1e-5)
        if mask[1]:
            mostly_close(found[1], expected[1].float(), max(input.shape[2:]))


def by_torch(grad_out, input, grid, padding, mode):
    """By PyTorch in float64."""
    leaves = [x.double().requires_grad_() for x in (input, grid)]
    out = F.grid_sample(*leaves, mode, padding, align_corners=False)
    return torch.autograd.grad(out, leaves, grad_out.double())


def in_float32(grad_out, input, grid, padding, mode):
    """By the kernels for float32, which find the same places."""
    tensors = [x.float() for x in (grad_out, input, grid)]
    return grid_sample_bw(*tensors, mode, padding, output_mask=(True, True))


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize("dtype, C", [(torch.float32, 1), (torch.float32, 3), (torch.float16, 2)])
@pytest.mark.parametrize("dims", [2, 3])
def test_many_points_of_few_pixels(dims, dtype, C, path):
    """Where neighbouring points lie apart, a GPU sums in shared memory."""
    for padding, last in (("zeros", False), ("border", True), ("reflection", False)):
        input, _ = sample((2, C, *(7, 19, 23)[-dims:]), (1,) * dims, "cuda", dtype)
        input = input.contiguous(memory_format=LAST[dims]) if last else input
        grid = places(path, 2, (2_200_000 if dims == 2 else 1_100_000) // C, dims, "cuda")
        check_gradients(input, grid.to(dtype), padding, by_torch)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "size, last", [((1, 1, 40, 33), False), ((3, 4, 7, 19), True), ((5, 3, 1, 50), False)]
)
def test_parts_of_many_points_have_sums_of_their_own(size, last, dtype, mode):
    """On the CPU; the same bits whatever the number of threads."""
    input = torch.rand(size, dtype=dtype)
    input = input.contiguous(memory_format=LAST[2]) if last else input
    grid = places("crowded", size[0], 30_001, 2, "cpu").to(dtype)
    grad_out = torch.rand(*size[:2], 30_001, 1, dtype=dtype)
    leaves = [x.double().requires_grad_() for x in (input, grid)]
    out = F.grid_sample(*leaves, mode, "zeros", align_corners=False)
    to_input, to_grid = torch.autograd.grad(out, leaves, grad_out.double())
    most = torch.get_num_threads()
    for mask in ((True, False), (True, True)):
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(grid_sample_bw(grad_out, input, grid, mode, output_mask=mask))
        torch.set_num_threads(most)
        results = [r if mask[1] else (r,) for r in results]
        assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))
        # One may be nearest to another pixel.
        off = (results[0][0] - to_input).norm() / to_input.norm()
        assert off < (1e-5 if mode == "bilinear" else 5e-2)
    mostly_close(results[0][1], to_grid, max(size[2:]))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, last",
    [
        ((2, 1, 40, 33), False),
        ((1, 2, 19, 50), True),
        ((2, 3, 20, 31), True),
        ((1, 3, 64, 9), False),
        ((2, 13, 12, 15), True),
        ((1, 2, 7, 9, 8), False),
    ],
)
def test_many_points_in_16_bits_give_what_float32_gives_rounded(size, last, dtype, mode):
    """On the CPU, to the bit: points and results are converted a few at a time."""
    dims = len(size) - 2
    image = torch.rand(size).to(dtype)
    image = image.contiguous(memory_format=LAST[dims]) if last else image
    grid = places("anywhere", size[0], 7_001, dims, "cpu").to(dtype)
    grad_out = torch.rand(*size[:2], 7_001, *[1] * (dims - 1)).to(dtype)
    apart = grid.movedim(-1, 1).contiguous().movedim(1, -1)  # all x, then all y
    turned = grad_out.movedim(1, -1).contiguous().movedim(-1, 1)
    for points, grads, input in (
        (grid, grad_out, image), (apart, turned, image), (grid, grad_out, image.float())
    ):  # fmt: skip
        grads = grads.to(input.dtype)
        given = grads, input, points
        alike = [x.float() for x in given]
        x, y = grid_sample(input, points, mode), grid_sample(*alike[1:], mode)
        pairs = [(x, y)]
        for mask in ((True, True), (True, False), (False, True)):
            results = [grid_sample_bw(*of, mode, output_mask=mask) for of in (given, alike)]
            pairs += zip(*results, strict=True) if all(mask) else [results]
        for x, y in pairs:
            assert_close(x, y.to(x.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order", "crowded"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, last",
    [
        ((1, 3, 3601, 3709), False),
        ((1, 3, 3601, 3709), True),
        ((5, 1, 2200, 3401), False),
        ((2, 1, 300, 281, 273), False),
        ((1, 2, 300, 281, 273), True),
        ((1, 5, 199, 231, 207), False),
        ((1, 64, 1000, 1000), True),
        ((1, 47, 700, 1200), True),
        ((1, 20, 90, 150, 160), True),
    ],
)
def test_few_points_of_far_more_pixels(size, last, dtype, path):
    """A GPU sums runs of pixels in shared memory, but for those that too many points add to. Of many
    channels side by side it sets to zero and rounds the sums of pixels that points touch.
    """
    dims = len(size) - 2
    input = torch.rand(size, device="cuda").to(dtype)
    input = input.contiguous(memory_format=LAST[dims]) if last else input
    for padding, share in (("zeros", 45), ("border", 80), ("reflection", 110)):
        points = math.prod(size[2:]) // share
        grid = places(path, size[0], points, dims, "cuda").to(dtype)
        check_gradients(input, grid, padding, in_float32)
        if size[1] > 8 and points >= 1 << 14:  # of fewer, launches decide
            leaves = input.detach().requires_grad_(), grid
            told = str(loader.explain(loader.grid_sample, *leaves, padding_mode=padding))
            assert "of pixels that points touch" in told
        if size[1] < 8:
            grid = places(path, size[0], math.prod(size[2:]) // 20, dims, "cuda").to(dtype)
            check_gradients(input, grid, padding, in_float32, "nearest")


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, points",
    [
        ((2, 3, 61, 67), 200_000),  # channels of an odd number of pixels, which begin anywhere
        ((3, 2, 40, 64), 100_000),
        ((1, 5, 23, 21, 19), 90_000),
        ((1, 33, 141, 203), 500_000),
        ((2, 72, 16, 20, 24), 30_000),
        ((1, 3, 1811, 1907), 30_000),  # few points of large channels: one channel after the other
        ((1, 5, 201, 203, 207), 80_000),
    ],
)
def test_channels_turned_on_a_gpu(size, points, dtype, path):
    """A GPU turns channels last, reads and adds to them together; or takes one after the other."""
    dims = len(size) - 2
    dense = torch.rand(size, device="cuda").to(dtype)
    grid = places(path, size[0], points, dims, "cuda").to(dtype)
    slices = torch.rand(*size[:-1], size[-1] + 1, device="cuda").to(dtype)[..., 1:]
    for image in (dense, dense.contiguous(memory_format=LAST[dims]), slices):
        options = "bilinear", "border", True
        theirs = torchs(image.float(), grid.float(), *options)
        mostly_close(grid_sample(image, grid, *options), theirs, 256)
        small = max(size) < 100 and dtype == torch.float32
        check_gradients(image, grid, "reflection", by_torch if small else in_float32)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, points",
    [((1, 33, 431, 401), 70_000), ((2, 13, 809, 503), 40_000), ((1, 5, 131, 141, 151), 90_000)],
)
def test_words_that_begin_anywhere(size, points, dtype):
    """A GPU reads channels side by side in words, wherever these begin."""
    dims = len(size) - 2
    room = torch.rand(size[0], size[1] + 1, *size[2:], device="cuda").to(dtype)
    room = room.contiguous(memory_format=LAST[dims])
    grid = places("anywhere", size[0], points, dims, "cuda").to(dtype)
    for image in (room[:, 1:], room[:, 1:].contiguous(memory_format=LAST[dims])):
        for options in (("bilinear", "zeros", False), ("bilinear", "border", True)):
            planar = grid_sample(image.contiguous(), grid, *options)
            rtol = max(1e-5, 1.01 * torch.finfo(dtype).eps)
            assert_close(grid_sample(image, grid, *options), planar, rtol=rtol, atol=1e-5)
            found, expected = (
                grid_sample_bw(planar, x, grid, *options, output_mask=(False, True))
                for x in (image, image.contiguous())
            )
            mostly_close(found, expected, max(size[2:]))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "mode, dims", [("bilinear", 2), ("bilinear", 3), ("nearest", 2), ("bicubic", 2)]
)
def test_ways_on_a_gpu(mode, dims, dtype):
    """Few channels and several in each layout, rows exchanged, grids that are apart or of float32,
    points exactly at borders and far beyond; few points, also of so many channels that threads share
    a point, and so many that other kernels serve them.
    """
    work = torch.promote_types(dtype, torch.float32)
    sizes = [*itertools.product((1, 3, 4, 6), (40, 2400)), (20, 40), (69, 40)]
    for (C, wide), padding in itertools.product(sizes, PADDINGS):
        points = (37, wide) if dims == 2 else (4, 9, wide)
        input, grid = sample((2, C, 21, 19, 23)[: 2 + dims], points, "cuda", dtype, reach=1.6)
        ends = torch.tensor([1.0, -1.0, 3.0, -3.0, 0.0], device="cuda").to(grid)
        grid.view(-1)[: 5 * dims] = ends.repeat(dims)
        room = torch.empty(*grid.shape[:-1], dims + 1, dtype=dtype, device="cuda")
        grids = grid, room[..., :dims].copy_(grid), grid.float()
        last = input.contiguous(memory_format=LAST[dims])
        options = mode, padding, C == 3
        for image, at in zip(
            (input, last, last.transpose(-1, -2), input[..., 1:]),
            itertools.cycle(grids if dtype != torch.float64 else grids[:2]),
        ):
            leaves = [x.to(work).detach().requires_grad_() for x in (image, at)]
            with torch.backends.cudnn.flags(enabled=False):
                theirs = torchs(*leaves, *options)
            grad_out = torch.randn(theirs.shape, device="cuda").to(dtype)
            expected = torch.autograd.grad(theirs, leaves, grad_out.to(work))
            mostly_close(grid_sample(image, at, *options), theirs, 23)
            both = grid_sample_bw(grad_out, image, at, *options, output_mask=(True, True))
            alone = grid_sample_bw(grad_out, image, at, *options, output_mask=(False, True))
            for ours, expected_one in zip((*both, alone), (*expected, expected[1]), strict=True):
                mostly_close(ours, expected_one, 23)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 2, 65, 85), (2, 3, 120, 260), (1, 5, 31, 29, 27)])
def test_kernels_that_follow_each_other(size, dtype, mode):
    """Zeros, sums and their rounding overlap on a GPU: by calls in a row that find other values in
    the same memory, and in a CUDA graph, whole numbers add up to the same bits each time.
    """
    dims, points = len(size) - 2, 4096
    torch.manual_seed(5)
    input = torch.zeros(size, device="cuda", dtype=dtype)
    pixel = torch.stack([torch.randint(0, n, (size[0], points)) for n in size[:1:-1]], -1)
    whole = 2 * pixel / (torch.tensor(size[:1:-1]) - 1) - 1  # the pixels themselves, aligned
    at = torch.arange(size[0]).repeat_interleave(points), *pixel.flatten(0, 1).unbind(-1)[::-1]
    grid = whole.view(size[0], *[1] * (dims - 1), points, dims).cuda()
    options = mode, "border", True

    def gradient(grad_out):
        return grid_sample_bw(grad_out, input, grid, *options, output_mask=(True, False))

    grad_outs = [torch.randint(-3, 4, (size[0], size[1], points)).float() for _ in range(40)]
    expected = []
    for grad_out in grad_outs:
        sums = torch.zeros(size[0], *size[2:], size[1])
        sums.index_put_(at, grad_out.movedim(1, -1).flatten(0, 1), accumulate=True)
        expected.append(sums.movedim(-1, 1).to(input).cpu())
    shape = size[0], size[1], *[1] * (dims - 1), points
    on_gpu = [x.view(shape).to(input) for x in grad_outs]
    tolerance = {"rtol": 0, "atol": 0 if mode == "nearest" else 1e-3}
    for found, one in zip([gradient(x) for x in on_gpu], expected, strict=True):
        assert_close(found.cpu(), one, **tolerance)
    held, graph = on_gpu[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient(held)
    for x, one in zip(on_gpu, expected, strict=True):
        held.copy_(x)
        graph.replay()
        assert_close(found.cpu(), one, **tolerance)


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


def test_autocast(device):
    """On CUDA the widest type of the two, on the CPU float32; float64 stays; as torch has it."""
    for dtypes in itertools.product((torch.float32, torch.float16, torch.float64), repeat=2):
        input, grid = (
            x.to(d) for x, d in zip(sample((1, 2, 5, 6), (3, 4), device), dtypes, strict=True)
        )
        with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):
            ours = grid_sample(input, grid)
            if torch.float64 not in dtypes:
                theirs = F.grid_sample(input, grid, align_corners=False)
                assert ours.dtype == theirs.dtype
                assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        with torch.autocast(device, enabled=False):
            assert grid_sample(input, grid).dtype == dtypes[0]


def test_more_than_2_31_elements():
    """Offsets beyond 32 bits, on memory that one pixel or row stands for."""
    row = torch.arange(200.0)
    grid = torch.tensor([[-1.0, 0.9], [-0.5, 1.0], [1.0, -1.0]]).view(1, 1, 3, 2)
    for C in (1, 6):
        images = [row.expand(1, C, size, 200) for size in (2**24, 3)]
        assert_close(*(grid_sample(x, grid, "bilinear", "border", True) for x in images))
    tall = torch.zeros(1).as_strided((1, 1, 40, 3), (0, 0, 0, 0))
    strided = torch.rand(3).as_strided((1, 3, 2**16, 2**16), (3, 1, 0, 0))
    out = grid_sample(strided, torch.rand(1, 5, 7, 2) - 0.5)
    assert_close(out, strided[:, :, :5, :7])
    assert grid_sample(tall, grid).abs().sum() == 0
    places = torch.tensor([[-1.0, 0.9, 0.3], [-0.5, 1.0, -0.2], [1.0, -1.0, 0.0]]).view(
        1, 1, 1, 3, 3
    )
    for C in (1, 6):
        strided = torch.rand(C).as_strided((1, C, 2**11, 2**11, 2**11), (0, 1, 0, 0, 0))
        out = grid_sample(strided, places / 2, "bicubic")
        assert_close(out, strided[:, :, :1, :1, :3])


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_more_pixels_along_an_axis_than_float32_numbers(mode):
    """Their places are rounded, at most to outside; what lies behind the image stays unread."""
    for size in (2**24 + 2, 2**24 + 4, 2**24 + 6):
        memory = torch.full((2 * size + 64,), 7.0)
        image = memory[: 2 * size].fill_(1.0).view(1, 1, 2, size)
        grid = torch.tensor([[1.0, 1.0], [1.0, 0.5], [-1.0, 1.0], [0.0, 0.0]]).view(1, 1, 4, 2)
        for options in itertools.product((mode,), PADDINGS, (False, True)):
            out, to_image, _ = all_of(grid_sample, image, grid, *options)
            assert ((out >= 0) & (out <= 1)).all()
            assert to_image.sum().isfinite()


@pytest.mark.cuda
@pytest.mark.parametrize("last", [False, True])
def test_more_than_2_31_elements_in_memory(last):
    input = torch.zeros(1, 8, 2**14 + 64, 2**14, device="cuda", dtype=torch.float16)
    input = input.contiguous(memory_format=torch.channels_last) if last else input
    corner = input[..., -20:, -30:]
    corner.copy_(torch.rand(corner.shape, device="cuda"))
    x = torch.linspace(-0.9, 0.9, 25, dtype=torch.float64, device="cuda")
    grid = torch.stack(torch.meshgrid(x, x, indexing="xy"), -1)[None]
    sizes = torch.tensor([2**14, 2**14 + 64], device="cuda")
    span = torch.tensor([30, 20], device="cuda")
    whole = (1 - (1 - grid) * (span - 1) / (sizes - 1)).float()
    small = (1 - (1 - whole.double()) * (sizes - 1) / (span - 1)).float()
    assert_close(
        grid_sample(input, whole, align_corners=True), grid_sample(corner, small, align_corners=True),
        rtol=0, atol=2e-2,
    )  # fmt: skip
    grad_out = torch.ones(1, 8, 25, 25, device="cuda", dtype=torch.float16)
    ours = grid_sample_bw(grad_out, input, whole, align_corners=True)
    expected = grid_sample_bw(grad_out, corner, small, align_corners=True)
    assert_close(ours[..., -20:, -30:], expected, rtol=0, atol=5e-2)
    assert ours[..., :-20, :].abs().amax() == 0


def test_what_the_registered_operators_refuse():
    input, grid = torch.rand(2, 3, 4, 5), torch.rand(2, 6, 7, 2)
    out = grid_sample(input, grid)
    raw = torch.ops.octet
    refused = ValueError, RuntimeError  # torch 2.15 makes the latter of whatever C++ throws
    with pytest.raises(
        refused, match=r"interpolation_mode must be 0 \(bilinear\), 1 \(nearest\) or 2"
    ):
        raw.grid_sample(input, grid, 3, 0, False)
    with pytest.raises(refused, match=r"padding_mode must be 0 \(zeros\), 1 \(border\) or 2"):
        raw.grid_sample(input, grid, 0, -1, False)
    flags = False, True, True, True, False
    second = raw.grid_sample_backward_backward
    with pytest.raises(RuntimeError, match="needs to_grad_input or to_grad_grid, got neither"):
        second(None, None, out, input, grid, 0, 0, *flags)
    with pytest.raises(RuntimeError, match=r"to_grad_grid must have shape \(2, 6, 7, 2\)"):
        second(input, grid[:1], out, input, grid, 0, 0, *flags)
