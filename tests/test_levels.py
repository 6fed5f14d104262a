"""Builds for any x86-64: loops for several levels in one entry, and each machine opens its own."""

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Checkout
from living import NOTE, Living, note_which
from test_key import TOOLCHAIN

from loader.jit.cache import key, prune
from loader.jit.cache.store import Store
from loader.jit.machine import levels
from loader.jit.machine import sources as units

on_x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="its levels are those of it")
FILES = {1: "library.so", 3: "library.v3.so", 4: "library.v4.so"}
OPENED_AT = {1: 1, 2: 1, 3: 3, 4: 4}


def test_levels_are_read_off_the_first_core(tmp_path):
    file = tmp_path / "cpuinfo"
    second = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
    third = f"{second} avx avx2 abm bmi1 bmi2 f16c fma movbe xsave"
    fourth = f"{third} avx512f avx512bw avx512cd avx512dq avx512vl"
    for level, names in enumerate(["", second, third, fourth], 1):
        file.write_text(f"processor\t: 0\nflags\t\t: fpu sse2 {names}\n\nflags\t\t: fpu\n")
        levels.here.cache_clear()
        assert levels.here(file) == level
    levels.here.cache_clear()
    assert levels.here(tmp_path / "none") == 1


def test_loops_are_compiled_by_level_where_no_flag_says_for_which_cpu(tmp_path):
    """Not those that a machine builds for itself, whose keys are what they were."""
    for file in ("ops/thing.cpp", "kernels/thing.cu", "ops/other.cpp", "kernels/other_cpu.cpp"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    found, sources = units.discover(tmp_path), units.Sources(tmp_path)

    def levels_of(name, **changes):
        tools = TOOLCHAIN._replace(**changes)
        return key.manifest(found[name], tools, sources)["toolchain"].get("levels")

    assert levels_of("other") == ["v3", "v4"]
    assert levels_of("other", cflags=("-O3", "-march=native")) is None
    assert levels_of("other", cflags=("-march=x86-64-v2",)) is None
    assert levels_of("other", machine="aarch64") is None
    assert levels_of("thing") is None, "its loops are on the GPU"
    assert levels_of("thing", nvcc=None) == ["v3", "v4"], "one source is all there is"


@pytest.fixture
def cpu(monkeypatch):
    """A function that has this process believe to run on a CPU of this level."""
    return lambda level: monkeypatch.setattr(levels, "here", lambda: level)


@pytest.fixture
def entry(tmp_path):
    """A store with one entry that has a file for each level; its folder and key."""
    store, made = Store([tmp_path / "cache"]), {}
    for level in FILES:
        made[level] = tmp_path / f"made{level}"
        made[level].write_text(f"code for {level}")
    inputs = {"unit": "square", "files": {}, "toolchain": {}, "format": 4}
    return store, store.publish(made, inputs, why=["a test"]), key.key(inputs)


@pytest.mark.parametrize("level", OPENED_AT)
def test_the_best_library_that_a_cpu_can_run_is_verified(entry, cpu, level):
    store, folder, digest = entry
    cpu(level)
    library = store.verified("square", digest)
    assert library == folder / FILES[OPENED_AT[level]]
    assert library.read_text() == f"code for {OPENED_AT[level]}"
    library.write_text("code for ?")
    assert store.verified("square", digest) is None
    library.unlink()
    assert store.verified("square", digest) is None
    (folder / "elsewhere").write_text(f"code for {OPENED_AT[level]}")
    library.symlink_to(folder / "elsewhere")
    assert store.verified("square", digest) is None


@pytest.mark.parametrize("found", [7, ["v3"], {"v3": "?"}, {"3": None}, "3", None])
def test_a_record_that_makes_no_sense_is_damage(entry, cpu, found):
    store, folder, digest = entry
    cpu(3)
    file = folder / "manifest.json"
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps({**recorded, "sha256_by_level": found}))
    assert store.verified("square", digest) is None
    file.write_text(json.dumps(recorded))
    assert store.verified("square", digest)


@pytest.mark.parametrize("level", FILES)
def test_whatever_level_is_in_use_the_whole_entry_stays(entry, cpu, level):
    store, folder, digest = entry
    cpu(level)
    held = store.hold(store.verified("square", digest))
    assert prune.prune(store, most=0)[2] == 1 and {*FILES.values()} <= {*os.listdir(folder)}
    os.close(held)
    assert prune.prune(store, most=0)[0] == 1 and not folder.exists()


@pytest.fixture(scope="module")
def portable(tmp_path_factory) -> Checkout:
    """A checkout in which `square` is built for any CPU, as all that runs there asks for."""
    checkout = Checkout(tmp_path_factory.mktemp("portable"), only="square")
    checkout.environment = functools.partial(
        checkout.environment, LOADER_NATIVE="0", OCTET_OPTIMIZE=1
    )
    done = checkout.run("import loader")
    assert done.returncode == 0, done.stderr
    return checkout


def files_of(checkout: Checkout) -> dict[str, Path]:
    (name,) = [name for name in checkout.entries() if name.startswith("square-")]
    return {file.name: file for file in (checkout.cache / "store" / name).iterdir()}


USE = """
import loader, torch
from loader.jit.machine import levels
levels.here = lambda: {level}
x = torch.linspace(-3, 3, 1000, requires_grad=True)
y = loader.square(x)
y.sum().backward()
maps = open("/proc/self/maps").read().split()
opened = {{path.rpartition("/")[2] for path in maps if "/square-" in path}}
print(torch.equal(y, x * x), torch.equal(x.grad, 2 * x), *opened)
"""


@on_x86_64
@pytest.mark.parametrize("level", OPENED_AT)
def test_a_machine_opens_what_it_can_run_of_a_shared_build(portable, level, tmp_path):
    """Without a compiler, from a folder that it only reads."""
    bare = {"PATH": "/nonexistent", "CXX": None, "CC": None, "LOADER_BUILD": "never"}
    layers = f"{portable.cache}:{tmp_path / 'mine'}"
    run = USE.format(level=min(level, levels.here()))
    opened = FILES[OPENED_AT[min(level, levels.here())]]
    for native in ("0", "1"):
        done = portable.run(run, LOADER_CACHE_DIR=layers, **{**bare, "LOADER_NATIVE": native})
        assert done.stdout.split() == ["True", "True", opened], done.stderr


@on_x86_64
@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump to look at code with")
def test_no_code_asks_for_more_than_its_level_has(portable):
    """AVX has registers that SSE has not, AVX-512 masks and more registers."""
    code = {
        level: subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", files_of(portable)[name]],
            capture_output=True, text=True, check=True,
        ).stdout
        for level, name in FILES.items()
    }  # fmt: skip
    avx = {level: bool(re.search(r"%ymm|\bv(mul|mov)\w+ ", text)) for level, text in code.items()}
    avx512 = {level: bool(re.search(r"%zmm|%k[1-7]\b", text)) for level, text in code.items()}
    assert avx == {1: False, 3: True, 4: True} and avx512 == {1: False, 3: False, 4: True}


@on_x86_64
def test_explain_tells_the_time_of_each_level(portable):
    done = portable.command("explain")
    assert re.search(r"ago in [\d.]+ s, of which v3 [\d.]+ s, v4 [\d.]+ s", done.stdout)
    recorded = json.loads(files_of(portable)["manifest.json"].read_text())
    parts = recorded["seconds_by_level"]
    assert {*parts} == {"", "v3", "v4"} and min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(recorded["seconds"]["compile"])


@on_x86_64
def test_a_damaged_library_is_built_again_by_machines_that_open_it(portable, tmp_path):
    shutil.copytree(portable.cache, tmp_path / "cache")
    at = {"LOADER_CACHE_DIR": str(tmp_path / "cache"), "LOADER_BUILD": "never"}
    (library,) = tmp_path.glob(f"cache/store/square-*/{FILES[3]}")
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    assert portable.run(USE.format(level=1), **at).returncode == 0
    if levels.here() >= 3:
        damaged = portable.run(USE.format(level=3), **at)
        assert "LOADER_BUILD=never forbids to compile it" in damaged.stderr
        at["LOADER_BUILD"] = "eager"
        assert portable.run(USE.format(level=3), **at).stdout.split()[:2] == ["True", "True"]
        assert library.read_bytes()[-1:] != b"?"


@on_x86_64
def test_an_edit_is_compiled_for_this_machine_first_and_kept_for_all(portable):
    living = Living(portable)
    living("import loader, torch; from loader import square as f; x = torch.arange(4.); f(x)")
    living(NOTE)
    note_which(living, "edited")
    living("from loader.jit.live.reload import reloader")
    compiled = "[*reloader.history[-1].rebuilt.compiled]"
    said = living(f"r = loader.reload(); print(r.ok or r, note(), {compiled})")
    assert said == "True edited ['kernels/square_cpu.cpp']"
    living("reloader.settle()")
    living.end()
    newest = max(portable.cache.glob("store/square-*"), key=lambda path: path.stat().st_mtime)
    assert {*FILES.values()} <= {*os.listdir(newest)}
    use = f"import torch, loader\nx = torch.arange(4.)\nf = loader.square\n{NOTE}\nprint(note())"
    lowest = f"from loader.jit.machine import levels\nlevels.here = lambda: 1\n{use}"
    done = portable.run(lowest, LOADER_BUILD="never")
    assert done.stdout == "edited\n", done.stderr
