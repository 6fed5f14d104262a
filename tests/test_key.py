"""What enters a build's key: changing it misses, changing it back hits."""

import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.jit.build import flags
from loader.jit.cache import key
from loader.jit.machine import sources as units
from loader.jit.machine import toolchain

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
    cuda="13.0",
)


@pytest.fixture
def keys(tmp_path):
    """A function that works out the key of a small unit, whose sources lie in `tmp_path`."""
    for folder in ("ops", "kernels", "include/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ops/thing.cpp").write_text('#include "thing.h"\n#include <ATen/ATen.h>\n')
    (tmp_path / "kernels/thing_cpu.cpp").write_text('  #  include "deep/below.h"\n')
    (tmp_path / "kernels/thing.cu").write_text('#include "only_cuda.cuh"\n')
    (tmp_path / "include/thing.h").write_text("// thing\n")
    (tmp_path / "include/deep/below.h").write_text('#include "beside.h"\n')
    (tmp_path / "include/deep/beside.h").write_text("// beside\n")
    (tmp_path / "include/only_cuda.cuh").write_text("// cuda\n")
    (tmp_path / "include/unrelated.h").write_text("// unrelated\n")

    def compute(tools=TOOLCHAIN):
        (unit,) = units.discover(tmp_path).values()
        sources = units.Sources(tmp_path, named=tools.named_files)
        return key.key(key.manifest(unit, tools, sources))

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


@pytest.mark.parametrize("flags", ["-include {}", "-imacros {}", "-specs={}", "@{}"])
def test_a_file_that_flags_name_counts(keys, tmp_path, flags):
    """And what that includes."""
    (tmp_path / "forced").write_text('#include "its.h"\n')
    (tmp_path / "its.h").write_text("// its\n")
    words = tuple(flags.format(tmp_path / "forced").split())
    for file in ("forced", "its.h"):
        before = keys(TOOLCHAIN._replace(cflags=words))
        (tmp_path / file).write_text(f"{(tmp_path / file).read_text()}// changed\n")
        assert keys(TOOLCHAIN._replace(cflags=words)) != before


def test_a_static_library_counts(keys, tmp_path):
    (tmp_path / "libx.a").write_bytes(b"!<arch>\n")
    by_path = {"ldflags": (f"{tmp_path}/libx.a",)}
    by_name = {"ldflags": (f"-L{tmp_path}", "-lx")}
    by_environment = {
        "ldflags": ("-lx",),
        "environment": (f"LIBRARY_PATH={tmp_path}",),
    }
    for change in (by_path, by_name, by_environment):
        before = keys(TOOLCHAIN._replace(**change))
        with open(tmp_path / "libx.a", "ab") as library:
            library.write(b"more")
        assert keys(TOOLCHAIN._replace(**change)) != before


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
        {"machine": "aarch64"},
        {"ldflags": ("-L/elsewhere",)},
        {"environment": ("CPATH=/elsewhere",)},
    ],
    ids=str,
)
def test_every_fact_of_the_toolchain_counts(keys, change):
    before = keys()
    assert keys(TOOLCHAIN._replace(**change)) != before
    assert keys() == before


@pytest.mark.parametrize(
    ("header", "counts"),
    [
        ("<torch/csrc/stable/library.h>", False),
        ("<torch/headeronly/core/ScalarType.h>", False),
        ("<torch/csrc/inductor/aoti_torch/c/shim.h>", False),
        ('"deep/below.h"', False),
        ("<vector>", False),
        ("<torch/library.h>", True),
        ("<torch/csrc/inductor/aoti_torch/utils.h>", True),
        ("<c10/util/Half.h>", True),
        ("<Python.h>", True),
        ("WHICH", True),
    ],
)
def test_torch_counts_where_a_source_sees_more_than_its_stable_abi(keys, tmp_path, header, counts):
    """One build serves every torch where not; a header of ours may be what brings more in."""
    (tmp_path / "ops/thing.cpp").write_text('#include "thing.h"\n')
    (tmp_path / "include/thing.h").write_text(f"#include {header}\n")
    other = TOOLCHAIN._replace(torch="2.15.0 beef", cuda="13.2")
    assert (keys() != keys(other)) == counts
    (unit,) = units.discover(tmp_path).values()
    stable = key.keeps_to_stable_abi(unit, TOOLCHAIN, units.Sources(tmp_path))
    assert stable != counts


def test_of_cuda_the_runtime_counts_that_the_library_loads(keys, tmp_path):
    """libcudart.so.13 is that of 13.0 and 13.2; in a build for the CPU there is none."""
    (tmp_path / "ops/thing.cpp").write_text("")
    other = TOOLCHAIN._replace(torch="2.10.0 dead", cuda="12.8")
    assert keys() != keys(other)
    assert keys() == keys(other._replace(cuda="13.2"))
    assert keys(TOOLCHAIN._replace(architectures="")) == keys(other._replace(architectures=""))


def test_our_operators_keep_to_the_stable_abi():
    sources = units.Sources(units.HOME)
    for unit in units.discover(units.HOME).values():
        assert key.keeps_to_stable_abi(unit, TOOLCHAIN, sources), unit.name


def test_cuda_does_not_count_in_a_build_for_the_cpu(keys, tmp_path):
    cpu = TOOLCHAIN._replace(architectures="")
    before = keys(cpu)
    (tmp_path / "kernels/thing.cu").write_text("// changed\n")
    assert keys(cpu._replace(nvcc=None, cuda_flags=())) == before


def test_format_counts(keys, monkeypatch):
    before = keys()
    monkeypatch.setattr(key, "FORMAT", key.FORMAT + 1)
    assert keys() != before


@pytest.mark.parametrize(
    "directive",
    [
        '#include "a.h"',
        '  #  include   "a.h"  // why',
        '#/* why */include/**/"a.h"',
        '#\\\n  include \\\n "a.h"',
        '%:include "a.h"',
        '#import "a.h"',
        "#include <a.h>",
        "#include_next <a.h>",
        '#define WHICH "a.h"\n#include WHICH',
        '/* a comment\n that ends */ #include "a.h"',
        '#include "../include/./a.h"',
    ],
)
def test_directives_are_read_as_compilers_read_them(tmp_path, directive):
    for room in ("ops", "kernels", "include"):
        (tmp_path / room).mkdir()
    (tmp_path / "include/a.h").write_text("")
    for before in ("int x;\n", "", "\ufeff"):  # which some editors begin a file by
        (tmp_path / "ops/x.cpp").write_text(f"{before}{directive}\n")
        assert "include/a.h" in units.Sources(tmp_path).closure("ops/x.cpp")


names = st.sampled_from(["ops/x.cpp", "kernels/x_cpu.cpp", "kernels/x.cu", "include/x.h"])
text = st.text(max_size=8)
inputs = st.fixed_dictionaries(
    {
        "files": st.dictionaries(names, text, min_size=1),
        "cxx": st.none() | text,
        "nvcc": st.none() | text,
        "architectures": st.sampled_from(["", "8.0", "9.0", "8.0;9.0"]),
        "machine": text,
        "cpu": text,
        "torch": text,
        "cuda": st.sampled_from(["", "12.8", "13.0", "13.2"]),
        "stable": st.booleans(),
        "cflags": st.lists(text, max_size=3).map(tuple),
        "cuda_flags": st.lists(text, max_size=3).map(tuple),
        "ldflags": st.lists(text, max_size=3).map(tuple),
        "environment": st.lists(text, max_size=3).map(tuple),
    }
)


class Files:
    """Sources that exist only here."""

    def __init__(self, files, stable):
        self._files = files
        self._header = f"torch/csrc/{'stable/' * stable}library.h"

    def foreign(self, source):
        return {self._header, "vector"}

    def closure(self, source):
        return {
            path: digest
            for path, digest in self._files.items()
            if path != "kernels/x.cu" or source == path
        }


def key_and_facts(chosen):
    """The key, and by hand all that the library depends on."""
    facts = dict(chosen)
    files, stable = facts.pop("files"), facts.pop("stable")
    tools = toolchain.Toolchain(cuda_home=None, **facts)
    unit = units.Unit("x", Path("/"), ("ops/x.cpp", "kernels/x_cpu.cpp", "kernels/x.cu"))
    with_cuda = bool(facts["architectures"] and facts["nvcc"])
    if not facts["architectures"]:
        del facts["nvcc"], facts["cuda_flags"]
    facts["files"] = {p: d for p, d in files.items() if with_cuda or p != "kernels/x.cu"}
    cuda = facts.pop("cuda")  # which torch's version implies
    if stable:
        facts["torch"] = "stable", cuda.split(".")[0] * with_cuda
    return key.key(key.manifest(unit, tools, Files(files, stable))), repr(sorted(facts.items()))


SEEN = {}


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(inputs, inputs)
def test_differing_inputs_never_share_a_key_and_equal_ones_always_do(one, two):
    for chosen in (one, two, {**one, "cflags": two["cflags"]}, {**two, "files": one["files"]}):
        chosen = {**chosen, "files": dict(sorted(chosen["files"].items()))}
        made, facts = key_and_facts(chosen)
        again = {**chosen, "files": dict(reversed(chosen["files"].items()))}
        assert key_and_facts(again)[0] == made
        assert SEEN.setdefault(made, facts) == facts


def test_the_random_inputs_were_many():
    assert len(SEEN) >= 300


def test_an_operator_may_have_a_folder_of_kernels(tmp_path):
    """Each `.cpp` and `.cu` of it is compiled; headers lie beside them, and are digested too."""
    for folder in ("ops", "kernels/thing", "include"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ops/thing.cpp").write_text("")
    (tmp_path / "kernels/thing/rows_cpu.cpp").write_text('#include "own.h"\n')
    (tmp_path / "kernels/thing/forward.cu").write_text('#include "own.h"\n')
    (tmp_path / "kernels/thing/own.h").write_text("")
    (tmp_path / "kernels/thing.more.cu").write_text("")
    (tmp_path / "kernels/other").mkdir()
    (tmp_path / "kernels/other/stray.cpp").write_text("")
    unit = units.discover(tmp_path)["thing"]
    assert unit.sources == (
        "ops/thing.cpp",
        "kernels/thing/rows_cpu.cpp",
        "kernels/thing.more.cu",
        "kernels/thing/forward.cu",
    )
    found = units.Sources(tmp_path).closure("kernels/thing/forward.cu")
    assert [*found] == ["kernels/thing/forward.cu", "kernels/thing/own.h"]
    assert str(tmp_path / "kernels/thing") in units.source_folders(tmp_path)


@pytest.mark.parametrize("known", [True, False])
def test_ptxas_does_kernels_at_once_where_it_knows_how(tmp_path, monkeypatch, known):
    """An older one, which ends at a flag that it does not know, is not given it: nvcc's own one."""
    toolchain.current.cache_clear()
    for home, status in (("cuda", 0 if known else 255), ("other", 255 if known else 0)):
        (tmp_path / home / "bin").mkdir(parents=True)
        for name, ends in (("ptxas", f"[ $# = 2 ] && exit {status}; exit 1"), ("nvcc", "exit 0")):
            (tmp_path / home / "bin" / name).write_text(f"#!/bin/sh\n{ends}\n")
            (tmp_path / home / "bin" / name).chmod(0o755)
    # By PYTORCH_NVCC nvcc is of another CUDA than the rest.
    monkeypatch.setenv("PYTORCH_NVCC", f"env {tmp_path}/cuda/bin/nvcc -ccbin c++")
    tools = toolchain.current(tmp_path)
    tools = tools._replace(nvcc="nvcc 1 2", cuda_home=str(tmp_path / "other"))
    flags.of.cache_clear()
    found = flags.of(tools, tmp_path).together
    flags.of.cache_clear()
    toolchain.current.cache_clear()
    if not known:
        assert found == []
    else:
        assert found[0] == "-Xptxas" and re.fullmatch(r"--split-compile=[1-4]", found[1])


def test_a_trial_of_the_compiler_that_fails_once_decides_nothing(tmp_path, monkeypatch):
    """How all is linked, and so every library's bytes, must not hang on a moment's trouble."""
    toolchain.current.cache_clear()
    tools = toolchain.current(tmp_path)._replace(nvcc=None)
    usual = flags.of(tools, tmp_path)
    script, once = tmp_path / "c++", tmp_path / "once"
    once.mkdir()
    script.write_text(
        f"#!/bin/sh\nn={once}/$(echo \"$*\" | cksum | cut -d' ' -f1)\n"
        f'[ -e "$n" ] && exec {shutil.which(os.environ.get("CXX", "c++"))} "$@"\n: > "$n"; exit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    (tmp_path / "other").mkdir()
    flags.of.cache_clear()
    found = flags.of(tools, tmp_path / "other")
    assert (found.linker, found.quicker) == (usual.linker, usual.quicker)
    assert [*once.iterdir()]
    flags.of.cache_clear()


def test_flags_are_asked_for_without_a_touch_of_the_filters_of_warnings(tmp_path, monkeypatch):
    """They are the process's, and builds ask in threads of their own."""
    toolchain.current.cache_clear()
    tools = toolchain.current(tmp_path)
    flags.of.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr("warnings.catch_warnings", None)
        assert flags.of(tools, tmp_path).lines
    flags.of.cache_clear()
