"""The key of a build: a digest over everything that the library depends on."""

import hashlib
import json
import re

from ..machine import levels
from ..machine.sources import Sources, Unit, with_loops
from ..machine.toolchain import NATIVE, STABLE_ABI, Toolchain

# Raise when the layout of a store entry, or the way a library is made, changes.
FORMAT = 4
# Headers of torch, and those that are the same from STABLE_ABI on.
_TORCHS = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")
_STABLE = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")


def manifest(unit: Unit, toolchain: Toolchain, sources: Sources) -> dict:
    """All that enters the key, as plain data: the sources' digests and the toolchain's identity.

    What keeps to torch's stable ABI is made for that, and for the CUDA whose runtime it loads.
    """
    files: dict[str, str] = {}
    for source in built_sources(unit, toolchain):
        files.update(sources.closure(source))
    made_by = toolchain.identity
    if keeps_to_stable_abi(unit, toolchain, sources):
        made_by = made_by | {"torch": f"stable-ABI-{STABLE_ABI}"}
        if any(source.endswith(".cu") for source in built_sources(unit, toolchain)):
            made_by["cuda_runtime"] = toolchain.cuda.partition(".")[0]
    if built := levels_of(unit, toolchain):
        made_by = made_by | {"levels": [*map(levels.name, built)]}
    return {
        "format": FORMAT,
        "unit": unit.name,
        "files": dict(sorted(files.items())),
        "toolchain": made_by,
    }


def keeps_to_stable_abi(unit: Unit, toolchain: Toolchain, sources: Sources) -> bool:
    """True if its sources see no more of torch than the headers of its stable ABI."""
    for source in built_sources(unit, toolchain):
        for header in sources.foreign(source):
            if header is None or (header.startswith(_TORCHS) and not header.startswith(_STABLE)):
                return False
    return True


def built_sources(unit: Unit, toolchain: Toolchain) -> tuple[str, ...]:
    """The sources that this toolchain builds: without architectures there is no CUDA part."""
    with_cuda = toolchain.nvcc and toolchain.architectures
    return tuple(s for s in unit.sources if with_cuda or not s.endswith(".cu"))


def levels_of(unit: Unit, toolchain: Toolchain) -> tuple[int, ...]:
    """The levels of x86-64 that its loops are compiled for, beside what all have; see recipe.py."""
    loops = with_loops(built_sources(unit, toolchain))
    return levels.chosen(toolchain.machine, toolchain.cflags) if loops else ()


def key(manifest: dict) -> str:
    """SHA-256 of the manifest, cut to 160 bits."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def serves(
    stored: dict, unit: Unit, toolchain: Toolchain, sources: Sources, brought: bool = False
) -> bool:
    """True if the build that `stored` is the manifest of will do, though its key is not quite ours.

    It may be for more architectures than there are here. Where there is no compiler, nobody can
    tell which one it would be, and code for any CPU will do; likewise nvcc. What a wheel `brought`
    along will do whatever compilers and flags there are; a build without CUDA where there is no
    nvcc to add that.
    """
    made = stored["toolchain"]
    same = {}
    if brought:
        same = {"cpu": made["cpu"]} | {name: tuple(made[name]) for name in ("cflags", "ldflags")}
        if not made["architectures"] and not toolchain.nvcc:
            same["architectures"] = ""
        toolchain = toolchain._replace(cxx=None, **same)
    wanted, without_nvcc = toolchain.architectures, None in (toolchain.cxx, toolchain.nvcc)
    if not wanted or _covers(made["architectures"], wanted, without_nvcc):
        same["architectures"] = made["architectures"]
        if without_nvcc:
            same |= {"nvcc": made.get("nvcc"), "cuda_flags": tuple(made.get("cuda_flags", ()))}
    if toolchain.cxx is None:
        same |= {"cxx": made["cxx"], "environment": tuple(made["environment"])}
        if NATIVE not in made["cflags"]:
            same |= {"cpu": "", "cflags": tuple(f for f in toolchain.cflags if f != NATIVE)}
    return stored == manifest(unit, toolchain._replace(**same), sources)


def _covers(made: str, wanted: str, without_nvcc: bool) -> bool:
    """True if code for the architectures `made` runs on all those `wanted`, e.g. "8.0;9.0".

    A GPU runs code made for a lower minor version too, and its driver compiles PTX of any older
    one, which will do where there is no nvcc.
    """

    def runs(there: str, here: str) -> bool:
        if there == here or there == f"{here}+PTX":
            return True
        numbers = re.fullmatch(r"(\d+)\.(\d+)(?:\+(PTX))? (\d+)\.(\d+)", f"{there} {here}")
        if not without_nvcc or not numbers:
            return False
        major, minor, wanted_major, wanted_minor = map(int, numbers.group(1, 2, 4, 5))
        older = (major, minor) <= (wanted_major, wanted_minor)
        return older and (major == wanted_major or numbers[3] is not None)

    return all(any(runs(there, here) for there in made.split(";")) for here in wanted.split(";"))
