"""Derivatives of an operator by its reference in plain PyTorch, or by a backward of the user's.

`name_backward` is an operator of its own, so that torch.compile sees a call and not what is in it:
a kernel could not be traced. Its own derivatives, and forward mode, are torch.func's of the
reference.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from . import frame, sharding
from .watch import plainly, tidy, type_name


class Definition(Protocol):
    """What an operator is made of, as far as its derivatives depend on that."""

    name: str
    text: str  # its schema without the name
    schema: Any
    parameters: list[inspect.Parameter]
    tensors: list[int]  # the numbers of the arguments that are tensors
    backward: Callable | None
    shapes: sharding.Shapes | None

    def run_reference(self, *args: Any) -> Any:
        """Call the reference."""


def is_smooth(x: object) -> bool:
    """True for a tensor that may have a gradient."""
    return isinstance(x, Tensor) and _is_smooth(x.dtype)


def _is_smooth(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def differentiable(of: Definition, op: Any) -> Callable:
    """Give an operator its derivatives; what calls it."""
    if not of.tensors:
        return op
    of_backward = _register_backward(of)

    def setup(ctx: Any, inputs: Sequence, output: Any) -> None:
        _keep(ctx, inputs)
        ctx.results = [(x.shape, x.dtype, x.device) for x in _tuple(output)]

    def backward(ctx: Any, *grads: Any) -> Any:
        args = _kept(ctx)
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
        ]
        found = dict(zip(of.tensors, _tuple(of_backward(*given, *args)), strict=True))
        return tuple(found[i] if is_smooth(x) else None for i, x in enumerate(args))

    def tangent(ctx: Any, *tangents: Any) -> Any:
        return _pushed(of.run_reference, _kept(ctx), tangents)

    return frame.differentiable(op, setup, backward, tangent)


def _register_backward(of: Definition) -> Callable:
    """Give torch `name_backward`: gradients of all tensor arguments by those of the results."""
    name, returns = f"{of.name}_backward", len(of.schema.returns)
    grads = "".join(f"Tensor grad_{i}, " for i in range(returns))
    types = ", ".join(["Tensor"] * len(of.tensors))
    # Without defaults: it is called with all arguments.
    arguments = re.sub(r"=[^,]*(?=[,)])", "", of.text.rpartition(" -> ")[0][1:-1] + ")")
    schema = f"({grads}{arguments} -> {types if len(of.tensors) == 1 else f'({types})'}"

    def own(*args: Any) -> Any:
        return _untupled(_gradients(of, args[:returns], args[returns:]))

    def run(*args: Any) -> Any:
        if of.backward is None:
            return tidy(_with_autograd(own, *args), args)
        found = of.backward(*map(plainly, args))
        return _untupled(_checked(of, found, args[0], args[returns:]))

    def fake(*args: Any) -> Any:
        return _untupled(tuple(_blank(args[returns + i], args[0]) for i in of.tensors))

    def cut(*args: Any) -> sharding.Cut:
        if of.shapes is None:
            return sharding.replicated(args, len(of.tensors))
        tensors = [args[returns + i] for i in of.tensors]
        need = [x is not None and _is_smooth(x.tensor_meta.dtype) for x in tensors]
        inputs, gradients = sharding.backward(of.shapes, [*args[:returns], *tensors], need)
        at = [*range(returns), *(returns + i for i in of.tensors)]
        of_tensors = dict(zip(at, inputs, strict=True))
        return [of_tensors.get(i) for i in range(len(args))], gradients

    def setup(ctx: Any, inputs: Sequence, output: Any) -> None:
        _keep(ctx, inputs)

    def again(ctx: Any, *grads: Any) -> Any:
        return _pulled(own, _kept(ctx), grads)

    def tangent(ctx: Any, *tangents: Any) -> Any:
        return _pushed(own, _kept(ctx), tangents)

    frame.forget(name)
    made = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    one_by_one(made._opoverload)
    sharding.offer(made._opoverload, cut)
    return frame.differentiable(made._opoverload, setup, again, tangent)


def one_by_one(op: Any) -> None:
    """Let torch.vmap call an operator for each member of a batch: kernels know of one."""

    def rule(info: Any, in_dims: Sequence, *args: Any) -> tuple:
        def member(k: int) -> tuple:
            pairs = zip(args, in_dims, strict=True)
            return _tuple(op(*[x if d is None else x.select(d, k) for x, d in pairs]))

        if info.batch_size:
            members = [member(k) for k in range(info.batch_size)]
            outs = tuple(map(torch.stack, zip(*members, strict=True)))
        else:
            pairs = zip(args, in_dims, strict=True)
            args = tuple(x if d is None else x.new_zeros(_without(x, d)) for x, d in pairs)
            outs = tuple(x.new_zeros(0, *x.shape) for x in _tuple(op(*args)))
        return _untupled(outs), _untupled((0,) * len(outs))

    frame.vmap(op, rule)


def _without(x: Tensor, dim: int) -> list[int]:
    return [size for d, size in enumerate(x.shape) if d != dim % x.dim()]


def _gradients(of: Definition, grads: Sequence, args: Sequence) -> tuple:
    """Those of the tensor arguments, by differentiating the reference; blank for integers."""
    found = _pulled(of.run_reference, args, grads)
    return tuple(_blank(args[i], grads[0]) if found[i] is None else found[i] for i in of.tensors)


def _pulled(function: Callable, args: Sequence, grads: Sequence) -> tuple:
    """A gradient for each argument, None for what has none, by those of the results."""
    at, part, results = _smooth_part(function, args)
    outs, pull = torch.func.vjp(part, *[args[i] for i in at])
    given = [g for g, smooth in zip(grads, results.values(), strict=True) if smooth]
    pairs = zip(outs, given, strict=True)
    found = pull(tuple(torch.zeros_like(o) if g is None else g for o, g in pairs))
    return tuple(dict(zip(at, found, strict=True)).get(i) for i in range(len(args)))


def _pushed(function: Callable, args: Sequence, tangents: Sequence) -> Any:
    """A tangent for each result, None for what has none, by those of the arguments."""
    at, part, results = _smooth_part(function, args)
    primals = tuple(args[i] for i in at)
    given = [tangents[i] for i in at]
    pairs = zip(primals, given, strict=True)
    own = tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)

    # A vjp is linear in the gradient that it gets; the vjp of that is the jvp. torch.func.jvp would
    # be a second forward mode inside the first one, which torch refuses.
    def pulled(*grads: Tensor) -> tuple:
        return torch.func.vjp(part, *primals)[1](grads)

    _, push = torch.func.vjp(pulled, *map(torch.zeros_like, part(*primals)))
    found = push(own)
    rest = iter(found)
    return _untupled(tuple(next(rest) if smooth else None for smooth in results.values()))


def _smooth_part(function: Callable, args: Sequence) -> tuple[list[int], Callable, dict[int, bool]]:
    """The arguments that may have a gradient; the function of these and its results alike.

    What comes last is filled in the call: for each result if it may have a gradient.
    """
    at = [i for i, x in enumerate(args) if is_smooth(x)]
    results: dict[int, bool] = {}

    def smooth(*given: Any) -> tuple:
        own = dict(zip(at, given, strict=True))
        outs = _tuple(function(*[own.get(i, x) for i, x in enumerate(args)]))
        results.update(enumerate(map(is_smooth, outs)))
        return tuple(x for x in outs if is_smooth(x))

    return at, smooth, results


def _with_autograd(function: Callable, *args: Any) -> Any:
    """Call a function that differentiates, inside of a kernel, where torch has that turned off.

    So it has torch.func, where the kernel is called for a rank's part of DTensors.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    layers = "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"
    for name in ("ADInplaceOrView", "FuncTorchGradWrapper", *layers):
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded - keys
    ):
        return function(*args)


def _checked(of: Definition, found: Any, grad: Tensor, args: Sequence) -> tuple:
    """The gradients of the caller's own backward, one for each tensor argument."""
    given = [*found] if isinstance(found, (tuple, list)) else [found]
    smooth = [i for i in of.tensors if is_smooth(args[i])]
    if len(given) == len(smooth):
        own = dict(zip(smooth, given, strict=True))
    elif len(given) == len(of.tensors):
        own = dict(zip(of.tensors, given, strict=True))
    else:
        raise RuntimeError(
            f"{of.name}: backward must return {len(of.tensors)} gradients, one for each tensor "
            f"argument, got {len(given)}"
        )
    result = []
    for i in of.tensors:
        x, gradient, which = args[i], own.get(i), of.parameters[i].name
        if gradient is None or not is_smooth(x):
            result.append(_blank(x, grad).zero_())
            continue
        for what in ("shape", "dtype", "device"):
            got = getattr(gradient, what, type_name(gradient))
            if got != getattr(x, what):
                wanted = getattr(x, what)
                got, wanted = ((*y,) if isinstance(y, torch.Size) else y for y in (got, wanted))
                raise RuntimeError(
                    f"{of.name}: backward must return for {which} a gradient of its {what}, "
                    f"{wanted}, got {got}"
                )
        result.append(gradient)
    return tidy(result, [grad, *args])


def _blank(x: Any, grad: Tensor) -> Tensor:
    """A tensor for the gradient of an argument; of no elements where it can have none."""
    return (
        torch.zeros_like(x, memory_format=torch.contiguous_format)
        if is_smooth(x)
        else grad.new_zeros(0)
    )


def _keep(ctx: Any, inputs: Sequence) -> None:
    frame.keep(ctx, *[x for x in inputs if isinstance(x, Tensor)])
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.kept = [isinstance(x, Tensor) for x in inputs]


def _kept(ctx: Any) -> list:
    """The inputs that `_keep` was given."""
    saved = iter(ctx.saved_tensors)
    return [next(saved) if k else x for x, k in zip(ctx.others, ctx.kept, strict=True)]


def _tuple(result: Any) -> tuple:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _untupled(results: tuple) -> Any:
    return results[0] if len(results) == 1 else results
