"""The mistakes that setup.py looks for before a compiler runs, each with its cure."""

import subprocess
import sys
from collections import Counter
from pathlib import Path


def check_name(name: str) -> None:
    """A module named like one of the standard library is never imported, or breaks that one."""
    if name in sys.stdlib_module_names:
        sys.exit(f"setup.py: {name!r} is a module of Python's standard library; choose another NAME")


def check_stems(sources: list[Path]) -> None:
    """setuptools names objects by folder and stem: x.cpp and x.cu in one folder both make x.o.

    `load` has one folder for all objects of a library, so there even folders do not help. That is
    why the CPU kernels' files end in _cpu. CMake names objects x.cpp.o and x.cu.o.
    """
    counts = Counter(source.with_suffix("") for source in sources)
    for stem, count in counts.items():
        if count > 1:
            names = " and ".join(source.name for source in sources if source.with_suffix("") == stem)
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
        host = compiler or "its default, the first g++ on PATH"
        sys.exit(
            f"setup.py: nvcc does not work with the host compiler ({host}):\n"
            f"{done.stdout.strip()}\n"
            "If that says 'unsupported version', install an older one and name it in CC, which "
            "torch gives to nvcc, and in CXX: e.g. CC=gcc-14 CXX=g++-14 (CMake: CUDAHOSTCXX)"
        )
