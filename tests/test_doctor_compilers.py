"""What the doctor finds of C++ compilers and of nvcc."""

import re
import shlex
import shutil
from dataclasses import replace

import doctor
import pytest
from doctor import look, needs_namespace, run_alone

from loader.jit.machine import toolchain
from loader.jit.tools.doctor import examine

# Fixtures.
context = doctor.context
nvcc = doctor.nvcc
plain_environment = doctor.plain_environment
tool = doctor.tool


def test_no_compiler(monkeypatch, context):
    monkeypatch.setenv("PATH", "/nonexistent")
    state, found, cure = look("C++ compiler", context)
    assert (state, found) == ("error", "`c++` is not on PATH") and "apt install g++" in cure


@pytest.mark.parametrize(
    "flags, says, cure",
    [
        ("-nostdinc++", "string: No such file or directory", "$ apt install g++"),
        ("-fuse-ld=none-such", "error: ", "set CXX to a compiler that works"),
        ("-lnone-such", "cannot find -lnone-such", "set CXX to a compiler that works"),
    ],
)
def test_a_compiler_that_fails(flags, says, cure, monkeypatch, context):
    monkeypatch.setenv("CXX", f"g++ {flags}")
    state, found, got = look("C++ compiler", context)
    assert state == "error" and says in found and got.startswith(cure), (found, got)


@pytest.mark.parametrize(
    "says, cure",
    [
        ("c++: error: unrecognized command line option '-std=c++17'", "it is too old"),
        ("trial.cpp:1:0: error: bad value ('native') for '-march=' switch", "LOADER_NATIVE=0"),
        (
            "/usr/include/c++/12/cstdlib:75:15: fatal error: stdlib.h: No such file or directory",
            "$ apt install libc6-dev",
        ),
        ("trial.cpp:1:10: fatal error: 'string' file not found", "$ apt install g++"),
        ("collect2: fatal error: cannot find 'ld'", "$ apt install binutils"),
        ("/usr/bin/ld: cannot find -lstdc++: No such file or directory", "$ apt install g++"),
        (
            "/tmp/cc1.s: fatal error: error writing to /tmp/cc1.s: No space left on device",
            "make room there, or set TMPDIR",
        ),
    ],
)
def test_what_compilers_say(says, cure, tool, monkeypatch, context):
    monkeypatch.setenv("CXX", tool("odd-c++", f"echo {shlex.quote(says)} >&2; exit 1"))
    state, found, got = look("C++ compiler", context)
    assert state == "error" and found.endswith(says.split(": ", 1)[1]) and cure in got, (found, got)


def test_a_library_that_this_cpu_cannot_run(tool, monkeypatch, context):
    script = '[ "$1" = --version ] && exit; for last; do :; done; echo "int trial(int n) { __builtin_trap(); }" | cc -shared -fPIC -x c - -o "$last"'
    monkeypatch.setenv("CXX", tool("future-c++", script))
    state, found, cure = look("C++ compiler", context)
    assert state == "error" and "killed by SIG" in found and "LOADER_NATIVE=0" in cure


def test_a_library_that_does_not_load(tool, monkeypatch, context):
    monkeypatch.setenv(
        "CXX", tool("empty-c++", '[ "$1" = --version ] && exit; for last; do :; done; : > "$last"')
    )
    state, found, _ = look("C++ compiler", context)
    assert state == "error" and "does not load" in found and "file too short" in found


@needs_namespace
def test_a_cache_on_a_disk_mounted_noexec(tmp_path):
    code = f"""
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", {str(tmp_path)!r}], check=True)
look("C++ compiler", {str(tmp_path)!r})"""
    state, found, cure = run_alone(code, "unshare", "-rm")
    assert state == "error" and "failed to map segment" in found
    assert cure.startswith("the disk is mounted noexec: set LOADER_CACHE_DIR")


def test_flags_of_the_user_that_the_compiler_refuses(monkeypatch, context):
    monkeypatch.setenv("CXXFLAGS", "-fno-such-flag")
    state, found, _ = look("C++ compiler", context)
    assert state == "error" and "-fno-such-flag" in found
    monkeypatch.setenv("CXXFLAGS", "'-DX")
    state, found, cure = look("settings", context)
    assert (state, cure) == ("error", "$ unset CXXFLAGS") and "CXXFLAGS" in found


def test_no_nvcc(monkeypatch, context):
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    state, found, cure = look("nvcc", context)
    assert (state, found) == ("warning", "not found: only the CPU part is built")
    wheels = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
    assert cure.endswith("$ pip install " + " ".join(f"'{name}==13.0.*'" for name in wheels))
    assert "pip" not in look("nvcc", context, cuda="12.8")[2]  # no such wheels then
    assert look("nvcc", replace(context, architectures=""))[0] == "ok"
    assert look("nvcc", context, cuda=None)[:2] == ("ok", "not needed: torch is built without CUDA")
    monkeypatch.setenv("PYTORCH_NVCC", "/none/nvcc")
    assert look("nvcc", context)[1:] == (
        "/none/nvcc not found: only the CPU part is built",
        "unset PYTORCH_NVCC",
    )


def test_nvcc_that_does_not_run(tool, monkeypatch, context):
    says = "nvcc: error while loading shared libraries: libdl.so.2: cannot open shared object file"
    monkeypatch.setenv("PYTORCH_NVCC", tool("fake-nvcc", f"echo '{says}'; exit 127"))
    state, found, cure = look("nvcc", context)
    assert state == "error" and says in found and "CUDA toolkit 13.0" in cure
    assert look("nvcc", replace(context, architectures=""))[0] == "warning"


def test_cuda_home_without_nvcc(nvcc, monkeypatch, context, tmp_path):
    nvcc()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    state, found, cure = look("nvcc", context)
    assert (state, cure) == ("warning", "$ unset CUDA_HOME") and "has no bin/nvcc" in found


@pytest.mark.parametrize(
    "release, state, says",
    [
        ("13.0", "ok", "13.0"),
        ("13.1", "warning", "most likely"),
        ("12.8", "error", "major versions"),
    ],
)
def test_nvcc_of_another_version_than_torch(release, state, says, nvcc, context):
    nvcc(f"Cuda compilation tools, release {release}, V{release}.61")
    got, found, cure = look("nvcc", context)
    assert got == state and says in found and bool(cure) == (state != "ok")


GNU = "/usr/include/crt/host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than 11 are not supported! The nvcc flag '-allow-unsupported-compiler' can be used"
CLANG = "/usr/include/crt/host_config.h:151:2: error: #error -- unsupported clang version! clang version must be less than 21 and greater than 3.2 ."


def test_nvcc_that_refuses_the_compiler(nvcc, tool, monkeypatch, context):
    """The compiler to take is one that is here, where one is."""
    nvcc(refusal=GNU.replace("11", "4"))
    tool("g++-3", "exit 0")
    state, found, cure = look("nvcc and C++", context)
    assert state == "error" and "gcc versions later than 4 are not supported!" in found
    assert found.startswith("with nvcc's default compiler: ")
    assert cure == "let nvcc use g++-3, which is here:\n$ export NVCC_CCBIN=g++-3"
    monkeypatch.setenv("CC", "gcc")
    assert look("nvcc and C++", context)[2].endswith("$ export CC=g++-3")
    assert look("nvcc and C++", replace(context, architectures=""))[0] == "warning"


def test_the_compiler_to_install_for_nvcc(nvcc, context):
    nvcc(refusal=GNU.replace("11", "5"))
    cure = look("nvcc and C++", context)[2]
    assert cure == "let nvcc use g++-5 (or older)\n$ apt install g++-5\n$ export NVCC_CCBIN=g++-5"
    nvcc(refusal=CLANG)
    cure = look("nvcc and C++", context)[2]
    assert re.search(r"\$ export NVCC_CCBIN=clang\+\+-(20|1\d|\d)$", cure)
    nvcc(refusal="sh: 1: cicc: not found")
    assert "'nvidia-nvvm==13.0.*'" in look("nvcc and C++", context)[2]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_the_real_nvcc_and_a_compiler_that_is_too_new(tool, monkeypatch, context):
    assert look("nvcc and C++", context)[0] == "ok"
    monkeypatch.setenv("CC", tool("g++-99", 'exec g++ -U__GNUC__ -D__GNUC__=99 "$@"'))
    state, found, cure = look("nvcc and C++", context)
    assert state == "error" and "unsupported GNU version! gcc versions later than" in found
    assert "g++-" in cure and "$ export CC=g++-" in cure
    monkeypatch.setenv("CC", "/none/g++")
    assert "unset CC, or set CC to a C++ compiler that is there" in look("nvcc and C++", context)[2]


def test_architectures(nvcc, monkeypatch, context):
    nvcc()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert look("architectures", context)[:2] == ("ok", "9.0, from TORCH_CUDA_ARCH_LIST")
    old = look("architectures", context, flags=["-gencode=arch=compute_61,code=sm_61"])
    assert old[0] == "error" and "knows those from 7.5 to 12.1" in old[1] and "older CUDA" in old[2]
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    new = look("architectures", context, flags=["-gencode=arch=compute_130,code=sm_130"])
    assert new[0] == "error" and new[2].endswith("$ export TORCH_CUDA_ARCH_LIST=12.1+PTX")


def test_architectures_that_cannot_be_checked(context):
    state, found, _ = look("architectures", context, extension_error="ImportError: setuptools")
    assert state == "warning" and found.startswith("not checked: torch.utils.cpp_extension")


def test_an_architecture_list_that_torch_refuses(context, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90")
    facts = examine.ask_torch("sm_90")
    assert facts["torch"] and not facts.get("extension_error")
    state, found, cure = look("architectures", replace(context, architectures="sm_90"), **facts)
    assert state == "error" and "Unknown CUDA arch (sm_90)" in found and "'8.0;9.0+PTX'" in cure
