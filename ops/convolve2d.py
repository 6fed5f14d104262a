"""Two-dimensional convolution of images, bilinear in image and kernel."""

import torch
from torch import Tensor

from loader.jit.operators.frame import unflatten, vmap
from loader.jit.operators.shapes import shown

from .linear import Linear, in_turns, rank, refuse_batch

_KERNEL = "kernel must be (kh, kw)", 3
_MODES, _BOUNDARIES = ("same", "valid", "full"), ("zero", "reflect", "nearest")


def convolve2d(image: Tensor, kernel: Tensor, mode: str = "same", boundary: str = "zero") -> Tensor:
    """Convolve images with a kernel, as `scipy.ndimage.convolve` does.

    out[y, x] = sum over i, j of kernel[i, j] * image[y + kh // 2 - i, x + kw // 2 - j]: the kernel
    is turned by half a turn against the image, and its centre is the tap (kh // 2, kw // 2).

    Args:
        image: (H, W) or (N, H, W) float32, float64, float16 or bfloat16, on the CPU or a CUDA
            device, any strides.
        kernel: (kh, kw) of any of these dtypes, on the same device, any strides and any size, also
            larger than the image.
        mode: "same" for an output of the image's size; "full" for all (H + kh - 1, W + kw - 1)
            places where image and kernel meet, "valid" for the (H - kh + 1, W - kw + 1) where the
            kernel lies within the image, both as in `scipy.signal.convolve2d`.
        boundary: how the image goes on beyond its border: "zero" 0 0 | a b c d | 0 0, "reflect"
            b a | a b c d | d c, "nearest" a a | a b c d | d d. scipy.ndimage calls the first
            "constant".

    Returns:
        Contiguous, dtype and device of `image`; accumulated in float32 (float64 for float64).
        Differentiable in both arguments, to any order; results are deterministic.

    Raises:
        TypeError: `image` or `kernel` is no tensor.
        ValueError: `mode` or `boundary` is none of the above.
        RuntimeError: a shape, a dtype, a layout or a device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: `convolve2d_reference`.
    """
    refuse_batch("convolve2d", _KERNEL, kernel)
    return _operator.call(image, kernel, mode, boundary)


def convolve2d_reference(
    image: Tensor, kernel: Tensor, mode: str = "same", boundary: str = "zero"
) -> Tensor:
    """The same in plain PyTorch, tap by tap; 16-bit dtypes are computed in float32."""
    work = torch.promote_types(image.dtype, torch.float32)
    pixels, taps = image.to(work), kernel.to(work)
    for dim, count in ((-2, kernel.shape[0]), (-1, kernel.shape[1])):
        size = image.shape[dim]
        first = {"same": count // 2, "valid": count - 1, "full": 0}[mode] - (count - 1)
        length = size + {"same": count - 1, "valid": 0, "full": 2 * (count - 1)}[mode]
        at = torch.arange(first, first + length, device=image.device)
        if boundary == "reflect":
            source = torch.minimum(at % (2 * size), (-1 - at) % (2 * size))
        else:
            source = at.clamp(0, size - 1)
        pixels = pixels.index_select(dim, source)
        if boundary == "zero":
            inside = ((at >= 0) & (at < size)).unsqueeze(-1 if dim == -2 else 0)
            pixels = torch.where(inside, pixels, 0)
    out = 0
    for i, row in enumerate(taps.flip(0)):
        for j, tap in enumerate(row.flip(0)):
            rows = pixels[..., i : pixels.shape[-2] - len(taps) + 1 + i, :]
            out = out + tap * rows[..., j : pixels.shape[-1] - len(row) + 1 + j]
    return out.to(image.dtype)


def samples(device):
    """Small arguments of `convolve2d`, for comparisons with the reference after an edit."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}

    def pair(image, kernel, dtype=torch.float32):
        return torch.randn(*image, **make).to(dtype), torch.randn(*kernel, **make)

    yield *pair((37, 75), (3, 3)), "same", "zero"
    yield *pair((3, 40, 136), (5, 5)), "same", "reflect"
    yield *pair((33, 70), (9, 9), torch.float16), "same", "nearest"
    yield *pair((35, 41), (4, 18), torch.float64), "full", "reflect"
    yield *pair((2, 20, 30), (1, 7), torch.bfloat16), "valid", "zero"


def benchmark(device):
    """Arguments of a size worth timing."""
    size = 2048 if torch.device(device).type == "cuda" else 1024
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    return torch.randn(size, size, **make), torch.randn(5, 5, **make)


def _options(image, kernel, mode, boundary) -> tuple[str, str]:
    refuse_batch("convolve2d", _KERNEL, kernel)
    _check(mode, boundary)
    return mode, boundary


def _check(mode, boundary) -> None:
    for name, value, allowed in (("mode", mode, _MODES), ("boundary", boundary, _BOUNDARIES)):
        if not isinstance(value, str) or value not in allowed:
            first, second, third, got = map(repr, (*allowed, value))  # see grid_sample's
            raise ValueError(f"convolve2d: {name} must be {first}, {second} or {third}, got {got}")


def _fake(image, kernel, mode, boundary):
    _check(mode, boundary)
    torch._check(
        image.dim() in (2, 3),
        lambda: (
            f"convolve2d: image must be (H, W) or (N, H, W), got {shown(image)}; "
            "join leading dimensions, e.g. with .flatten(0, -3)"
        ),
    )
    torch._check(
        kernel.dim() == 2 or (kernel.dim() == 3 and image.dim() == 3),
        lambda: f"convolve2d: kernel must be (kh, kw), got {shown(kernel)}",
    )
    torch._check(
        kernel.shape[-2] * kernel.shape[-1] > 0,
        lambda: f"convolve2d: kernel must have at least one tap, got shape {shown(kernel)}",
    )
    shape = _shape(image, kernel, mode, 1)
    torch._check(
        mode != "valid" or min(shape[-2:]) > 0,
        lambda: (
            "convolve2d: mode 'valid' needs an image no smaller than the kernel, "
            f"{shown(kernel)}, got {shown(image)}"
        ),
    )
    torch._check(
        mode != "full" or min(image.shape[-2:]) > 0,
        lambda: f"convolve2d: mode 'full' needs an image with pixels, got {shown(image)}",
    )
    return image.new_empty(shape)


def _fake_gradients(grad_out, image, kernel, mode, boundary):
    _check(mode, boundary)
    shape = _shape(grad_out, kernel, mode, -1)
    return grad_out.new_empty(shape), kernel.new_empty(kernel.shape)


def _shape(x, kernel, mode, sign):
    """The output's shape of an image's (`sign` 1), or the image's of an output's (-1)."""
    grow = {"same": 0, "valid": -sign, "full": sign}[mode]
    sizes = (x.shape[d] + grow * (kernel.shape[d] - 1) for d in (-2, -1))
    return (*x.shape[:-2], *sizes)


def _batched(op, images: int, kernel_too: bool):
    """Let torch.vmap run `op` once over the whole batch: its first `images` arguments become one
    more dimension in front, the kernel after them one for each group of images.

    `kernel_too`: the kernel's gradient is among the results, one for each member of the batch.
    """

    def rule(info, in_dims, *args):
        B = info.batch_size

        def whole(x, dim):
            return x.expand(B, *x.shape) if dim is None else x.movedim(dim, 0)

        if min(rank(args[i], in_dims[i]) for i in range(images + 1) if args[i] is not None) < 2:
            return in_turns(op, info, in_dims, args)
        args, images_joined, kernels_joined = list(args), False, False
        for i in range(images):
            if args[i] is not None:
                x = whole(args[i], in_dims[i])
                images_joined = x.dim() == 4
                args[i] = x.flatten(0, 1) if images_joined else x
        # Kernels of a batch within this one go with neighbouring images, so each member has them.
        if kernel_too or in_dims[images] is not None or args[images].dim() == 3:
            x = whole(args[images], in_dims[images])
            kernels_joined = x.dim() == 4
            args[images] = x.flatten(0, 1) if kernels_joined else x

        def split(x, joined):  # (0,) is a gradient that was not asked for
            return unflatten(x, 0, (B, x.shape[0] // B)) if joined or x.dim() == 1 else x

        out = op(*args)
        if not isinstance(out, tuple):
            return split(out, images_joined), 0
        return (split(out[0], images_joined), split(out[1], kernels_joined)), (0, 0)

    vmap(op, rule)


_operator = Linear(
    convolve2d,
    ("image", "kernel"),
    linear=(0, 1),
    fake=_fake,
    shapes="(..., _, _), (_, _) -> (..., _, _)",
    options=_options,
    spared=True,
    fake_gradients=_fake_gradients,
)
_batched(_operator.op, 1, kernel_too=False)
_batched(_operator.backward_op, 2, kernel_too=True)
convolve2d_fw, convolve2d_bw = _operator.fw, _operator.bw
