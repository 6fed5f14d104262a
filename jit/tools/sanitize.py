"""`python -m loader sanitize X`: operators on the GPU under NVIDIA's `compute-sanitizer`.

It sees each access to memory outside of what was allocated, each race in shared memory, and each
read of what nobody wrote. torch's allocator is told to keep nothing back, so that every tensor has
bounds of its own.
"""

import os
import re
import subprocess

from . import exercise

TOOLS = ("memcheck", "racecheck", "initcheck")
_FOUND = 86  # our exit status for findings, unlike Python's own
_GET = "it is part of the CUDA toolkit; or pip install nvidia-cuda-sanitizer-api"


def sanitize(loader, names: list[str], folder: str | None, tools: tuple[str, ...]) -> int:
    """Run each operator's samples under each of `tools` and print what they find.

    Returns: the command's exit status, 1 where something was found. Raises RuntimeError with what
    is missing and its cure.
    """
    owner = loader.Library(folder) if folder else loader
    names = owner._session.named(tuple(names))
    program = exercise.find("compute-sanitizer", loader._session.toolchain.cuda_home, _GET)
    for name in names:
        side = exercise.prepare(owner, name)
        if not hasattr(side, "samples"):
            raise RuntimeError(f"{name}: {side.__file__} has no samples(device) to run it with")
    status = 0
    for name in names:
        for tool in tools:
            found = _findings(program, tool, name, folder)
            print(f"{name}: {tool}: " + (f"\n{found}" if found else "clean"), flush=True)
            status = 1 if found else status
    return status


def _findings(program: str, tool: str, name: str, folder: str | None) -> str:
    """Return what a tool found in an operator; empty where nothing."""
    done = subprocess.run(
        [
            *(program, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "10"),
            *("--report-api-errors", "no"),  # torch tries out what may fail
            *exercise.command(name, folder, "samples"),
        ],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    said = [line for line in lines if line.startswith("=========")]
    if done.returncode == 0 and any("SUMMARY: 0 " in line for line in said):
        return ""
    if done.returncode == _FOUND or any(re.search(r"SUMMARY: [1-9]", line) for line in said):
        return "\n".join(line for line in said if "COMPUTE-SANITIZER" not in line)
    last = "\n".join(lines[-15:])
    raise RuntimeError(
        f"{name}: compute-sanitizer --tool {tool} did not get to its end (exit status "
        f"{done.returncode}):\n{last}"
    )
