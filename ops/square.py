"""x * x, element by element: the smallest complete operator with a backward kernel."""

import torch
from torch import Tensor

from loader.jit.operators.frame import (
    batched,
    check_fake,
    check_tensors,
    differentiable,
    fake,
    library,
    registered,
)

_forward, _backward = library("square"), registered("square_backward")


def square(x: Tensor) -> Tensor:
    """Square each element.

    Args:
        x: any shape and strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA
            device.

    Returns:
        x * x, shape, dtype and device of `x`; differentiable, twice and more.

    Raises:
        TypeError: `x` is no tensor.
        RuntimeError: its dtype, layout or device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: `square_reference`.
    """
    check_tensors("square", x=x)
    return _square(x)


def square_fw(x: Tensor) -> Tensor:
    """The forward kernel alone: as `square`, without gradients."""
    check_tensors("square", x=x)
    with torch.no_grad():
        return _square(x)


def square_bw(grad_out: Tensor, x: Tensor) -> Tensor:
    """The backward kernel alone: 2 * grad_out * x; both of one shape, dtype and device."""
    check_tensors("square", grad_out=grad_out, x=x)
    with torch.no_grad():
        return _square_backward(grad_out, x)


def square_reference(x: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return x * x


def samples(device):
    """Small arguments, to compare operator and reference on after an edit."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    yield (torch.randn(4096, **make),)
    yield (torch.randn(37, 41, **make),)
    yield (torch.randn(1000, **make)[1:],)
    yield (torch.randn(33, 20, **make).t()[::2],)
    yield (torch.randn(513, **make).half(),)


def benchmark(device):
    """Arguments of a size worth timing."""
    size = 1 << (24 if torch.device(device).type == "cuda" else 22)
    return (torch.ones(size, device=device),)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, grad_out):
    return _square_backward(grad_out, *ctx.saved_tensors)


def _second_gradient(ctx, grad):
    grad_out, x = ctx.saved_tensors
    return 2 * grad * x, 2 * grad * grad_out


def _fake(x):
    check_fake("square", x=x)
    return torch.empty_like(x)


def _fake_backward(grad_out, x):
    check_fake("square", grad_out=grad_out, x=x)
    return torch.empty_like(grad_out)


fake(_forward, _fake)
fake(_backward, _fake_backward)
batched(_forward, flatten=False)
batched(_backward, flatten=False)
_square = differentiable(_forward, _save, _gradient)
_square_backward = differentiable(_backward, _save, _second_gradient)
