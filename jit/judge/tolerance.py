"""By how much an element may differ: from its dtype, and from the lengths of the sums behind it.

The reference runs in float64: once exactly, and a few times with its arguments and each result
moved by what rounding could do to it there. A result of an elementwise operation moves by some
units in the last place of the dtype that it would have; a sum of n terms also by 2 sqrt(n) units of
the accumulator (float32) times the sum of the sizes of its terms, which is what sums in any order
keep to with a probability that is as good as certain (N. Higham, T. Mary: A New Approach to
Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019). How far an element of the
result moves, four times, is what it may differ by, and sixteen units for the last roundings.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..live.rounding import NARROW, in_float64

_UNITS = 4.0  # of an elementwise result
_PER_TERM = 2.0  # times the root of the number of terms
_SLACK = 4.0
# By chance an element may move in no run; of how far all of them move it gets this share, and more
# among many, where what is rare happens: of 2.5e8 elements beside a kink (hardswish's, below which
# it does not move) three were off by half of that.
_LEAST, _MANY = 0.05, 1e6
_RUNS = ((1, 0), (0, 1), (0, 2))  # way, seed; way 0 is at random
_MORE = *_RUNS, *((0, seed) for seed in range(3, 24))
# The formats in which products may be taken, by half of their spacing at 1.
PRECISIONS = {"own": 0.0, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_LINEAR = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "sum", "mean"),
    *("cumsum", "linear", "matmul", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "cumprod"),
}
# Made of exponentials whose sums with 1 cancel, so that they round as numbers near 1 do.
_NEAR_ONE = {
    *("gelu", "silu", "mish", "softplus", "elu", "celu", "selu", "tanh", "sigmoid", "erf", "sin"),
    *("log_sigmoid_forward", "logit", "expm1", "log1p", "cos", "softshrink", "hardswish"),
}
RULE = "dtype and length of sums (Higham and Mary 2019)"
_PLAIN_RULE = "dtype alone: the reference does not run in float64"


class Bounds(NamedTuple):
    """Of each result, what it should be and by how much its elements may differ."""

    pairs: list[tuple[Tensor, Tensor]]
    rule: str


def unit(dtype: torch.dtype) -> float:
    """Half of a dtype's spacing at 1; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def bounds(
    function: Callable, arguments: Sequence[Any], precision: str = "own", closely: bool = False
) -> Bounds:
    """Return what the reference gives, exactly, and by how much a result may differ.

    An element may by chance hardly move in each of a few runs: `closely` takes eight times as many.

    Raises: what the reference does in its own dtype.
    """
    narrow = [x.dtype for x in _tensors(arguments) if x.dtype in NARROW]
    widest = max([unit(d) for d in narrow] or [torch.finfo(torch.float64).eps / 2])
    factor = max(widest, PRECISIONS[precision])
    accumulator = max(min(widest, 2.0**-24), PRECISIONS[precision])
    with torch.no_grad():
        try:
            exact = _run(function, arguments, _Rounding(0, 0, 0, 0))
        except Exception:
            return _crude(function, arguments, factor)
        moved = [torch.zeros_like(x, dtype=torch.float64) for x in exact]
        for way, seed in _MORE if closely else _RUNS:
            noisy = _run(function, arguments, _Rounding(factor, accumulator, way, seed))
            for i, (x, y) in enumerate(zip(exact, noisy, strict=True)):
                if x.shape == y.shape:
                    moved[i] = torch.maximum(moved[i], _apart(x, y))
    pairs = []
    for x, far in zip(exact, moved, strict=True):
        small = torch.finfo(torch.float32).tiny if x.is_floating_point() or x.is_complex() else 0
        own = 4 * _UNITS * factor * _size(x) if small else 0
        typical = far[far.isfinite()].square().mean().sqrt().nan_to_num(0)
        least = _LEAST * max(1.0, far.numel() / _MANY) ** (1 / 3)
        rounded = far.clamp_min(least * float(typical)) if small else far
        pairs.append((x, (_SLACK * rounded + own + small).nan_to_num(0, 0, 0)))
    return Bounds(pairs, RULE)


def _crude(function: Callable, arguments: Sequence[Any], factor: float) -> Bounds:
    """Where there is no float64: what the reference gives, within sqrt(n) units of the largest."""
    given = [x for x in _tensors(arguments)]
    most = max([x.numel() for x in given] or [1])
    pairs = []
    for x in _tensors([function(*arguments)]):
        scale = float(_size(x.double()).nan_to_num(0, 0, 0).max()) if x.numel() else 0.0
        terms = max(1.0, most / max(1, x.numel()))
        allowed = (8 + 4 * terms**0.5) * factor * scale if x.is_floating_point() else 0.0
        pairs.append((x, torch.full(x.shape, allowed, dtype=torch.float64)))
    return Bounds(pairs, _PLAIN_RULE)


def _run(function: Callable, arguments: Sequence[Any], mode: "_Rounding") -> list[Tensor]:
    wide = tree_map_only(Tensor, mode.off, list(arguments))
    # In matrix products and a softmax of which each rounds.
    with sdpa_kernel(SDPBackend.MATH), mode:
        return [x.detach() for x in _tensors([function(*wide)])]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for v in value for x in _tensors(v)] if isinstance(value, list | tuple) else []


def _size(x: Tensor) -> Tensor:
    return x.abs().double()


def _apart(a: Tensor, b: Tensor) -> Tensor:
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b if a.dtype != torch.bool else a ^ b).abs().double()
    return torch.where(equal, 0.0, difference).nan_to_num(torch.inf, torch.inf)


class _Rounding(TorchDispatchMode):
    """PyTorch within computes in float64, and results move by what rounding could do to them."""

    def __init__(self, factor: float, accumulator: float, way: int, seed: int):
        super().__init__()
        self._factor, self._accumulator, self._way = factor, accumulator, way
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def off(self, x: Tensor) -> Tensor:
        """Return an argument in float64, moved as a result of its size would be."""
        if not x.is_floating_point():
            return x.clone()
        wide = x.detach().double()
        return wide + wide.abs() * self._factor * _UNITS * self._noise(wide)

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one of PyTorch's own operators."""
        kwargs = in_float64(kwargs or {})
        name = str(function.overloadpacket).rpartition(".")[2].rstrip("_")
        if not self._factor or function.is_view or name in _EXACT:
            return function(*args, **kwargs)
        terms = _terms(name, function, args)
        scale = None
        if name in _LINEAR and not function._schema.is_mutable:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                scale = function(*tree_map_only(Tensor, _magnitude, args), **kwargs)
        out = function(*args, **kwargs)

        def moved(x: Tensor) -> Tensor:
            if not (x.is_floating_point() and x.numel()) or x.is_meta or x._is_zerotensor():
                return x
            n = terms if terms else max(1.0, _most(args) / x.numel())
            by = _UNITS * self._factor + _PER_TERM * self._accumulator * n**0.5 * (n > 1)
            if x.is_cuda and self._factor == unit(torch.float32):
                by += _products(name)
            size = scale if isinstance(scale, Tensor) and scale.shape == x.shape else x.abs()
            if name in _NEAR_ONE:
                size = size + _largest(args, x) + 1
            there = x + size * by * self._noise(x)
            return x.copy_(there) if function._schema.is_mutable else there

        return tree_map_only(Tensor, moved, out)

    def _noise(self, x: Tensor) -> Tensor | float:
        if self._way or not self._factor:
            return float(self._way)
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        drawn = self._generators[x.device]
        found = torch.rand(x.shape, generator=drawn, dtype=torch.float64, device=x.device) - 0.5
        return found + 0.5 * found.sign()  # from 0.5 to 1, up or down


_EXACT = {
    *("clone", "copy", "_to_copy", "relu", "neg", "abs", "maximum", "minimum", "where", "cat"),
    *("stack", "max", "min", "amax", "amin", "sort", "topk", "index", "gather", "index_select"),
    *("flip", "roll", "constant_pad_nd", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("embedding", "full", "zeros", "ones", "empty", "fill", "zero", "detach", "arange", "eye"),
    *("tril", "triu", "clamp", "clamp_min", "clamp_max", "hardtanh", "scalar_tensor", "repeat"),
}


def _products(name: str) -> float:
    """Say in which format PyTorch itself may take products of float32 on this machine's GPU."""
    flags = None
    if name == "convolution":
        flags = torch.backends.cudnn
    elif (name in _LINEAR and "mm" in name) or name in ("linear", "matmul", "mv", "addmv"):
        flags = torch.backends.cuda.matmul
    with contextlib.suppress(RuntimeError):  # set by both of torch's ways to do so
        return PRECISIONS["tf32"] if flags and flags.allow_tf32 else 0.0
    return PRECISIONS["tf32"]


def _largest(args: Sequence[Any], like: Tensor) -> Tensor | float:
    first = next(iter(_tensors(list(args))), None)
    return first.abs() if first is not None and first.shape == like.shape else 0.0


def _magnitude(x: Tensor) -> Tensor:
    return x.abs() if x.is_floating_point() else x.clone()


def _most(args: Sequence[Any]) -> float:
    return float(max([x.numel() for x in _tensors(list(args))] or [1]))


def _terms(name: str, function: OpOverload, args: Sequence[Any]) -> float | None:
    """How many terms an element of the result is the sum of; None: as the sizes say."""
    if torch.Tag.pointwise in function.tags:
        return 1.0
    tensors = _tensors(list(args))
    if name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul"):
        return float(tensors[-1].shape[0 if tensors[-1].dim() < 2 else -2])
    if name == "convolution":
        weight, transposed = args[1], bool(args[6])
        return float(weight.numel() / max(1, weight.shape[1 if transposed else 0]))
    if len(tensors) and name in ("cumsum", "cumprod"):
        return float(tensors[0].shape[args[1]] if tensors[0].dim() else 1)
    if "norm" in name or "softmax" in name or "attention" in name:
        return float(max(tensors[0].shape, default=1))
    return None
