"""What a function gives, and its derivatives, by name: of an operator, its reference, its fake."""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor


class Arriving:
    """The gradients that arrive at the results of a function, the same for all that are compared.

    They are made for the operator, in its dtypes; its reference gets the same.
    """

    def __init__(self):
        self._generator = torch.Generator().manual_seed(1)
        self._made: dict[str, Tensor] = {}
        self._empty = False

    def make(self, name: str, x: Tensor) -> None:
        """Have one arrive at `x`, unless it is there."""
        if name not in self._made:
            noise = torch.randn(x.shape, generator=self._generator, dtype=torch.float64)
            self._made[name] = noise.to(x)

    def without_data(self) -> "Arriving":
        """The same for tensors that hold no data."""
        other = copy(self)
        other._empty = True
        return other

    def at(self, name: str, like: Tensor, blurred: bool) -> Tensor | None:
        """What arrives at `name`, None where nothing does; `blurred` by a rounding if of 16 bits.

        Sums over terms that a kernel rounds to 16 bits differ by as much as this makes them.
        """
        made = self._made.get(name)
        if made is not None and self._empty:
            return like.new_empty(like.shape)
        if made is None or made.shape != like.shape:
            return None
        if blurred and made.dtype.itemsize == 2:
            share = torch.finfo(made.dtype).eps
            noise = torch.rand(made.shape, generator=self._generator, dtype=torch.float64)
            return made.to(like) * (1 + share * (2 * noise - 1).to(like))
        return made.to(like).detach()


def evaluate(
    function: Callable,
    arguments: tuple,
    arriving: Arriving,
    *,
    make: bool = False,
    twice: bool = False,
    blurred: bool = False,
) -> dict[str, Tensor | None]:
    """Return what `function(*arguments)` gives, and its gradients to each floating argument.

    Args:
        make: have gradients arrive where they do not yet.
        twice: and the derivatives of those gradients, where there are any.
        blurred: as `Arriving.at` has it.
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
        if make:
            for name, x in results.items():
                arriving.make(name, x)
        grads = {name: arriving.at(name, x, blurred) for name, x in results.items()}
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
