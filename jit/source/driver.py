"""The few functions of CUDA's driver that load a kernel and launch it.

Called through ctypes, whose call takes a microsecond; they have been the same since CUDA 4. torch
has loaded the driver and owns the contexts: a device's primary one is current where torch works.
cuda.core would do as well, but torch does not bring it along, and a launch of its objects is not
known to be as quick.
"""

import ctypes
from functools import cache

import torch

_INVALID_CONTEXT = 201
# Attributes of a function, as the driver numbers them.
MAX_THREADS, STATIC_SHARED, LOCAL, REGISTERS, MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8


@cache
def library() -> ctypes.CDLL:
    """The driver with the types of what is called there; RuntimeError where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(
            f"source_module: a kernel cannot be launched here: NVIDIA's driver is missing ({error})"
            '; make the module with device="cpu" for small cases'
        ) from None
    handle, unsigned, pointer = ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER
    cuda.cuModuleLoadData.argtypes = (pointer(handle), ctypes.c_char_p)
    cuda.cuModuleGetFunction.argtypes = (pointer(handle), handle, ctypes.c_char_p)
    cuda.cuFuncGetAttribute.argtypes = (pointer(ctypes.c_int), ctypes.c_int, handle)
    cuda.cuFuncSetAttribute.argtypes = (handle, ctypes.c_int, ctypes.c_int)
    cuda.cuLaunchKernel.argtypes = (handle, *[unsigned] * 7, handle, handle, handle)
    cuda.cuDeviceGet.argtypes = (pointer(ctypes.c_int), ctypes.c_int)
    cuda.cuDevicePrimaryCtxRetain.argtypes = (pointer(handle), ctypes.c_int)
    cuda.cuCtxGetCurrent.argtypes = (pointer(handle),)
    cuda.cuCtxSetCurrent.argtypes = (handle,)
    cuda.cuGetErrorName.argtypes = (ctypes.c_int, pointer(ctypes.c_char_p))
    cuda.cuGetErrorString.argtypes = (ctypes.c_int, pointer(ctypes.c_char_p))
    if hasattr(cuda, "cuFuncGetParamInfo"):  # from CUDA 12.4 on
        size = pointer(ctypes.c_size_t)
        cuda.cuFuncGetParamInfo.argtypes = (handle, ctypes.c_size_t, size, size)
    return cuda


def check(status: int, what: str) -> None:
    """RuntimeError with the driver's own words unless a call succeeded."""
    if status:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(name))
        library().cuGetErrorString(status, ctypes.byref(text))
        said = [(x.value or b"unknown").decode() for x in (name, text)]
        raise RuntimeError(f"{what}: {said[0]}: {said[1]}")


def enter() -> None:
    """Make the context of torch's current device current in this thread, where it has none yet.

    A device's primary context is the one that torch works in; it is made here if need be.
    """
    torch.cuda.init()
    cuda, context, device = library(), ctypes.c_void_p(), ctypes.c_int()
    check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "context")
    if not context.value:
        check(cuda.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()), "device")
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "context")
        check(cuda.cuCtxSetCurrent(context), "context")


def load(code: bytes) -> int:
    """A module made of machine code or PTX in the current context.

    It stays until the process ends: work in flight may use it.
    """
    module = ctypes.c_void_p()
    check(library().cuModuleLoadData(ctypes.byref(module), code), "source_module: load")
    return module.value


def function(module: int, symbol: str) -> int:
    """A kernel of a module."""
    found = ctypes.c_void_p()
    status = library().cuModuleGetFunction(ctypes.byref(found), module, symbol.encode())
    check(status, f"source_module: {symbol}")
    return found.value


def attribute(function: int, which: int) -> int:
    """An attribute of a function; the first one asked for loads its code onto the device."""
    value = ctypes.c_int()
    check(library().cuFuncGetAttribute(ctypes.byref(value), which, function), "attributes")
    return value.value


def allow_shared(function: int, size: int) -> None:
    """Let a function have this much dynamic shared memory, where that is more than 48 KiB."""
    check(library().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, size), "shared memory")


def parameter_sizes(function: int) -> list[int] | None:
    """Bytes of each parameter; None where the driver is too old to tell."""
    if not hasattr(library(), "cuFuncGetParamInfo"):
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not library().cuFuncGetParamInfo(
        function, len(sizes), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    return sizes


def launch_again(status: int, name: str, *arguments) -> None:
    """After a launch that failed: once more, where this thread had no context yet; or the error."""
    if status == _INVALID_CONTEXT:
        enter()
        status = library().cuLaunchKernel(*arguments)
    check(status, name)
