"""What is found out about compilers, GPUs and headers, and so counts in a key."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from loader.jit.machine import gpus, toolchain
from loader.jit.machine import sources as units


@pytest.fixture
def detect(monkeypatch, tmp_path):
    """A function that looks at the machine anew, as a fresh process would."""
    for name in ("TORCH_CUDA_ARCH_LIST", "CXX", "LOADER_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def look():
        toolchain.current.cache_clear()
        return toolchain.current(tmp_path).identity

    yield look
    toolchain.current.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        *("CC", "CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "SOURCE_DATE_EPOCH", "LD_RUN_PATH"),
        *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
        *("COMPILER_PATH", "GCC_EXEC_PREFIX"),
        *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "PYTORCH_NVCC"),
    ],
)
def test_environment_of_the_compilers_is_noticed(detect, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = detect()
    monkeypatch.setenv(name, "/elsewhere")
    assert detect() != before
    monkeypatch.delenv(name)
    assert detect() == before


def test_the_host_compiler_of_nvcc_is_noticed(detect, monkeypatch, tmp_path):
    if toolchain.current(tmp_path).nvcc is None:
        pytest.skip("no nvcc, or a torch without CUDA")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.delenv("CC", raising=False)
    before = detect()["nvcc"]
    other = tmp_path / "other-gcc"
    other.write_text('#!/bin/sh\nexec gcc "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("NVCC_CCBIN", str(other))
    assert str(other) in detect()["nvcc"] and detect()["nvcc"] != before


def test_python_does_not_count(detect, monkeypatch):
    """No library links it: two versions of Python with one torch share what is built."""
    before = detect()
    monkeypatch.setattr("sys.version_info", (3, 99, 0))
    monkeypatch.setattr("sys.executable", "/elsewhere/python3.99")
    assert detect() == before


def test_another_compiler_is_noticed(detect, monkeypatch, tmp_path):
    """By its path, and where it was replaced in place by its size and time."""
    before = detect()
    other = tmp_path / "other-g++"
    other.write_text('#!/bin/sh\nexec c++ "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    first = detect()
    assert first["cxx"] != before["cxx"]
    os.utime(other, (1, 1))
    assert detect()["cxx"] != first["cxx"]
    monkeypatch.setenv("CXX", f"{shutil.which('env')} {other}")
    assert str(other) in detect()["cxx"] and "env" in detect()["cxx"]
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert detect()["cxx"] is None


def test_architectures_come_from_the_list(detect, monkeypatch):
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    assert detect()["architectures"] == ""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0 8.0;9.0")
    assert detect()["architectures"] == "8.0;9.0"


def test_native_code_is_tied_to_this_cpu(detect, monkeypatch):
    native = detect()
    assert "-march=native" in native["cflags"] and native["cpu"]
    monkeypatch.setenv("LOADER_NATIVE", "0")
    portable = detect()
    assert "-march=native" not in portable["cflags"] and portable["cpu"] == ""


def test_torch_is_named_by_version_and_commit(detect):
    assert detect()["torch"] == f"{torch.__version__} {torch.version.git_version}"


def test_gpus_are_remembered_until_the_next_boot(monkeypatch, tmp_path):
    """The driver is asked once for a set of devices; other devices, and it is asked again."""
    asked = []
    monkeypatch.setattr(gpus, "capabilities", lambda: asked.append(1) or ["9.0"])
    file = tmp_path / "cache" / "gpus.json"
    for _ in range(3):
        assert gpus.remembered_capabilities(["/dev/null"], file) == "9.0"
    assert len(asked) == (1 if Path("/proc/sys/kernel/random/boot_id").exists() else 3)
    gpus.remembered_capabilities(["/dev/zero"], file)
    file.write_text("{")
    gpus.remembered_capabilities(["/dev/zero"], file)
    assert len(asked) >= 3


def test_includes_are_read_as_compilers_do(tmp_path):
    """Comments may hide an include; that counts all the same, which costs a needless build at most."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "ops/a.cpp").write_text('int x;\n#include "../include/loop.h"\n')
    (tmp_path / "include/loop.h").write_text('#include "loop.h"\n')
    assert sorted(units.Sources(tmp_path).closure("ops/a.cpp")) == ["include/loop.h", "ops/a.cpp"]


def test_headers_in_folders_of_the_environment_count(detect, monkeypatch, tmp_path):
    """Those that CPATH, or -I in the user's flags, let a source find."""
    for variable, text in (("CPATH", "{}"), ("CXXFLAGS", "-I{}"), ("NVCC_APPEND_FLAGS", "-I {}")):
        folder = tmp_path / variable
        folder.mkdir()
        (folder / "theirs.h").write_text("1")
        monkeypatch.setenv(variable, text.format(folder))
    detect()
    folders = toolchain.current(tmp_path).header_folders
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/a.cpp").write_text("#include <theirs.h>\n")
    for variable in ("CPATH", "CXXFLAGS", "NVCC_APPEND_FLAGS"):
        before = units.Sources(tmp_path, folders).closure("ops/a.cpp")
        (tmp_path / variable / "theirs.h").write_text("2")
        assert units.Sources(tmp_path, folders).closure("ops/a.cpp") != before
