"""The mistakes that setup.py looks for before a compiler runs, each with its cure."""

import subprocess
import sys
from collections import Counter
from pathlib import Path


def check_name(name: str) -> None:
    """A module named like one of the standard library is never imported, or breaks that one."""
    if name in sys.stdlib_module_names:
        sys.exit(
            f"setup.py: {name!r} is a module of Python's standard library; choose another NAME"
        )


def check_stems(sources: list[Path]) -> None:
    """Two sources of one object. setuptools names it by folder and stem: from x.cpp and x.cu, x.o.

    `load` puts all objects of a library into one folder, so there ops/x.cpp and kernels/x.cpp clash
    too: hence the names kernels/x_cpu.cpp. CMake has no such trap, it says x.cpp.o and x.cu.o.
    """
    counts = Counter(source.with_suffix("") for source in sources)
    for stem, count in counts.items():
        if count > 1:
            names = " and ".join(
                source.name for source in sources if source.with_suffix("") == stem
            )
            sys.exit(
                f"setup.py: {names} in {stem.parent} would both be compiled to {stem.name}.o; "
                f"rename one of them, e.g. to {stem.name}_cpu.cpp"
            )


def check_host_compiler(nvcc: str, compiler: str | None, folder: Path) -> None:
    """Each nvcc knows host compilers up to some version; a newer one fails in a wall of errors."""
    trial = folder / "trial.cu"
    trial.write_text("int main() {}\n")
    command = [nvcc, *(["-ccbin", compiler] if compiler else []), "-c", str(trial)]
    done = subprocess.run(
        [*command, "-o", str(trial.with_suffix(".o"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        cure = (
            "The host compiler is newer than this nvcc knows: install an older one and name it in "
            "CC, which torch hands to nvcc, and CXX, e.g. CC=gcc-14 CXX=g++-14 "
            "(CMake takes CUDAHOSTCXX instead)."
        )
        sys.exit(
            f"setup.py: {nvcc} does not compile an empty program:\n{done.stdout.strip()}\n"
            + (cure if "unsupported" in done.stdout else "")
        )
