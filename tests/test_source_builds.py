"""Kernels from a string: the compilers' errors, one build each, the store, what is not imported."""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import kernel_strings
import pytest
import torch
from conftest import ROOT, start_python
from kernel_strings import in_a_new_process, source_build

import loader
from loader.jit.build import slots
from loader.jit.errors import BuildError
from loader.jit.errors import literal as source_place
from loader.jit.source import nvrtc

cache = kernel_strings.cache  # fixtures
pytestmark = pytest.mark.usefixtures("cache")


BROKEN = """
__global__ void f(float* out) {
    out[0] = missing;
}
"""


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cuda", "arch": "9.0"}])
def test_errors_are_shown_at_the_line_of_the_string(options):
    if "arch" in options:
        pytest.importorskip("cuda.bindings.nvrtc")
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().split("\n"), 1)
        if "= missing;" in text
    )
    with pytest.raises(BuildError) as error:
        loader.source_module(BROKEN, **options)
    first, where, quoted, caret, *_ = str(error.value).split("\n")
    assert first == "source_module: the source does not compile:"
    assert where.startswith(f"{__file__}:{line}:14: error: ") and "missing" in where
    assert quoted == f"{line:>5} |     out[0] = missing;" and caret.index("^") == quoted.index("m")
    with pytest.raises(BuildError, match=r"source:3:14: error: .*missing"):
        loader.source_module(BROKEN.replace("f(", "g("), **options)


def test_a_literal_is_found_line_by_line():
    """The caller's file and the line where the text begins."""

    def place(source):
        return source_place.locate_in(source, __file__)

    here = place.__code__.co_firstlineno
    assert place("one\ntwo") is None  # an escape: its lines are not the file's
    indented = """first
        second
    third"""
    assert place(indented) == (__file__, here + 5)
    assert place("x\n" + indented) is None


@pytest.mark.parametrize(
    "line, what",
    [
        ("__shared__ float s[4];", "__shared__ (shared memory)"),
        ("__syncthreads();", "__syncthreads (barriers)"),
        ("int i = __shfl_sync(~0, 1, 0);", "__shfl_sync (warps)"),
        ("BARRIER", "__syncthreads (barriers)"),
        ('asm("exit;");', "asm (inline PTX)"),
        ("f<<<1, 1>>>(x);", "<<< (launches from within a kernel)"),
        ("__half h;", "__half (CUDA's 16-bit and 8-bit types)"),
        ("\n#include <cooperative_groups.h>", "<cooperative_groups.h>, a header for GPUs"),
    ],
)
def test_what_needs_a_gpu_is_refused_with_its_line(line, what):
    source = f"// __shared__\n#define BARRIER __syncthreads()\n__global__ void f(float* x) {{\n{line}\n}}\n"
    number = 5 if line[0] == "\n" else 4
    with pytest.raises(NotImplementedError) as error:
        loader.source_module(source, device="cpu")
    assert f"line {number} of the source: {what} cannot run on the CPU" in str(error.value)


# Builds and the store


def test_one_build_for_each_set_of_constants(monkeypatch, tmp_path):
    """Nothing is compiled twice, in a process or after it; headers and options count."""
    pytest.importorskip("cuda.bindings.nvrtc")
    compiled, compile = [], nvrtc.compile
    monkeypatch.setattr(nvrtc, "compile", lambda *a, **k: compiled.append(a) or compile(*a, **k))
    (tmp_path / "mine.h").write_text("#define MINE 1\n")

    def make(forget=False, **changes):
        if forget:
            monkeypatch.setattr(source_build, "_builds", {})
        options = {"arch": "9.0", "device": "cuda", "include_dirs": [tmp_path], "N": 1, **changes}
        loader.source_module(
            '#include "mine.h"\n__global__ void f(int* x) { x[0] = N + MINE; }', **options
        )
        return len(compiled)

    assert (make(), make(), make(forget=True)) == (1, 1, 1)
    assert (make(N=2), make(N=1.0), make(N=True), make(N=2, forget=True)) == (2, 3, 4, 4)
    assert make(options=["--use_fast_math"]) == 5
    (tmp_path / "mine.h").write_text("#define MINE 2\n")
    assert (make(), make(arch="8.0")) == (6, 7)
    (tmp_path / "mine.h").write_text('#define ITS "its.h"\n#include ITS\n')
    forced = {"options": [f"-I{tmp_path}/more", "-include", "more.h"]}
    (tmp_path / "more").mkdir()
    for number in (1, 2):  # by a macro; by options
        (tmp_path / "its.h").write_text(f"#define MINE {number}\n")
        assert (make(), make()) == (7 + number, 7 + number)
    for number in (1, 2):
        (tmp_path / "more/more.h").write_text(f"#define MORE {number}\n")
        assert (make(**forced), make(**forced)) == (9 + number, 9 + number)


def test_a_damaged_build_is_made_anew(monkeypatch, cache):
    for options, name in (({"device": "cpu"}, "cpu"), ({"device": "cuda", "arch": "9.0"}, "sm_90")):
        if name != "cpu":
            pytest.importorskip("cuda.bindings.nvrtc")
        source = f"__global__ void damaged_{name}(int* x) {{ x[0] = 1; }}"
        loader.source_module(source, **options)
        entry = max(
            (cache / "store").glob("source_module-*"), key=lambda path: path.stat().st_mtime_ns
        )
        assert json.loads((entry / "manifest.json").read_text())["inputs"]["target"] == name
        content = bytearray((entry / "library.so").read_bytes())
        content[len(content) // 2] ^= 1
        (entry / "library.so").unlink()
        (entry / "library.so").write_bytes(content)
        monkeypatch.setattr(source_build, "_builds", {})
        assert loader.source_module(source, **options).kernels == [f"damaged_{name}"]
        manifest = json.loads((entry / "manifest.json").read_text())
        del manifest["templates"]
        (entry / "manifest.json").write_text(json.dumps(manifest))
        monkeypatch.setattr(source_build, "_builds", {})
        assert loader.source_module(source, **options).kernels == [f"damaged_{name}"]


def test_a_cache_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOADER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"compiled anew in each process: the build cache"):
        mod = loader.source_module("__global__ void f(int* x) { x[0] = 7; }", device="cpu")
    x = torch.zeros(1, dtype=torch.int32)
    mod.get_function("f")(x, grid=1, block=1)
    assert x.item() == 7


def test_never_build_is_kept_to(monkeypatch):
    monkeypatch.setenv("LOADER_BUILD", "never")
    with pytest.raises(
        BuildError, match=r"no build of this source with these constants.*LOADER_BUILD=never"
    ):
        loader.source_module("__global__ void never() {}", device="cpu")


def test_of_two_processes_one_compiles_and_the_other_waits(tmp_path):
    log, go, compiler = tmp_path / "log", tmp_path / "go", tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\necho $$ >> "{log}"\nwhile [ ! -e "{go}" ]; do sleep 0.02; done\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import loader, torch
print("asks", flush=True)
x = torch.zeros(1, dtype=torch.int32)
loader.source_module("__global__ void f(int* x) {{ x[0] = 7; }}", device="cpu").f(x, block=1)
print(x.item())
"""
    env = {
        **os.environ,
        "CXX": str(compiler),
        "LOADER_CACHE_DIR": str(tmp_path / "cache"),
        "LOADER_BUILD": "lazy",
    }
    two = [start_python(code, os.getcwd(), env) for _ in range(2)]
    assert [process.stdout.readline() for process in two] == ["asks\n"] * 2
    while not log.exists():
        time.sleep(0.02)
    time.sleep(1)  # the other one comes to its compiler too, if it does not wait
    go.touch()
    assert [process.communicate(timeout=100)[0] for process in two] == ["7\n"] * 2
    assert len(log.read_text().split()) == 2  # to preprocess, to compile


def test_it_waits_for_no_compiler_of_an_operator():
    """It is built although every core is taken."""
    source, made = "__global__ void at_once(int* x) {}", []
    with contextlib.ExitStack() as taken:
        for _ in range(slots.cores()):
            taken.enter_context(slots.SLOTS.take(tuple))
        builds = threading.Thread(
            target=lambda: made.append(loader.source_module(source, device="cpu")), daemon=True
        )
        builds.start()
        builds.join(100)
        assert made[0].kernels == ["at_once"]


# A process of its own


FRESH = """
import json, sys, torch, loader
loader.source_module('''%s''', **%s).get_function("scale")
print(json.dumps([name for name in ("cuda.bindings.nvrtc", "loader.jit.build.workshop") if name in sys.modules]))
"""
SHORT = (
    "__global__ void scale(float* x, float f, int n) { if (threadIdx.x < n) x[threadIdx.x] *= f; }"
)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cuda", "arch": "9.0"}])
def test_a_build_from_the_store_loads_neither_compiler_nor_engine(tmp_path, options):
    """Cold and warm times are those of `python -m loader bench source_module`."""
    if "arch" in options:
        pytest.importorskip("cuda.bindings.nvrtc")
    code = FRESH % (SHORT, options)
    cold, warm = (in_a_new_process(code, tmp_path, CUDA_VISIBLE_DEVICES="") for _ in range(2))
    assert "loader.jit.build.workshop" in cold and ("cuda.bindings.nvrtc" in cold) == (
        "arch" in options
    )
    assert warm == []
