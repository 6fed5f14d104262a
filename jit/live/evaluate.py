"""What a function gives, and its derivatives, by name: of an operator, its reference, its fake."""

from collections.abc import Callable

import torch
from torch import Tensor


class Arriving:
    """The gradients that arrive at the results of a function, the same for all that are compared.

    They are made for the operator, in its dtypes; its reference gets the same.

    Attributes:
        asked: shape, dtype and device of what they were asked for, by name.
    """

    def __init__(self):
        self.asked: dict[str, tuple] = {}
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

    Args:
        arriving: the gradient that arrives at a result; None where nothing does.
        twice: and the derivatives of those gradients, where there are any.
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

    def derive(results: dict, by: dict, what: str, again: bool):
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


def _leaf(x):
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().requires_grad_()
