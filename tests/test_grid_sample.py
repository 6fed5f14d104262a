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
from sampling import KINDS, LAST, LAYOUTS, PADDINGS, all_of, check, sample, torchs
from torch.testing import assert_close

from loader import grid_sample, grid_sample_bw, grid_sample_fw, grid_sample_reference


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
            # Of what is reflected from further away a rounding decides between two pixels.
            small = grid.abs().amax(-1) < 1e4
            chosen = small | ~grid.abs().amax(-1).isfinite()
            sure = chosen | (padding != "reflection")
            for x, y in (
                (ours[0].movedim(1, -1), expected[0].movedim(1, -1)),
                (ours[2], expected[2]),
            ):
                assert_close(x[sure], y[sure], rtol=1e-4, atol=1e-4, equal_nan=True)
            with torch.backends.cudnn.flags(enabled=False):  # cuDNN has rules of its own for NaN
                theirs = torchs(image, grid, *options)
            # A column of images is not asked beyond its ends, whatever its images give.
            judged = small if device == "cpu" or (mode, dims) == ("bicubic", 3) else chosen
            assert_close(
                ours[0].movedim(1, -1)[judged], theirs.movedim(1, -1)[judged],
                rtol=1e-4, atol=1e-4, equal_nan=True,
            )  # fmt: skip
            assert torch.equal(grid_sample_fw(image, grid, *options).isnan(), ours[0].isnan())


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


@pytest.mark.parametrize("mode, dims", KINDS)
def test_empty_inputs(mode, dims, device):
    """No images, channels or points give an empty output, and gradients of 0."""
    for B, C, points in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        input, grid = sample((B, C, 5, 6, 7)[: dims + 2], (points,) * dims, device)
        out = grid_sample(input, grid, mode)
        assert out.shape == (B, C) + (points,) * dims
        grads = grid_sample_bw(out, input, grid, mode, output_mask=(True, True))
        assert_close([*grads], [torch.zeros_like(x) for x in (input, grid)])


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
