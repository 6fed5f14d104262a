"""`python -m loader profile` and `sanitize`, with stand-ins for NVIDIA's programs but where marked."""

import json
import os
import shutil
import sys

import pytest
import torch

import loader
from loader.jit.tools import cli, exercise, profile

SAMPLES = """
import torch

def samples(device):
    x = torch.linspace(-1, 1, 1001, device=device)
    return [(x,), (x[1:],), (x.half(),), (x[::2],)]


def benchmark(device):
    return (torch.ones(1 << 20, device=device),)
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A function that puts a program on PATH which notes its words and prints what it is told."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("LOADER_BUILD", "lazy")  # which the commands would set for good
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    square = loader._session.module("square")
    monkeypatch.setattr(square, "samples", lambda device: [(torch.ones(3),)], raising=False)

    def make(name, text, status=0):
        noted = tmp_path / "words"
        (tmp_path / "said").write_text(text)
        (folder / name).write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"with open({str(noted)!r}, 'a') as file:\n"
            "    print(json.dumps(sys.argv[1:]), file=file)\n"
            f"print(open({str(tmp_path / 'said')!r}).read(), end='')\nsys.exit({status})\n"
        )
        (folder / name).chmod(0o755)
        return lambda: [json.loads(line) for line in noted.read_text().splitlines()]

    return make


NCU = """==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "flat_kernel": 0%....50%....100% - 8 passes
==PROF== Disconnected from process 4711
[4711] python3.11@127.0.0.1
  void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int, T2) (512, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    Duration                      us         4.00

  void flat_kernel<Square, float, 4>(ElementwiseParams, long) (1024, 1, 1)x(256, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    Memory Throughput                 %        88.90
    ----------------------- ----------- ------------

  void flat_kernel<SquareBackward, float, 4>(ElementwiseParams, long) (1024, 1, 1)x(256, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: Occupancy
    Achieved Occupancy                %        90.12

"""


def test_profile_shows_the_operator_s_own_kernels(tool, capsys):
    words = tool("ncu", NCU)
    assert cli.main(["profile", "square"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith("  void flat_kernel<Square, float, 4>")
    assert "    Memory Throughput                 %        88.90" in lines
    assert sum(line.startswith("  void flat_kernel") for line in lines) == 2
    assert "==PROF==" not in said and "FillFunctor" not in said and "Duration" not in said
    assert lines[-1] == "(1 kernels of torch's own left out)"
    (first,) = words()
    assert first[first.index("--profile-from-start") + 1] == "off"
    sections = [first[i + 1] for i, word in enumerate(first) if word == "--section"]
    assert sections == [*profile.SECTIONS]
    assert json.loads(first[-1])[-1] == ["square", None, "profile"] and sys.executable in first


def test_profile_keeps_the_report(tool, capsys, tmp_path):
    words = tool("ncu", NCU)
    kept = tmp_path / "report.ncu-rep"
    assert cli.main(["profile", "square", "--set", "full", "--output", str(kept)]) == 0
    run, show = words()
    assert run[run.index("--set") + 1] == "full" and "--section" not in run
    assert run[run.index("--export") + 1] == show[show.index("--import") + 1] == str(kept)
    assert f"The whole report is in {kept}" in capsys.readouterr().out
    kept.write_text("")
    assert cli.main(["profile", "square", "--output", str(tmp_path / "report")]) == 1
    assert f"{kept} exists already" in capsys.readouterr().err and len(words()) == 2


@pytest.mark.parametrize(
    ("text", "status", "cure"),
    [
        (
            "==PROF== Connected to process 1\n==ERROR== ERR_NVGPUCTRPERM - The user does not have "
            "permission to access NVIDIA GPU Performance Counters on the target device 0. For "
            "instructions on enabling permissions and to get more information see "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n",
            1,
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("==WARNING== No kernels were profiled.\n", 0, "is its build for the CPU only?"),
        (
            "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no "
            "other tool (like DCGM) is concurrently collecting profiling data.\n",
            9,
            "another profiler is using this GPU",
        ),
        ("Traceback\nRuntimeError: x is on cuda:0\n", 3, "exit status 3:\nTraceback\nRuntimeError"),
    ],
    ids=["permission", "no kernels", "busy", "anything else"],
)
def test_profile_says_what_is_wrong(tool, capsys, text, status, cure):
    tool("ncu", text, status)
    assert cli.main(["profile", "square"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("loader: square: ncu ")
    assert cure in captured.err


def test_both_say_what_is_missing(tool, capsys, monkeypatch):
    for command in ("profile", "sanitize"):
        assert cli.main([command, "squarer"]) == 1
        assert "'squarer' is no operator; there are add2" in capsys.readouterr().err
    for command, program in (("profile", "ncu"), ("sanitize", "compute-sanitizer")):
        if not shutil.which(program):
            monkeypatch.setattr(exercise, "glob", type("glob", (), {"glob": lambda pattern: []}))
            assert cli.main([command, "square"]) == 1
            assert capsys.readouterr().err.startswith(f"loader: no {program}, neither on PATH nor")
        tool(program, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("profile", "sanitize"):
        assert cli.main([command, "square"]) == 1
        assert "square: no GPU to run it on" in capsys.readouterr().err


CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed "
    "(0 errors, 0 warnings)\n",
}
FOUND = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at void flat_kernel<Square, float, 4>(ElementwiseParams, long)+0x1f0
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f5a5ac00fa4 is out of bounds
========= ERROR SUMMARY: 1 error
"""


def test_sanitize_tells_clean_from_found(tool, capsys):
    words = tool("compute-sanitizer", CLEAN["memcheck"])
    assert cli.main(["sanitize", "square"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"square: {name}: clean" for name in ("memcheck", "racecheck", "initcheck")
    ]
    assert [w[w.index("--tool") + 1] for w in words()] == ["memcheck", "racecheck", "initcheck"]
    assert all(w[w.index("--error-exitcode") + 1] == "86" for w in words())
    tool("compute-sanitizer", CLEAN["racecheck"])
    assert cli.main(["sanitize", "square", "--tool", "racecheck"]) == 0
    tool("compute-sanitizer", FOUND, 86)
    assert cli.main(["sanitize", "square", "--tool", "memcheck"]) == 1
    assert "square: memcheck: \n========= Invalid __global__ write" in capsys.readouterr().out


def test_sanitize_does_not_take_an_early_end_for_clean(tool, capsys):
    end = "========= Error: Target application terminated before first instrumented API call\n"
    tool("compute-sanitizer", end, 255)
    assert cli.main(["sanitize", "square"]) == 1
    assert "did not get to its end (exit status 255):\n" + end.strip() in capsys.readouterr().err


def test_the_process_that_a_tool_starts(checkout):
    """Here without a GPU, which it says; the rest of what it does works on the CPU too."""
    side = checkout.root / "ops/square.py"
    side.write_text(side.read_text() + SAMPLES)
    code = """
import contextlib, shutil, torch, loader
from loader.jit.tools import exercise
side, calls = loader._session.module("square"), []

@contextlib.contextmanager
def mark():
    calls.append("begin")
    yield
    calls.append("end")

def square(x):
    calls.append(x.requires_grad)
    out = side.square(x)
    out.register_hook(lambda grad: calls.append(grad.tolist()))
    return out

torch.cuda.synchronize = lambda: None
exercise.run(square, (torch.zeros(2),), repeat=mark)
assert calls == [True, [1.0, 1.0], "begin", True, [1.0, 1.0], "end"]
torch.cuda.is_available = lambda: True
assert exercise.prepare(loader, ["square"], None, "sh", "") == (["square"], shutil.which("sh"))
status, said = exercise.run_under([], "square", None, "samples")
assert status == 1 and "GPU" in said, said
"""
    done = checkout.run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("fault", ["", "q.out[0] = static_cast<char*>(q.out[0]) + 4096;"])
def test_a_planted_fault_is_found(checkout, fault):
    """For real, where there is a GPU."""
    if not shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"):
        pytest.skip("no compute-sanitizer")
    side = checkout.root / "ops/square.py"
    side.write_text(side.read_text() + SAMPLES)
    kernel = checkout.root / "kernels/square.cu"
    text = kernel.read_text().replace(
        "return elementwise_cuda<Square>(*p, stream)",
        f"ElementwiseParams q = *p; {fault} return elementwise_cuda<Square>(q, stream)",
    )
    assert fault in text
    kernel.write_text(text)
    done = checkout.command("sanitize", "square", "--tool", "memcheck", CUDA_VISIBLE_DEVICES=None)
    if fault:
        assert done.returncode == 1 and "Invalid __global__ write" in done.stdout
    else:
        assert (done.returncode, done.stdout) == (0, "square: memcheck: clean\n"), done.stderr


@pytest.mark.cuda
def test_a_real_profile_or_its_cure(checkout):
    if not shutil.which("ncu", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"):
        pytest.skip("no ncu")
    side = checkout.root / "ops/square.py"
    side.write_text(side.read_text() + SAMPLES)
    done = checkout.command("profile", "square", CUDA_VISIBLE_DEVICES=None)
    if done.returncode:
        assert "ERR_NVGPUCTRPERM" in done.stderr and "RestrictProfiling" in done.stderr
    else:
        assert "SquareBackward" in done.stdout and "GPU Speed Of Light" in done.stdout
