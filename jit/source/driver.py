"""The few functions of CUDA's driver that load a kernel and launch it.

Called through ctypes, in a microsecond; they have been the same since CUDA 4. torch has loaded the
driver, and a device's primary context is current where torch works. cuda.bindings would do as well,
but takes 30 ms to import, six times what a kernel takes that is in the store.
"""

import ctypes
from ctypes import byref, c_int, c_void_p
from functools import cache
from typing import Any

import torch

_INVALID_CONTEXT = 201


@cache
def library() -> ctypes.CDLL:
    """Return the driver; RuntimeError where there is none.

    Handles stay `c_void_p`, which needs no declarations; a launch, whose arguments are plain
    numbers, has them.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(
            f"source_module: a kernel cannot be launched here: NVIDIA's driver is missing ({error})"
            '; make the module with device="cpu" for small cases'
        ) from None
    cuda.cuLaunchKernel.argtypes = (c_void_p, *[ctypes.c_uint] * 7, *[c_void_p] * 3)
    return cuda


def check(status: int, what: str) -> None:
    """RuntimeError with the driver's own words unless a call succeeded."""
    if status:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        library().cuGetErrorName(status, byref(name))
        library().cuGetErrorString(status, byref(text))
        said = [(x.value or b"unknown").decode() for x in (name, text)]
        raise RuntimeError(f"{what}: {said[0]}: {said[1]}")


def ask(what: str, name: str, *arguments: object, kind: type = c_void_p) -> Any:
    """Return what a function of the driver gives: a handle, unless it is of another kind."""
    found = kind()
    check(getattr(library(), name)(byref(found), *arguments), what)
    return found


def enter() -> None:
    """Make the context of torch's current device current in this thread, where it has none yet.

    A device's primary context is the one that torch works in; it is made here if need be.
    """
    torch.cuda.init()
    if not ask("context", "cuCtxGetCurrent").value:
        device = ask("device", "cuDeviceGet", torch.cuda.current_device(), kind=c_int)
        context = ask("context", "cuDevicePrimaryCtxRetain", device)
        check(library().cuCtxSetCurrent(context), "context")


def launch_again(status: int, name: str, *arguments: object) -> None:
    """After a launch that failed: once more, where this thread had no context yet; or the error."""
    if status == _INVALID_CONTEXT:
        enter()
        status = library().cuLaunchKernel(*arguments)
    check(status, name)
