"""An operator run forward and backward on the GPU, in a process of its own, for a tool to look at.

What it is run with, `benchmark(device)` and `samples(device)` of its `ops/X.py` give: tuples of
arguments.
"""

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..machine import child


def prepare(
    loader: Any,
    names: Sequence[str],
    folder: str | None,
    program: str,
    cure: str,
    ways: Sequence[str] = ("benchmark", "samples"),
) -> tuple[list[str], str]:
    """Build operators, all where none is named; their names, and where a program of CUDA's is.

    Raises: RuntimeError with what is missing: `program`, which `cure` says how to get, a GPU, or
        in an operator's Python side each of `ways` to give it arguments.
    """
    owner = loader.Library(folder) if folder else loader
    units = owner._session.named(tuple(names))
    path = path_of(program, loader._session.toolchain.cuda_home)
    if not path:
        raise RuntimeError(f"no {program}, neither on PATH nor beside nvcc; {cure}")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{units[0]}: no GPU to run it on: torch.cuda.is_available() is false; "
            "`python -m loader doctor` says more"
        )
    for name in units:
        owner.build(name)
        side = owner._session.module(name)
        if not any(hasattr(side, way) for way in ways):
            raise RuntimeError(
                f"{name}: nothing to run it with: {side.__file__} has no "
                f"{' or '.join(f'{way}(device)' for way in ways)}, which "
                "return a tuple of arguments and a list of such tuples"
            )
    return units, path


def path_of(program: str, toolkit: str | None) -> str | None:
    """Where a program of CUDA's is: on PATH, or beside a toolkit; None where it is not."""
    places = [f"{toolkit}/bin"] if toolkit else []
    for pattern in ("/opt/nvidia/nsight-compute/*", *(f"{p}/nvidia/cu*/bin" for p in sys.path)):
        places += sorted(glob.glob(pattern), reverse=True)
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(places))


def run_under(tool: list[str], *what: str | None, **environment: str) -> tuple[int, str]:
    """Run `main(*what)` in a process under a tool; its exit status, and all that both say."""
    done = subprocess.run(
        [*tool, *(child.command("tools.exercise.main", *what) if what else ())],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def last_lines(said: str) -> str:
    """What a program said in the end."""
    return "\n".join(said.strip().splitlines()[-15:])


def main(name: str, folder: str | None, way: str) -> None:
    """Run an operator in this process, in one of two ways.

    `profile`: with its benchmark, once between two marks for a profiler, when all is warm.
    `samples`: with each of its samples.
    """
    import loader

    side = (loader.Library(folder) if folder else loader)._session.module(name)
    function = getattr(side, name)
    if way == "samples":
        for arguments in side.samples("cuda"):
            run(function, arguments)
    else:
        found = (getattr(side, "benchmark", None) or side.samples)("cuda")
        one = found if isinstance(found, tuple) else next(iter(found))
        run(function, one, repeat=torch.cuda.profiler.profile)
    torch.cuda.synchronize()


def run(function: Callable, arguments: tuple, repeat: Callable | None = None) -> None:
    """Call a function, and its derivative in every argument; again inside `repeat()` where given.

    The second time nothing but the operator runs on the GPU: the incoming gradient is there.
    """
    leaves = [
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in arguments
    ]
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]

    def both(grads: list[Tensor]) -> list[Tensor]:
        out = function(*leaves)
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
        grads = grads or [torch.ones_like(x) for x in outs]
        if outs:
            torch.autograd.grad(outs, wanted, grads, allow_unused=True)
        return grads

    grads = both([])
    if repeat:
        torch.cuda.synchronize()
        with repeat():
            both(grads)
            torch.cuda.synchronize()
