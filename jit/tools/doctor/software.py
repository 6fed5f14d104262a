"""Checks of Python and its packages, of the compilers, and of what CUDA sources are compiled for.

What can be tried is tried, by the command that a build would run.
"""

import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from ...machine import settings
from ...machine.toolchain import CFLAGS, CUDA_FLAGS, FLAGS, LINK_FLAGS, command, identity, words
from .context import MOVE_CACHE, Check, Context, Found, first_error, last_line, run, version

ANOTHER = "set CXX to a compiler that works, or install one\n$ apt install g++"
# The first whose pattern is in the error holds.
COMPILER_CURES = (
    ("No space left", "make room there, or set TMPDIR to a folder that has some"),
    (r"std=c\+\+17", "it is too old: install a newer one and set CXX\n$ apt install g++"),
    ("march|native", "set LOADER_NATIVE=0"),
    (r"(stdlib|stdio|features|wchar|limits)\.h", "$ apt install libc6-dev"),
    ("cannot find '?ld|'ld'|'as'|'collect2'", "$ apt install binutils"),
    (r"<?(vector|string)\b|stdc\+\+", "$ apt install g++"),
    ("", ANOTHER),
)
LOADING_CURES = (
    ("killed by SIGILL", "this CPU cannot run what -march=native makes\n$ export LOADER_NATIVE=0"),
    ("map segment|not permitted|Permission", f"the disk is mounted noexec: {MOVE_CACHE}"),
    ("", ANOTHER),
)
LIBRARY = """
#include <string>
#include <vector>
extern "C" __attribute__((visibility("default"))) int trial(int n) {
    return std::vector<std::string>(n, "some text").size();
}
"""
LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).trial(3)"
KERNEL = """
#include <vector>
__global__ void fill(float* x) { *x = 1; }
void launch(float* x) { fill<<<1, 1>>>(x); }
"""


def _python(_: Context) -> Found:
    return "ok", f"{platform.python_version()}, {sys.executable}"  # an older one cannot get here


def _headers(_: Context) -> Found:
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.exists():
        return "ok", str(header)
    package = f"python3-dev python{sysconfig.get_python_version()}-dev"
    found = f"{header} is missing; operators do without, modules made with pybind11 do not"
    return "warning", found, f"one of them has it:\n$ apt install {package}"


def _torch(context: Context) -> Found:
    facts = context.facts()
    if error := facts.get("torch_error"):
        module = "numpy" if "numpy" in error.lower() else "torch"
        return "error", f"does not import: {error}", f"$ pip install --force-reinstall {module}"
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    found = f"{facts['torch']} (git {facts['git'][:8]}), {cuda}"
    if version(found) < (2, 10):
        return "error", f"{found}; 2.10 or newer is needed", "$ pip install -U 'torch>=2.10'"
    return "ok", found


def _numpy(context: Context) -> Found:
    context.cuda  # noqa: B018  not without torch
    facts = context.facts()
    error, there = facts.get("numpy_error", facts.get("from_numpy_error")), facts.get("numpy", "")
    if not error:
        return "ok", there
    if "No module named 'numpy'" in error:
        return "ok", "not installed; operators do without"
    found = f"torch cannot use NumPy {there}: {error}"
    return "warning", found, "$ pip install --upgrade --force-reinstall numpy"


def _setuptools(context: Context) -> Found:
    facts, cure = context.facts(), "$ pip install 'setuptools>=70'"
    found = facts.get("setuptools", "")
    if error := facts.get("setuptools_error"):
        return "error", f"torch.utils.cpp_extension needs it: {error}", cure
    if error := facts.get("extension_error"):
        return "error", f"{found}; torch.utils.cpp_extension does not import: {error}", cure
    if version(found) < (70,):
        return "warning", f"{found}; 70 or newer is expected", cure
    return "ok", found


def _compiler(context: Context) -> Found:
    """Compile and link a small library, and load it from the cache folder."""
    name = os.environ.get("CXX") or "c++"
    if identity(name) is None:
        cure = "set CXX to a compiler that supports C++17, or install one\n$ apt install g++"
        if context.brought:
            found = f"`{name}` is not on PATH; the operators of this wheel do without, edits do not"
            return "warning", found, cure
        return "error", f"`{name}` is not on PATH", cure
    cxx = command("CXX")
    works, said = run([*cxx, "--version"])
    named = said.strip().splitlines()[0] if works and said.strip() else f"`{name}`"
    source, library = context.probe / "trial.cpp", context.probe / "trial.so"
    source.write_text(LIBRARY)
    native = ["-march=native"] if settings.value("LOADER_NATIVE") == "1" else []
    flags = ["-std=c++17", "-fPIC", "-shared", *words(FLAGS), *CFLAGS, *native]
    works, said = run([*cxx, *flags, str(source), "-o", str(library), *words(LINK_FLAGS)])
    if not works:
        error = first_error(said)
        return "error", f"{named} fails: {error}", _cure(COMPILER_CURES, error)
    works, said = run([sys.executable, "-I", "-S", "-c", LOAD, str(library)])
    if not works:
        found = f"what {named} makes does not load: {last_line(said)}"
        return "error", found, _cure(LOADING_CURES, found)
    return "ok", f"{named}; a trial library compiles, links and loads"


def _cure(cures: tuple[tuple[str, str], ...], error: str) -> str:
    return next(cure for pattern, cure in cures if re.search(pattern, error))


def _nvcc(context: Context) -> Found:
    """Look whether there is one: without it, or without a GPU, only the CPU part is built."""
    cuda, chosen = context.cuda, os.environ.get("PYTORCH_NVCC", "")
    if not cuda:
        return "ok", "not needed: torch is built without CUDA"
    if not context.nvcc:
        found = f"{chosen} not found".strip()
        if not context.architectures:
            return "ok", f"{found}; not needed without a GPU"
        cure = "unset PYTORCH_NVCC" if chosen else _nvcc_cure(cuda)
        return "warning", f"{found}: only the CPU part is built", cure
    works, said = run([*context.nvcc, "--version"])
    release = re.search(r"release (\d+\.\d+)", said)
    if not works or not release:
        found = f"{context.nvcc[0]} does not run: {first_error(said)}"
        return _severity(context), found, _nvcc_cure(cuda)
    both = f"nvcc {release[1]}, torch {cuda}"
    if version(release[1])[0] != version(cuda)[0]:
        return _severity(context), f"{both}: the major versions must be the same", _nvcc_cure(cuda)
    found, home = f"{release[1]}, {' '.join(context.nvcc)}", os.environ.get("CUDA_HOME")
    if home and not Path(home, "bin", "nvcc").exists():
        return "warning", f"{found}; CUDA_HOME={home} has no bin/nvcc", "$ unset CUDA_HOME"
    if release[1] != cuda:
        return "warning", f"{both}: most likely that does no harm", _nvcc_cure(cuda)
    return "ok", found


def _host_compiler(context: Context) -> Found:
    """Compile a kernel: nvcc may refuse the C++ compiler that it would get."""
    if not context.nvcc:
        return "ok", "not checked: no nvcc"
    if not context.cuda:
        return "ok", "not needed: torch is built without CUDA"
    source = context.probe / "trial.cu"
    source.write_text(KERNEL)
    host = ["-ccbin", *shlex.split(os.environ["CC"])] if "CC" in os.environ else []  # as torch does
    flags = [*host, "-std=c++17", "-Xcompiler", "-fPIC", *CUDA_FLAGS]
    works, said = run([*context.nvcc, *flags, "-c", str(source), "-o", f"{source}.o"])
    name = os.environ.get("CC") or os.environ.get("NVCC_CCBIN") or "nvcc's default compiler"
    if works:
        return "ok", f"a trial kernel compiles with {name}"
    cure = _host_compiler_cure(said) or _nvcc_cure(context.cuda)
    return _severity(context), f"with {name}: {first_error(said)}", cure


def _host_compiler_cure(said: str) -> str:
    """Which compiler nvcc wants, where its message tells: one that is here, or one to install."""
    variable = "CC" if "CC" in os.environ else "NVCC_CCBIN"
    if wanted := re.search(
        r"(gcc) versions later than (\d+)|clang.* must be less than (\d+)", said
    ):
        kind, package = ("g++", "g++") if wanted[1] else ("clang++", "clang")
        most = int(wanted[2] or int(wanted[3]) - 1)
        if name := next(filter(shutil.which, (f"{kind}-{most - n}" for n in range(6))), ""):
            return f"let nvcc use {name}, which is here:\n$ export {variable}={name}"
        cure = f"let nvcc use {kind}-{most} (or older)\n$ apt install {package}-{most}\n"
        return f"{cure}$ export {variable}={kind}-{most}"
    if "host compiler" in said or "No such file or directory" in said.partition("\n")[0]:
        unset = f"unset {variable}, or " if variable in os.environ else ""
        return f"{unset}set {variable} to a C++ compiler that is there\n$ apt install g++"
    return ""


def _architectures(context: Context) -> Found:
    """Ask torch and nvcc for the GPUs that would be compiled for."""
    wanted, facts = context.architectures, context.facts()
    if not context.cuda or not wanted:
        return "ok", "none: only the CPU part is built"
    listed = bool(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    found = f"{wanted}, from {'TORCH_CUDA_ARCH_LIST' if listed else 'the GPUs here'}"
    cure = "set TORCH_CUDA_ARCH_LIST to a list such as '9.0' or '8.0;9.0+PTX'"
    if "extension_error" in facts:
        return "warning", "not checked: torch.utils.cpp_extension does not import"
    if error := facts.get("flags_error"):
        return "error", f"{found}: torch refuses it: {error}", cure
    _, said = run([*context.nvcc, "--list-gpu-arch"]) if context.nvcc else (True, "")
    known, needed = _numbers(said), _numbers(" ".join(facts["flags"]))
    unknown = sorted({*needed} - {*known})
    if not known or not unknown:
        return "ok", found
    first, last = (f"{number // 10}.{number % 10}" for number in (known[0], known[-1]))
    if unknown[0] < known[0]:
        cure = "GPUs as old as that need an older CUDA toolkit, and a torch built for it"
    elif not listed:
        cure = f"install a newer CUDA toolkit, or\n$ export TORCH_CUDA_ARCH_LIST={last}+PTX"
    return "error", f"{found}: this nvcc knows those from {first} to {last}", cure


def _numbers(text: str) -> list[int]:
    """Architectures in a text of nvcc's: 90 for compute_90."""
    return sorted({int(number) for number in re.findall(r"compute_(\d+)", text)})


def _nvcc_cure(cuda: str) -> str:
    """How to get the nvcc for torch's CUDA version; from 13 on there are wheels that suffice."""
    if version(cuda) < (13,):
        return f"install the CUDA toolkit {cuda} and set CUDA_HOME to its folder"
    names = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
    packages = " ".join(f"'{name}=={cuda}.*'" for name in names)
    return f"install the CUDA toolkit {cuda}, or its compiler alone:\n$ pip install {packages}"


def _severity(context: Context) -> str:
    """Return how bad a fault of nvcc is: a build for no architecture does without nvcc."""
    return "error" if context.architectures else "warning"


CHECKS: dict[str, Check] = {
    "Python": _python,
    "Python.h": _headers,
    "torch": _torch,
    "NumPy": _numpy,
    "setuptools": _setuptools,
    "C++ compiler": _compiler,
    "nvcc": _nvcc,
    "nvcc and C++": _host_compiler,
    "architectures": _architectures,
}
