"""Two-dimensional convolution of images, bilinear in image and kernel."""

import torch
from torch import Tensor

from loader.jit.operators.frame import (
    asked,
    check_fake,
    check_tensors,
    differentiable,
    fake,
    forward_form,
    library,
    masked,
    registered,
    total,
    vmap,
)

_MODES, _BOUNDARIES = ("same", "valid", "full"), ("zero", "reflect", "nearest")
_forward, _backward = library("convolve2d"), registered("convolve2d_backward")


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
    _check(kernel, mode, boundary, image=image)
    return _convolve2d(image, kernel, mode, boundary)


def convolve2d_bw(
    grad_out: Tensor,
    image: Tensor,
    kernel: Tensor,
    mode: str = "same",
    boundary: str = "zero",
    output_mask: tuple[bool, bool] = (True, False),
) -> Tensor | tuple[Tensor, Tensor]:
    """The backward kernels alone: gradients of sum(grad_out * convolve2d(image, kernel, ...)).

    Args:
        grad_out: shape of the output, dtype and device of `image`, any strides.
        image, kernel, mode, boundary: as in the forward.
        output_mask: which gradients to compute, of image and of kernel.

    Returns:
        grad_image, or grad_kernel in the dtype of `kernel`, or both as a tuple, as `output_mask`
        says.
    """
    _check(kernel, mode, boundary, grad_out=grad_out, image=image)

    def gradients(*need):
        return _gradients(grad_out, image, kernel, mode, boundary, *need)

    return masked("convolve2d", output_mask, ("image", "kernel"), gradients)


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


def _check(kernel, mode, boundary, **images) -> None:
    check_tensors("convolve2d", **images, kernel=kernel)
    if kernel.dim() != 2:
        raise RuntimeError(f"convolve2d: kernel must be (kh, kw), got {tuple(kernel.shape)}")
    _check_options(mode, boundary)


def _check_options(mode, boundary) -> None:
    for name, value, allowed in (("mode", mode, _MODES), ("boundary", boundary, _BOUNDARIES)):
        if not isinstance(value, str) or value not in allowed:
            first, second, third = map(repr, allowed)
            raise ValueError(
                f"convolve2d: {name} must be {first}, {second} or {third}, got {value!r}"
            )


def _fake(image, kernel, mode, boundary):
    check_fake("convolve2d", image=image, kernel=kernel)
    _check_options(mode, boundary)
    torch._check(
        image.dim() in (2, 3),
        lambda: f"convolve2d: image must be (H, W) or (N, H, W), got {tuple(image.shape)}",
    )
    torch._check(
        kernel.dim() == 2 or (kernel.dim() == 3 and image.dim() == 3),
        lambda: f"convolve2d: kernel must be (kh, kw), got {tuple(kernel.shape)}",
    )
    torch._check(
        kernel.shape[-2] * kernel.shape[-1] > 0,
        lambda: f"convolve2d: kernel must have at least one tap, got shape {tuple(kernel.shape)}",
    )
    return image.new_empty(_shape(image, kernel, mode, 1))


def _fake_backward(grad_out, image, kernel, mode, boundary, need_image, need_kernel):
    check_fake("convolve2d", grad_out=grad_out, kernel=kernel)
    _check_options(mode, boundary)
    return (
        grad_out.new_empty(_shape(grad_out, kernel, mode, -1) if need_image else (0,)),
        kernel.new_empty(kernel.shape if need_kernel else (0,)),
    )


def _shape(x, kernel, mode, sign):
    """The output's shape of an image's (`sign` 1), or the image's of an output's (-1)."""
    grow = {"same": 0, "valid": -sign, "full": sign}[mode]
    sizes = (x.shape[d] + grow * (kernel.shape[d] - 1) for d in (-2, -1))
    return (*x.shape[:-2], *sizes)


def _setup(ctx, inputs, output):
    image, kernel, ctx.mode, ctx.boundary = inputs
    ctx.save_for_backward(image if ctx.needs_input_grad[1] else None, kernel)


def _gradient(ctx, grad_out):
    image, kernel = ctx.saved_tensors
    need = ctx.needs_input_grad[:2]
    if not any(need):
        return (None,) * 4
    both = _gradients(grad_out, image, kernel, ctx.mode, ctx.boundary, *need)
    return *asked(need, both), None, None


def _setup_backward(ctx, inputs, output):
    grad_out, image, kernel, ctx.mode, ctx.boundary, ctx.need_image, ctx.need_kernel = inputs
    ctx.save_for_backward(grad_out, image, kernel)
    ctx.set_materialize_grads(False)


def _second_gradient(ctx, to_image, to_kernel):
    """Gradients of the backward; `to_*` is what arrives for its grad_image and grad_kernel.

    F(g, image, kernel) = sum(g * convolve2d(image, kernel)) is linear in each. What arrives meets
    F(g, to_image, kernel) + F(g, image, to_kernel), whose gradients are the operator's own.
    """
    grad_out, image, kernel = ctx.saved_tensors
    need_grad_out, need_image, need_kernel = ctx.needs_input_grad[:3]
    options = ctx.mode, ctx.boundary
    to_grad_out = for_image = for_kernel = None
    if to_image is not None and ctx.need_image:
        if need_grad_out:
            to_grad_out = _convolve2d(to_image, kernel, *options)
        if need_kernel:
            for_kernel = _gradients(grad_out, to_image, kernel, *options, False, True)[1]
    if to_kernel is not None and ctx.need_kernel:
        if need_grad_out:
            extra = _convolve2d(image, to_kernel, *options)
            to_grad_out = total(to_grad_out, extra)
        if need_image:
            for_image = _gradients(grad_out, None, to_kernel, *options, True, False)[0]
    return to_grad_out, for_image, for_kernel, None, None, None, None


def _batched(op, images: int, kernel_too: bool):
    """Let torch.vmap run `op` once over the whole batch: its first `images` arguments become one
    more dimension in front, the kernel after them one for each group of images.

    `kernel_too`: the kernel's gradient is among the results, one for each member of the batch.
    """

    def rule(info, in_dims, *args):
        B = info.batch_size

        def whole(x, dim):
            return x.expand(B, *x.shape) if dim is None else x.movedim(dim, 0)

        args, images_joined, kernels_joined = list(args), False, False
        for i in range(images):
            if args[i] is not None:
                x = whole(args[i], in_dims[i])
                images_joined = x.dim() == 4
                args[i] = x.flatten(0, 1) if images_joined else x
        if kernel_too or in_dims[images] is not None:
            x = whole(args[images], in_dims[images])
            kernels_joined = x.dim() == 4
            args[images] = x.flatten(0, 1) if kernels_joined else x

        def split(x, joined):  # (0,) is a gradient that was not asked for
            return x.unflatten(0, (B, x.shape[0] // B)) if joined or x.dim() == 1 else x

        out = op(*args)
        if not isinstance(out, tuple):
            return split(out, images_joined), 0
        return (split(out[0], images_joined), split(out[1], kernels_joined)), (0, 0)

    vmap(op, rule)


fake(_forward, _fake)
fake(_backward, _fake_backward)
_batched(_forward, 1, kernel_too=False)
_batched(_backward, 2, kernel_too=True)
_convolve2d = differentiable(_forward, _setup, _gradient)
_gradients = differentiable(_backward, _setup_backward, _second_gradient)
convolve2d_fw = forward_form(convolve2d)
