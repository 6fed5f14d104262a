"""An operator run forward and backward on the GPU, in a process of its own, for a tool to look at.

What it is run with, `benchmark(device)` and `samples(device)` of its `ops/X.py` give: tuples of
arguments.
"""

import glob
import os
import shutil
import sys

import torch
from torch import Tensor

from ..machine import child


def prepare(owner, name: str):
    """Build operator `name` of `owner`, which is loader or a library; its Python side.

    Raises: RuntimeError where it cannot run on a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{name}: no GPU to run it on: torch.cuda.is_available() is false; "
            "`python -m loader doctor` says more"
        )
    owner.build(name)
    side = owner._session.module(name)
    if not hasattr(side, "samples") and not hasattr(side, "benchmark"):
        raise RuntimeError(
            f"{name}: nothing to run it with: {side.__file__} has neither benchmark(device) nor "
            "samples(device), which return a tuple of arguments and a list of such tuples"
        )
    return side


def find(program: str, toolkit: str | None, cure: str) -> str:
    """Where a program of CUDA's is; RuntimeError with the `cure` where it is not."""
    places = [f"{toolkit}/bin"] if toolkit else []
    places += sorted(glob.glob("/opt/nvidia/nsight-compute/*"), reverse=True)
    for path in sys.path:
        if path.endswith("-packages"):
            places += sorted(glob.glob(f"{path}/nvidia/cu*/bin"), reverse=True)
    found = shutil.which(program) or shutil.which(program, path=os.pathsep.join(places))
    if not found:
        raise RuntimeError(f"no {program}, neither on PATH nor beside nvcc; {cure}")
    return found


def command(name: str, folder: str | None, way: str) -> list[str]:
    """The words that start this process again, to run operator `name` in one of two ways.

    `profile`: with its benchmark, once between two marks for a profiler, when all is warm.
    `samples`: with each of its samples.
    """
    return child.command("tools.exercise.main", name, folder, way)


def main(name: str, folder: str | None, way: str) -> None:
    """Run the operator in this process, as `command` says."""
    import loader

    owner = loader.Library(folder) if folder else loader
    side = owner._session.module(name)
    function = getattr(side, name)
    if way == "samples":
        for arguments in side.samples("cuda"):
            run(function, arguments)
    else:
        run(function, of_benchmark(side), repeat=torch.cuda.profiler.profile)
    torch.cuda.synchronize()


def of_benchmark(side) -> tuple:
    """The arguments of the operator's benchmark; of its first sample where it has none."""
    if hasattr(side, "benchmark"):
        found = side.benchmark("cuda")
        return found[0] if isinstance(found, list) else found
    return next(iter(side.samples("cuda")))


def run(function, arguments: tuple, repeat=None) -> None:
    """Call a function, and its derivative in every argument; again inside `repeat()` where given.

    The second time nothing but the operator runs on the GPU: the incoming gradient is there.
    """
    leaves = [
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in arguments
    ]
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]

    def both(grads):
        out = function(*leaves)
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
        grads = grads or [torch.ones_like(x) for x in outs]
        if outs:
            torch.autograd.grad(outs, wanted, grads, allow_unused=True)
        return grads

    grads = both(None)
    if repeat:
        torch.cuda.synchronize()
        with repeat():
            both(grads)
            torch.cuda.synchronize()
