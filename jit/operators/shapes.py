"""Shapes checked by named sizes, "(N, 8, F)"; what torch/shapes.h is, for tensors without data."""

import torch
from torch import Tensor


class Sizes:
    """The sizes that an operator's tensors have in common, by name.

    A name is bound by the first tensor that has it; where a later one differs the message says
    which size, what was expected and what came, in the words of the operator's C++ side.
    """

    def __init__(self, op: str):
        self._op = op
        self._bound: dict[str, tuple] = {}  # size, whose it is, and all of its shape

    def __getitem__(self, name: str) -> int:
        """The size of a name that is bound."""
        return self._bound[name][0]

    def match(self, argument: str, x: Tensor, pattern: str, cure: str = "") -> None:
        """Refuse an argument that has not the shape of `pattern`; `cure` ends the message."""
        shape, end = tuple(x.shape), f"; {cure}" if cure else ""
        self._fit(x, pattern, {}, f"{argument} must be {pattern}, got {shape}{end}")
        for part, size in zip(*_named(x, pattern), strict=True):
            if not part.isdigit():
                first = (size, f"{argument} {pattern}", shape)
                known, who, its_shape = self._bound.setdefault(part, first)
                text = f"{who} and {argument} {pattern} must have the same {part}, "
                self._check(size == known, f"{text}got {its_shape} and {shape}")

    def match_known(self, argument: str, x: Tensor, pattern: str) -> None:
        """The same of an argument whose shape the others before it decide, all or in part."""
        known = {name: size for name, (size, *_) in self._bound.items()}
        values = ", ".join(str(known.get(part, part)) for part in _parts(pattern))
        message = f"{argument} must be {pattern} = ({values}), got {tuple(x.shape)}"
        self._fit(x, pattern, known, message)
        self.match(argument, x, pattern)

    def _fit(self, x: Tensor, pattern: str, known: dict[str, int], message: str) -> None:
        """Refuse another rank, other numbers, and other sizes than those known by name."""
        parts, sizes = _named(x, pattern)
        self._check(len(parts) == len(sizes), message)
        for part, size in zip(parts, sizes, strict=True):
            expected = int(part) if part.isdigit() else known.get(part, sizes[parts.index(part)])
            self._check(size == expected, message)

    def _check(self, holds: bool, message: str) -> None:
        torch._check(holds, lambda: f"{self._op}: {message}")


def _parts(pattern: str) -> list[str]:
    """Of "(N, 8, F), with words behind", `["N", "8", "F"]`."""
    return pattern[1 : pattern.index(")")].replace(",", " ").split()


def _named(x: Tensor, pattern: str) -> tuple[list[str], tuple]:
    """The parts of a pattern and the sizes that they are for: of "(..., 3)" the last."""
    parts, sizes = _parts(pattern), tuple(x.shape)
    if parts[0] != "...":
        return parts, sizes
    return parts[1:], sizes[max(0, len(sizes) - len(parts) + 1) :]
