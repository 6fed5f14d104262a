"""a + b, element by element: the smallest operator of two arguments."""

import torch
from torch import Tensor

from loader.jit.operators.frame import (
    batched,
    check_fake,
    check_tensors,
    differentiable,
    fake,
    library,
)

_forward = library("add2")


def add2(a: Tensor, b: Tensor) -> Tensor:
    """Add two tensors of one shape.

    Args:
        a: any shape and strides, float32, float64, float16 or bfloat16, on the CPU or a CUDA
            device.
        b: shape, dtype and device of `a`, any strides.

    Returns:
        a + b, shape, dtype and device of `a`; differentiable in both arguments, to any order.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a shape, a dtype, a layout or a device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: `add2_reference`.
    """
    check_tensors("add2", a=a, b=b)
    return _add2(a, b)


def add2_fw(a: Tensor, b: Tensor) -> Tensor:
    """The forward kernel alone: as `add2`, without gradients."""
    check_tensors("add2", a=a, b=b)
    with torch.no_grad():
        return _add2(a, b)


def add2_bw(grad_out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients to `a` and to `b`: grad_out itself, twice."""
    check_tensors("add2", grad_out=grad_out, a=a, b=b)
    return grad_out, grad_out


def add2_reference(a: Tensor, b: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return a + b


def samples(device):
    """Small arguments, to compare operator and reference on after an edit."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}

    def pair(*shape):
        return torch.randn(*shape, **make), torch.randn(*shape, **make)

    a, b = pair(33, 20)
    yield pair(4096)
    yield pair(37, 41)
    yield tuple(x[1:] for x in pair(1000))
    yield a.t()[::2], b.t()[::2]
    yield tuple(x.half() for x in pair(513))


def benchmark(device):
    """Arguments of a size worth timing."""
    size = 1 << (24 if torch.device(device).type == "cuda" else 22)
    return torch.ones(size, device=device), torch.ones(size, device=device)


def _save(ctx, inputs, output):
    pass


def _gradient(ctx, grad_out):
    return grad_out, grad_out


def _fake(a, b):
    check_fake("add2", a=a, b=b)
    torch._check(
        a.shape == b.shape,
        lambda: f"add2: b must have the shape of a, {tuple(a.shape)}, got {tuple(b.shape)}",
    )
    return torch.empty_like(a)


fake(_forward, _fake)
batched(_forward, flatten=False)
_add2 = differentiable(_forward, _save, _gradient)
