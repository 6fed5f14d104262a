"""The levels of x86-64: what a CPU has of what loops may be compiled for."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# Those that portable loops are compiled for beside the first, which every x86-64 has.
BUILT = (3, 4)
# What each level adds to those before it, by the names of /proc/cpuinfo.
_ADDS = {
    2: "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    3: "avx avx2 abm bmi1 bmi2 f16c fma movbe xsave",
    4: "avx512f avx512bw avx512cd avx512dq avx512vl",
}
# Compilers have other names for some.
_FLAGS = {"lahf_lm": "sahf", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "abm": "lzcnt", "bmi1": "bmi"}
# With a general tuning g++ takes whole AVX-512 registers for loops too short to fill them.
_TUNED = {4: ["-mtune=icelake-server"]}
_ENOUGH = 8192  # bytes of /proc/cpuinfo that have the first core; all of them take milliseconds


def name(level: int) -> str:
    """Return what a level is called, but for the first: `v3`."""
    return f"v{level}"


def flags(level: int) -> list[str]:
    """Return the compiler's flags for a level; none for the first.

    Compilers that do not know `-march=x86-64-v3` yet, g++ 10 say, know these.
    """
    added = [feature for at in _ADDS if at <= level for feature in _ADDS[at].split()]
    return [*(f"-m{_FLAGS.get(feature, feature)}" for feature in added), *_TUNED.get(level, ())]


def chosen(machine: str, cflags: Sequence[str]) -> tuple[int, ...]:
    """Return the levels to compile loops for, beside what these flags ask for.

    None for other kinds of CPU, nor where a flag says which one it is for.
    """
    asked = any(flag.startswith("-march") for flag in cflags)
    return () if asked or machine != "x86_64" else BUILT


@cache
def here(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Return the highest level that this machine's CPU has; 1 for other kinds too."""
    try:
        with open(cpuinfo, "rb", buffering=0) as file:
            lines = os.fsdecode(file.read(_ENOUGH)).splitlines()
    except OSError:
        return 1
    first = next((line for line in lines if line.startswith("flags")), "")
    there, level = {*first.partition(":")[2].split()}, 1
    for adds in _ADDS.values():
        if not there.issuperset(adds.split()):
            break
        level += 1
    return level
