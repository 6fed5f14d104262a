"""Is convolve2d as fast as memory, or as arithmetic, allows, and how do its peers compare?

Bytes that must move for N x H x W pixels of s bytes: 2 N H W s, read and written by the forward and
by the gradient to the image, read by the gradient to the kernel. Flops: 2 K^2 N H W. Peers:
torch.nn.functional.conv2d, after its `pad` where the boundary is not zero (its gradients of large
images left out on a GPU, where one call may take a minute), torch.compile of the
reference (float32, 3 x 3 taps: it unrolls them all, which takes it 20 to 40 s a case for a GPU),
scipy.ndimage.convolve on the CPU. "column and row" is what a kernel that is the product of two
vectors takes as two of our convolutions. Limits: a copy of as many bytes, and the bandwidth of a
large copy.
"""

from functools import partial

import torch
import torch._functorch.config
import torch.nn.functional as F
from spaces.convolve2d import MOST_CUDNN

import harness
import loader

SIZES = [(512, 512), (2048, 2048), (8192, 8192), (16, 1024, 1024)]
CPU_SIZES = [(512, 512), (2048, 2048), (4, 512, 512)]
KERNELS = [3, 5, 9, 15]
DTYPES = [torch.float32, torch.float16]
MOST_COMPILED = 3
LEAST_SEPARATED = 9
MOST_SCIPY = 1 << 27  # products: above, one call takes longer than a second


def by_conv2d(image, kernel, boundary):
    """The same by F.conv2d, which correlates, of one channel; it has no "reflect" of scipy's."""
    half = kernel.shape[0] // 2
    pixels, taps = image.reshape(-1, 1, *image.shape[-2:]), kernel.flip(0, 1)[None, None]
    if boundary == "zero":
        return F.conv2d(pixels, taps, padding=half).view(image.shape)
    return F.conv2d(F.pad(pixels, (half,) * 4, mode="replicate"), taps).view(image.shape)


def by_scipy(image, kernel, boundary):
    """The same in scipy, which takes the CPU's arrays."""
    from scipy import ndimage

    mode = "constant" if boundary == "zero" else boundary
    taps = kernel.detach().view((1,) * (image.dim() - 2) + kernel.shape)
    return torch.from_numpy(ndimage.convolve(image.detach().numpy(), taps.numpy(), mode=mode))


def measure(shape, K, boundary, dtype, timer, limit, peers):
    """One row for each direction."""
    make = {"device": timer.device, "generator": torch.Generator(timer.device).manual_seed(0)}
    image = torch.randn(shape, **make).to(dtype).requires_grad_()
    kernel = (torch.randn(K, K, **make) / K).to(dtype).requires_grad_()
    grad_out = torch.randn(shape, **make).to(dtype)
    torch.compiler.reset()
    functions = {"loader": lambda image, kernel: loader.convolve2d(image, kernel, "same", boundary)}
    if "conv2d" in peers:
        functions["conv2d"] = lambda image, kernel: by_conv2d(image, kernel, boundary)
    if "compile" in peers and K <= MOST_COMPILED and dtype == torch.float32:
        compiled = torch.compile(loader.convolve2d_reference, dynamic=False)
        functions["compile"] = lambda image, kernel: compiled(image, kernel, "same", boundary)
    check(functions, image, kernel, boundary)
    runs = {"forward": {}, "backward to image": {}, "backward to kernel": {}}
    for name, function in functions.items():
        runs["forward"][name] = lambda function=function: function(image.detach(), kernel.detach())
        if name == "conv2d" and image.is_cuda and 2 * K * K * image.numel() > MOST_CUDNN:
            continue
        for direction, leaf in (("backward to image", image), ("backward to kernel", kernel)):
            out = function(*(x if x is leaf else x.detach() for x in (image, kernel)))
            runs[direction][name] = lambda out=out, leaf=leaf: torch.autograd.grad(
                out, leaf, grad_out, retain_graph=True
            )
    if "scipy" in peers and timer.device.type == "cpu" and image.numel() * K * K <= MOST_SCIPY:
        runs["forward"]["scipy"] = lambda: by_scipy(image, kernel, boundary)
    if K >= LEAST_SEPARATED:
        runs["forward"]["column and row"] = lambda: loader.convolve2d(
            loader.convolve2d(image.detach(), kernel.detach()[:, :1], "same", boundary),
            kernel.detach()[:1],
            "same",
            boundary,
        )
    size = 2 * image.numel() * image.element_size()
    source = torch.ones(size // 2, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    for direction, contenders in runs.items():
        contenders["copy"] = lambda: target.copy_(source)
        row = {
            "operator": "convolve2d",
            "direction": direction,
            "case": f"{' x '.join(map(str, shape))}, {K} x {K}, {boundary}",
            "shape": shape,
            "K": K,
            "boundary": boundary,
            "dtype": str(dtype)[6:],
            "bytes": size,
            "flops": 2 * K * K * image.numel(),
            "limit_us": size / limit,
            "us": timer(contenders),
        }
        show(row)
        yield row


def check(functions, image, kernel, boundary):
    """Every contender agrees with the reference in the first rows before it is timed."""
    rows, K = 64, len(kernel)
    with torch.no_grad():
        top = image[..., : rows + K, :].double()
        expected = loader.convolve2d_reference(top, kernel.double(), "same", boundary)
        for name, function in functions.items():
            off = function(image, kernel)[..., :rows, :].double() - expected[..., :rows, :]
            worst = off.abs().max().item()
            assert worst < 50 * K * torch.finfo(image.dtype).eps, f"{name} is off by {worst}"


def show(row):
    """One line for a case."""
    us = {name: times["median"] for name, times in row["us"].items()}
    ours = us["loader"]
    peers = "  ".join(f"{us[n] / ours:.2f}x {n}" for n in us if n not in ("loader", "copy"))
    print(
        f"{row['direction']:<18} {row['case']:<32} {row['dtype']:<8}{ours:10.1f} us "
        f"{row['bytes'] / ours / 1e6:6.3f} TB/s {row['flops'] / ours / 1e6:6.2f} Tflop/s "
        f"{100 * us['copy'] / ours:4.0f} % of a copy as large"
        f" {100 * row['limit_us'] / ours:4.0f} % of a large copy  {peers}",
        flush=True,
    )


def main(arguments=None):
    """Run the cases and keep the results."""
    parser = harness.parser("convolve2d", 30, "float32, 3 x 3 and 5 x 5 taps")
    parser.add_argument("--peers", nargs="*", default=["conv2d", "compile", "scipy"])
    parser.add_argument("--seconds", type=float, default=0.3, help="most for all turns of one")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    torch.backends.cudnn.allow_tf32 = False  # F.conv2d is to compute what is asked for
    timer, limit = harness.start(options)
    cases = [
        (shape, K, "zero", dtype)
        for dtype in DTYPES[: 2 if cuda and not options.quick else 1]
        for shape in (SIZES if cuda else CPU_SIZES)
        for K in KERNELS[: 2 if options.quick else 4]
    ]
    cases += [((2048, 2048), 5, "nearest", torch.float32)]
    if cuda and not options.quick:
        cases += [((2048, 2048), 25, "zero", dtype) for dtype in DTYPES]
    made = {str(case): partial(measure, *case, timer, limit, options.peers) for case in cases}
    rows = harness.each("convolve2d", "convolve2d", options, made)
    harness.finish("convolve2d", "convolve2d", rows, options, copy_bytes_per_us=limit)
