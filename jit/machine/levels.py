"""The levels of x86-64, as compilers name them: what a build for many machines asks of a CPU."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

_FLAG = "-march=x86-64-v"
# What each level adds to those before it, by the names of /proc/cpuinfo.
_ADDS = {
    2: "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    3: "avx avx2 abm bmi1 bmi2 f16c fma movbe xsave",
    4: "avx512f avx512bw avx512cd avx512dq avx512vl",
}


def flags(level: int) -> list[str]:
    """Return the compiler's flags for a level; none for the first, which all have."""
    return [f"{_FLAG}{level}"] if level > 1 else []


def asked(cflags: Sequence[str]) -> int:
    """Return the level that code compiled with these flags asks for."""
    return max([1, *(int(f[len(_FLAG) :]) for f in cflags if f.startswith(_FLAG))])


@cache
def here(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Return the highest level that this machine's CPU has; 1 for other kinds too."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return 1
    first = next((line for line in lines if line.startswith("flags")), "")
    there, level = {*first.partition(":")[2].split()}, 1
    for adds in _ADDS.values():
        if not there.issuperset(adds.split()):
            break
        level += 1
    return level
