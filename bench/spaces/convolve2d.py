"""Images and stacks of them under kernels of any size.

In float32 a product and a sum each count as an operation: 2 kh kw to an output.
"""

import math

import torch
import torch.nn.functional as F

import loader

from . import Task, backward, choose, log_uniform, misaligned, padded
from . import size as draw_size

DTYPES = {"float32": 8, "float16": 4, "bfloat16": 4, "float64": 1}
MOST_FLOPS = {True: 1e11, False: 4e9}  # on a GPU, on the CPU
MOST_CUDNN = 1 << 32  # flops: of more, a gradient of F.conv2d of one channel may take it a minute


def draw(random, largest):
    """Return a case: a few large images or many small ones; square kernels are frequent."""
    dtype = choose(random, DTYPES)
    pixels = log_uniform(random, 1 << 12, largest // (2 * getattr(torch, dtype).itemsize))
    batch = random.choice((1, 1, 1, draw_size(random, 1, 512)))
    each = max(64, pixels // batch)
    H = max(1, round(math.sqrt(each) * math.exp(random.uniform(-0.7, 0.7))))
    kh, kw = draw_size(random, 1, 33), draw_size(random, 1, 33)
    if random.random() < 0.6:
        kh = kw = random.choice((3, 5, 7, 9, 11, 15, 21, 25, 31))
    rank_one = random.random() < 0.3  # a Gaussian, a box: two vectors' product
    # Fewer pixels where one case would take all the time there is.
    most = MOST_FLOPS[largest > 1 << 28] / (2 * kh * kw * batch)
    H, W = (max(1, round(n * min(1, most / each) ** 0.5)) for n in (H, each / H))
    mode = choose(random, {"same": 6, "valid": 1, "full": 1})
    if mode == "valid":  # needs an image no smaller than the kernel
        H, W = max(H, kh), max(W, kw)
    return {
        "image": [batch, H, W] if batch > 1 else [H, W],
        "kernel": [kh, kw],
        "separable": rank_one,
        "dtype": dtype,
        "mode": mode,
        "boundary": random.choice(("zero", "zero", "reflect", "nearest")),
        "layout": choose(random, {"plain": 6, "misaligned": 1, "rows apart": 2}),
    }


def kernel_of(case, make):
    """Return (kh, kw), positive, with sum 1."""
    kh, kw = case["kernel"]
    taps = torch.rand(kh, 1, **make) * torch.rand(1, kw, **make)
    taps = taps if case["separable"] else torch.rand(kh, kw, **make)
    return (taps / taps.sum()).to(getattr(torch, case["dtype"]))


def by_conv2d(image, kernel, pad):
    """The same by F.conv2d, which correlates; where the boundary is not zero after a pad."""
    pixels, taps = image.reshape(-1, 1, *image.shape[-2:]), kernel.flip(0, 1)[None, None]
    above, below, left, right, how = pad
    if how is None and above == below and left == right:
        out = F.conv2d(pixels, taps, padding=(above, left))
    else:
        out = F.conv2d(F.pad(pixels, (left, right, above, below), mode=how or "constant"), taps)
    return out.view(*image.shape[:-2], *out.shape[-2:])


def by_fft(image, kernel, shape):
    """The same with a zero boundary through the frequency domain, in float32 at least."""
    work = torch.promote_types(image.dtype, torch.float32)
    size = [n + k - 1 for n, k in zip(image.shape[-2:], kernel.shape, strict=True)]
    product = torch.fft.rfft2(image.to(work), size) * torch.fft.rfft2(kernel.to(work), size)
    out = torch.fft.irfft2(product, size)
    top, left = ((n - m + 1) // 2 for n, m in zip(size, shape, strict=True))
    return out[..., top : top + shape[0], left : left + shape[1]].to(image.dtype)


def tasks(case, make):
    """Return forward, and the gradients to the image and to the kernel."""
    image = torch.randn(case["image"], **make).to(getattr(torch, case["dtype"]))
    if case["layout"] == "misaligned":
        image = misaligned(image, 1)
    if case["layout"] == "rows apart":
        image = padded(image, image.dim() - 1, 2, 3)
    kernel, mode = kernel_of(case, make), case["mode"]
    boundary = case["boundary"] if mode == "same" else "zero"
    ours = lambda image, kernel: loader.convolve2d(image, kernel, mode, boundary)  # noqa: E731
    out = ours(image, kernel)
    (kh, kw), (H, W) = kernel.shape, image.shape[-2:]
    around = {"same": ((kh - 1) // 2, (kw - 1) // 2), "valid": (0, 0), "full": (kh - 1, kw - 1)}
    above, left = around[mode]
    below, right = out.shape[-2] + kh - 1 - H - above, out.shape[-1] + kw - 1 - W - left
    how = {"zero": None, "nearest": "replicate"}.get(boundary, "")
    functions = {"loader": ours}
    if how != "":  # torch's "reflect" leaves the outermost pixel out, scipy's and ours does not
        pad = above, below, left, right, how
        functions["conv2d"] = lambda image, kernel: by_conv2d(image, kernel, pad)
    if boundary == "zero":
        functions["fft"] = lambda image, kernel: by_fft(image, kernel, out.shape[-2:])
    grad_out = torch.randn(out.shape, **make).to(out.dtype)
    size = (image.numel() + out.numel()) * image.element_size()
    flops = 2 * kh * kw * (out.numel() if mode != "full" else image.numel())
    forward = {who: lambda f=f: f(image, kernel) for who, f in functions.items()}
    found = {"forward": Task(forward, size, flops)}
    for what, which in (("image", 0), ("kernel", 1)):
        runs = {
            who: backward(f, [image, kernel], [which], grad_out)
            for who, f in functions.items()
            if not (who == "conv2d" and image.is_cuda and flops > MOST_CUDNN)
        }
        found[f"backward to {what}"] = Task(runs, size, flops)
    return found
