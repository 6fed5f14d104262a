"""What is refused of tensors without data, as C++ refuses it of others.

Shapes are checked by named sizes, "(N, 8, F)", as torch/shapes.h does.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor


def shown(x: Tensor | tuple) -> tuple:
    """The sizes of a tensor for a message, of which torch.compile may have symbols."""
    sizes = x.shape if isinstance(x, Tensor) else x
    hints = (getattr(getattr(size, "node", None), "hint", size) for size in sizes)
    return tuple(size if hint is None else hint for size, hint in zip(sizes, hints, strict=True))


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
        shape, end = shown(x), f"; {cure}" if cure else ""
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
        values = ", ".join(str(shown((known.get(part, part),))[0]) for part in _parts(pattern))
        message = f"{argument} must be {pattern} = ({values}), got {shown(x)}"
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


_FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16


def check_fake(
    op: str, arguments: Mapping[str, Tensor], also: Mapping = MappingProxyType({})
) -> None:
    """What a fake kernel has to refuse, as the real one does: layouts, dtypes and two devices.

    `also`: a dtype that an argument may have beside the four of floating point.
    """
    (first, reference), *_ = arguments.items()
    for name, x in arguments.items():
        allowed = (*([also[name]] if name in also else []), *_FLOATS)
        torch._check(
            x.layout == torch.strided,
            lambda name=name: (
                f"{op}: {name} must be a dense tensor, got a sparse or packed one; "
                f"use {name}.to_dense()"
            ),
        )
        torch._check(
            x.device == reference.device,
            lambda name=name, x=x: (
                f"{op}: {name} must be on the device of {first}, {reference.device}, "
                f"got {x.device}; move one of them with .to()"
            ),
        )
        torch._check(
            x.dtype in allowed,
            lambda name=name, x=x, allowed=allowed: (
                f"{op}: {name} must be {', '.join(map(_word, allowed[:-1]))} or "
                f"{_word(allowed[-1])}, got {_word(x.dtype)}; convert it, e.g. {name}.float()"
            ),
        )


_NAMED = {*_FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_NAMED |= {torch.complex32, torch.complex64, torch.complex128}


def refusal(op: torch._ops.OpOverload, args: Sequence) -> RuntimeError | None:
    """What to say of the first tensor that a registered operator refuses in words of torch's, or by
    a number: a nested one, which does not come to it, and one of a dtype that C++ has no name for.
    """
    for parameter, x in zip(op._schema.arguments, args, strict=False):
        if not isinstance(x, Tensor) or (x.dtype in _NAMED and not x.is_nested):
            continue
        name, cure = parameter.name, ""
        if x.is_nested:
            what = "a dense tensor, got a nested one"
            cure = f"; use {name}.to_padded_tensor(0.0), or each of {name}.unbind()"
        else:
            what = f"float32, float64, float16 or bfloat16, got {_word(x.dtype)}"
            if x.is_quantized:
                cure = f"; convert it, e.g. {name}.dequantize()"
            elif x.dtype.is_floating_point or x.dtype in (torch.uint16, torch.uint32, torch.uint64):
                cure = f"; convert it, e.g. {name}.float()"
        public = op._schema.name.split("::")[1].removesuffix("_backward")
        return RuntimeError(f"{public}: {name} must be {what}{cure}")
    return None


def check_fake_dtype(
    op: str, first: str, a: Tensor, second: str, b: Tensor, cure: str = ""
) -> None:
    """What a fake kernel refuses where two arguments have to be of one dtype."""
    torch._check(
        a.dtype == b.dtype,
        lambda: (
            f"{op}: {second} must have the dtype of {first}, {_word(a.dtype)}, "
            f"got {_word(b.dtype)}{cure}"
        ),
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
