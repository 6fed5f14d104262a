"""compile_commands.json: what an editor's clangd is told of each file."""

import json
import shutil
import subprocess

import pytest
from conftest import ROOT, Checkout

import loader
from loader.jit.build import compile_commands

TOOLCHAIN = loader._session.toolchain


def test_each_source_and_header_has_a_command():
    entries = {e["file"]: e["arguments"] for e in compile_commands.commands(ROOT, TOOLCHAIN)}
    names = [*ROOT.glob("ops/*.cpp"), *ROOT.glob("kernels/**/*.c*")]
    names += [
        ROOT / "include" / name for name in ("square.h", "torch/glue.h", "common.h", "vector.cuh")
    ]
    assert not {*map(str, names)} - {*entries}
    for file, words in entries.items():
        assert words[-1] == file and f"-I{ROOT}/include" in words
        assert ("cuda" in words) == file.endswith((".cu", ".cuh"))
    on_gpu = TOOLCHAIN._replace(architectures="8.0;9.0a+PTX", nvcc="nvcc", cuda_home="/opt/cuda")
    entries = {e["file"]: e["arguments"] for e in compile_commands.commands(ROOT, on_gpu)}
    words = entries[str(ROOT / "kernels/square.cu")]
    assert {"--cuda-gpu-arch=sm_90a", "--cuda-path=/opt/cuda", "-DOCTET_CUDA"} <= {*words}
    assert not [w for w in words if w.startswith(("-gencode", "--generate", "-Xcompiler", "-O"))]


@pytest.mark.parametrize(
    "file", ["ops/square.cpp", "kernels/square_cpu.cpp", "include/torch/glue.h"]
)
def test_the_commands_work(file):
    """clang's own check of a file, or g++'s where there is no clang."""
    (words,) = (
        entry["arguments"]
        for entry in compile_commands.commands(ROOT, TOOLCHAIN)
        if entry["file"] == str(ROOT / file)
    )
    clang = shutil.which("clang++")
    quiet = ["-Wno-pragma-once-outside-header"] if clang else ["-w"]
    command = [clang or "c++", *words[1:], "-fsyntax-only", *quiet, *(["-Werror"] if clang else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_file_is_written_when_it_changes(tmp_path):
    checkout = Checkout(tmp_path, only="square")
    file = checkout.root / "compile_commands.json"
    compile_commands.write(checkout.root, TOOLCHAIN)
    first = file.stat()
    listed = {entry["file"] for entry in json.loads(file.read_text())}
    compile_commands.write(checkout.root, TOOLCHAIN)
    assert file.stat().st_mtime_ns == first.st_mtime_ns and file.stat().st_ino == first.st_ino
    added = checkout.root / "kernels/cube.cu"
    added.write_text('#include "square.h"\n')
    compile_commands.write(checkout.root, TOOLCHAIN)
    assert {entry["file"] for entry in json.loads(file.read_text())} == listed | {str(added)}
    file.unlink()
    file.mkdir()  # as good as a folder that cannot be written, for root too
    compile_commands.write(checkout.root, TOOLCHAIN)
    assert not [*checkout.root.glob(".compile_commands*")]
