"""Checks of the GPUs, their driver, and the architectures that are compiled for."""

import os
import re
from pathlib import Path

from ...machine import gpus
from .context import Context, Found, run, version


def check_architectures(context: Context) -> Found:
    """Ask torch and nvcc for the GPUs that would be compiled for."""
    wanted, facts = context.architectures, context.facts()
    if not context.cuda or not wanted:
        return "ok", "none: only the CPU part is built"
    listed = bool(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    found = f"{wanted}, from {'TORCH_CUDA_ARCH_LIST' if listed else 'the GPUs here'}"
    cure = "set TORCH_CUDA_ARCH_LIST to a list such as '9.0' or '8.0;9.0+PTX'"
    if error := facts.get("flags_error"):
        return "error", f"{found}: torch refuses it: {error}", cure
    if "flags" not in facts:
        return "warning", "not checked: torch.utils.cpp_extension does not import"
    _, said = run([*context.nvcc, "--list-gpu-arch"]) if context.nvcc else (True, "")
    known, needed = _numbers(said), _numbers(" ".join(facts.get("flags", ())))
    unknown = sorted({*needed} - {*known})
    if not known or not unknown:
        return "ok", found
    last = f"{known[-1] // 10}.{known[-1] % 10}"
    if unknown[0] < known[0]:
        cure = "GPUs as old as that need an older CUDA toolkit, and a torch built for it"
    elif not listed:
        cure = f"install a newer CUDA toolkit, or\n$ export TORCH_CUDA_ARCH_LIST={last}+PTX"
    first = f"{known[0] // 10}.{known[0] % 10}"
    return "error", f"{found}: this nvcc knows those from {first} to {last}", cure


def _numbers(text: str) -> list[int]:
    """Architectures in a text of nvcc's: 90 for compute_90."""
    return sorted({int(number) for number in re.findall(r"compute_(\d+)", text)})


def check_driver(context: Context) -> Found:
    """NVIDIA's driver against torch's CUDA."""
    try:
        major, minor = gpus.driver_cuda()
    except FileNotFoundError:
        devices = sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
        if not devices:
            return "ok", "none, and no GPU"
        found = f"{devices[0]} is there, but the driver's libnvidia-ml.so.1 is not"
        cure = "in a container: start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return "warning", found, cure
    except OSError as error:
        cure = "reload the driver or reboot; restart a container"
        return "warning", f"does not start: {error}", cure
    found = f"supports CUDA {major}.{minor}"
    if context.cuda and major < version(context.cuda)[0]:
        found += f", torch needs {context.cuda}: the GPU cannot be used"
        return "warning", found, f"install a newer driver, or a torch built for CUDA {major}"
    return "ok", found


def check_gpu(context: Context) -> Found:
    """Look for a GPU that torch may use."""
    found = ", ".join(f"compute capability {c}" for c in gpus.capabilities())
    if not found:
        return "ok", "none: operators run on the CPU"
    hidden = gpus.hidden()
    if hidden is not None:
        found += f", hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        return "warning", found, "$ unset CUDA_VISIBLE_DEVICES"
    if not context.cuda:
        return "warning", f"{found}, but torch is built without CUDA", "install one built for CUDA"
    return "ok", found
