"""Checks of the C++ compiler and of nvcc, by compiling something with them."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from ...machine import settings
from ...machine.toolchain import CFLAGS, CUDA_FLAGS, FLAGS, LINK_FLAGS, command, identity, words
from .context import MOVE_CACHE, Context, Found, cure_of, first_error, last_line, run, version

COMPILER_CURES = (
    ("No space left", "make room there, or set TMPDIR to a folder that has some"),
    (r"std=c\+\+17", "it is too old: install a newer one and set CXX\n$ apt install g++"),
    ("march|native", "set LOADER_NATIVE=0"),
    (r"(stdlib|stdio|features|wchar|limits)\.h", "$ apt install libc6-dev"),
    ("cannot find '?ld|'ld'|'as'|'collect2'", "$ apt install binutils"),
    (r"<?(vector|string)\b|stdc\+\+", "$ apt install g++"),
    ("", "set CXX to a compiler that works, or install one\n$ apt install g++"),
)


LOADING_CURES = (
    ("killed by SIGILL", "this CPU cannot run what -march=native makes\n$ export LOADER_NATIVE=0"),
    ("map segment|not permitted|Permission", f"the disk is mounted noexec: {MOVE_CACHE}"),
    ("", "set CXX to a compiler that works, or install one\n$ apt install g++"),
)


def check_compiler(context: Context) -> Found:
    """Compile and link a small library, and load it from the cache folder."""
    name = os.environ.get("CXX") or "c++"
    cxx = command("CXX")
    if identity(name) is None:
        cure = "set CXX to a compiler that supports C++17, or install one\n$ apt install g++"
        return "error", f"`{name}` is not on PATH", cure
    works, said = run([*cxx, "--version"])
    named = said.strip().splitlines()[0] if works and said.strip() else f"`{name}`"
    source, library = context.probe / "trial.cpp", context.probe / "trial.so"
    source.write_text(
        "#include <string>\n#include <vector>\n"
        'extern "C" __attribute__((visibility("default"))) int trial(int n) {\n'
        '    return std::vector<std::string>(n, "some text").size();\n}\n'
    )
    native = ["-march=native"] if settings.value("LOADER_NATIVE") == "1" else []
    flags = ["-std=c++17", "-fPIC", "-shared", *words(FLAGS), *CFLAGS, *native]
    works, said = run([*cxx, *flags, str(source), "-o", str(library), *words(LINK_FLAGS)])
    if not works:
        return (
            "error",
            f"{named} fails: {first_error(said)}",
            cure_of(COMPILER_CURES, first_error(said)),
        )
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).trial(3)"
    works, said = run([sys.executable, "-I", "-S", "-c", load, str(library)])
    if not works:
        found = f"what {named} makes does not load: {last_line(said)}"
        return "error", found, cure_of(LOADING_CURES, found)
    return "ok", f"{named}; a trial library compiles, links and loads"


def check_nvcc(context: Context) -> Found:
    """The compiler of CUDA sources: without it, or without a GPU, only the CPU part is built."""
    if not context.cuda:
        return "ok", "not needed: torch is built without CUDA"
    named = {name: os.environ.get(name) for name in ("PYTORCH_NVCC", "CUDA_HOME")}
    if not context.nvcc:
        found = f"{named['PYTORCH_NVCC'] or ''} not found".strip()
        if not context.architectures:
            return "ok", f"{found}; not needed without a GPU"
        cure = "unset PYTORCH_NVCC" if named["PYTORCH_NVCC"] else nvcc_cure(context.cuda)
        return "warning", f"{found}: only the CPU part is built", cure
    release, said = _nvcc_release(context)
    if not release:
        found = f"{context.nvcc[0]} does not run: {first_error(said)}"
        return _severity(context), found, nvcc_cure(context.cuda)
    found, home = f"{release}, {' '.join(context.nvcc)}", named["CUDA_HOME"]
    if home and not Path(home, "bin", "nvcc").exists():
        return "warning", f"{found}; CUDA_HOME={home} has no bin/nvcc", "$ unset CUDA_HOME"
    return "ok", found


def check_toolkit(context: Context) -> Found:
    """The version of nvcc against that of torch's CUDA."""
    cuda = context.cuda
    release = _nvcc_release(context)[0] if cuda else ""
    if not cuda or not release:
        return "ok", "not checked: no nvcc, or none needed"
    found, cure = f"nvcc {release}, torch {cuda}", nvcc_cure(cuda)
    if version(release)[0] != version(cuda)[0]:
        return _severity(context), f"{found}: the major versions must be the same", cure
    if release != cuda:
        return "warning", f"{found}: most likely that does no harm", cure
    return "ok", found


def nvcc_cure(cuda: str) -> str:
    """How to get the nvcc for torch's CUDA version; from 13 on there are wheels that suffice."""
    if version(cuda) < (13,):
        return f"install the CUDA toolkit {cuda} and set CUDA_HOME to its folder"
    names = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
    command = " ".join(f"'{name}=={cuda}.*'" for name in names)
    return f"install the CUDA toolkit {cuda}, or its compiler alone:\n$ pip install {command}"


def _nvcc_release(context: Context) -> tuple[str, str]:
    """Version of nvcc, "" where it does not tell, and what it says."""
    works, said = run([*context.nvcc, "--version"]) if context.nvcc else (False, "")
    release = re.search(r"release (\d+\.\d+)", said)
    return (release[1] if works and release else ""), said


def _severity(context: Context) -> str:
    """Return how bad a fault of nvcc is: a build for no architecture does without nvcc."""
    return "error" if context.architectures else "warning"


def check_host_compiler(context: Context) -> Found:
    """Compile a kernel: nvcc may refuse the C++ compiler that it would get."""
    if not context.nvcc:
        return "ok", "not checked: no nvcc"
    source = context.probe / "trial.cu"
    source.write_text(
        "#include <vector>\n__global__ void fill(float* x) { *x = 1; }\n"
        "void launch(float* x) { fill<<<1, 1>>>(x); }\n"
    )
    host = ["-ccbin", *shlex.split(os.environ["CC"])] if "CC" in os.environ else []  # as torch does
    flags = [*host, "-std=c++17", "-Xcompiler", "-fPIC", *CUDA_FLAGS]
    works, said = run([*context.nvcc, *flags, "-c", str(source), "-o", f"{source}.o"])
    name = os.environ.get("CC") or os.environ.get("NVCC_CCBIN") or "nvcc's default compiler"
    if not context.cuda:
        return "ok", "not needed: torch is built without CUDA"
    if works:
        return "ok", f"a trial kernel compiles with {name}"
    cure = _host_compiler_cure(said) or nvcc_cure(context.cuda)
    return _severity(context), f"with {name}: {first_error(said)}", cure


def _host_compiler_cure(said: str) -> str:
    """Which compiler nvcc wants, where its message tells: one that is here, or one to install."""
    variable = "CC" if "CC" in os.environ else "NVCC_CCBIN"
    kind = most = None
    if newest := re.search(r"gcc versions later than (\d+)", said):
        kind, most = "g++", int(newest[1])
    elif below := re.search(r"clang version must be less than (\d+)", said):
        kind, most = "clang++", int(below[1]) - 1
    if kind and most:
        names = [f"{kind}-{n}" for n in range(most, most - 6, -1)]
        if name := next(filter(shutil.which, names), ""):
            return f"let nvcc use {name}, which is here:\n$ export {variable}={name}"
        package, name = names[0].replace("clang++", "clang"), names[0]
        cure = f"let nvcc use {name} (or older)\n$ apt install {package}\n"
        return f"{cure}$ export {variable}={name}"
    if "host compiler" in said or "No such file or directory" in said.partition("\n")[0]:
        unset = f"unset {variable}, or " if variable in os.environ else ""
        return f"{unset}set {variable} to a C++ compiler that is there\n$ apt install g++"
    return ""
