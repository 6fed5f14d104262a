"""`python -m loader sanitize X`: operators on the GPU under NVIDIA's `compute-sanitizer`.

It sees each access to memory outside of what was allocated, each race in shared memory, and each
read of what nobody wrote. torch's allocator is told to keep nothing back, so that every tensor has
bounds of its own.
"""

import re
from typing import Any

from . import exercise

TOOLS = ("memcheck", "racecheck", "initcheck")
_FOUND = 86  # our exit status for findings, unlike Python's own
_GET = "it is part of the CUDA toolkit; or pip install nvidia-cuda-sanitizer-api"


def sanitize(loader: Any, names: list[str], folder: str | None, tools: tuple[str, ...]) -> int:
    """Run each operator's samples under each of `tools` and print what they find.

    Returns: the command's exit status, 1 where something was found. Raises RuntimeError with what
    is missing and its cure.
    """
    what = loader, names, folder, "compute-sanitizer", _GET
    names, program = exercise.prepare(*what, ways=("samples",))
    status = 0
    for name in names:
        for tool in tools:
            found = _findings(program, tool, name, folder)
            print(f"{name}: {tool}: " + (f"\n{found}" if found else "clean"), flush=True)
            status = 1 if found else status
    return status


def _findings(program: str, tool: str, name: str, folder: str | None) -> str:
    """Return what a tool found in an operator; empty where nothing."""
    words = [program, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "10"]
    words += ["--report-api-errors", "no"]  # torch tries out what may fail
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, all_said = exercise.run_under(words, name, folder, "samples", **alone)
    said = [line for line in all_said.splitlines() if line.startswith("=========")]
    if status == 0 and any("SUMMARY: 0 " in line for line in said):
        return ""
    if status == _FOUND or any(re.search(r"SUMMARY: [1-9]", line) for line in said):
        return "\n".join(line for line in said if "COMPUTE-SANITIZER" not in line)
    raise RuntimeError(
        f"{name}: compute-sanitizer --tool {tool} did not get to its end (exit status "
        f"{status}):\n{exercise.last_lines(all_said)}"
    )
