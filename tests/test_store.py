"""The store: what is damaged, foreign or not private is not loaded; layers; room is made with care."""

import hashlib
import json
import os
import random
import shutil
import stat
import time
from pathlib import Path

import pytest
from conftest import ROOT, Checkout, ended, start_python

from loader.jit.cache import key
from loader.jit.cache import prune as cache
from loader.jit.cache.explain import why_built
from loader.jit.cache.store import Store
from loader.jit.errors import BuildError
from loader.jit.machine import settings
from loader.jit.machine.sources import Unit
from loader.jit.tools import cli

USE = "import torch, loader; assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3"


@pytest.fixture(scope="module")
def library() -> bytes:
    """A real library of this checkout."""
    import loader

    loader.build("square")
    session = loader._session
    return session.store.verified("square", session.keys["square"]).read_bytes()


@pytest.fixture
def store(tmp_path) -> Store:
    return Store([tmp_path / "cache"])


def publish(store: Store, library: bytes, unit: str = "square", **inputs) -> tuple[Path, str]:
    """An entry with this library; its folder and key."""
    source = store.path.parent.parent / "built.so"
    source.write_bytes(library)
    made_of = {"unit": unit, "files": {}, "toolchain": {}, "format": 2, **inputs}
    return store.publish({1: source}, made_of, why=["a test"]), key.key(made_of)


def test_no_truncated_library_is_verified(store, library):
    entry, digest = publish(store, library)
    assert store.verified("square", digest) == entry / "library.so"
    for point in [*range(0, len(library), len(library) // 39), len(library) - 1]:
        (entry / "library.so").write_bytes(library[:point])
        assert store.verified("square", digest) is None, point


def test_why_something_is_built_that_seems_to_be_there(store, library, tmp_path):
    """What another process has published since this one looked is no damage."""
    entry, _ = publish(store, library)
    inputs = json.loads((entry / "manifest.json").read_text())["inputs"]
    unit = Unit("square", tmp_path, ())
    assert why_built(store, unit, inputs) == ["another process has built it meanwhile"]
    rest = inputs | {"unit": "square.rest"}
    assert why_built(store, unit, rest) == ["this part of it has not been built yet"]
    (entry / "library.so").write_bytes(library[:-1])
    assert why_built(store, unit, inputs) == ["its library was missing or damaged"]


def test_no_library_with_a_flipped_bit_is_verified(store, library):
    entry, digest = publish(store, library)
    dice = random.Random(0)
    for _ in range(200):
        flipped = bytearray(library)
        flipped[dice.randrange(len(library))] ^= 1 << dice.randrange(8)
        (entry / "library.so").write_bytes(flipped)
        assert store.verified("square", digest) is None
    (entry / "library.so").write_bytes(library)
    assert store.verified("square", digest)


@pytest.mark.parametrize("field", ["unit", "toolchain", "sha256", "inputs"])
def test_a_manifest_that_was_tampered_with_is_not_trusted(store, library, field):
    """Neither one that tells of other inputs than its key, nor one without what it needs."""
    entry, digest = publish(store, library)
    record = json.loads((entry / "manifest.json").read_text())
    if field in ("sha256", "inputs"):
        del record[field]
    else:
        record["inputs"][field] = "other"
    (entry / "manifest.json").write_text(json.dumps(record))
    assert store.verified("square", digest) is None


def test_no_link_is_followed(store, library, tmp_path):
    entry, digest = publish(store, library)
    for name in ("library.so", "manifest.json"):
        (entry / name).rename(tmp_path / name)
        (entry / name).symlink_to(tmp_path / name)
        assert store.verified("square", digest) is None
        (entry / name).unlink()
        (tmp_path / name).rename(entry / name)
    assert store.verified("square", digest)
    entry.rename(tmp_path / "moved")
    entry.symlink_to(tmp_path / "moved")
    assert store.verified("square", digest) is None


def test_an_entry_or_parent_that_others_can_write_is_refused(store, library, tmp_path):
    entry, digest = publish(store, library)
    entry.chmod(0o777)
    assert store.verified("square", digest) is None
    entry.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match=r"anybody can rename it.*chmod o-w"):
        store.verified("square", digest)
    tmp_path.chmod(0o1777)  # as /tmp itself is: nobody else can rename what is ours
    assert store.verified("square", digest)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_store_of_somebody_else_is_refused(store, library):
    _, digest = publish(store, library)
    os.chown(store.path, 12345, 12345)
    with pytest.raises(BuildError, match="belongs to user 12345, not to you"):
        store.verified("square", digest)


@pytest.mark.usefixtures("built")
def test_a_library_for_another_machine_is_built_again(checkout):
    """Its digest is right, as in a cache copied from there, but it does not load."""
    assert checkout.run(USE).returncode == 0
    (entry,) = (checkout.cache / "store").glob("square-*")
    content = bytearray((entry / "library.so").read_bytes())
    content[18:20] = (183).to_bytes(2, "little")  # ELF machine: AArch64
    (entry / "library.so").write_bytes(content)
    record = json.loads((entry / "manifest.json").read_text())
    record["sha256"] = hashlib.sha256(content).hexdigest()
    (entry / "manifest.json").write_text(json.dumps(record))
    done = checkout.run(USE + "; print(loader.explain())")
    assert done.returncode == 0, done.stderr
    assert "loader: built 1 of 1" in done.stderr and "it did not load" in done.stdout
    assert checkout.run(USE).stderr == ""


def test_what_a_killed_publisher_left_is_no_entry(store, library):
    publish(store, library)
    left = store.path / ".staging-1-dead"
    left.mkdir()
    (left / "library.so").write_bytes(library[:100])
    assert len([*store.entries()]) == 1
    cache.tidy(store)
    assert left.exists(), "its process may be alive"
    os.utime(left, (1e9, 1e9))
    cache.tidy(store)
    assert not left.exists()


@pytest.mark.usefixtures("built")
def test_layers_are_read_in_order_and_the_last_is_written(checkout, tmp_path):
    """As in an image: a layer for reading only, made elsewhere, and a folder of the user's own."""
    assert checkout.run(USE).returncode == 0
    (made,) = checkout.entries()
    image = tmp_path / "image"
    shutil.copytree(checkout.cache / "store", image / "store")
    shutil.rmtree(checkout.cache)
    both = f"{image}:{checkout.cache}"
    done = checkout.run(USE, LOADER_CACHE_DIR=both)
    assert (done.returncode, done.stderr, checkout.entries()) == (0, "", [])
    library = image / "store" / made / "library.so"
    library.write_bytes(library.read_bytes()[:-1])
    damaged = checkout.run(USE, LOADER_CACHE_DIR=both)
    assert damaged.returncode == 0 and checkout.entries() == [made]
    assert checkout.run(USE, LOADER_CACHE_DIR=both).stderr == ""


def bare(checkout: Checkout) -> dict:
    """The environment of a machine without compilers."""
    return {"PATH": "/nonexistent", "CXX": None, "CC": None, "CUDA_HOME": "/nonexistent"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_a_prebuilt_store_serves_machines_without_compilers(checkout, tmp_path):
    """With any of the architectures it was built for, and any CPU; copied to another place."""
    done = checkout.command("build", "--arch", "8.0", "9.0", "--jobs", "2", "--portable")
    assert done.returncode == 0, done.stderr
    node, entry = checkout.entries()
    content = (checkout.cache / "store" / entry / "library.so").read_bytes()
    assert b"sm_80" in content and b"sm_90" in content and node.startswith("node.")
    image = tmp_path / "image"
    shutil.copytree(checkout.cache, image)
    for path in image.rglob("*"):
        path.chmod(0o755)
    layers = f"{image}:{tmp_path / 'mine'}"
    for architecture in ("9.0", "8.0", "8.6", None):
        with_node = f"{USE}\nfrom loader.jit.operators.node import NODE; assert NODE.module"
        done = checkout.run(
            with_node, LOADER_CACHE_DIR=layers, TORCH_CUDA_ARCH_LIST=architecture, **bare(checkout)
        )
        assert (done.returncode, done.stderr) == (0, ""), (architecture, done.stderr)
    other = checkout.run(
        USE, LOADER_CACHE_DIR=layers, TORCH_CUDA_ARCH_LIST="12.0", **bare(checkout)
    )
    assert "no C++ compiler" in other.stderr


@pytest.mark.usefixtures("built")
def test_code_for_this_cpu_does_not_serve_another(checkout, tmp_path):
    """/proc/cpuinfo tells them apart."""
    assert checkout.run(USE).returncode == 0
    other = """
from loader.jit.machine import toolchain
toolchain.cpu_features = lambda: "another"
"""
    code = f"import sys, types\npackage = types.ModuleType('loader'); package.__path__ = ['.']\nsys.modules['loader'] = package{other}del sys.modules['loader']\n{USE}"
    done = checkout.run(code, **bare(checkout))
    assert "no C++ compiler" in done.stderr


def test_arch_without_nvcc_is_an_error_and_so_is_nonsense(checkout):
    done = checkout.command(
        "build", "square", "--arch", "9.0", PATH="/usr/bin:/bin", CUDA_HOME="/nonexistent"
    )
    if done.returncode:  # else there is a toolkit in a place that torch knows
        assert "--arch needs nvcc" in done.stderr
    for wrong in (["--arch", "fast"], ["--jobs", "0"]):
        assert checkout.command("build", *wrong).returncode == 1
    assert not checkout.entries() or not done.returncode


def test_prune_removes_what_was_not_used_for_longest_but_nothing_in_use(store, library, tmp_path):
    entries = {}
    for days, name in enumerate(("new", "middle", "old", "held")):
        entry, _ = publish(store, library, unit=name)
        entries[name] = entry
        os.utime(entry / "manifest.json", (time.time() - days * 86400,) * 2)
    held = store.hold(entries["held"] / "library.so")
    os.utime(entries["held"] / "manifest.json", (1e9, 1e9))
    work = tmp_path / "cache" / "work" / "new-abc"
    work.mkdir(parents=True)
    (work / "new.o").write_bytes(bytes(100_000))
    removed, freed, kept = cache.prune(store, age=1.5 * 86400)
    assert (removed, kept) == (1, 1) and freed >= len(library)
    assert {name for name in entries if entries[name].exists()} == {"new", "middle", "held"}
    assert cache.prune(store, most=2 * (len(library) + 16384))[2] == 1
    assert not work.exists(), "objects go before libraries"
    assert {name for name in entries if entries[name].exists()} == {"new", "held"}
    os.close(held)
    cache.prune(store, most=0)
    assert not [*store.entries()]


@pytest.mark.usefixtures("built")
def test_a_process_that_uses_an_operator_keeps_it(checkout):
    """`cache --clear` in another process leaves it, and says so."""
    code = (
        USE + "; print('using', flush=True); input(); import loader; loader.square(torch.ones(2))"
    )
    theirs, ours = os.pipe()
    process = start_python(code, checkout.root, checkout.environment(), stdin=theirs)
    os.close(theirs)
    assert process.stdout.readline() == "using\n"
    listed = checkout.command("cache")
    assert "square" in listed.stdout and "yes" in listed.stdout
    cleared = checkout.command("cache", "--clear")
    assert "1 in use stay" in cleared.stdout and len(checkout.entries()) == 1
    os.write(ours, b"\n")
    os.close(ours)
    assert ended(process).returncode == 0
    assert checkout.command("cache", "--clear").returncode == 0 and not checkout.entries()


@pytest.fixture
def filled(tmp_path, monkeypatch, store, library):
    """A store with one library that was last used two days ago, as the commands see it."""
    monkeypatch.setenv("LOADER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LOADER_BUILD", "lazy")  # which the commands would set for good
    entry, _ = publish(store, library)
    os.utime(entry / "manifest.json", (time.time() - 2 * 86400,) * 2)
    return entry


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        (["--max-size", "0"], False),
        (["--max-size", "1GB"], True),
        (["--max-age", "1d"], False),
        (["--max-age", "3d"], True),
        (["--max-age", "3d", "--max-size", "0"], False),
        (["--prune"], True),
        (["--prune", "--max-age", "1d"], False),
        (["--clear", "--max-age", "3d"], False),
    ],
)
def test_the_cache_command_makes_room(words, stays, filled, capsys):
    assert cli.main(["cache", *words]) == 0
    assert capsys.readouterr().out.startswith(f"removed {0 if stays else 1} (")
    assert filled.exists() == stays


@pytest.mark.parametrize("first", [[], ["--prune"], ["--clear"]])
@pytest.mark.parametrize("word", ["--max-size", "--max-age"])
@pytest.mark.parametrize("text", ["5x", ""])
def test_the_cache_command_refuses_what_is_no_size_or_age(first, word, text, filled, capsys):
    assert cli.main(["cache", *first, word, text]) == 1
    assert f"loader: {word} must be a" in capsys.readouterr().err
    assert filled.exists()


@pytest.mark.usefixtures("built")
def test_a_build_keeps_the_cache_below_its_limit(checkout):
    """The new library stays; those not used for longest go, and a line says so."""
    assert checkout.run(USE).returncode == 0
    (first,) = checkout.entries()
    header = checkout.root / "include/square.h"
    header.write_text(header.read_text() + "// edited\n")
    done = checkout.run(USE, LOADER_CACHE_LIMIT="50kB")
    assert done.returncode == 0, done.stderr
    assert "which may take 50.0 kB (LOADER_CACHE_LIMIT)" in done.stderr
    (second,) = checkout.entries()
    assert second != first


@pytest.mark.parametrize(
    ("text", "bytes_"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("7", 7)]
)
def test_sizes(text, bytes_):
    assert settings.size(text, "x") == bytes_


@pytest.mark.parametrize("text", ["", "big", "-1", "2 GB of it", "1e9"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="LOADER_CACHE_LIMIT must be a size such as 500MB or 2GiB"):
        settings.size(text, "LOADER_CACHE_LIMIT")


CANARY = "$(touch canary)`touch canary`;touch canary;'\"&|touch canary\n# {x} %s \\"


def test_no_name_path_or_flag_reaches_a_shell(tmp_path):
    """Folders, flags and compilers whose names would run a command if one read them."""
    folder = tmp_path / f"a b {CANARY.replace('/', '')}"
    folder.mkdir()
    checkout = Checkout(folder, only="square")
    flags = "-DCANARY='\"$(touch canary)`touch canary`;touch canary\"' '-I/none$(touch canary)'"
    done = checkout.run(
        USE,
        CXXFLAGS=flags,
        CPPFLAGS="'-DX=$HOME;touch canary'",
        LDFLAGS="'-Wl,-rpath,$ORIGIN;touch canary'",
        CXX="c++ '-DY=$(touch canary)'",
        CC="gcc;touch canary",
    )
    assert done.returncode == 0, done.stderr
    for changes in (
        {"CXX": "c++; touch canary"},
        {"CXX": "c++ `touch canary`"},
        {"CXX": "c++\ntouch canary"},
        {"CXX": "c++ '-DX=\ntouch canary'"},
        {"CXX": "'c++"},
        {"TORCH_CUDA_ARCH_LIST": "9.0$(touch canary)"},
        {"MAX_JOBS": "1;touch canary"},
    ):
        header = checkout.root / "include/square.h"
        header.write_text(header.read_text() + "//\n")
        assert checkout.run(USE, **changes).returncode in (0, 1)
    assert not [*tmp_path.rglob("canary")] and not (ROOT / "canary").exists()
    assert not Path("canary").exists()


def test_a_published_entry_is_private(tmp_path, library):
    """Whatever the umask; servers set it to 0."""
    before = os.umask(0)
    try:
        store = Store((tmp_path / "new",))
        entry, _ = publish(store, library)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o755
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o700
