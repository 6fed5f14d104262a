"""What a trial makes of a sample: other strides, no elements, and tensors without data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from .evaluate import Arriving, evaluate


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
