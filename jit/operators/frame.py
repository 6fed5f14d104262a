"""The Python side that every operator shares: loading, derivatives, argument types."""

from collections.abc import Callable

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
    # What formula.apply ends in outside of torch.func, after 14 us for the signature of `forward`.
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


def check_mask(op: str, mask, first: str, second: str) -> None:
    """ValueError where `output_mask` does not say which of two gradients to compute."""
    if not isinstance(mask, (tuple, list)) or len(mask) != 2 or not any(mask):
        raise ValueError(
            f"{op}: output_mask must be two flags, for {first} and {second}, "
            f"at least one of them set, got {mask}"
        )


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
            return x.unflatten(0, (info.batch_size, len(x) // info.batch_size)) if flatten else x

        return (
            (tuple(map(split, out)), (0,) * len(out)) if isinstance(out, tuple) else (split(out), 0)
        )

    vmap(op, rule)
