"""What enters a build's key: changing it misses, changing it back hits."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loader.jit import key, toolchain, units

TOOLCHAIN = toolchain.Toolchain(
    cxx="/usr/bin/g++-12 1 2",
    nvcc="/cuda/bin/nvcc 3 4",
    cuda_home="/cuda",
    architectures="9.0",
    machine="x86_64",
    cpu="abc",
    torch="2.11.0 deadbeef",
    cflags=("-O3",),
    cuda_flags=("-O1",),
    ldflags=(),
    environment=(),
)


@pytest.fixture
def keys(tmp_path):
    """A function that works out the key of a small unit, whose sources lie in `tmp_path`."""
    for folder in ("ops", "kernels", "include/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ops/thing.cpp").write_text('#include "thing.h"\n#include <vector>\n')
    (tmp_path / "kernels/thing_cpu.cpp").write_text('  #  include "deep/below.h"\n')
    (tmp_path / "kernels/thing.cu").write_text('#include "only_cuda.cuh"\n')
    (tmp_path / "include/thing.h").write_text("// thing\n")
    (tmp_path / "include/deep/below.h").write_text('#include "beside.h"\n')
    (tmp_path / "include/deep/beside.h").write_text("// beside\n")
    (tmp_path / "include/only_cuda.cuh").write_text("// cuda\n")
    (tmp_path / "include/unrelated.h").write_text("// unrelated\n")

    def compute(tools=TOOLCHAIN):
        (unit,) = units.discover(tmp_path).values()
        return key.key(key.manifest(unit, tools, units.Sources(tmp_path)))

    return compute


@pytest.mark.parametrize(
    "file",
    [
        "ops/thing.cpp",
        "kernels/thing_cpu.cpp",
        "kernels/thing.cu",
        "include/thing.h",
        "include/deep/below.h",
        "include/deep/beside.h",
        "include/only_cuda.cuh",
    ],
)
def test_every_reachable_file_counts(keys, tmp_path, file):
    before, path = keys(), tmp_path / file
    text = path.read_text()
    path.write_text(text + " ")
    assert keys() != before
    path.write_text(text)
    assert keys() == before


def test_a_header_that_comes_to_stand_before_another_counts(keys, tmp_path):
    before = keys()
    (tmp_path / "ops/thing.h").write_text("// found first, beside the source\n")
    assert keys() != before


def test_other_files_do_not_count(keys, tmp_path):
    before = keys()
    (tmp_path / "include/unrelated.h").write_text("// changed\n")
    (tmp_path / "ops/thing.py").write_text("# Python is not compiled\n")
    os.utime(tmp_path / "ops/thing.cpp", (1, 1))
    assert keys() == before


@pytest.mark.parametrize(
    "change",
    [
        {"cxx": "/usr/bin/g++-13 1 2"},
        {"nvcc": "/cuda/bin/nvcc 3 5"},
        {"architectures": "8.0;9.0"},
        {"architectures": ""},
        {"cpu": "abd"},
        {"cpu": "", "cflags": ("-O3", "-march=native")},
        {"torch": "2.11.1 deadbeef"},
        {"torch": "2.11.0 beefdead"},
        {"cflags": ("-O2",)},
        {"cuda_flags": ("-O1", "-lineinfo")},
        {"environment": ("CPATH=/elsewhere",)},
    ],
    ids=str,
)
def test_every_fact_of_the_toolchain_counts(keys, change):
    before = keys()
    assert keys(replace(TOOLCHAIN, **change)) != before
    assert keys() == before


def test_cuda_does_not_count_in_a_build_for_the_cpu(keys, tmp_path):
    cpu = replace(TOOLCHAIN, architectures="")
    before = keys(cpu)
    (tmp_path / "kernels/thing.cu").write_text("// changed\n")
    assert keys(replace(cpu, nvcc=None, cuda_flags=())) == before


def test_format_counts(keys, monkeypatch):
    before = keys()
    monkeypatch.setattr(key, "FORMAT", key.FORMAT + 1)
    assert keys() != before


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


@pytest.mark.parametrize("name", ["CC", "CPATH", "NVCC_PREPEND_FLAGS", "LIBRARY_PATH"])
def test_environment_of_the_compilers_is_noticed(detect, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = detect()
    monkeypatch.setenv(name, "/elsewhere")
    assert detect() != before
    monkeypatch.delenv(name)
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
    monkeypatch.setattr(toolchain, "_gpu_capabilities", lambda: asked.append(1) or ["9.0"])
    file = tmp_path / "cache" / "gpus.json"
    for _ in range(3):
        assert toolchain._remembered_capabilities(["/dev/null"], file) == "9.0"
    assert len(asked) == (1 if Path("/proc/sys/kernel/random/boot_id").exists() else 3)
    toolchain._remembered_capabilities(["/dev/zero"], file)
    file.write_text("{")
    toolchain._remembered_capabilities(["/dev/zero"], file)
    assert len(asked) >= 3


def test_includes_are_read_as_compilers_do(tmp_path):
    """Comments may hide an include; that counts all the same, which costs a needless build at most."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "ops/a.cpp").write_text('int x;\n#include "../include/loop.h"\n')
    (tmp_path / "include/loop.h").write_text('#include "loop.h"\n')
    assert sorted(units.Sources(tmp_path).closure("ops/a.cpp")) == ["include/loop.h", "ops/a.cpp"]
