"""Results of a kernel of the user's, held against what its reference would return."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MOST_KINDS = 64  # kinds of calls of an operator that are looked at
_MOST_COPIED = 1 << 24  # elements of an argument that is looked at for changes


class Watch:
    """Runs kernels of one operator, and looks at the first call with arguments of each kind.

    A kind is shapes, dtypes and devices. Looking costs a run of the reference without data, and a
    copy of the arguments.
    """

    def __init__(self, name: str, arguments: list[str], written: list[bool], reference: Callable):
        """`written` tells for each argument if the kernel may write to it."""
        self._name, self._arguments, self._written = name, arguments, written
        self._reference = reference
        self._seen: set[tuple] = set()

    def run(self, kernel: Callable | None, args: Sequence) -> Any:
        """Return what the kernel, or the reference, does.

        Raises: RuntimeError where that cannot be right.
        """
        who, kernel = ("kernel", kernel) if kernel else ("reference", self._reference)
        kind = tuple(
            (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in args
        )
        if kind in self._seen or len(self._seen) >= _MOST_KINDS:
            return kernel(*args)
        expected = self._expected(args) if who == "kernel" else None
        before = [
            x.clone() if isinstance(x, Tensor) and not w and x.numel() <= _MOST_COPIED else None
            for x, w in zip(args, self._written, strict=True)
        ]
        result = kernel(*args)
        if who == "kernel":
            self._check(result, expected, args)
        for argument, old, x in zip(self._arguments, before, args, strict=True):
            if old is not None and not ((old == x) | (x != x)).all():
                raise RuntimeError(
                    f"{self._name}: the {who} wrote to its argument {argument}; return a new "
                    f"tensor, or declare mutates=({argument!r},)"
                )
        self._seen.add(kind)
        return result

    def _expected(self, args: Sequence) -> Any:
        """What the reference returns for these arguments without their data."""
        from torch._subclasses import fake_tensor

        with fake_tensor.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
            try:
                return self._reference(*fakes)
            except fake_tensor.DynamicOutputShapeException as error:
                raise NotImplementedError(
                    f"{self._name}: the shape of what the reference returns depends on values "
                    f"({error.func}), so that torch.compile could not tell it"
                ) from None
            except fake_tensor.DataDependentOutputException as error:
                raise NotImplementedError(
                    f"{self._name}: the reference asks a tensor for a value ({error.func}), which "
                    "torch.compile could not tell; leave it in a tensor, without item() or float()"
                ) from None
            except (RuntimeError, TypeError) as error:
                if "numpy" not in str(error):
                    raise
                raise NotImplementedError(
                    f"{self._name}: the reference must be plain PyTorch, which gives shapes and "
                    f"gradients, and it calls numpy: {error}"
                ) from None

    def _check(self, result: Any, expected: Any, args: Sequence) -> None:
        """Raise RuntimeError where a result is not of the kind that is expected."""
        if not isinstance(expected, (tuple, list)):
            self._check_one("the kernel's result", result, expected, args)
            return
        if not isinstance(result, (tuple, list)) or len(result) != len(expected):
            got = len(result) if isinstance(result, (tuple, list)) else type_name(result)
            raise RuntimeError(
                f"{self._name}: the kernel must return a tuple of {len(expected)}, as the "
                f"reference does, got {got}"
            )
        for i, (got, wanted) in enumerate(zip(result, expected, strict=True)):
            self._check_one(f"result {i} of the kernel", got, wanted, args)

    def _check_one(self, which: str, got: Any, wanted: Any, args: Sequence) -> None:
        if got is None and wanted is None:
            return
        if not isinstance(got, Tensor) or not isinstance(wanted, Tensor):
            raise RuntimeError(
                f"{self._name}: {which} must be a {type_name(wanted)}, as the reference's, got "
                f"{type_name(got)}"
            )
        for what in ("shape", "dtype", "device"):
            a, b = getattr(got, what), getattr(wanted, what)
            if a != b:
                a, b = ((*a,), (*b,)) if what == "shape" else (a, b)
                raise RuntimeError(
                    f"{self._name}: {which} must have the {what} of the reference's, {b}, got {a}"
                )
        if any(isinstance(x, Tensor) and torch._C._is_alias_of(got, x) for x in args):
            raise RuntimeError(
                f"{self._name}: {which} shares memory with an argument; return a new tensor"
            )


def tidy(result: Any, args: Sequence) -> Any:
    """Return results as torch.compile is told of them: contiguous, and none of the arguments."""
    if isinstance(result, (tuple, list)):
        return tuple(tidy(x, args) for x in result)
    if not isinstance(result, Tensor):
        return result
    made = result.contiguous()
    shared = any(isinstance(x, Tensor) and torch._C._is_alias_of(made, x) for x in args)
    return made.clone() if shared else made


def plainly(x: Any, written: bool = False) -> Any:
    """Return an argument as a kernel gets it: contiguous, unless it is to be written to."""
    if not isinstance(x, Tensor):
        return x
    return x.detach() if written else x.detach().contiguous()


def type_name(value: object) -> str:
    """Return what a message calls a value: its type."""
    known = "Tensor" if isinstance(value, Tensor) else type(value).__name__
    return "None" if value is None else known
