"""Results beside what they should be, in a process that never ran the candidate's code."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BESIDE = 2  # elements to each side that a report shows


def unlike(answer: dict, got: Sequence[Tensor], tree: Any, due: Sequence[Tensor]) -> str:
    """Say how results are of other number, kind, shape or dtype than is due; "" for alike."""
    mine = answer["results"]["tree"]
    if _loose(mine) != _loose(tree) or len(got) != len(due):
        return f"it returns {_shape_of(mine)}, the reference {_shape_of(tree)}"
    kinds = {*answer["types"]} - {"Tensor", "Parameter"}
    if kinds:
        return f"a result is a {kinds.pop()}, where a plain tensor is due"
    for i, (x, y) in enumerate(zip(got, due, strict=True)):
        for what, a, b in (("shape", tuple(x.shape), tuple(y.shape)), ("dtype", x.dtype, y.dtype)):
            if a != b:
                return f"result {i} has {what} {a}, the reference's {b}"
    return ""


def _loose(tree: Any) -> Any:
    """Return a result's description with lists and tuples alike."""
    if len(tree) != 1:
        return None
    ((kind, value),) = tree.items()
    if kind in ("list", "tuple"):
        return [_loose(each) if isinstance(each, dict) else None for each in value]
    return kind, value


def _shape_of(tree: Any) -> str:
    if not isinstance(tree, dict):
        return "nothing"
    ((kind, value),) = list(tree.items())[:1] or [("plain", None)]
    if kind in ("list", "tuple"):
        return f"a {kind} of {len(value)}"
    return "a tensor" if kind == "tensor" else f"{value!r}"[:80]


def differs(got: Tensor, exact: Tensor, allowed: Tensor) -> dict | None:
    """Return where a result is wrong, as plain data; None where each element is near enough."""
    wide, narrow = (torch.complex128, got.dtype) if exact.is_complex() else (torch.float64, None)
    expected, numbers = exact.to(wide), got.to(narrow or torch.float64).to(wide)
    equal = (expected == numbers) | (expected.isnan() & numbers.isnan())
    equal |= expected.to(got.dtype) == got
    far = torch.where(equal, 0.0, (numbers - expected).abs().double())
    far = far.nan_to_num(torch.inf, torch.inf)
    wrong = far > allowed.double()
    count = int(wrong.sum())
    if not count:
        return None
    at = torch.unravel_index(torch.where(wrong, far, -1.0).argmax(), far.shape)
    index = [int(i) for i in at]
    unwritten = int((wrong & is_unwritten(got)).sum())
    return {
        "wrong": count,
        "of": got.numel(),
        "index": index,
        "got": number(numbers[at]),
        "expected": number(expected[at]),
        "allowed": number(allowed[at]),
        "unwritten": unwritten,
        "neighbourhood": _neighbourhood(numbers, expected, index),
    }


def is_old(got: Tensor, exact: Tensor, allowed: Tensor, earlier: Sequence[Tensor]) -> bool:
    """True if most of what is wrong is nearer to the result of an earlier call than to its own."""
    wide = torch.complex128 if exact.is_complex() else torch.float64

    def away(x: Tensor) -> Tensor:
        return (got.to(wide) - x.to(wide)).abs().nan_to_num(torch.inf, torch.inf)

    wrong = away(exact) > allowed.double()
    return any(
        2 * int((wrong & (away(old) < away(exact))).sum()) > int(wrong.sum())
        for old in earlier
        if old.shape == got.shape
    )


def share(got: Tensor, exact: Tensor, allowed: Tensor) -> float:
    """Return the largest difference as a share of what is allowed there."""
    if not got.numel() or got.is_complex():
        return 0.0
    far = (got.double() - exact.double()).abs().nan_to_num(0, 0, 0)
    return float((far / allowed.double().clamp_min(1e-300)).where(far > 0, 0.0).max())


def is_unwritten(x: Tensor) -> Tensor:
    """Tell of each element whether it is what guarded memory holds until it is written."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size())
    if whole is None or x.dtype == torch.bool:
        return torch.zeros_like(x, dtype=torch.bool)
    return x.contiguous().view(whole) == -1


def number(x: Tensor) -> Any:
    """Return one element as JSON has it: numbers, and texts for what is not finite."""
    value = x.item()
    if isinstance(value, complex):
        return str(value)
    return value if value == value and abs(value) != float("inf") else str(value)


def _neighbourhood(got: Tensor, expected: Tensor, index: Sequence[int]) -> dict:
    """Return what lies beside the worst element, along the last two dimensions."""
    window: list[Any] = list(index)
    first = []
    for d in range(max(0, got.dim() - 2), got.dim()):
        begin = max(0, index[d] - _BESIDE)
        window[d] = slice(begin, index[d] + _BESIDE + 1)
        first.append(begin)

    def numbers(x: Tensor) -> Any:
        if x.dim():
            return [numbers(row) for row in x]
        return number(x)

    shown = tuple(window)
    return {"first": first, "got": numbers(got[shown]), "expected": numbers(expected[shown])}


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """True if two sets of tensors hold the same bytes."""
    if len(a) != len(b):
        return False
    return all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y))
        for x, y in zip(a, b, strict=True)
    )


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
