"""The Python side that every operator shares: loading, derivatives, argument types."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from . import session


def library(name: str):
    """Load operator `name`; its registered form, `torch.ops.octet.<name>.default`."""
    owner, _ = session.owner(name)
    owner.load(name)
    return registered(name)


def registered(name: str):
    """`torch.ops.octet.<name>.default`, its library being loaded."""
    return torch._ops._OpNamespace.__getattr__(torch.ops.octet, name).default


_functions: dict[tuple[str, str], Callable] = {}


def _later(op, role: str, function: Callable) -> Callable | None:
    """`function` for a role that torch lets an operator be given only once.

    What torch gets looks the function up when it is called, so that an edit of `ops/X.py`, which is
    run again then, changes it; None where torch has that already.
    """
    known = (op.name(), role) in _functions
    _functions[op.name(), role] = function

    def latest(*args, **named):
        return _functions[op.name(), role](*args, **named)

    return None if known else latest


def fake(op, function: Callable) -> None:
    """Tell torch what a registered operator returns for tensors without data."""
    if later := _later(op, "fake", function):
        torch.library.register_fake(op.name(), later)


def differentiable(op, setup_context: Callable, backward: Callable) -> Callable:
    """Give a registered operator its derivative; the quick way to call it.

    `setup_context(ctx, inputs, output)` and `backward(ctx, *grads)`, as torch.autograd.Function has
    them, serve both ways in: `torch.ops.octet.X`, also under torch.compile and torch.export, by
    torch.library.register_autograd; and the function returned, which is quicker in eager mode and
    which torch.func can transform (torch 2.11 cannot transform the former).
    """
    setup, gradient = _later(op, "setup", setup_context), _later(op, "backward", backward)
    if setup:
        torch.library.register_autograd(op, gradient, setup_context=setup)
    below_autograd, any_requires_grad = (
        torch._C._AutoDispatchBelowAutograd,
        torch._C._any_requires_grad,
    )
    transforming = torch._C._are_functorch_transforms_active

    def forward(*args):
        with below_autograd():
            return op(*args)

    formula = type(
        f"{op.name().split('::')[1]}_formula",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "generate_vmap_rule": True,
        },
    )
    # formula.apply ends in this outside of torch.func, after 14 us for the signature of `forward`.
    apply = super(torch.autograd.Function, formula).apply

    def call(*args):
        if torch.compiler.is_compiling():
            return op(*args)
        # In a dual level only the formula notices a tangent, and says that it has no rule.
        wanted = torch.is_grad_enabled() and any_requires_grad(*args)
        if wanted or forward_ad._current_level >= 0:
            return formula.apply(*args) if transforming() else apply(*unwrap_dead_wrappers(args))
        with below_autograd():
            return op(*args)

    return call


def check_tensors(op: str, **arguments) -> None:
    """TypeError for the first argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            got = type(value).__name__ + _cure(value)
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {got}")


def check_fake(op: str, **arguments: Tensor) -> None:
    """What a fake kernel has to refuse, as the real one does: no data, or two devices."""
    (first, reference), *_ = arguments.items()
    for name, value in arguments.items():
        if value.device.type == "meta":
            raise RuntimeError(
                f"{op}: {name} is on the meta device, which holds no data; make it on the CPU or a "
                "CUDA device (for shapes alone there is torch.compile, or FakeTensorMode)"
            )
        if value.device != reference.device:
            raise RuntimeError(
                f"{op}: {name} must be on the device of {first}, {reference.device}, "
                f"got {value.device}; move one of them with .to()"
            )


def _cure(value) -> str:
    if type(value).__module__ == "numpy":
        return "; convert it with torch.from_numpy()"
    return (
        "; convert it with torch.tensor()" if isinstance(value, (list, tuple, int, float)) else ""
    )


def masked(op: str, mask, names: Sequence[str], compute: Callable):
    """What `X_bw` returns: of the gradients to the tensors named those that `output_mask` asks for.

    `compute(*flags)` gives all of them. One comes back as it is, several as a tuple.

    Raises: ValueError where the mask does not say which of the gradients to compute.
    """
    if not isinstance(mask, (tuple, list)) or len(mask) != len(names) or not any(mask):
        count = ("no", "one", "two", "three", "four")[len(names)] if len(names) < 5 else len(names)
        *before, last = names
        raise ValueError(
            f"{op}: output_mask must be {count} flags, for {', '.join(before)} and {last}, "
            f"at least one of them set, got {mask}"
        )
    with torch.no_grad():
        gradients = compute(*map(bool, mask))
    some = tuple(x for x, wanted in zip(gradients, mask, strict=True) if wanted)
    return some if len(some) > 1 else some[0]


def asked(mask, gradients) -> list[Tensor | None]:
    """The gradients that a mask asks for; None in the place of the others."""
    return [x if wanted else None for x, wanted in zip(gradients, mask, strict=True)]


def total(a: Tensor | None, b: Tensor) -> Tensor:
    """The sum of two gradients, of which the first may not be there yet."""
    return b if a is None else a + b


def forward_form(function: Callable) -> Callable:
    """The public `X_fw` of a public X."""
    name = function.__name__

    @functools.wraps(function)
    def form(*args, **named):
        with torch.no_grad():
            return function(*args, **named)

    form.__name__ = form.__qualname__ = f"{name}_fw"
    form.__doc__ = f"The forward kernel alone: as `{name}`, without gradients."
    return form


def backward_form(
    function: Callable, names: list[str], backward: Callable, default: tuple[bool, ...]
) -> Callable:
    """The public `X_bw` of a public X of the tensors named.

    `backward(grad_out, *tensors, mask=...)` gives a gradient for each of them; `default` is the
    output_mask that holds where none is given. An X of one tensor has none.
    """
    name, several = function.__name__, len(names) > 1
    tensors = ["grad_out", *names]
    _functions[name, "backward form"] = backward

    def run(*args, mask=(True,)):
        for x in args:
            if not isinstance(x, Tensor):
                check_tensors(name, **dict(zip(tensors, args, strict=True)))
        compute = _functions[name, "backward form"]
        if several:
            return masked(name, mask, names, lambda *flags: compute(*args, mask=flags))
        with torch.no_grad():
            return compute(*args, mask=mask)[0]

    listed = ", ".join(tensors)
    mask, to_run = (f", output_mask={default}", ", mask=output_mask") if several else ("", "")
    form = eval(f"lambda {listed}{mask}: run({listed}{to_run})", {"run": run})
    form.__name__ = form.__qualname__ = f"{name}_bw"
    form.__module__ = function.__module__
    form.__annotations__ = dict.fromkeys(tensors, Tensor)
    form.__annotations__["return"] = Tensor
    form.__doc__ = f"""The backward kernel alone: gradients of sum(grad_out * {name}(...)).

    Args:
        grad_out: shape, dtype and device of the output, any strides.
        {", ".join(names)}: as in the forward."""
    if several:
        form.__annotations__["output_mask"] = tuple[(bool,) * len(names)]
        form.__annotations__["return"] = Tensor | tuple[(Tensor,) * len(names)]
        form.__doc__ += f"""
        output_mask: which gradients to compute, of {", ".join(names[:-1])} and of {names[-1]}.

    Returns:
        the gradient asked for, or a tuple of those, in this order; each has its tensor's shape
        and dtype.
    """
    return form


def vmap(op, rule: Callable) -> None:
    """Tell torch.vmap how to run a registered operator on a batch, as register_vmap has it."""
    if later := _later(op, "vmap", rule):
        torch.library.register_vmap(op, later)


def batched(op, flatten: bool) -> None:
    """Let torch.vmap run `op` once over the whole batch, instead of once for each member.

    `flatten` joins the batch with the first dimension, for operators on N independent points;
    without it the operator takes any number of dimensions.
    """

    def rule(info, in_dims, *args):
        def whole(x, dim):
            if not isinstance(x, Tensor):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1) if flatten else x

        out = op(*(whole(x, dim) for x, dim in zip(args, in_dims, strict=True)))

        def split(x):
            if flatten:
                return x.unflatten(0, (info.batch_size, len(x) // info.batch_size))
            return x.expand(info.batch_size, 0) if x.shape == (0,) else x  # was not asked for

        return (
            (tuple(map(split, out)), (0,) * len(out)) if isinstance(out, tuple) else (split(out), 0)
        )

    vmap(op, rule)
