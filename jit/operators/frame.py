"""The Python side that every operator shares: loading, derivatives, argument types."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import levels, session, shapes, sharding


def library(name: str):
    """Load operator `name`; its registered form, `torch.ops.octet.<name>.default`."""
    owner, unit = session.owner(name)
    owner.load(unit)
    return registered(name)


def registered(name: str):
    """`torch.ops.octet.<name>.default`, its library being loaded."""
    names = torch.ops.octet
    # One that is there already is kept: another would be none of those that torch's modes see.
    packet = vars(names).get(name) or torch._ops._OpNamespace.__getattr__(names, name)
    return packet.default


_latest: dict[tuple[str, str], Callable] = {}


def _later(name: str, role: str, function: Callable) -> Callable | None:
    """`function` for a role that torch lets an operator be given only once.

    What torch gets looks the function up when it is called, so that an edit of `ops/X.py`, which is
    run again then, changes it; None where torch has that already.
    """
    key = name, role
    known, _latest[key] = key in _latest, function

    def latest(*args, **named):
        return _latest[key](*args, **named)

    return None if known else latest


def forget(name: str) -> None:
    """Let an operator, `namespace::name`, be given its functions anew: it was defined again."""
    for key in [key for key in _latest if key[0] == name]:
        del _latest[key]


def fake(op, function: Callable, cut: sharding.Find | None = None) -> None:
    """Tell torch what a registered operator returns for tensors without data, and DTensor along
    which sizes it may be cut; where that is not said each rank computes everything.
    """
    if later := _later(op.name(), "fake", function):
        torch.library.register_fake(op.name(), later)
    sharding.offer(op, cut or (lambda *x: sharding.replicated(x, len(op._schema.returns))))


def vmap(op, rule: Callable) -> None:
    """Tell torch.vmap how to run a registered operator on a batch, as register_vmap has it.

    What does not fit is refused in the sizes of one member, which are those of the caller.
    """

    def by_member(info, in_dims, *args):
        try:
            return rule(info, in_dims, *args)
        except (RuntimeError, ValueError) as error:
            refused = error
        if info.batch_size:
            op(*first_member(in_dims, args))
        raise refused

    if later := _later(op.name(), "vmap", by_member):
        torch.library.register_vmap(op, later)


def differentiable(op, setup_context: Callable, backward: Callable, tangent: Callable) -> Callable:
    """Give a registered operator its derivatives; the quick way to call it.

    `setup_context(ctx, inputs, output)` and `backward(ctx, *grads)`, as torch.autograd.Function has
    them, serve both ways in: `torch.ops.octet.X`, also under torch.compile and torch.export, by
    torch.library.register_autograd; and the function returned, which is quicker in eager mode and
    which torch.func can transform (torch 2.11 cannot transform the former).
    `tangent(ctx, *tangents)`, the formula of forward mode, serves the function returned alone. Any
    tangent may be None.
    """
    setup = _later(op.name(), "setup", setup_context)
    gradient = _later(op.name(), "backward", backward)
    if setup:
        torch.library.register_autograd(op, gradient, setup_context=setup)
    below_autograd, any_requires_grad, transforming, unwrap_if_dead, direct = (
        torch._C._AutoDispatchBelowAutograd,
        torch._C._any_requires_grad,
        torch._C._are_functorch_transforms_active,
        torch._C._functorch.unwrap_if_dead,
        op._op,  # what op(...) calls
    )

    def forward(*args):
        try:
            with below_autograd():
                return direct(*args)
        except RuntimeError as error:
            if told := _lack_of_memory(error) or shapes.refusal(op, args):
                raise told from None
            raise

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward}
    methods["jvp"] = levels.nested(tangent)
    formula = type(
        f"{op.name().split('::')[1]}_formula",
        (torch.autograd.Function,),
        {k: staticmethod(f) for k, f in methods.items()} | {"generate_vmap_rule": True},
    )
    # formula.apply ends in this outside of torch.func, after 14 us for the signature of `forward`.
    apply = super(torch.autograd.Function, formula).apply

    def call(*args):
        if torch.compiler.is_compiling():
            return op(*args)
        wanted = forward_ad._current_level >= 0  # there only the formula notices a tangent
        if torch.is_grad_enabled():
            if any(map(levels.in_a_batch_of_gradients, args)):
                return op(*args)
            wanted = wanted or any_requires_grad(*args)
            wanted = wanted or (transforming() and any(map(levels.batch_of_leaves, args)))
        if not wanted:
            return forward(*args)
        if transforming():
            return formula.apply(*args)
        return apply(*[unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args])

    return call


def _lack_of_memory(error: RuntimeError) -> RuntimeError | None:
    """A kernel's error in torch's class, which a kernel on the stable ABI cannot raise."""
    is_it = type(error) is RuntimeError and str(error).startswith("CUDA out of memory.")
    return torch.OutOfMemoryError(str(error)) if is_it else None


def in_forward_mode() -> bool:
    """True where tensors may have tangents."""
    return forward_ad._current_level >= 0


def keep(ctx, *tensors: Tensor | None) -> None:
    """Have `ctx.saved_tensors` in an operator's derivatives, the same in every mode: torch.vmap
    remembers of one list alone which dimension is the batch.
    """
    ctx.save_for_backward(*tensors)
    if in_forward_mode():
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)


def stand_for_tensors(values: Iterable) -> bool:
    """True if each is a tensor or has `__torch_function__`, as a torch.fx.Proxy does. In
    torch.compile tensors are all there is.
    """
    if torch.compiler.is_compiling():
        return all(isinstance(x, Tensor) for x in values)
    return all(isinstance(x, Tensor) or hasattr(type(x), "__torch_function__") for x in values)


def defer(function: Callable, values: Sequence):
    """What those that stand for tensors make of a call of a public X, its arguments in the order of
    its parameters. Of X and not of the registered operator, which torch.func cannot transform and
    torch.autocast does not reach.
    """
    pairs = [*zip(inspect.signature(function).parameters.values(), values, strict=False)]
    named = {p.name: x for p, x in pairs if p.kind is p.KEYWORD_ONLY}
    given = [x for p, x in pairs if p.kind is not p.KEYWORD_ONLY]
    return torch.overrides.handle_torch_function(function, given, *given, **named)


def check_all(op: str, names: Iterable[str], values: Iterable) -> None:
    """TypeError for the first argument that is no tensor, in the order of their names."""
    for stand_in in (False, True):  # what a caller would take in a tensor's place comes last
        for name, value in zip(names, values, strict=True):
            if isinstance(value, Tensor) or stand_for_tensors((value,)) != stand_in:
                continue
            got = type(value).__name__
            if type(value).__module__ == "numpy":
                got += "; convert it with torch.from_numpy()"
            elif isinstance(value, (list, tuple, int, float)):
                got += "; convert it with torch.tensor()"
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {got}")


def masked(op: str, mask, names: Sequence[str], compute: Callable):
    """What `X_bw` returns: of the gradients to the tensors named those that `output_mask` asks for.

    `compute(*flags)` gives all of them. One comes back as it is, several as a tuple.

    Raises: ValueError where the mask does not say which of the gradients to compute.
    """
    if not isinstance(mask, (tuple, list)) or len(mask) != len(names) or not any(mask):
        count = ("one flag", "two flags", "three flags", f"{len(names)} flags")[len(names[:4]) - 1]
        raise ValueError(
            f"{op}: output_mask must be {count}, for {_and(names)}, at least one of them set, "
            f"got {mask}"
        )
    with torch.no_grad():
        gradients = compute(*map(bool, mask))
    some = tuple(x for x, wanted in zip(gradients, mask, strict=True) if wanted)
    return some if len(some) > 1 else some[0]


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def asked(mask, gradients: Sequence) -> Sequence[Tensor | None]:
    """The gradients that a mask asks for; None in the place of the others."""
    return (
        gradients
        if all(mask)
        else [x if wanted else None for x, wanted in zip(gradients, mask, strict=True)]
    )


def total(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may not be there."""
    return b if a is None else a if b is None else a + b


def forward_form(function: Callable) -> Callable:
    """The public `X_fw` of a public X."""

    @functools.wraps(function)
    def form(*args, **named):
        with torch.no_grad():
            return function(*args, **named)

    form.__name__ = form.__qualname__ = f"{function.__name__}_fw"
    form.__doc__ = f"The forward kernel alone: as `{function.__name__}`, without gradients."
    return form


def backward_form(
    function: Callable,
    names: Sequence[str],
    backward: Callable,
    default: tuple[bool, ...],
    flag: str = "",
) -> Callable:
    """The public `X_bw` of a public X of the tensors named, which may have options behind these.

    `backward(grad_out, *arguments, mask=...)` gives a gradient for each of the tensors; `default`
    is the output_mask that holds where none is given. It takes `flag` too, where that names one of
    torch's: None asks for torch's own.
    """
    name, several = function.__name__, len(names) > 1
    parameters = [*inspect.signature(function).parameters.values()]
    key, tensors = (name, "backward form"), ["grad_out", *names]
    _latest[key] = backward

    def run(*args, mask, **named):
        check_all(name, tensors, args[: len(tensors)])
        return masked(name, mask, names, lambda *need: _latest[key](*args, mask=need, **named))

    arguments = ", ".join(p.name for p in parameters)
    given, by_name = (
        "".join(f", {p.name}={p.default!r}" for p in parameters[len(names) :] if p.kind is kind)
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    )
    by_name += f", {flag}=None" if flag else ""
    form = eval(
        f"lambda {', '.join(tensors)}{given}, output_mask={default}{by_name and ', *' + by_name}: "
        f"run(grad_out, {arguments}, mask=output_mask{flag and f', {flag}={flag}'})",
        {"run": run},
    )
    form.__name__ = form.__qualname__ = f"{name}_bw"
    form.__module__ = function.__module__
    form.__annotations__ = {
        "grad_out": Tensor,
        **function.__annotations__,
        "output_mask": tuple[(bool,) * len(names)],
        **({flag: bool | None} if flag else {}),
        "return": Tensor | tuple[(Tensor,) * len(names)] if several else Tensor,
    }
    asks = f"\n        {flag}: None asks `torch.are_{flag}_algorithms_enabled()`." if flag else ""
    form.__doc__ = f"""The backward kernel alone: gradients of sum(grad_out * {name}(...)).

    Args:
        grad_out: shape, dtype and device of the output, any strides.
        {arguments}: as in the forward.
        output_mask: which gradients to compute, of {_and(names)}.{asks}

    Returns:
        the gradient asked for, or a tuple of those, in this order; each has its tensor's shape
        and dtype.
    """
    return form


def first_member(in_dims: Sequence, args: Sequence) -> list:
    """The arguments of the first member of a batch."""
    return [x if dim is None else x.select(dim, 0) for x, dim in zip(args, in_dims, strict=True)]


def unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Return `x.unflatten(dim, sizes)`, which torch 2.15 does to a DTensor's part within a rule."""
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


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

        def split(x):
            if flatten:
                return unflatten(x, 0, (info.batch_size, len(x) // info.batch_size))
            return x.expand(info.batch_size, 0) if x.shape == (0,) else x  # was not asked for

        out = op(*map(whole, args, in_dims))
        if isinstance(out, tuple):
            return tuple(map(split, out)), (0,) * len(out)
        return split(out), 0

    vmap(op, rule)
