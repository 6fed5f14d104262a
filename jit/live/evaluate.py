"""What a function gives, and its derivatives, by name: of an operator, its reference, its fake.

And what a trial makes of a sample: other strides, no elements, and tensors without data.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)


class Arriving:
    """The gradients that arrive at the results of a function, the same for all that are compared.

    They are made for the operator, in its dtypes; its reference gets the same.
    """

    def __init__(self) -> None:
        self.asked: dict[str, tuple] = {}  # by name the result's shape, dtype and device
        self._generator = torch.Generator().manual_seed(1)
        self._made: dict[str, tuple[tuple, Tensor]] = {}

    def note(self, name: str, x: Tensor) -> Tensor:
        """Return one for a tensor without data."""
        self.asked[name] = x.shape, x.dtype, x.device
        return x.new_empty(x.shape)

    def made(self) -> None:
        """Make all that were asked for: the reference, which computes in float64, could not."""
        for name in self.asked:
            self._one(name)

    def make(self, name: str, x: Tensor) -> Tensor:
        """Return one for a result of the operator."""
        self.asked[name] = x.shape, x.dtype, x.device
        return self._one(name).detach()

    def blurred(self, name: str, x: Tensor) -> Tensor | None:
        """As `exact`, off by a rounding if of 16 bits.

        Sums over terms that a kernel rounds to 16 bits differ by as much as this makes them.
        """
        exact = self.exact(name, x)
        if exact is None or self._one(name).dtype.itemsize > 2:
            return exact
        share = torch.finfo(self._one(name).dtype).eps
        noise = torch.rand(exact.shape, generator=self._generator, dtype=torch.float64)
        return exact * (1 + share * (2 * noise - 1).to(exact))

    def exact(self, name: str, x: Tensor) -> Tensor | None:
        """Return the one for a result of the reference; None where nothing arrives."""
        if name not in self.asked or self.asked[name][0] != x.shape:
            return None
        return self._one(name).to(x).detach()

    def _one(self, name: str) -> Tensor:
        facts = shape, dtype, device = self.asked[name]
        if self._made.get(name, [None])[0] != facts:
            noise = torch.randn(shape, generator=self._generator, dtype=torch.float64)
            self._made[name] = facts, noise.to(device, dtype)
        return self._made[name][1]


def evaluate(
    function: Callable,
    arguments: tuple,
    arriving: Callable[[str, Tensor], Tensor | None],
    twice: bool,
) -> dict[str, Tensor | None]:
    """Return what `function(*arguments)` gives, and its gradients to each floating argument.

    `arriving` gives what arrives at a result, or None; `twice`: the gradients' derivatives too.
    """
    leaves = [_leaf(x) for x in arguments]
    outputs = function(*leaves)
    outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    names = ["the output"] if len(outputs) == 1 else [f"output {k}" for k in range(len(outputs))]
    found = dict(zip(names, outputs, strict=True))
    wanted = {
        f"argument {i}": x
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and x.requires_grad
    }

    def derive(results: dict, by: dict, what: str, again: bool) -> tuple[dict, dict]:
        results = {n: x for n, x in results.items() if isinstance(x, Tensor) and x.requires_grad}
        grads = {name: arriving(name, x) for name, x in results.items()}
        grads = {n: g.requires_grad_(again) for n, g in grads.items() if g is not None}
        if not grads or not by:
            return {}, {}
        derived = torch.autograd.grad(
            [results[name] for name in grads],
            [*by.values()],
            [*grads.values()],
            allow_unused=True,
            create_graph=again,
        )
        return dict(zip((f"{what} {name}" for name in by), derived, strict=True)), grads

    first, grads = derive(found, wanted, "the gradient to", twice)
    found |= first
    if twice:
        by = wanted | {f"what arrives at {name}": x for name, x in grads.items()}
        second, _ = derive(first, by, "the second derivative by", False)
        found |= second
    return {n: x.detach() if isinstance(x, Tensor) else x for n, x in found.items()}


def _leaf(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().requires_grad_()


def spread(x: Tensor) -> Tensor:
    """The same numbers with the order of dimensions turned round in memory, and gaps in between.

    In the gaps are NaN, and the largest of the integers.
    """
    if x.dtype == torch.bool or x.is_complex():
        return x
    gap = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    turned = x.detach().permute(*reversed(range(x.dim()))).contiguous()
    spaced = torch.stack([turned, torch.full_like(turned, gap)], -1)[..., 0]
    return spaced.permute(*reversed(range(x.dim())))


def emptied(arguments: tuple) -> Iterator[tuple]:
    """Yield the arguments without elements: all tensors of the first one's length, or it alone."""
    tensors = [x for x in arguments if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        return
    first, length = tensors[0], len(tensors[0])

    def cut(chosen: Callable[[Tensor], bool]) -> tuple:
        return tuple(x[:0] if isinstance(x, Tensor) and chosen(x) else x for x in arguments)

    yield cut(lambda x: x.dim() > 0 and len(x) == length)
    yield cut(lambda x: x is first)


def of_fakes(
    operator: Callable, unit: str, arguments: tuple, arriving: Arriving, twice: bool
) -> dict | str | None:
    """Return what the fake kernel gives, or the text of its error; None where that tells nothing.

    `arriving` notes what the gradients are asked for.
    """
    if singleton.find(f"octet::{unit}").fake_impl.kernel is None:
        return None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tuple(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments)
            return evaluate(operator, fakes, arriving.note, twice)
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ):
        return None
    except Exception as error:
        return f"its fake kernel raises {type(error).__name__}: {error}"


def unlike(fakes: dict, ours: dict) -> str:
    """Say how shape, dtype, strides or device of a result differ from a fake's; "" if nowhere."""
    for name, got in ours.items():
        if name not in fakes or not isinstance(got, Tensor):
            continue
        if fakes[name] is None:
            return f"{name} is missing where the fake kernel takes the operator's place"
        for what, of in _FACTS.items():
            if of(fakes[name]) != of(got):
                said = of(fakes[name])
                return f"{name} has {what} {of(got)}, which its fake kernel says is {said}"
    return ""


def _strides(x: Tensor) -> tuple[int, ...]:
    """Those that matter: of a dimension with more than one element, in a tensor that has any."""
    if not x.numel():
        return ()
    return tuple(step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)


_FACTS: dict[str, Callable] = {
    "shape": lambda x: tuple(x.shape),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "strides": _strides,
}
