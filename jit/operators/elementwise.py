"""Elementwise operators: all of their Python side but docstring and reference."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from . import sharding
from .frame import (
    asked,
    backward_form,
    batched,
    check_all,
    defer,
    differentiable,
    fake,
    forward_form,
    keep,
    library,
    registered,
    stand_for_tensors,
    total,
)
from .locally import locally
from .node import quickly
from .shapes import check_fake, check_fake_dtype, shown


def elementwise(
    function: Callable, reference: Callable, gradient: Callable | None = None
) -> tuple[Callable, ...]:
    """X with its arguments checked, `X_fw`, `X_bw`, `samples` and `benchmark` of a public X.

    The operator and its backward are those that `ops/X.cpp` registers by OCTET_ELEMENTWISE and
    OCTET_ELEMENTWISE_BACKWARD. Derivatives of the second order and above are the reference's.

    Args:
        function: X itself, whose arguments without a default are the operator's.
        reference: the same in plain PyTorch.
        gradient: where there is no backward kernel, the gradients in plain PyTorch, as a tuple:
            a function of grad_out and of those arguments, by name, that are to be kept for it.
    """
    name = function.__name__
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty]
    operator = library(name)
    if gradient:
        kept = [names.index(argument) for argument in [*inspect.signature(gradient).parameters][1:]]
    else:
        kept, kernels = range(len(names)), _kernels(name, names, reference)

    def backward(grad_out, kept_inputs, mask):
        if gradient:
            return asked(mask, gradient(grad_out, *kept_inputs))
        return kernels(grad_out, kept_inputs, mask)

    def save(ctx, inputs, output):
        keep(ctx, *[inputs[i] for i in kept])

    def derive(ctx, grad_out):
        return tuple(backward(grad_out, ctx.saved_tensors, ctx.needs_input_grad))

    def gradients(grad_out, *inputs, mask):
        return backward(grad_out, [inputs[i] for i in kept], mask)

    def change(ctx, *tangents):
        """Each element of the output depends on one of each input alone."""
        found, inputs = None, ctx.saved_tensors
        for i, to in enumerate(tangents):
            if to is not None:
                found = total(found, backward(to, inputs, [k == i for k in range(len(names))])[i])
        return found

    fake(
        operator,
        lambda *x: _like_the_first(name, names, x),
        lambda *x: sharding.forward(_shapes(len(names)), x),
    )
    batched(operator, flatten=False)
    formula = differentiable(operator, save, derive, change)

    def call(*args):
        for x in args:
            if not isinstance(x, Tensor):
                if stand_for_tensors(args):
                    return defer(function, args)
                check_all(name, names, args)
        return formula(*args)

    way = quickly(
        call,
        name,
        kept=tuple(i in kept for i in range(len(names))),
        options=None,
        gradients=lambda grad_out, inputs, _, need: gradients(grad_out, *inputs, mask=need),
    )
    bw = backward_form(function, names, gradients, default=(True,) * len(names))
    return way, forward_form(function), bw, *_arguments(len(names))


def _like_the_first(name: str, names: list[str], tensors: tuple) -> Tensor:
    """Return what an elementwise kernel does for tensors without data."""
    check_fake(name, dict(zip(names, tensors, strict=True)))
    for argument, x in zip(names[1:], tensors[1:], strict=True):
        torch._check(
            x.shape == tensors[0].shape,
            lambda argument=argument, x=x: (
                f"{name}: {argument} must have the shape of {names[0]}, "
                f"{shown(tensors[0])}, got {shown(x)}; "
                "expand it first, e.g. with torch.broadcast_tensors"
            ),
        )
        cure = "; convert one of them with .to()"
        check_fake_dtype(name, names[0], tensors[0], argument, x, cure)
    return torch.empty_like(tensors[0])


def _shapes(count: int) -> sharding.Shapes:
    return sharding.Shapes(f"{', '.join(['(...)'] * count)} -> (...)")


class _Mask(tuple):
    """One argument, for torch.func, which takes a tuple or a list to pieces."""


def _kernels(name: str, names: list[str], reference: Callable) -> Callable:
    """The backward by the operator's own kernel, differentiable to any order."""
    operator, several = registered(f"{name}_backward"), len(names) > 1

    def fake_backward(*args):
        grad_out, *_ = tensors = args[: len(names) + 1]
        like = _like_the_first(name, ["grad_out", *names], tensors)
        if not several:
            return like
        return tuple(torch.empty_like(like) if m else grad_out.new_empty(0) for m in args[-1])

    def save(ctx, inputs, output):
        ctx.mask = inputs[-1] if several else (True,)
        keep(ctx, *inputs[: len(names) + 1])

    def derive(ctx, *arriving):
        grads = _second(reference, ctx.mask, ctx.saved_tensors, arriving)
        return (*grads, None) if several else grads

    def change(ctx, to, *tangents):
        """Linear in grad_out; second derivatives are the same in either order."""
        tensors = ctx.saved_tensors
        inputs = tensors[1:]
        along = [
            torch.zeros_like(x) if change is None else change
            for x, change in zip(inputs, tangents, strict=False)
        ]
        every = (True,) * len(inputs)
        found = _second(reference, every, tensors, along)[1:]
        if to is not None:
            found = map(torch.add, found, backward(to, inputs, every))
        found = tuple(
            x if wanted else x.new_empty(0) for x, wanted in zip(found, ctx.mask, strict=True)
        )
        return found if several else found[0]

    def cut(*args):
        return sharding.backward(_shapes(len(names)), args, args[-1] if several else (True,))

    fake(operator, fake_backward, cut)
    batched(operator, flatten=False)
    call = differentiable(operator, save, derive, change)

    def backward(grad_out, inputs, mask):
        if not several:
            return (call(grad_out, *inputs) if mask[0] else None,)
        mask = _Mask(map(bool, mask))
        return asked(mask, call(grad_out, *inputs, mask))

    return backward


def _second(reference: Callable, mask, tensors: tuple, arriving: tuple) -> tuple:
    """Return what arrives for the gradients as gradients of grad_out and inputs."""

    def wanted(gradients):
        return tuple(x for x, wanted in zip(gradients, mask, strict=True) if wanted)

    def gradients(grad_out, *inputs):
        return wanted(torch.func.vjp(reference, *inputs)[1](grad_out))

    def derive(*args):
        return torch.func.vjp(gradients, *args[: len(tensors)])[1](args[len(tensors) :])

    args = *tensors, *wanted(arriving)
    of_each = sharding.forward(_shapes(len(args)), args)[0]
    return locally(of_each, derive, args, like=range(len(tensors)))


def _arguments(count: int) -> tuple[Callable, Callable]:
    """`samples` and `benchmark` of an operator of so many tensors."""

    def samples(device):
        """Small arguments, to compare operator and reference on after an edit."""
        make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}

        def several(*shape):
            return tuple(torch.randn(*shape, **make) for _ in range(count))

        yield several(4096)
        yield several(37, 41)
        yield tuple(x[1:] for x in several(1000))
        yield tuple(x.t()[::2] for x in several(33, 20))
        yield tuple(x.half() for x in several(513))

    def benchmark(device):
        """Arguments of a size worth timing."""
        size = 1 << (24 if torch.device(device).type == "cuda" else 22)
        return tuple(torch.ones(size, device=device) for _ in range(count))

    return samples, benchmark
