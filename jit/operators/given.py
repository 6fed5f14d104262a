"""What a user gives `loader.operator`, looked at: a name, functions, and arguments of a call."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .watch import type_name

_TAKEN = ("octet", "aten", "prim", "prims", "torch", "torchvision")


def checked_name(name: str | None, reference: Callable) -> str:
    """Return an operator's name, by default of its reference. Raises: ValueError."""
    own = re.sub(r"\W", "_", getattr(reference, "__name__", "operator"))
    name = f"local::{own}" if name is None else name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(
            f'operator: name must be "namespace::name", as "mine::{own}", got {name!r}'
        )
    if name.partition("::")[0] in _TAKEN:
        raise ValueError(
            f"operator: the namespace of {name!r} is taken; choose one of your own, as "
            f'"mine::{name.partition("::")[2]}"'
        )
    return name


def kernels_of(name: str, kernel: Any, arguments: list[str]) -> dict[str, Callable]:
    """Return kernels by type of device, "" being any. Raises: TypeError or ValueError."""
    found = {} if kernel is None else {**kernel} if isinstance(kernel, Mapping) else {"": kernel}
    for device, function in found.items():
        where = f" for {device!r}" if device else ""
        check_function(name, f"kernel{where}", function, arguments)
        if device:
            try:
                torch.device(device)
            except (RuntimeError, TypeError):
                raise ValueError(
                    f"{name}: kernel must be a dict by type of device, as 'cuda', got {device!r}"
                ) from None
    return found


def check_function(name: str, what: str, function: Any, arguments: list[str]) -> None:
    """Raise TypeError for what is no function, or does not take so many arguments."""
    if not callable(function):
        raise TypeError(f"{name}: {what} must be a function, got {type_name(function)}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C++, which does not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"{name}: {what} must take the arguments ({', '.join(arguments)}) by position, got a "
            f"function of {signature}: {error}"
        ) from None


def bound(name: str, names: list[str], defaults: dict, args: tuple, named: dict) -> list:
    """Return all arguments in their order. Raises: TypeError."""
    if len(args) > len(names):
        raise TypeError(f"{name} takes {len(names)} arguments, got {len(args)}")
    found = [*args]
    for parameter in names[len(args) :]:
        if parameter in named:
            found.append(named[parameter])
        elif parameter in defaults:
            found.append(defaults[parameter])
        else:
            raise TypeError(f"{name}: argument {parameter} is missing")
    for parameter in named:
        if parameter not in names[len(args) :]:
            twice = "is given twice" if parameter in names else "is none of its arguments"
            raise TypeError(f"{name}: {parameter} {twice}")
    return found
