"""Operators that take an image: loader's own, or those of a folder of the user's."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import loader

_PATCH = (24, 32)  # pixels, on which it is found out how an operator takes an image
# From a picture (C, H, W) to what an operator is given, and from what it gives back again.
_LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "(C, H, W)": (lambda x: x, lambda x: x),
    "(N, C, H, W)": (lambda x: x[None], lambda x: x[0]),
    "(H, W, C)": (lambda x: x.movedim(0, -1), lambda x: x.movedim(-1, 0)),
}
_PLANE_BY_PLANE = "(H, W)"


class NotForImages(ValueError):
    """An operator that does not take an image, and what it says itself."""


def blur(size: int = 15, sigma: float = 3.0) -> Tensor:
    """Return a Gaussian kernel (size, size) whose sum is 1."""
    ticks = torch.arange(size) - (size - 1) / 2
    bell = torch.exp(-(ticks**2) / (2 * sigma**2))
    return torch.outer(bell, bell) / bell.sum() ** 2


def offered(folder: Path) -> list[str]:
    """Return the operators of a folder that take an image, by their signatures.

    They need one argument, or `kernel` as a second, or each has one letter, as in `blend(a, b)`.
    Nothing is imported, so nothing is built.
    """
    return [
        name
        for name in sorted(path.stem for path in (folder / "ops").glob("*.cpp"))
        if _takes_an_image(folder / "ops" / f"{name}.py", name)
    ]


def _takes_an_image(file: Path, name: str) -> bool:
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            given = node.args
            needed = [a.arg for a in given.posonlyargs + given.args]
            needed = needed[: len(needed) - len(given.defaults)]
            if None in given.kw_defaults or not needed:
                return False
            more = needed[1:]
            return all(arg == "kernel" for arg in more) or all(len(arg) == 1 for arg in needed)
    return False


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator on its way from picture to picture.

    Attributes:
        name: what it is called.
        function: the operator itself, and `reference` the same in plain PyTorch.
        layout: how it takes a picture, a key of `_LAYOUTS` or "(H, W)".
        more: the names of further arguments: `kernel` is a blur, all others are the picture again.
    """

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor] | None
    layout: str
    more: tuple[str, ...]

    def __call__(self, picture: Tensor, reference: bool = False) -> Tensor:
        """Return the picture (C, H, W) that it makes of one, or that its reference makes."""
        function = self.reference if reference and self.reference else self.function
        return _apply(function, picture, self.layout, self.more)


def find(name: str, library: Any = loader) -> Operator:
    """Return an operator of `loader`, or of a `loader.Library`, that takes an image.

    How it takes one is found out on a small one; where the operator is not built yet, that waits.

    Raises: NotForImages, with the operator's own words; loader.BuildError.
    """
    function = getattr(library, name, None)
    if not callable(function):
        raise NotForImages(f"{name}: there is no such operator in {_title(library)}")
    more = _further(function)
    patch = torch.rand(3, *_PATCH, generator=torch.Generator().manual_seed(0))
    first = ""
    for layout in (*_LAYOUTS, _PLANE_BY_PLANE):
        try:
            out = _apply(function, patch, layout, more)
        except loader.BuildError:
            raise
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
            first = first or str(error).split("\n")[0]
            continue
        if isinstance(out, Tensor) and out.shape == patch.shape and out.is_floating_point():
            return Operator(
                name, function, getattr(library, f"{name}_reference", None), layout, more
            )
        first = first or "it gives no image of the same size"
    raise NotForImages(f"{name} does not take an image: {first}")


def _title(library: Any) -> str:
    return "loader" if library is loader else str(getattr(library, "__name__", library))


def _further(function: Callable) -> tuple[str, ...]:
    """Return the names of the arguments that it needs beside the image."""
    try:
        arguments = [*inspect.signature(function).parameters.values()][1:]
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(a.name for a in arguments if a.kind in kinds and a.default is a.empty)


def _apply(function: Callable, picture: Tensor, layout: str, more: tuple[str, ...]) -> Tensor:
    def call(image: Tensor) -> Tensor:
        return function(image, *(_argument(name, image) for name in more))

    if layout == _PLANE_BY_PLANE:
        return torch.stack([call(plane) for plane in picture])
    give, take = _LAYOUTS[layout]
    return take(call(give(picture)))


def _argument(name: str, image: Tensor) -> Tensor:
    return blur().to(image) if name == "kernel" else image
