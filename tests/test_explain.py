"""What an import tells of itself: the receipt, and why each operator was built."""

import pytest

from loader.jit.cache import explain
from loader.jit.errors import table

BEFORE = {
    "format": 2,
    "unit": "x",
    "files": {"ops/x.cpp": "1", "include/x.h": "2", "include/gone.h": "3"},
    "toolchain": {
        "cxx": "/usr/bin/g++-12 1 2",
        "nvcc": "/cuda/bin/nvcc 1 2",
        "architectures": "9.0",
        "machine": "x86_64",
        "cpu": "abc",
        "torch": "2.10.0 dead",
        "cflags": ["-O2", "-g"],
        "environment": [],
    },
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cxx": "/usr/bin/g++-12 1 3"}, "C++ compiler /usr/bin/g++-12 was replaced"),
        ({"cxx": "/usr/bin/g++-13 1 3"}, "C++ compiler /usr/bin/g++-12 -> /usr/bin/g++-13"),
        ({"nvcc": None}, "nvcc /cuda/bin/nvcc 1 2 -> none"),
        ({"architectures": "8.0;9.0"}, "GPU architectures 9.0 -> 8.0;9.0"),
        ({"machine": "aarch64"}, "instruction set x86_64 -> aarch64"),
        ({"cpu": "xyz"}, "CPU another one"),
        ({"cpu": ""}, "CPU -> any"),
        ({"torch": "2.11.0 beef"}, "torch 2.10.0 -> 2.11.0"),
        ({"torch": "2.10.0 beef"}, "torch 2.10.0, another build of it"),
        ({"torch": "stable-ABI-2.10"}, "torch 2.10.0 -> stable-ABI-2.10"),
        ({"cuda_runtime": "13"}, "torch's CUDA none -> 13"),
        ({"cflags": ["-O3", "-g"]}, "C++ flags without -O2, with -O3"),
        ({"cflags": ["-g", "-O2"]}, "C++ flags in another order"),
        ({"environment": ["CPATH=/x"]}, "environment with CPATH=/x"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_fact_of_the_toolchain_in_words(change, line):
    after = {**BEFORE, "toolchain": {**BEFORE["toolchain"], **change}}
    assert explain.differences(BEFORE, after) == [line]


def test_files_in_words():
    files = {"ops/x.cpp": "1", "include/x.h": "changed", "include/new.h": "4"}
    assert explain.differences(BEFORE, {**BEFORE, "files": files}) == [
        "include/gone.h removed",
        "include/new.h added",
        "include/x.h changed",
    ]
    assert explain.differences(BEFORE, BEFORE) == []


def test_an_import_tells_what_it_did_and_why(checkout):
    code = """
import collections, os, sys, torch, loader
loader.square(torch.ones(2))
row = loader.receipt().units["square"]
print(row["result"], *sorted(set(row) - {"result"}))
opened, started = collections.Counter(), []
def note(event, arguments):
    if event == "open" and str(arguments[0]).startswith(os.getcwd()):
        opened[os.path.realpath(arguments[0])] += 1
    elif event == "subprocess.Popen":
        started.append(arguments)
sys.addaudithook(note)
print(loader.explain("square"))
sources = [count for path, count in opened.items() if not path.endswith((".py", ".pyc"))]
assert sum(sources) > 4 and max(sources) == 1, opened  # the manifest, and each source once
assert not started
assert "<table>" in loader.receipt()._repr_html_() and "<td" in loader.explain()._repr_html_()
assert str(loader.receipt()).startswith("import loader: ")
"""
    first = checkout.run(code).stdout.splitlines()
    assert first[0] == "built compile dlopen hash link lookup verify"
    assert "the first build of it in this cache" in first[3]
    warm = checkout.run(code).stdout.splitlines()
    assert warm[0].startswith("hit dlopen")
    header = checkout.root / "include/square.h"
    header.write_text(header.read_text() + "// edited\n")
    lazy = checkout.run("import loader; print(loader.explain('square'))", LOADER_BUILD="lazy")
    assert "not built yet" in lazy.stdout and "include/square.h changed" in lazy.stdout
    edited = checkout.run(code, CPATH="/elsewhere").stdout.splitlines()
    assert edited[0].startswith("built")
    assert "include/square.h changed" in edited[3]
    assert "environment with CPATH=/elsewhere" in edited[4]
    told = checkout.command("explain", "square", CPATH="/elsewhere")
    assert "include/square.h changed" in told.stdout and told.returncode == 0
    assert checkout.command("explain", "sqare").returncode == 1


def test_a_receipt_of_an_operator_that_cannot_be_built(checkout):
    (checkout.root / "kernels/square_cpu.cpp").write_text("int oops() { return undeclared; }\n")
    done = checkout.run("import loader; print(loader.receipt().units['square']['result'])")
    assert done.stdout == "failed\n"
    lazy = checkout.run("import loader; print(loader.receipt())", LOADER_BUILD="never")
    assert lazy.returncode == 0


def test_tables_in_html_are_escaped():
    shown = table.Table("<b>", ("a", "b"), ("b",))
    shown.rows.append(("<script>", "1"))
    assert "<script>" not in shown._repr_html_() and "&lt;script&gt;" in shown._repr_html_()
    assert str(shown) == "<b>\na         b\n<script>  1"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_durations(seconds, text):
    assert table.duration(seconds) == text
