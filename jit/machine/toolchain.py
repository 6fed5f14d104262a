"""Compilers, flags and target, found without running anything: warm imports stay fast."""

import glob
import hashlib
import os
import re
import shutil
import sys
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from . import gpus, settings
from .forks import cached_property

# Flags of the user's for the host compiler and the linker. They come before ours, which win.
FLAGS = ["CPPFLAGS", "CFLAGS", "CXXFLAGS"]
LINK_FLAGS = ["LDFLAGS"]
_HEADER_PATHS = ("CPATH", "CPLUS_INCLUDE_PATH")
# What else changes a compiler's output beside its command line.
_ENVIRONMENT = """
CC CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX LD_RUN_PATH
SOURCE_DATE_EPOCH NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS NVCC_CCBIN PYTORCH_NVCC
"""

# torch's flags turn off the 16-bit types' operators and conversions; kernels may want them.
_UNDEFINE = [
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
]
NATIVE = "-march=native"
CFLAGS = ["-O3", "-fopenmp-simd", "-fvisibility=hidden", "-Wall", "-Wextra"]
# -O is for the launchers alone: device code is optimised fully in any case.
CUDA_FLAGS = ["-O1", "-Xcompiler", "-fvisibility=hidden", *_UNDEFINE]
# The oldest torch that an operator serves which keeps to the stable ABI, and what has torch's
# headers bring no more than that one knows.
STABLE_ABI = "2.10"
ON_STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"


class _Facts(NamedTuple):
    cxx: str | None  # identity: resolved path, size and time of change
    nvcc: str | None
    cuda_home: str | None
    architectures: str  # as in TORCH_CUDA_ARCH_LIST, e.g. "8.0;9.0"; "" builds for the CPU only
    machine: str  # instruction set, e.g. "x86_64"
    cpu: str  # digest of the CPU's features where code is made for this CPU, else ""
    torch: str
    cflags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    ldflags: tuple[str, ...]
    environment: tuple[str, ...]
    cuda: str = ""  # that this torch is made with, e.g. "13.0"


class Toolchain(_Facts):
    """All but the sources that a build depends on; `cxx` and `nvcc` are None where missing."""

    @cached_property
    def identity(self) -> dict:
        """Return what enters a build's key, by name."""
        facts = {k: [*v] if isinstance(v, tuple) else v for k, v in self._asdict().items()}
        del facts["cuda_home"], facts["cuda"]  # nvcc's identity has the path, torch's the CUDA
        if not self.architectures:
            del facts["nvcc"], facts["cuda_flags"]
        return facts

    @cached_property
    def header_folders(self) -> tuple[str, ...]:
        """Where the user's environment lets headers be found beside our own folders."""
        environment = dict(fact.split("=", 1) for fact in self.environment)
        found = [f for name in _HEADER_PATHS for f in environment.get(name, "").split(os.pathsep)]
        words = [*self.cflags]
        for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
            words += environment.get(name, "").split()
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if word[:2] in ("-I", "-i"):  # a warm import compiles no pattern
                flag = re.fullmatch(r"-(?:I|isystem|iquote|idirafter)=?(.*)", word)
                found += [flag[1] or after] if flag else []
        return tuple(os.path.abspath(folder) for folder in found if folder)

    @cached_property
    def named_files(self) -> tuple[str, ...]:
        """What the user's flags have the compilers and the linker read: see reads.py."""
        environment = dict(fact.split("=", 1) for fact in self.environment)
        words = [*self.cflags, *self.ldflags]
        for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
            words += environment.get(name, "").split()
        library_path = environment.get("LIBRARY_PATH", "") if self.ldflags else ""
        if not any("/" in word for word in (*words, library_path)):
            return ()
        from . import reads

        archives = reads.archives(self.ldflags, library_path)
        return tuple(dict.fromkeys([*reads.files(words), *archives]))

    def command(self, variable: str) -> list[str]:
        """Return the command that `CXX` or `PYTORCH_NVCC` gives, or the usual one, as words."""
        return command(variable, self.cuda_home)


@cache
def current(cache_dir: Path) -> Toolchain:
    """The toolchain of this process, as its environment was at the first call."""
    import torch

    home = cuda_home() if torch.version.cuda else None
    nvcc = os.environ.get("PYTORCH_NVCC") or (os.path.join(home, "bin", "nvcc") if home else None)
    native = settings.value("LOADER_NATIVE") == "1"
    cflags = [*words(FLAGS), *CFLAGS, *([NATIVE] if native else [])]
    # nvcc runs a host compiler of its own choice, which torch's load() takes from CC.
    host = os.environ.get("CC") or os.environ.get("NVCC_CCBIN") or "g++"
    programs = [identity(command) for command in (nvcc or "", host)]
    return Toolchain(
        cxx=identity(os.environ.get("CXX") or "c++"),
        nvcc=" with ".join(filter(None, programs)) if all(programs) else None,
        cuda_home=home,
        architectures=architectures(cache_dir) if torch.version.cuda else "",
        machine=os.uname().machine,
        cpu=cpu_features() if native else "",
        torch=f"{torch.__version__} {torch.version.git_version}",
        cflags=tuple(cflags),
        cuda_flags=tuple(CUDA_FLAGS),
        ldflags=tuple(words(LINK_FLAGS)),
        environment=tuple(f"{n}={os.environ[n]}" for n in _ENVIRONMENT.split() if n in os.environ),
        cuda=torch.version.cuda or "",
    )


def split(text: str) -> list[str]:
    """Return a text's words, as a shell has them; ValueError where a quotation does not end."""
    if not {*text} & {*"'\"\\"}:
        return text.split()
    import shlex  # which a warm import does without

    return shlex.split(text)


def words(variables: list[str]) -> list[str]:
    """Return the flags in these environment variables, split as a shell would; none sees them."""
    found = []
    for name in variables:
        try:
            found += split(os.environ.get(name, ""))
        except ValueError as error:
            raise ValueError(
                f"{name} cannot be split into flags ({error}): {os.environ[name]!r}"
            ) from None
    return found


def command(variable: str, cuda_home: str | None = None) -> list[str]:
    """Return the words of `CXX` or `PYTORCH_NVCC`, or of the usual command; raises as `split`."""
    usual = "c++" if variable == "CXX" else os.path.join(cuda_home or "", "bin", "nvcc")
    return _words(os.environ.get(variable) or usual)


def _words(command: str) -> list[str]:
    return [command] if os.path.isfile(command) else split(command)


def identity(command: str) -> str | None:
    """Return which programs a command such as `ccache g++` runs; None where one is missing."""
    facts: list[str] = []
    try:
        words = _words(command)
    except ValueError:
        return None  # a quotation that does not end
    for word in words:
        path = shutil.which(word)
        if path is not None:
            path = os.path.realpath(path)
            stat = os.stat(path)
            facts.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
        elif facts and word.startswith("-"):
            facts.append(word)
        else:
            return None
    return "; ".join(facts) or None


def cuda_home() -> str | None:
    """Return the toolkit where torch would look for nvcc, else the `nvidia-cuda-nvcc` package."""
    nvcc = shutil.which("nvcc")
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    beside = os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else None
    packages = [os.path.join(path, "nvidia/cu*") for path in sys.path if path.endswith("-packages")]
    wheels = (home for path in packages for home in sorted(glob.glob(path), reverse=True))
    homes = chain([named, beside, "/usr/local/cuda"], wheels)
    return next((home for home in homes if home and os.path.exists(f"{home}/bin/nvcc")), None)


def architectures(cache_dir: Path) -> str:
    """TORCH_CUDA_ARCH_LIST, or else the compute capabilities of this machine's GPUs."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if named and named != "native":
        return ";".join(sorted({a for a in re.split(r"[ ;,]+", named) if a}))
    there = gpus.devices()
    return gpus.remembered_capabilities(there, cache_dir / "gpus.json") if there else ""


def cpu_features() -> str:
    """Digest of model and instruction sets of the first core; the rest of /proc/cpuinfo is slow."""
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            first = file.read(8192).split(b"\n\n")[0]
    except OSError:
        return "unknown"
    named = (b"model", b"cpu family", b"flags", b"Features", b"CPU ")
    facts = [line for line in first.splitlines() if line.startswith(named)]
    return hashlib.sha256(b"\n".join(facts)).hexdigest()[:16]
