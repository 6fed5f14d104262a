"""The Python side of operators of two tensors, linear in one of them at least.

With F(g, a, b) = sum(g * X(a, b)), X_backward has the gradients of F to a and b. Where X is linear
in a, what arrives for grad_a, say `to`, meets F(g, to, b), whose gradients X and X_backward
compute. Where it is not, it meets the derivative of F along `to`, of which each operator's `along`
has the gradients. So derivatives of the second order are made of kernels that there are. And those
in forward mode: how X changes along `to` is the gradient of F(g, to, b) to g, how gradients of F
change along `to` are the others.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from loader.jit.operators import frame, sharding
from loader.jit.operators.frame import asked, in_forward_mode, keep, total
from loader.jit.operators.locally import locally
from loader.jit.operators.node import quickly
from loader.jit.operators.shapes import check_fake, check_fake_dtype, shown


class Linear:
    """An operator X; `call` takes its tensors and options, `fw` and `bw` are the public X_fw, X_bw.

    Args:
        function: the public X.
        tensors: names of the two that gradients go to.
        linear: in which of them X is linear, by their numbers.
        fake: the output, for tensors without data; takes what the registered operator does.
        shapes: of tensors and output, by the sizes along which DTensors may be cut:
            jit/operators/sharding.py.
        options: `(*tensors, *options)` of the public X -> the registered operator's options; raises
            what torch's dispatcher would not. Not a function of the tensors: the node in C++ asks
            once for each set of options.
        along: `(to, grad_out, *tensors, *options, need)` -> gradients to grad_out and both tensors;
            `need` says which of these are used.
        spared: whether the registered backward takes None for the first tensor, which is then kept
            for the gradient to the second alone.
        extra: how many tensors more, without gradients from the registered backward, come third;
            `options` gives them first.
        mask: the output_mask of X_bw where none is given.
        flag: "deterministic" where X_bw takes it.
        also: a dtype that a tensor, by name, may have beside the four of floating point.
        fake_gradients: `(grad_out, *tensors, *options)` -> both gradients, without data; where not
            given they are contiguous and of their tensors' shapes.
    """

    def __init__(
        self,
        function: Callable,
        tensors: tuple[str, str],
        linear: Sequence[int],
        fake: Callable,
        shapes: str | Sequence[str],
        options: Callable | None = None,
        along: Callable | None = None,
        spared: bool = False,
        fake_gradients: Callable | None = None,
        extra: int = 0,
        mask: tuple[bool, bool] = (True, False),
        flag: str = "",
        also: Mapping[str, torch.dtype] = MappingProxyType({}),
    ):
        self.name, self.tensors, self.linear = function.__name__, tensors, linear
        self.fake, self.options, self.along, self.spared = fake, options, along, spared
        self.also, self.shapes = also, sharding.Shapes(shapes)
        self.fake_gradients = fake_gradients or _like_tensors
        op, backward_op = frame.library(self.name), frame.registered(f"{self.name}_backward")
        names = [argument.name for argument in backward_op._schema.arguments]
        self.count, self.inputs = len(tensors) + extra, len(names)
        self.flag = None  # where `deterministic` comes among the backward's options
        if "deterministic" in names:
            self.flag = names.index("deterministic") - 1 - self.count
        frame.fake(op, self._fake, lambda *args: sharding.forward(self.shapes, args))
        frame.fake(backward_op, self._fake_backward, self._cut_backward)
        self.forward = frame.differentiable(op, self._setup, self._gradient, self._tangent)
        self._backward = frame.differentiable(
            backward_op, self._setup_backward, self._gradient_backward, self._tangent_backward
        )
        self.op, self.backward_op, self.call = op, backward_op, self._quickest(function)
        self.fw = frame.forward_form(function)
        self.bw = frame.backward_form(function, tensors, self._given, mask, flag)

    def _checked(self, function) -> Callable:
        """The differentiable operator. Every call goes through it, so little is done in it."""
        forward, options, check = self.forward, self.options, frame.check_all

        def call(first, second, *given):
            known = isinstance(first, Tensor) and isinstance(second, Tensor)
            if not known and not frame.stand_for_tensors((first, second)):
                check(self.name, self.tensors, (first, second))
            rest = given and options(first, second, *given)
            if not known:
                return frame.defer(function, (first, second, *given))
            return forward(first, second, *rest)

        return call

    def _quickest(self, function) -> Callable:
        """The same, in C++ where that is there; of a third tensor that takes None alone."""

        def gradients(grad_out, tensors, options, need):
            more = self.count - 2
            tensors = *tensors, *options[:more]
            return self.gradients(grad_out, tensors, options[more:], need)

        how = {"options": self.options, "gradients": gradients, "spared": self.spared}
        return quickly(self._checked(function), self.name, kept=(True, True), **how)

    def gradients(self, grad_out, tensors, options, need, deterministic=None):
        """Of sum(grad_out * X(*tensors, *options)) to both tensors; empty ones where not needed.

        `deterministic`: None asks torch.are_deterministic_algorithms_enabled().
        """
        if self.flag is None:
            return self._backward(grad_out, *tensors, *options, *need)
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        rest = [*options, *need]
        rest.insert(self.flag, bool(deterministic))
        return self._backward(grad_out, *tensors, *rest)

    def _given(self, grad_out, first, second, *given, mask, deterministic=None):
        """What the public X_bw computes: gradients with the options that X takes."""
        args = first, second, *(given and self.options(first, second, *given))
        tensors, options = args[: self.count], args[self.count :]
        return self.gradients(grad_out, tensors, options, mask, deterministic)

    def _fake(self, *args):
        check_fake(self.name, dict(zip(self.tensors, args[:2], strict=True)), self.also)
        return self.fake(*args)

    def _fake_backward(self, grad_out, *args):
        tensors, options, need = self.split(args)
        named = dict(zip(self.tensors, tensors[:2], strict=True)) | {"grad_out": grad_out}
        check_fake(self.name, {name: x for name, x in named.items() if x is not None})
        if tensors[0] is not None:
            out = self.fake(*tensors, *options)
            torch._check(
                grad_out.shape == out.shape,
                lambda: (
                    f"{self.name}: grad_out must have the shape of the output, "
                    f"{shown(out)}, got {shown(grad_out)}"
                ),
            )
            check_fake_dtype(self.name, "the output", out, "grad_out", grad_out)
        both = self.fake_gradients(grad_out, *tensors, *options)
        return tuple(x if wanted else x.new_empty(0) for x, wanted in zip(both, need, strict=True))

    def _cut_backward(self, *args):
        return sharding.backward(self.shapes, args, self.split(args[1:])[2])

    def split(self, args):
        """Tensors, options and `need_*` of the backward's arguments after grad_out."""
        rest = [*args[self.count :]]
        if self.flag is not None:
            del rest[self.flag]
        return args[: self.count], rest[:-2], rest[-2:]

    def _setup(self, ctx, inputs, output):
        tensors, ctx.options = inputs[: self.count], inputs[self.count :]
        if in_forward_mode():
            tensors = *tensors, output
        elif self.spared and not ctx.needs_input_grad[1]:
            tensors = None, *tensors[1:]
        keep(ctx, *tensors)

    def _gradient(self, ctx, grad_out, saved=None):
        """`saved`: ctx.saved_tensors, where a form of this has them; hooks give them out once."""
        need, tensors = ctx.needs_input_grad[:2], (saved or ctx.saved_tensors)[: self.count]
        both = (None, None)
        if any(need):
            both = asked(need, self.gradients(grad_out, tensors, ctx.options, need))
        return *both, *(None,) * (self.count - 2 + len(ctx.options))

    def _tangent(self, ctx, *tangents):
        """Of the output, where inputs have tangents: the rule at this file's head."""
        *tensors, output = ctx.saved_tensors
        need = True, False, False
        return self.second(tangents[: self.count], output, tensors, ctx.options, need)[0]

    def _setup_backward(self, ctx, inputs, output):
        grad_out, *args = inputs
        tensors, ctx.options, ctx.needed = self.split(args)
        keep(ctx, grad_out, *tensors)
        ctx.set_materialize_grads(False)

    def _gradient_backward(self, ctx, *arriving):
        """Gradients of the backward, of what arrives for its two."""
        grad_out, *tensors = ctx.saved_tensors
        arriving = [x if needed else None for x, needed in zip(arriving, ctx.needed, strict=True)]
        need, found = ctx.needs_input_grad[: 1 + self.count], ()
        if any(need) and any(x is not None for x in arriving):
            found = self.second(arriving, grad_out, tensors, ctx.options, need)
        found = *found, *(None,) * (len(need) - len(found))
        return *asked(need, found), *(None,) * (self.inputs - len(need))

    def _tangent_backward(self, ctx, to, *tangents):
        """Of both gradients: they are linear in grad_out, and change with the tensors."""
        grad_out, *tensors = ctx.saved_tensors
        need, found, along = ctx.needed, (None, None), tangents[: self.count]
        if to is not None:
            found = asked(need, self.gradients(to, tensors, ctx.options, need))
        if any(x is not None for x in along):
            more = self.second(along, grad_out, tensors, ctx.options, (False, *need))[1:3]
            found = [total(x, y) for x, y in zip(found, more, strict=True)]
        return tuple(
            grad_out.new_empty(0) if not needed else torch.zeros_like(x) if y is None else y
            for x, y, needed in zip(tensors[:2], found, need, strict=True)
        )

    def _along(self, i, to, grad_out, tensors, rest):
        """What `along` gives, of what arrives for tensor number i."""
        (*inputs,), (output,) = self.shapes.named(tensors, (grad_out,))
        names = inputs[i], output, *inputs
        args = to, grad_out, *tensors, *rest
        return locally(names, self.along, args, like=range(1, len(names)))

    def second(self, arriving, grad_out, tensors, options, need):
        """Gradients of sum(arriving * gradients of F) to grad_out and the tensors.

        None arrives for a gradient without influence; None is found where nothing was asked for.
        """
        found = [None, None, None]
        for i, to in enumerate(arriving):
            if to is None:
                continue
            if i in self.linear:
                changed = [to if k == i else x for k, x in enumerate(tensors)]
                other, some = 1 - i, [None, None, None]
                if need[0]:
                    some[0] = self.forward(*changed, *options)
                if need[1 + other]:
                    flags = other == 0, other == 1
                    some[1 + other] = self.gradients(grad_out, changed, options, flags)[other]
            else:
                some = self._along(i, to, grad_out, tensors, (*options, need))
                some = [
                    x if x is None else x.to(like.dtype)
                    for x, like in zip(some, (grad_out, *tensors), strict=False)
                ]
            found = [total(x, y) for x, y in zip(found, some, strict=True)]
        return found


def _like_tensors(grad_out, first, second, *rest):
    return first.new_empty(first.shape), second.new_empty(second.shape)


def refuse_batch(op: str, form: tuple[str, int], x) -> None:
    """RuntimeError for an argument of as many dimensions as it has under torch.vmap alone.

    For public functions, since the node in C++ goes by the options of an earlier call; and for
    options, since `X_bw` asks for these alone.
    """
    expected, dims = form
    if isinstance(x, Tensor) and x.dim() == dims:
        raise RuntimeError(f"{op}: {expected}, got a tensor of {dims} dimensions")


def rank(x: Tensor, dim: int | None) -> int:
    """The dimensions of one member's tensor, of an argument whose batch is along `dim`."""
    return x.dim() - (dim is not None)


def in_turns(op, info, in_dims, args):
    """What a rule for torch.vmap returns, where each member of the batch is a call of its own.

    So it is too where members do not fit, which with a dimension more might pass for what does.
    """

    def member(i):
        return (x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))

    outs = [op(*member(i)) for i in range(info.batch_size)]
    if isinstance(outs[0], Tensor):
        return torch.stack(outs), 0
    return tuple(map(torch.stack, zip(*outs, strict=True))), (0,) * len(outs[0])
