"""Arguments that a candidate is tried with: drawn anew, of other distributions, shapes and dtypes.

Whatever has a structure that values drawn at random would destroy (zeros, order, symmetry) is left
as the user's function gives it; and where the reference raises for a case, or gives what is not
finite, there is no such case.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SPARSE = "nine of ten zero"
_DRAWN = "standard normal", "magnitudes from 2^-4 to 2^4", SPARSE
_FEW = 8  # elements below which nothing can be said about structure


class Case(NamedTuple):
    """Arguments of one call: plain data with places for tensors, and those."""

    name: str
    tree: Any
    tensors: list[Tensor]

    def named(self, name: str, tensors: Sequence[Tensor]) -> "Case":
        """Return another with the same tree."""
        return Case(name, self.tree, [*tensors])


def secret() -> int:
    """Return a seed that nobody can know."""
    return int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF


def is_free(x: Tensor) -> bool:
    """True for numbers that look drawn at random, so that others may take their place."""
    if not x.is_floating_point() or x.numel() < _FEW:
        return False
    x = x.detach().float()
    if not bool(x.isfinite().all()) or float((x == 0).float().mean()) > 0.02:
        return False
    flat = x.flatten()
    if bool((flat == flat[0]).all()):
        return False
    rising = (x.diff(dim=-1) >= 0).float().mean() if x.shape[-1] > 1 else torch.tensor(0.5)
    if x.shape[-1] >= _FEW and not 0.02 < float(rising) < 0.98:
        return False
    square = x.dim() >= 2 and x.shape[-1] == x.shape[-2] and x.shape[-1] > 1
    return not (square and torch.equal(x, x.mT))


def distributions(case: Case) -> list[Case]:
    """Return the case with numbers of other distributions."""
    free = [is_free(x) for x in case.tensors]
    if not any(free):
        return []
    drawn = torch.Generator().manual_seed(secret())

    def each(name: str, make: Any) -> Case:
        return case.named(
            name,
            [make(x) if f else x for x, f in zip(case.tensors, free, strict=True)],
        )

    def normal(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=drawn).to(x.dtype)

    def wide(x: Tensor) -> Tensor:
        powers = torch.rand(x.shape, generator=drawn).mul_(8).sub_(4).exp2_()
        return (torch.randn(x.shape, generator=drawn) * powers).to(x.dtype)

    def sparse(x: Tensor) -> Tensor:
        return torch.where(torch.rand(x.shape, generator=drawn) < 0.9, 0.0, normal(x)).to(x.dtype)

    return [each(name, make) for name, make in zip(_DRAWN, (normal, wide, sparse), strict=True)]


def alike(name: str) -> tuple[str, ...]:
    """Return the names of cases that a reference does not take if it does not take this one."""
    return _DRAWN if name in _DRAWN else (name,)


def shuffled(case: Case, name: str) -> Case:
    """Return the case with each free tensor's numbers in another order."""
    drawn = torch.Generator().manual_seed(secret())

    def mixed(x: Tensor) -> Tensor:
        order = torch.randperm(x.numel(), generator=drawn)
        return x.flatten()[order].reshape(x.shape)

    return case.named(name, [mixed(x) if is_free(x) else x for x in case.tensors])


def half_changed(case: Case, other: Case) -> Case | None:
    """Return the case with the last half of each free tensor from another case; None for none."""
    if not any(is_free(x) for x in case.tensors):
        return None
    found = []
    for x, y in zip(case.tensors, other.tensors, strict=True):
        mixed = x.clone()
        if is_free(x) and x.shape == y.shape:
            middle = x.numel() // 2
            mixed = torch.cat([x.flatten()[:middle], y.flatten()[middle:]]).reshape(x.shape)
        found.append(mixed)
    return case.named("only the last half of each argument changed", found)


def other_shapes(case: Case) -> list[Case]:
    """Return the case with other lengths of the first dimension, where the tensors share one."""
    lengths = {x.shape[0] for x in case.tensors if x.dim()}
    tensors = [x for x in case.tensors if x.dim()]
    if len(lengths) != 1 or not tensors or min(lengths) < 2:
        return []
    (length,) = lengths
    made = []
    for wanted in (length - 1, 1):
        cut = [x[:wanted].clone() if x.dim() else x for x in case.tensors]
        made.append(case.named(f"first dimension {wanted} instead of {length}", cut))
    return made


def other_dtypes(case: Case) -> list[Case]:
    """Return the case in other floating dtypes."""
    found = {x.dtype for x in case.tensors if x.is_floating_point()}
    return [
        case.named(
            f"dtype {str(dtype).removeprefix('torch.')}",
            [x.to(dtype) if x.is_floating_point() else x for x in case.tensors],
        )
        for dtype in (torch.float64, torch.bfloat16)
        if found and dtype not in found
    ]
