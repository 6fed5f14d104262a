"""How far arithmetic in float32 may be from the exact result, element by element.

The reference runs in float64, whatever dtype it asks for; then with its arguments and each
intermediate result off by several roundings of float32, at random or all in one direction (Monte
Carlo arithmetic: Vignes 1993, Parker 1997). How far an element moves is what float32 does to it:
little where terms agree, much where they cancel, a whole level where a number is next to a tie.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

UNIT = 2.0**-24  # half of float32's spacing at 1
_ROUNDINGS = 4  # of a result in its own dtype: what 16-bit derivatives take in several steps
_SLACK = 4  # times what rounding did to the reference: other formulas, other orders of sums

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def in_float64(options: dict) -> dict:
    """Return the options of one of PyTorch's operators, with float64 for a narrower dtype."""
    return {
        key: torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
        for key, value in options.items()
    }


class Level(NamedTuple):
    """How the reference is rounded in one run: by up to `units`; up (1), down (-1), at random."""

    units: float
    way: int = 0
    seed: int = 0


EXACT = Level(0)
# Few kernels need more than the first two. All the way in one direction, a number next to a tie
# crosses it; by chance an element may stay where it was, but not in every run.
LEVELS = Level(8, 1), Level(8), Level(8, -1), *(Level(8, seed=seed) for seed in range(1, 6))


class Rounding(TorchDispatchMode):
    """PyTorch within computes in float64, each result rounded as `level` says."""

    def __init__(self, level: Level):
        super().__init__()
        self._level = level
        self._generators: dict[torch.device, torch.Generator] = {}

    def off(self, x: Tensor) -> Tensor:
        """Return an argument in float64, off by as much as a result would be.

        Other formulas round where that of the reference is exact, as x + 1 near -1.
        """
        wide = x.detach().double()
        if not self._level.units:
            return wide
        return (wide + wide.abs() * self._noise(wide)).float().double()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; and it would import torch._dynamo, for a second

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one of PyTorch's own operators."""
        kwargs = in_float64(kwargs) if kwargs else {}
        if not self._level.units or function.is_view:
            return function(*args, **kwargs)
        changes, sums = _facts(function)

        def magnitude() -> Any:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                return function(*tree_map_only(Tensor, _magnitude, args), **kwargs)
            return None

        before = magnitude() if changes and sums else None
        out = function(*args, **kwargs)

        def rounded(x: Tensor) -> Tensor:
            if not (x.is_floating_point() and x.numel()) or x.is_meta or x._is_zerotensor():
                return x  # nothing to round: torch has zeros without memory
            nearest = x.float().to(x.dtype)
            if torch.equal(nearest, x):  # copies, whole numbers, what was rounded before
                return x
            scale = (before if changes else magnitude()) if sums else None
            if not isinstance(scale, Tensor) or scale.shape != x.shape:
                scale = x.abs()
            moved = (x + scale * self._noise(x)).float().to(x.dtype)
            moved = torch.where(nearest == x, x, moved)
            return x.copy_(moved) if changes else moved

        return rounded(out) if isinstance(out, Tensor) else tree_map_only(Tensor, rounded, out)

    def _noise(self, x: Tensor) -> Tensor | float:
        """By what share of its terms each element moves."""
        most = self._level.units * UNIT
        if self._level.way:
            return most * self._level.way
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._level.seed)
        uniform = torch.rand(x.shape, device=x.device, generator=self._generators[x.device])
        return uniform.mul_(2 * most).sub_(most)


@functools.cache
def _facts(function: OpOverload) -> tuple[bool, bool]:
    """Tell whether one of PyTorch's operators changes its arguments, and whether it sums."""
    return function._schema.is_mutable, torch.Tag.pointwise not in function.tags


def _magnitude(x: Tensor) -> Tensor:
    """The sizes of the terms of a sum; a copy, which the sum may change."""
    return x.abs() if x.is_floating_point() else x.clone()


def same(a: Tensor, b: Tensor) -> Tensor:
    """Tell of each element whether both are the same or NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def apart(a: Tensor, b: Tensor) -> Tensor:
    """How far two tensors are apart, element by element."""
    return torch.where(same(a, b), 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)


def _allowed(got: Tensor, expected: Tensor, moved: Tensor | None) -> Tensor:
    """By how much each element may differ; `moved`: what rounding did to the reference's."""
    if not got.is_floating_point():
        return torch.zeros_like(expected) if moved is None else moved
    kind = torch.finfo(got.dtype)
    least = kind.tiny * (1 if got.dtype.itemsize > 2 else kind.eps)
    own = _ROUNDINGS * kind.eps * expected.nan_to_num(0, 0, 0).abs() + least
    return own if moved is None else own + _SLACK * moved


def differs(got: Tensor, expected: Tensor, moved: Tensor | None) -> tuple[str, bool] | None:
    """Compare a result with the reference's, which rounding has `moved`; None where it is right.

    Else where it is not, and whether that is by far and at many places.
    """
    expected = expected.double().to(got.device)
    numbers = got.double()
    far = torch.where(expected.to(got.dtype) == got, 0.0, apart(numbers, expected))
    allowed = _allowed(got, expected, moved)
    wrong = (far > allowed) | (numbers.isnan() & ~expected.isnan() & allowed.isfinite())
    count = int(wrong.sum())
    if not count:
        return None
    at = torch.unravel_index(torch.where(wrong, far, -1.0).argmax(), far.shape)
    at = tuple(int(index) for index in at)
    text = (
        f"differs from the reference at {count} of {got.numel()} places, by most at {at}: "
        f"{float(numbers[at]):.9g}, expected {float(expected[at]):.9g}, which rounding changes by "
        f"no more than {float(allowed[at]):.1e}"
    )
    return text, int((far > 16 * allowed).sum()) > 0.01 * got.numel()


def share(got: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    if not got.numel():
        return 0.0
    expected = expected.double().to(got.device)
    scale = max(1e-30, float(expected.nan_to_num(0, 0, 0).abs().max()))
    return min(float(apart(got.double(), expected).max()) / scale, 1e30)
