"""`python -m loader profile X`: what NVIDIA's `ncu` says of one operator's kernels."""

import os
import re
import subprocess

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
_GET_NCU = (
    "it is part of the CUDA toolkit, and of Nsight Compute from "
    "https://developer.nvidia.com/nsight-compute (Debian, Ubuntu with NVIDIA's repository: "
    "apt install nsight-compute)"
)
# What ncu says, and what to do about it.
_CURES = {
    "ERR_NVGPUCTRPERM": "the driver shows the GPU's counters to root alone: run this as root (in a "
    "container: started with --cap-add=SYS_ADMIN), or let everybody see them with `options nvidia "
    "NVreg_RestrictProfilingToAdminUsers=0` in a file of /etc/modprobe.d and a reboot",
    "driver resource was unavailable": "another profiler is using this GPU (another ncu, DCGM, "
    "nsys): end it first",
    "driver is not compatible": "this ncu does not fit the driver: install the one of its release",
    "No kernels were profiled": "it launched no CUDA kernel: is its build for the CPU only? See "
    "`python -m loader doctor`",
}


def profile(loader, name: str, folder: str | None, choice: str | None, output: str | None) -> str:
    """Run operator `name` under ncu, once forward and backward; the text about its own kernels.

    `choice` is one of ncu's sets (`ncu --list-sets`), instead of SECTIONS; `output` a file in which
    to keep the whole report. Raises RuntimeError with what is missing and its cure.
    """
    owner = loader.Library(folder) if folder else loader
    owner._session.named((name,))
    ncu = exercise.find("ncu", loader._session.toolchain.cuda_home, _GET_NCU)
    exercise.prepare(owner, name)
    wanted = ["--set", choice] if choice else [w for s in SECTIONS for w in ("--section", s)]
    what = [ncu, "--profile-from-start", "off", "--target-processes", "all", *wanted]
    kept = ""
    if output:
        output = os.path.abspath(output.removesuffix(".ncu-rep")) + ".ncu-rep"
        if os.path.exists(output):
            raise ValueError(f"--output: {output} exists already; name another file")
        what += ["--export", output]
        kept = f"\nThe whole report is in {output}; ncu-ui shows it"
    text = _run([*what, *exercise.command(name, folder, "profile")], name)
    if output:  # then nothing is printed
        text = _run([ncu, "--import", output, "--page", "details"], name)
    return own_kernels(text) + kept


def _run(command: list[str], name: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    for sign, cure in _CURES.items():
        if sign in done.stdout:
            raise RuntimeError(f"{name}: ncu could not measure it ({sign}): {cure}")
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise RuntimeError(f"{name}: ncu ended with exit status {done.returncode}:\n{last}")
    return done.stdout


def own_kernels(text: str) -> str:
    """The text of ncu without its progress and without the kernels of torch's own.

    A kernel begins with a line such as `  name(types) (1, 1, 1)x(32, 1, 1), Context 1, ...`.
    """
    head = re.compile(r"^  (\S.*) \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\), Context", re.MULTILINE)
    text = "".join(line for line in text.splitlines(True) if not line.startswith("=="))
    begins = [*head.finditer(text)]
    ends = [*(match.start() for match in begins[1:]), len(text)]
    blocks = [
        text[match.start() : end].rstrip()
        for match, end in zip(begins, ends, strict=True)
        if not re.search(r"\bat::|\bcub::|\bthrust::", match[1])
    ]
    left_out = len(begins) - len(blocks)
    note = [f"({left_out} kernels of torch's own left out)"] if left_out else []
    return "\n\n".join([*blocks, *note])
