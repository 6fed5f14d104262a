"""NVIDIA's GPUs, as the device files and the driver's management library NVML tell of them.

torch would initialise CUDA to tell, which takes seconds and leaves a later fork of this process
without the GPU; the package nvidia-ml-py takes 28 ms to import, three times a warm `import loader`.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from . import files

_NONE = ("", "-1", "NoDevFiles")  # of CUDA_VISIBLE_DEVICES: no GPU is to be seen


def devices() -> list[str]:
    """Return the device files of GPUs that this process may see, without waking CUDA."""
    if hidden() is not None:
        return []
    names = sorted(os.listdir("/dev"))
    return [f"/dev/{n}" for n in names if n == "dxg" or (n[:6] == "nvidia" and n[6:7].isdigit())]


def hidden() -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES that hides all GPUs; None where they are not."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return named if named in _NONE else None


def remembered_capabilities(there: list[str], file: Path) -> str:
    """Return the capabilities of the GPUs that have these device files, such as "8.0;9.0".

    To ask takes 20 ms, more than all the rest of a warm import: `file` keeps them until a boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    named = boot.read_text().strip() if boot.exists() else ""
    fingerprint = [named, *(f"{device} {os.stat(device).st_rdev}" for device in there)]
    known, capable = files.read_record(file) or ([], "")
    if not named or known != fingerprint:
        capable = ";".join(capabilities())
        with contextlib.suppress(OSError):  # a read-only cache: ask again next time
            files.make_folder(file.parent)
        files.write_record(file, [fingerprint, capable])
    return capable


def capabilities() -> list[str]:
    """Return the compute capability of each kind of GPU here, e.g. ["9.0"], hidden or not."""
    found = set()
    with contextlib.suppress(OSError), _nvml() as nvml:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for i in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)) == 0:
                nvml.nvmlDeviceGetCudaComputeCapability(
                    device, ctypes.byref(major), ctypes.byref(minor)
                )
                found.add((major.value, minor.value))
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def driver_cuda() -> tuple[int, int]:
    """Return the driver's CUDA; FileNotFoundError without a driver, OSError where it fails."""
    number = ctypes.c_int()
    with _nvml() as nvml:
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL]:
    """Give the driver's management library, started; what it raises, `driver_cuda` says."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise FileNotFoundError(str(error)) from None
    if status := library.nvmlInit_v2():
        library.nvmlErrorString.restype = ctypes.c_char_p
        raise OSError(library.nvmlErrorString(status).decode(errors="replace"))
    try:
        yield library
    finally:
        library.nvmlShutdown()
