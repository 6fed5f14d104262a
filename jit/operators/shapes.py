"""Shapes checked by named sizes, "(N, 8, F)"; what shapes.h is, for tensors without data."""

import torch
from torch import Tensor


class Sizes:
    """The sizes that an operator's tensors have in common, by name.

    A name is bound by the first tensor that has it; where a later one differs the message says
    which size, what was expected and what came, in the words of the operator's C++ side.
    """

    def __init__(self, op: str):
        self._op, self._bound = op, {}

    def __getitem__(self, name: str) -> int:
        """The size of a name that is bound."""
        return self._bound[name][0]

    def match(self, argument: str, x: Tensor, pattern: str, cure: str = "") -> None:
        """Refuse an argument that has not the shape of `pattern`; `cure` ends the message."""
        parts, shape = _parts(pattern), tuple(x.shape)
        end = f"; {cure}" if cure else ""
        self._check(
            len(parts) == len(shape),
            lambda: f"{argument} must be {pattern}, got {shape}{end}",
        )
        for part, size in zip(parts, shape, strict=True):
            if part.isdigit():
                self._check(
                    size == int(part), lambda: f"{argument} must be {pattern}, got {shape}{end}"
                )
        for part, size in zip(parts, shape, strict=True):
            if part.isdigit():
                continue
            known, who, its_shape = self._bound.setdefault(
                part, (size, f"{argument} {pattern}", shape)
            )
            self._check(
                size == known,
                lambda who=who, part=part, its_shape=its_shape: (
                    f"{who} and {argument} {pattern} must have the same {part}, "
                    f"got {its_shape} and {shape}"
                ),
            )

    def match_known(self, argument: str, x: Tensor, pattern: str) -> None:
        """The same of an argument whose shape the others before it decide, all or in part."""
        parts, shape = _parts(pattern), tuple(x.shape)
        known = [self._bound[part][0] if part in self._bound else part for part in parts]

        def message():
            return f"{argument} must be {pattern} = ({', '.join(map(str, known))}), got {shape}"

        self._check(len(parts) == len(shape), message)
        for size, expected in zip(shape, known, strict=True):
            if not isinstance(expected, str):
                self._check(size == expected, message)
            elif expected.isdigit():
                self._check(size == int(expected), message)
        self.match(argument, x, pattern)

    def _check(self, holds, message) -> None:
        torch._check(holds, lambda: f"{self._op}: {message()}")


def _parts(pattern: str) -> list[str]:
    return pattern.strip("()").replace(",", " ").split()
