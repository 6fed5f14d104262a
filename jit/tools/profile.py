"""`python -m loader profile X`: what NVIDIA's `ncu` says of one operator's kernels."""

import os
import re
from typing import Any

from . import exercise

# How near to the machine's limits, where the memory's time goes, and what keeps warps waiting.
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "LaunchStats",
    "Occupancy",
    "SchedulerStats",
    "WarpStateStats",
)
GET_NCU = (
    "it is part of the CUDA toolkit, and of Nsight Compute from "
    "https://developer.nvidia.com/nsight-compute (Debian, Ubuntu with NVIDIA's repository: "
    "apt install nsight-compute)"
)
# What ncu says, and what to do about it.
CURES = {
    "ERR_NVGPUCTRPERM": "the driver shows the GPU's counters to root alone: run this as root (in a "
    "container: started with --cap-add=SYS_ADMIN), or let everybody see them with `options nvidia "
    "NVreg_RestrictProfilingToAdminUsers=0` in a file of /etc/modprobe.d and a reboot",
    "driver resource was unavailable": "another profiler is using this GPU (another ncu, DCGM, "
    "nsys): end it first",
    "driver is not compatible": "this ncu does not fit the driver: install the one of its release",
    "No kernels were profiled": "it launched no CUDA kernel: is its build for the CPU only? See "
    "`python -m loader doctor`",
}


def profile(
    loader: Any, name: str, folder: str | None, choice: str | None, output: str | None
) -> str:
    """Run operator `name` under ncu, once forward and backward; the text about its own kernels.

    `choice` is one of ncu's sets (`ncu --list-sets`), instead of SECTIONS; `output` a file in which
    to keep the whole report. Raises RuntimeError with what is missing and its cure.
    """
    _, ncu = exercise.prepare(loader, [name], folder, "ncu", GET_NCU)
    wanted = ["--set", choice] if choice else [w for s in SECTIONS for w in ("--section", s)]
    command = [ncu, "--profile-from-start", "off", "--target-processes", "all", *wanted]
    what = (name, folder, "profile")
    if not output:
        return own_kernels(_run(name, command, *what))
    output = os.path.abspath(output.removesuffix(".ncu-rep")) + ".ncu-rep"
    if os.path.exists(output):
        raise ValueError(f"--output: {output} exists already; name another file")
    _run(name, [*command, "--export", output], *what)  # then it prints nothing
    text = own_kernels(_run(name, [ncu, "--import", output, "--page", "details"]))
    return f"{text}\nThe whole report is in {output}; ncu-ui shows it"


def _run(name: str, command: list[str], *what: str | None) -> str:
    status, said = exercise.run_under(command, *what)
    for sign, cure in CURES.items():
        if sign in said:
            raise RuntimeError(f"{name}: ncu could not measure it ({sign}): {cure}")
    if status:
        raise RuntimeError(
            f"{name}: ncu ended with exit status {status}:\n{exercise.last_lines(said)}"
        )
    return said


def own_kernels(text: str) -> str:
    """The text of ncu without its progress and without the kernels of torch's own.

    A kernel begins with a line such as `  name(types) (1, 1, 1)x(32, 1, 1), Context 1, ...`.
    """
    text = "".join(line for line in text.splitlines(True) if not line.startswith("=="))
    head = re.compile(r"^(?=  \S.* \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\), Context)", re.MULTILINE)
    _, *parts = head.split(text)
    own = [p.rstrip() for p in parts if not re.match(r".*?(\bat::|\bcub::|\bthrust::)", p)]
    left_out = len(parts) - len(own)
    return "\n\n".join(own + [f"({left_out} kernels of torch's own left out)"] * bool(left_out))
