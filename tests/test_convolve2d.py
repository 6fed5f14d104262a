"""convolve2d beside scipy.ndimage and plain PyTorch."""

import sys

import numpy as np
import pytest
import torch
from scipy import ndimage, signal
from torch.testing import assert_close

import loader
from loader import convolve2d, convolve2d_bw, convolve2d_fw, convolve2d_reference

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
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


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0), (0, 0)], ids=str)
def test_empty_images(shape, device):
    """No pixels give no output, and a gradient of 0 to the kernel."""
    image, kernel = sample(shape, (3, 3), device)
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 5), (17, 3)], ids=str)
def test_a_nan_spreads_as_far_as_the_kernel_reaches(kernel, bad, device):
    image, taps = sample((50, 100), kernel, device)
    image[20, 70] = image[0, 99] = bad
    pixels, ones = (~image.isfinite()).float(), torch.ones_like(taps)
    reached = convolve2d(pixels, ones) > 0
    assert torch.equal(~convolve2d(image, taps).isfinite(), reached)
    # A tap's gradient is spoilt where the pixel meets an output, all but at the image's corner.
    grad_out = torch.zeros_like(image)
    grad_out[:20, :90] = 1
    to_image, _ = convolve2d_bw(image, grad_out, taps, output_mask=(True, True))
    assert torch.equal(~to_image.isfinite(), convolve2d(pixels, ones.flip(0, 1), "full")[
        kernel[0] - 1 - kernel[0] // 2 :, kernel[1] - 1 - kernel[1] // 2 :][:50, :100] > 0)  # fmt: skip


def test_a_nan_outside_of_a_ragged_tile_stays_out_of_the_kernels_gradient(device):
    """Tile positions beyond the output's end are left out, not multiplied by 0."""
    image, kernel = sample((33, 66), (5, 5), device)
    image[32, 65] = float("nan")
    grad_out = torch.ones(29, 62, device=device)
    grad = convolve2d_bw(grad_out, image, kernel, "valid", output_mask=(False, True))
    spoilt = torch.zeros(5, 5, dtype=torch.bool)
    spoilt[0, 0] = True  # the one tap that meets the last pixel
    assert torch.equal(grad.isnan().cpu(), spoilt)


@pytest.mark.parametrize("mode", ["same", "full", "valid"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_gradients(mode, boundary, device):
    inputs = sample((2, 4, 3), (3, 2), device, torch.float64, torch.float64)
    inputs = [x.requires_grad_() for x in inputs]

    def function(image, kernel):
        return convolve2d(image, kernel, mode, boundary)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_third_derivative():
    image, kernel = sample((5, 4), (3, 3), "cpu", torch.float64, torch.float64)

    def third(function):
        x = kernel.clone().requires_grad_()
        y = function(image, x, "same", "nearest").pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            y = grad.pow(2).sum()
        return grad

    assert_close(third(convolve2d), third(convolve2d_reference))


@pytest.mark.parametrize("mask", [(True, False), (False, True), (True, True)])
def test_gradients_only_where_they_are_asked_for(mask):
    leaves = [x.requires_grad_(need) for x, need in zip(sample((9, 9), (3, 3)), mask, strict=True)]
    out = convolve2d(*leaves)
    saved = out.grad_fn.saved_tensors
    assert (saved[0] is not None) == mask[1]  # without it the image need not be kept
    out.sum().backward()
    assert [x.grad is not None for x in leaves] == [*mask]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_registered_operators_pass_opcheck(dtype, device):
    image, kernel = (x.requires_grad_() for x in sample((2, 6, 7), (3, 3), device, dtype, dtype))
    options = "same", "reflect"
    grad_out = image.detach().clone().requires_grad_()
    forward, backward = torch.ops.octet.convolve2d, torch.ops.octet.convolve2d_backward
    torch.library.opcheck(forward.default, (image, kernel, *options))
    torch.library.opcheck(forward.default, (image.detach()[:0].requires_grad_(), kernel, *options))
    torch.library.opcheck(backward.default, (grad_out, image, kernel, *options, True, True))
    torch.library.opcheck(backward.default, (grad_out, None, kernel, *options, True, False))


@pytest.mark.filterwarnings("ignore")  # what torch.compile itself says
def test_compiles_as_one_graph(device):
    image, kernel = sample((20, 24), (3, 3), device)

    def loss(image, kernel):
        return convolve2d(image * 2, kernel, "full", "nearest").square().sum()

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, dynamic=True)):
        leaves = image.clone().requires_grad_(), kernel.clone().requires_grad_()
        value = run(*leaves)
        value.backward()
        results.append([value.detach(), *(x.grad for x in leaves)])
    assert_close(results[0], results[1])


def test_function_transforms():
    images, kernels = sample((3, 2, 6, 7), (3, 3, 3), dtype=torch.float64)

    def loss(image, kernel):
        return convolve2d(image, kernel, "same", "reflect").square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1))
    for dims in ((0, 0), (0, None), (None, 0)):
        args = [x if d == 0 else x[1] for x, d in zip((images, kernels), dims, strict=True)]
        each = [[x[i] if d == 0 else x for x, d in zip(args, dims, strict=True)] for i in range(3)]
        for function in (convolve2d, loss):
            expected = torch.stack([function(*a) for a in each])
            assert_close(torch.vmap(function, dims)(*args), expected)
        for ours, *expected in zip(
            torch.vmap(grad, dims)(*args), *(grad(*a) for a in each), strict=True
        ):
            assert_close(ours, torch.stack(expected))
    to_image = torch.vmap(torch.func.grad(loss), (0, None))(images, kernels[0])
    assert_close(to_image[2], torch.func.grad(loss)(images[2], kernels[0]))
    twice = torch.vmap(torch.vmap(convolve2d, (0, None)))(images, kernels)
    assert_close(twice, torch.vmap(convolve2d)(images, kernels))
    one = images[:, :1], kernels[:, None]  # an inner batch of one
    nested, flat = torch.vmap(torch.vmap(grad))(*one), torch.vmap(grad)(images[:, 0], kernels)
    assert_close([x[:, 0] for x in nested], [*flat])


def test_same_bits_in_every_run(device):
    image, kernel = sample((3, 200, 300), (5, 5), device)
    first = convolve2d_bw(image, image, kernel, "same", "reflect", (True, True))
    for _ in range(3):
        again = convolve2d_bw(image, image, kernel, "same", "reflect", (True, True))
        assert all(map(torch.equal, first, again))


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
    image = torch.zeros(shape, device="cuda", dtype=torch.float16)
    corner = (slice(-40, None), slice(-3000, None))
    image[corner] = torch.rand(image[corner].shape, device="cuda").half()
    _, taps = sample((1, 1), kernel, "cuda")
    small = image[corner].clone()
    inner = (slice(-38, None) if shape[0] > 1 else slice(None), slice(-2990, None))
    ours, expected = (convolve2d(x, taps, boundary="nearest")[inner] for x in (image, small))
    assert torch.equal(ours, expected)
    ours, expected = (convolve2d_bw(x, x, taps, boundary="nearest")[inner] for x in (image, small))
    assert torch.equal(ours, expected)
    ours, expected = (convolve2d_bw(x, x, taps, output_mask=(False, True)) for x in (image, small))
    assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.cuda
def test_current_stream_and_graphs():
    """Kernels wait for what is queued before them in the caller's stream, and can be captured."""
    image, kernel = sample((500, 600), (5, 5), "cuda")
    expected = convolve2d(image, kernel)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        later = torch.zeros_like(image)
        torch.cuda._sleep(50_000_000)
        later.copy_(image)
        out = convolve2d(later, kernel)
    side.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = convolve2d(image, kernel)
        grads = convolve2d_bw(image, image, kernel, "same", "reflect", (True, True))
    image.mul_(2)
    graph.replay()
    assert torch.equal(out, convolve2d(image, kernel))
    again = convolve2d_bw(image, image, kernel, "same", "reflect", (True, True))
    assert all(map(torch.equal, grads, again))


def test_bad_input_gets_one_clear_message():
    image, kernel = torch.rand(4, 5), torch.rand(3, 3)
    meta = "is on the meta device, which holds no data; make it on the CPU or a CUDA device (for shapes alone there is torch.compile, or FakeTensorMode)"
    for arguments, kind, message in (
        ((image[0], kernel), RuntimeError, "image must be (H, W) or (N, H, W), got (5,); join leading dimensions, e.g. with .flatten(0, -3)"),
        ((image[None, None], kernel), RuntimeError, "image must be (H, W) or (N, H, W), got (1, 1, 4, 5); join leading dimensions, e.g. with .flatten(0, -3)"),
        ((image, kernel[0]), RuntimeError, "kernel must be (kh, kw), got (3,)"),
        ((image, kernel[None]), RuntimeError, "kernel must be (kh, kw), got (1, 3, 3)"),
        ((image, kernel[:, :0]), RuntimeError, "kernel must have at least one tap, got shape (3, 0)"),
        ((image.int(), kernel), RuntimeError, "image must be float32, float64, float16 or bfloat16, got int32; convert it, e.g. image.float()"),
        ((image, kernel.long()), RuntimeError, "kernel must be float32, float64, float16 or bfloat16, got int64; convert it, e.g. kernel.float()"),
        ((image.to_sparse(), kernel), RuntimeError, "image must be a dense tensor, got a sparse or packed one; use image.to_dense()"),
        ((image.numpy(), kernel), TypeError, "image must be a torch.Tensor, got ndarray; convert it with torch.from_numpy()"),
        ((image, [[1.0]]), TypeError, "kernel must be a torch.Tensor, got list; convert it with torch.tensor()"),
        ((image.to("meta"), kernel), RuntimeError, f"image {meta}"),
        ((image, kernel, "Same"), ValueError, "mode must be 'same', 'valid' or 'full', got 'Same'"),
        ((image, kernel, None), ValueError, "mode must be 'same', 'valid' or 'full', got None"),
        ((image, kernel, "same", "constant"), ValueError, "boundary must be 'zero', 'reflect' or 'nearest', got 'constant'"),
        ((image[:2], kernel, "valid"), RuntimeError, "mode 'valid' needs an image no smaller than the kernel, (3, 3), got (2, 5)"),
        ((image[:0], kernel, "full"), RuntimeError, "mode 'full' needs an image with pixels, got (0, 5)"),
    ):  # fmt: skip
        for form in (convolve2d, convolve2d_fw):
            with pytest.raises(kind) as caught:
                form(*arguments)
            assert type(caught.value) is kind and str(caught.value) == f"convolve2d: {message}"


def test_bad_input_of_the_backward():
    image, kernel = torch.rand(4, 5), torch.rand(3, 3)
    for grad_out, message in (
        (image[:3], "grad_out must have the shape of the output, (4, 5), got (3, 5)"),
        (image[None], "grad_out must have the shape of the output, (4, 5), got (1, 4, 5)"),
        (image.double(), "grad_out must have the dtype of image, float32, got float64"),
    ):
        with pytest.raises(RuntimeError) as caught:
            convolve2d_bw(grad_out, image, kernel)
        assert str(caught.value) == f"convolve2d: {message}"
    with pytest.raises(ValueError, match="output_mask must be two flags"):
        convolve2d_bw(image, image, kernel, output_mask=(False, False))
    raw = torch.ops.octet.convolve2d_backward
    with pytest.raises(RuntimeError, match="the gradient to kernel needs image, got None"):
        raw(image, None, kernel, "same", "zero", False, True)
    with pytest.raises(ValueError, match="boundary must be 'zero'"):
        torch.ops.octet.convolve2d(image, kernel, "same", "wrap")


@pytest.mark.cuda
def test_mixed_devices():
    image, kernel = sample((4, 5), (3, 3))
    with pytest.raises(RuntimeError, match=r"kernel must be on the device of image, cuda:0, got c"):
        convolve2d(image.cuda(), kernel)


@pytest.mark.parametrize("name", loader._session.units)
def test_samples_and_benchmark_arguments_fit(name, device):
    """What an edited kernel is compared on: quick, the same each time, near the reference."""
    import importlib

    module = importlib.import_module(f"loader.ops.{name}")
    operator, reference = getattr(loader, name), getattr(loader, name + "_reference")
    cases = [*module.samples(device)]
    assert len(cases) >= 4 and {torch.float32} < {case[0].dtype for case in cases}
    for case, again in zip(cases, module.samples(device), strict=True):
        for x, y in zip(case, again, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        ours, expected = operator(*case), reference(*case)
        if not ours.is_floating_point():  # a level, where the value lies between two
            assert_close(ours, expected, rtol=0, atol=1)
            continue
        eps = torch.finfo(ours.dtype).eps
        assert_close(ours, expected, rtol=4 * eps, atol=1000 * min(eps, 1.2e-7))
    assert operator(*module.benchmark(device)).numel() > 10000


@pytest.mark.parametrize("name", loader._session.units)
def test_the_python_side_can_be_run_again(name):
    """What `loader.reload()` does after an edit of ops/X.py: torch takes a fake kernel once only."""
    from loader.jit.live.python_side import python_files, run_again

    operator, reference = getattr(loader, name), getattr(loader, f"{name}_reference")
    session = loader._session
    run_again(session, name, dict.fromkeys(python_files(session, name)))
    module = sys.modules[f"loader.ops.{name}"]
    assert getattr(module, name) is operator  # whoever holds it has the new code
    assert getattr(module, f"{name}_reference") is reference
    (arguments, *_) = module.samples("cpu")
    assert_close(operator(*arguments), reference(*arguments), rtol=1e-3, atol=1e-3)
