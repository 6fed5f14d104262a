"""convolve2d beside scipy.ndimage and plain PyTorch."""

import math

import numpy as np
import pytest
import torch
from battery import DTYPES, OperatorTests
from scipy import ndimage, signal
from torch.testing import assert_close

from loader import convolve2d, convolve2d_bw, convolve2d_fw, convolve2d_reference

BOUNDARIES = {"zero": "constant", "reflect": "reflect", "nearest": "nearest"}  # ours, scipy's
# Kernels compiled for their size, even ones, lines, two pieces of 16 taps, larger than the image.
KERNELS = [(1, 1), (3, 3), (5, 5), (7, 7), (9, 9), (2, 2), (4, 3), (1, 6), (11, 1), (19, 17)]
# One pixel, less than a tile, rows on and off 16-byte words, several tiles with an odd rest.
IMAGES = [(1, 1), (5, 3), (33, 64), (70, 139)]
LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(-1, x.shape[1], -1),
    "one channel of an interleaved image": lambda x: x[..., None].repeat(1, 1, 1, 3)[..., 1],
    "off by one element": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "cropped": lambda x: torch.nn.functional.pad(x, (2, 3, 1, 4))[:, 1:-4, 2:-3],
}


def sample(image, kernel, device="cpu", dtype=torch.float32, kernel_dtype=None):
    """Values in [-1, 1)."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(sum(image))}

    def uniform(shape):
        return torch.rand(*shape, **make) * 2 - 1

    return uniform(image).to(dtype), uniform(kernel).to(kernel_dtype or torch.float32)


def check(image, kernel, mode="same", boundary="zero"):
    """Forward and both gradients lie within rounding of the float64 reference on the CPU.

    Values are at most 1 and have either sign, so that the partial sums of n products stay below
    sqrt(n), and n roundings of these below n. A gradient to the kernel sums over the pixels, one to
    the image over the taps of all copies of a pixel, of which the nearest border has most.
    """
    leaves = [x.detach().cpu().double().requires_grad_() for x in (image, kernel)]
    expected = convolve2d_reference(*leaves, mode, boundary)
    out = convolve2d_fw(image, kernel, mode, boundary)
    grad_out = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    wanted = torch.autograd.grad(expected, leaves, grad_out.cpu().double())
    grads = convolve2d_bw(grad_out, image, kernel, mode, boundary, (True, True))
    work = min(torch.finfo(image.dtype).eps, torch.finfo(torch.float32).eps)
    copies = 1
    for d in (-2, -1) if boundary != "zero" else ():
        copies *= out.shape[d] + kernel.shape[d] - image.shape[d]
    terms = (kernel.numel(), copies * kernel.numel(), out.numel())
    for ours, reference, n in zip((out, *grads), (expected.detach(), *wanted), terms, strict=True):
        assert ours.is_contiguous()
        rounding = torch.finfo(ours.dtype).eps
        assert_close(ours.cpu().double(), reference, rtol=rounding, atol=max(n, 4) * work)
    assert torch.equal(convolve2d_bw(grad_out, image, kernel, mode, boundary), grads[0])
    alone = convolve2d_bw(grad_out, image, kernel, mode, boundary, (False, True))
    assert torch.equal(alone, grads[1])
    if image.is_cuda and out.numel() and kernel.dim() == 2:
        one = (
            (out, grads[0], image, grad_out)
            if image.dim() == 2
            else (out[0], grads[0][0], image[0], grad_out[0])
        )
        check_many(*one, kernel, mode, boundary)


def check_many(out, grad_image, image, grad_out, kernel, mode, boundary):
    """On a GPU few pixels have kernels of their own: so many more go through the others."""
    many = 1 + int(1.2e7) // (out.numel() * kernel.numel())
    images, grads = image.expand(many, -1, -1), grad_out.expand(many, -1, -1)
    eps = torch.finfo(image.dtype).eps
    work = max(kernel.numel(), 4) * min(eps, torch.finfo(torch.float32).eps)
    rounding = {"rtol": 2 * eps, "atol": 2 * work}
    ours = convolve2d_fw(images, kernel, mode, boundary)
    assert_close(ours, out.expand_as(ours), **rounding)
    ours = convolve2d_bw(grads, images, kernel, mode, boundary, (True, True))
    if boundary != "zero":
        rounding["atol"] *= sum(a + b for a, b in zip(out.shape, kernel.shape, strict=True))
    assert_close(ours[0], grad_image.expand_as(ours[0]), **rounding)
    each = convolve2d_bw(grad_out, image, kernel, mode, boundary, (False, True)).double()
    # Terms of one sign, up to 1, in a thousand sums one after the other.
    terms = many * out.numel()
    work = terms * (terms / 1024 + 32) * torch.finfo(torch.float32).eps
    rounding = {"rtol": 2 * torch.finfo(kernel.dtype).eps, "atol": work}
    assert_close(ours[1].double(), many * each, **rounding)


class TestConvolve2d(OperatorTests):
    name = "convolve2d"
    grows = {0: 0}
    options = {"mode": "same", "boundary": "reflect"}
    variants = tuple(
        {"mode": mode, "boundary": boundary}
        for mode in ("same", "full", "valid")
        for boundary in BOUNDARIES
    )
    backward_refuses = (
        (lambda grad: grad[:1], "grad_out must have the shape of the output, (2, 4, 3), got (1, 4, 3)"),
        (lambda grad: grad[None], "grad_out must have the shape of the output, (2, 4, 3), got (1, 2, 4, 3)"),
        (lambda grad: grad.double(), "grad_out must have the dtype of image, float32, got float64"),
    )  # fmt: skip

    def small(self, device="cpu", dtype=torch.float64, seed=0):
        image, kernel = sample((2, 4, 3), (3, 2), device, dtype, dtype)
        return [(1 - 0.1 * seed) * image, (1 - 0.2 * seed) * kernel]

    def large(self, device):
        return [[*sample((3, 200, 300), (5, 5), device)]]

    def cases(self, tensors):
        image, kernel = tensors
        grad_out = image.detach().clone().requires_grad_()
        options = "same", "reflect"
        yield "", (image, kernel, *options)
        yield "", (image.detach()[:0].requires_grad_(), kernel, *options)
        yield "_backward", (grad_out, image, kernel, *options, True, True)
        yield "_backward", (grad_out, None, kernel, *options, True, False)

    def bad_input(self):
        image, kernel = torch.rand(4, 5), torch.rand(3, 3)
        return (
            ((image[0], kernel), {}, RuntimeError, "image must be (H, W) or (N, H, W), got (5,); join leading dimensions, e.g. with .flatten(0, -3)"),
            ((image[None, None], kernel), {}, RuntimeError, "image must be (H, W) or (N, H, W), got (1, 1, 4, 5); join leading dimensions, e.g. with .flatten(0, -3)"),
            ((image, kernel[0]), {}, RuntimeError, "kernel must be (kh, kw), got (3,)"),
            ((image, kernel[None]), {}, RuntimeError, "kernel must be (kh, kw), got a tensor of 3 dimensions"),
            ((image, kernel[:, :0]), {}, RuntimeError, "kernel must have at least one tap, got shape (3, 0)"),
            ((image, kernel), {"mode": "Same"}, ValueError, "mode must be 'same', 'valid' or 'full', got 'Same'"),
            ((image, kernel), {"mode": None}, ValueError, "mode must be 'same', 'valid' or 'full', got None"),
            ((image, kernel), {"boundary": "constant"}, ValueError, "boundary must be 'zero', 'reflect' or 'nearest', got 'constant'"),
            ((image[:2], kernel), {"mode": "valid"}, RuntimeError, "mode 'valid' needs an image no smaller than the kernel, (3, 3), got (2, 5)"),
            ((image[:0], kernel), {"mode": "full"}, RuntimeError, "mode 'full' needs an image with pixels, got (0, 5)"),
        )  # fmt: skip


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_equals_scipy(kernel, boundary, device):
    """scipy 1.17 itself is wrong where a reflected image is shorter than half the kernel."""
    for shape in IMAGES:
        image, taps = sample(shape, kernel, device, torch.float64, torch.float64)
        args = image.cpu().numpy(), taps.cpu().numpy()
        ours = convolve2d(image, taps, boundary=boundary).cpu()
        if min(shape[0] - kernel[0] // 2, shape[1] - kernel[1] // 2) > 0 or boundary != "reflect":
            theirs = ndimage.convolve(*args, mode=BOUNDARIES[boundary], cval=0)
            assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-13 * taps.numel())
        if boundary == "zero":
            for mode in ("full", "valid"):
                if mode == "full" or all(k <= n for k, n in zip(kernel, shape, strict=True)):
                    theirs = torch.from_numpy(signal.convolve2d(*args, mode))
                    ours = convolve2d(image, taps, mode).cpu()
                    assert_close(ours, theirs, rtol=0, atol=1e-13 * taps.numel())


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_matches_the_reference(kernel, boundary, device):
    for shape in IMAGES:
        check(*sample((2, *shape), kernel, device), "same", boundary)
    check(*sample((34, 67), kernel, device, torch.float64), "full", boundary)
    check(*sample((1, 2), kernel, device, torch.float64), "full", boundary)
    check(*sample((2, 40, 90), kernel, device), "valid", boundary)


@pytest.mark.parametrize("kernel_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtypes(dtype, kernel_dtype, device):
    for kernel in ((3, 3), (9, 9), (4, 17)):
        for boundary in BOUNDARIES:
            check(*sample((35, 76), kernel, device, dtype, kernel_dtype), "same", boundary)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, dtype, device):
    for kernel in ((3, 3), (5, 5), (6, 2)):
        image, taps = sample((2, 40, 72), kernel, device, dtype)
        taps = taps.t().contiguous().t()
        check(LAYOUTS[layout](image), taps, "same", "reflect")
        grad_out = LAYOUTS[layout](image)
        both = convolve2d_bw(grad_out, image, taps, output_mask=(True, True))
        dense = convolve2d_bw(grad_out.contiguous(), image, taps, output_mask=(True, True))
        for ours, same in zip(both, dense, strict=True):
            assert_close(ours, same, rtol=0, atol=0 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("size", [(3, 3), (2, 3), (4, 6)], ids=str)
@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0), (0, 0)], ids=str)
def test_empty_images(shape, size, device):
    """No pixels give no output, and a gradient of 0 to the kernel."""
    image, kernel = sample(shape, size, device)
    out = convolve2d(image, kernel, boundary="reflect")
    assert out.shape == shape
    to_image, to_kernel = convolve2d_bw(out, image, kernel, output_mask=(True, True))
    assert to_image.shape == shape and torch.equal(to_kernel, torch.zeros_like(kernel))


def test_kernel_far_larger_than_the_image(device):
    """An image of 3 pixels reflected 14 times: every extended position from its definition."""
    image, kernel = sample((1, 3), (1, 40), device, torch.float64, torch.float64)
    row = torch.cat([image[0], image[0].flip(0)]).cpu().numpy()
    extended = np.array([row[i % 6] for i in range(20 - 39, 3 + 20)])
    expected = np.convolve(extended, kernel[0].cpu().numpy(), "valid")
    ours = convolve2d(image, kernel, boundary="reflect").cpu()
    assert_close(ours[0], torch.from_numpy(expected), rtol=0, atol=1e-13)
    for boundary in BOUNDARIES:
        check(*sample((3, 4), (40, 23), device, torch.float64), "same", boundary)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# A band of a row's taps: partly used, full, of the wider kind, in two turns; more rows than at once.
@pytest.mark.parametrize("kernel", [(5, 17), (25, 25), (3, 41), (12, 50), (45, 18)], ids=str)
def test_wide_kernels_on_tensor_cores(kernel, dtype):
    """Images of one tile and of several, and small ones of which a tile has four."""
    for shape in ((70, 139), (3, 29, 28), (5, 9, 40)):
        for boundary in ("zero", "reflect"):
            check(*sample(shape, kernel, "cuda", dtype), "same", boundary)
    image, taps = sample((2, 64, 67), kernel, "cuda", dtype)
    check(image.transpose(1, 2).contiguous().transpose(1, 2), taps, "full")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
# Bands of each width, partly used and full, in two turns, of more rows than at once; of one column.
@pytest.mark.parametrize(
    "kernel", [(5, 5), (9, 9), (4, 17), (11, 24), (31, 33), (2, 49), (45, 35), (40, 1)], ids=str
)
def test_kernels_of_the_images_16_bits(kernel, dtype):
    """Few tiles, whose warps share taps, and many; images of which a tile has several.

    Rows begin on 16 bytes, on words, between them, and apart; one kernel, and one to each image.
    """
    for shape in ((256, 136), (401, 139), (30, 29, 28), (9, 9, 40), (6, 700, 640)):
        image, taps = sample(shape, kernel, "cuda", dtype, dtype)
        for boundary in BOUNDARIES:
            close_to_float64(image, taps, "same", boundary)
    close_to_float64(image[:, 1:, 3:], taps.t().contiguous().t(), "valid", "zero")
    close_to_float64(image[:, ::3, ::2], taps, "full", "reflect")
    several = torch.stack([taps, taps.flip(0), -taps, taps / 2, taps / 3, taps])
    ours = torch.vmap(convolve2d)(image, several)
    for one, pixels, own in zip(ours, image, several, strict=True):
        off = max(own.numel(), 16) * torch.finfo(torch.float32).eps
        exact = convolve2d(pixels.double(), own.double())
        assert_close(one.double(), exact, rtol=torch.finfo(dtype).eps, atol=off)


def close_to_float64(image, kernel, mode, boundary):
    """Forward and both gradients are what float64 gives on the same device, rounded."""
    out = convolve2d_fw(image.double(), kernel.double(), mode, boundary)
    grad_out = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(image.dtype)
    tensors = grad_out.double(), image.double(), kernel.double()
    wanted = out, *convolve2d_bw(*tensors, mode, boundary, (True, True))
    ours = (
        convolve2d_fw(image, kernel, mode, boundary),
        *convolve2d_bw(grad_out, image, kernel, mode, boundary, (True, True)),
    )
    copies = 1 if boundary == "zero" else max(kernel.shape)
    terms = kernel.numel(), copies * kernel.numel(), 8 * math.isqrt(out.numel())
    for one, exact, n in zip(ours, wanted, terms, strict=True):
        off = max(n, 16) * torch.finfo(torch.float32).eps
        assert_close(one.double(), exact, rtol=torch.finfo(one.dtype).eps, atol=off)


@pytest.mark.cuda
# Rows of taps for one warp, for several and for two blocks; columns of each kind, and of two blocks.
@pytest.mark.parametrize(
    "kernel",
    [(3, 4), (4, 16), (5, 3), (7, 7), (9, 9), (11, 11), (13, 12), (26, 14), (31, 33), (40, 6)],
    ids=str,
)
def test_gradients_to_float32_kernels_in_strips(kernel):
    """Tiles of each height, one to a block and several; rows on words, between them, and apart."""
    for shape in ((60, 136), (401, 139), (30, 29, 28), (2000, 1001), (6, 700, 640)):
        image, taps = sample(shape, kernel, "cuda")
        for boundary in BOUNDARIES:
            close_to_float64(image, taps, "same", boundary)
    close_to_float64(image[:, 1:, 3:], taps.t().contiguous().t(), "valid", "zero")
    close_to_float64(image[:, ::3, ::2], taps, "full", "reflect")
    several = torch.stack([taps, taps.flip(0), -taps]).requires_grad_()
    torch.vmap(convolve2d)(image[:3], several).square().sum().backward()
    for pixels, own, grad in zip(image, several.detach(), several.grad, strict=False):
        alone = own.requires_grad_()
        convolve2d(pixels, alone).square().sum().backward()
        assert_close(grad, alone.grad, rtol=1e-4, atol=1e-4 * alone.grad.abs().max().item())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", [(5, 5), (17, 3), (15, 31)], ids=str)
def test_a_nan_in_16_bits_spreads_as_far_as_the_kernel_reaches(kernel, bad, dtype):
    image, taps = sample((500, 301), kernel, "cuda", dtype, dtype)
    image[20, 170] = image[0, 300] = bad
    grad_out = torch.zeros_like(image)
    grad_out[:120, :290] = 0.5
    single = image.float(), taps.float()
    for ours, exact in (
        ([convolve2d(image, taps)], [convolve2d(*single)]),
        (
            convolve2d_bw(image, grad_out, taps, output_mask=(True, True)),
            convolve2d_bw(single[0], grad_out.float(), single[1], output_mask=(True, True)),
        ),
        (
            convolve2d_bw(grad_out, image, taps, output_mask=(True, True)),
            convolve2d_bw(grad_out.float(), *single, output_mask=(True, True)),
        ),
    ):
        for one, other in zip(ours, exact, strict=True):
            assert torch.equal(one.isfinite(), other.isfinite())
    taps[1, 1] = bad
    assert torch.equal(
        convolve2d(image, taps).isfinite(), convolve2d(image.float(), taps.float()).isfinite()
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_few_columns_of_taps_on_tensor_cores(dtype):
    """Of many pixels: strips do fewer."""
    image, taps = sample((1010, 1003), (13, 13), "cuda", dtype)
    exact = convolve2d(image.double(), taps.double())
    off = taps.numel() * torch.finfo(torch.float32).eps
    ours = convolve2d(image, taps).double()
    assert_close(ours, exact, rtol=torch.finfo(dtype).eps, atol=off)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [(15, 15), (25, 25)], ids=str)  # CUDA cores, tensor cores
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_numbers_of_any_size(scale, kernel):
    """Within rounding of what is largest; small numbers beside far larger ones keep their digits."""
    image, taps = sample((100, 130), kernel, "cuda")
    ours = convolve2d(image * scale, taps) / scale
    assert_close(ours, convolve2d(image, taps), rtol=0, atol=taps.numel() * 2.0**-23)
    image[:, 60:] *= 2.0**-24
    exact = convolve2d(image.double(), taps.double())[:, 75:]
    off = taps.numel() * 2.0**-47
    assert_close(convolve2d(image, taps)[:, 75:].double(), exact, rtol=0, atol=off)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# One column and the most; more rows than at once; warps below each other, and sharing rows of taps;
# and two that tiles do.
@pytest.mark.parametrize(
    "kernel", [(18, 1), (6, 16), (11, 11), (40, 13), (70, 6), (12, 1), (3, 16)], ids=str
)
def test_strips_of_any_kernel(kernel, dtype):
    """Tiles of 32 and of 64 columns, one and many, ends of rows on and off words."""
    for shape in ((70, 139), (3, 29, 28), (300, 1000)):
        for boundary in BOUNDARIES:
            check(*sample(shape, kernel, "cuda", dtype), "same", boundary)
    image, taps = sample((2, 64, 67), kernel, "cuda", dtype)
    check(image.transpose(1, 2).contiguous().transpose(1, 2), taps.t().contiguous().t(), "full")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# One row and column and the most; chunks of taps that are full, that are not, and that overlap.
@pytest.mark.parametrize(
    "kernel", [(1, 1), (3, 3), (4, 6), (8, 2), (6, 5), (9, 3), (2, 9)], ids=str
)
def test_columns_of_few_taps(kernel, dtype):
    """One warp and many, rows of outputs fewer than those of taps and far more, gaps in rows."""
    for shape in ((3, 129, 130), (2, 900), (1500, 59)):
        for boundary in BOUNDARIES:
            check(*sample(shape, kernel, "cuda", dtype), "same", boundary)
    image, taps = sample((2, 300, 300), kernel, "cuda", dtype)
    check(image[:, :, ::2], taps, "full")
    check(image[:, 1:, 3:].transpose(1, 2), taps, "valid")


@pytest.mark.cuda
@pytest.mark.parametrize("boundary", ["reflect", "nearest"])
@pytest.mark.parametrize(
    ("shape", "kernel"),  # more taps than are held at a time; many pixels, and few of many taps
    [((60, 70), (90, 50)), ((3, 50), (2, 4100)), ((500, 28, 28), (5, 5)), ((2, 300, 40), (31, 31))],
    ids=str,
)
def test_pixels_that_are_repeated_get_the_same_gradient_as_on_the_cpu(shape, kernel, boundary):
    image, taps = sample(shape, kernel, "cuda", torch.float64, torch.float64)
    words = "same", boundary, (True, False)
    ours = convolve2d_bw(image, image, taps, *words)[0].cpu()
    expected = convolve2d_bw(image.cpu(), image.cpu(), taps.cpu(), *words)[0]
    assert_close(ours, expected, rtol=0, atol=1e-12 * taps.abs().sum().item())
    single = convolve2d_bw(image.float(), image.float(), taps.float(), *words)[0].cpu()
    assert_close(single.double(), expected, rtol=0, atol=1e-5 * taps.abs().sum().item())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
# A GPU has other kernels for few pixels.
@pytest.mark.parametrize("rows", [50, 500])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 5), (17, 3), (15, 11)], ids=str)
def test_a_nan_spreads_as_far_as_the_kernel_reaches(kernel, rows, bad, device):
    image, taps = sample((rows, 100), kernel, device)
    image[20, 70] = image[0, 99] = bad
    pixels, ones = (~image.isfinite()).float(), torch.ones_like(taps)
    reached = convolve2d(pixels, ones) > 0
    assert torch.equal(~convolve2d(image, taps).isfinite(), reached)
    # A tap's gradient is spoilt where the pixel meets an output, all but at the image's corner.
    grad_out = torch.zeros_like(image)
    grad_out[:20, :90] = 1
    to_image, _ = convolve2d_bw(image, grad_out, taps, output_mask=(True, True))
    assert torch.equal(~to_image.isfinite(), convolve2d(pixels, ones.flip(0, 1), "full")[
        kernel[0] - 1 - kernel[0] // 2 :, kernel[1] - 1 - kernel[1] // 2 :][:rows, :100] > 0)  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(33, 66), (333, 166)], ids=str)
@pytest.mark.parametrize("kernel", [(5, 5), (4, 4), (7, 6), (9, 25)], ids=str)
def test_a_nan_outside_of_a_ragged_tile_stays_out_of_the_kernels_gradient(
    kernel, shape, bad, device
):
    """Positions beyond the output's end are left out, not multiplied by 0."""
    image, kernel = sample(shape, kernel, device)
    image[-1, -1] = bad
    grad_out = torch.ones(
        [n - k + 1 for n, k in zip(shape, kernel.shape, strict=True)], device=device
    )
    grad = convolve2d_bw(grad_out, image, kernel, "valid", output_mask=(False, True))
    spoilt = torch.zeros(kernel.shape, dtype=torch.bool)
    spoilt[0, 0] = True  # the one tap that meets the last pixel
    found = ~grad.isfinite() if bad == float("inf") else grad.isnan()
    assert torch.equal(found.cpu(), spoilt)


@pytest.mark.parametrize("mask", [(True, False), (False, True), (True, True)])
def test_an_image_is_kept_for_the_gradient_to_the_kernel_alone(mask):
    leaves = [x.requires_grad_(need) for x, need in zip(sample((9, 9), (3, 3)), mask, strict=True)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        convolve2d(*leaves)
    assert kept == [x.shape for x in (leaves if mask[1] else leaves[1:])]


def test_more_than_2_31_elements():
    """Offsets beyond 32 bits, on memory that one row stands for."""
    row = torch.rand(1, 3 * 2**20)
    image = row.expand(800, -1)
    out = convolve2d(image, torch.ones(800, 1) / 800, "valid")
    assert_close(out, row, rtol=1e-4, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [(3, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("shape", [(1, 2**31 + 2**20), (2**16, 2**15 + 64)], ids=str)
def test_more_than_2_31_elements_in_memory(shape, kernel):
    """Of numbers whose sums are exact, since images of other sizes may be summed in other orders."""
    image = torch.zeros(shape, device="cuda", dtype=torch.float16)
    corner = (slice(-40, None), slice(-3000, None))
    image[corner] = torch.randint(8, image[corner].shape, device="cuda").half() / 8
    taps = torch.randint(-8, 9, kernel, device="cuda") / 4
    small = image[corner].clone()
    inner = (slice(-38, None) if shape[0] > 1 else slice(None), slice(-2990, None))
    ours, expected = (convolve2d(x, taps, boundary="nearest")[inner] for x in (image, small))
    assert torch.equal(ours, expected)
    ours, expected = (convolve2d_bw(x, x, taps, boundary="nearest")[inner] for x in (image, small))
    assert torch.equal(ours, expected)
    ours, expected = (convolve2d_bw(x, x, taps, output_mask=(False, True)) for x in (image, small))
    assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_what_the_registered_operators_refuse():
    image, kernel = torch.rand(4, 5), torch.rand(3, 3)
    raw = torch.ops.octet.convolve2d_backward
    with pytest.raises(RuntimeError, match="the gradient to kernel needs image, got None"):
        raw(image, None, kernel, "same", "zero", False, True)
    # torch 2.15 makes a RuntimeError of whatever C++ throws
    with pytest.raises((ValueError, RuntimeError), match="boundary must be 'zero'"):
        torch.ops.octet.convolve2d(image, kernel, "same", "wrap")
