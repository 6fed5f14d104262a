"""What the doctor finds of GPUs, settings, sources, disks and rights."""

import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import doctor
import pytest
from conftest import ROOT
from doctor import FACTS, NVML, SHIM, look, needs_namespace, run_alone

from loader.jit.tools.doctor import Finding, examine, system
from loader.jit.tools.doctor import context as c

# Fixtures.
context = doctor.context
made = doctor.made
plain_environment = doctor.plain_environment


def test_driver_and_gpu(made, tmp_path):
    library = made("libnvidia-ml.so.1", NVML)
    env = {"LD_LIBRARY_PATH": library.parent, "CUDA_VISIBLE_DEVICES": "0"}

    def ask(subject: str, facts: str = "", **changes) -> list[str]:
        return run_alone(f"look({subject!r}, {str(tmp_path)!r}{facts})", **env | changes)

    assert ask("driver") == ["ok", "supports CUDA 13.0", ""]
    old = ask("driver", FAKE_DRIVER=12040)
    assert old[:2] == ["warning", "supports CUDA 12.4, torch needs 13.0: the GPU cannot be used"]
    assert old[2] == "install a newer driver, or a torch built for CUDA 12"
    broken = ask("driver", FAKE_INIT=18)
    assert broken[:2] == ["warning", "does not start: Driver/library version mismatch"]
    assert ask("GPU") == ["ok", "compute capability 9.0", ""]
    hidden = ask("GPU", CUDA_VISIBLE_DEVICES="")
    assert hidden[0] == "warning" and hidden[1].endswith("hidden by CUDA_VISIBLE_DEVICES=''")
    without = ask("GPU", ", cuda=None")
    assert without[0] == "warning" and "torch is built without CUDA" in without[1]


@needs_namespace
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a driver")
def test_a_gpu_without_driver_library(tmp_path):
    """As in a container that was given the device alone."""
    code = f"""
import subprocess
subprocess.run("mount -t tmpfs none /dev && touch /dev/nvidia0", shell=True, check=True)
look("driver", {str(tmp_path)!r})"""
    state, found, cure = run_alone(code, "unshare", "-rm")
    assert state == "warning" and found.startswith("/dev/nvidia0 is there")
    assert "NVIDIA_DRIVER_CAPABILITIES" in cure


@pytest.mark.parametrize(
    "name, value, state",
    [
        ("LOADER_BUILD", "sometimes", "error"),
        ("LOADER_CACHE_LIMIT", "2XB", "error"),
        ("LOADER_CACHE_LIMIT", "2GiB", "ok"),
        ("LOADER_CACHE_DIR", ":", "error"),
        ("CXX", 'g++ "', "error"),
        ("MAX_JOBS", "many", "warning"),
        ("MAX_JOBS", "0", "warning"),
        ("MAX_JOBS", "3", "ok"),
    ],
)
def test_settings(name, value, state, monkeypatch, context):
    monkeypatch.setenv(name, value)
    got, found, cure = look("settings", context)
    assert got == state
    if state != "ok":
        assert name in found and repr(value) in found and cure == f"$ unset {name}"


def test_sources_from_the_future(tmp_path, context):
    (tmp_path / "ops").mkdir()
    late = tmp_path / "ops" / "it's late.cpp"
    late.touch()
    context = replace(context, root=tmp_path)
    assert look("sources", context)[0] == "ok"
    os.utime(late, (time.time() + 3600,) * 2)
    state, found, cure = look("sources", context)
    assert state == "warning" and str(late) in found
    subprocess.run(cure[2:], shell=True, check=True)
    assert look("sources", context)[0] == "ok"


@pytest.mark.parametrize(
    "subject, fault, state, says",
    [
        ("disk", {"FAKE_FREE_MB": 50}, "error", "50 MB free"),
        ("disk", {"FAKE_FREE_MB": 500}, "warning", "500 MB free"),
        ("disk", {"FAKE_FREE_MB": 5000, "FAKE_INODES": 7}, "error", "only 7 files"),
        ("temporary files", {"FAKE_FREE_MB": 50}, "error", "set TMPDIR"),
        ("file locks", {"FAKE_FLOCK": 37}, "error", "No locks available"),
        ("file locks", {"FAKE_FLOCK": 95}, "error", "Operation not supported"),
        ("file locks", {"FAKE_FLOCK": "lies"}, "error", "two were granted at once"),
        ("file locks", {}, "ok", "flock works"),
        ("clock", {"FAKE_CLOCK": 3600}, "warning", "3600 s behind"),
        ("clock", {"FAKE_CLOCK": -60}, "warning", "60 s ahead of"),
        ("clock", {}, "ok", "agrees"),
    ],
)
def test_the_disk(subject, fault, state, says, made, tmp_path):
    shim = made("shim.so", SHIM)
    said = run_alone(f"look({subject!r}, {str(tmp_path)!r})", LD_PRELOAD=shim, **fault)
    assert said[0] == state and says in "|".join(said), said
    assert state == "ok" or said[2]


@needs_namespace
def test_a_full_disk(tmp_path):
    """A real one, of one MB."""
    code = f"""
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", {str(tmp_path)!r}], check=True)
look("disk", {str(tmp_path)!r})"""
    state, found, _ = run_alone(code, "unshare", "-rm")
    assert (state, found) == ("error", f"1 MB free in {tmp_path}")


@pytest.fixture
def mine():
    """A folder of a user who is not root; this process is that user meanwhile."""
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid() or 65534
    folder.chmod(0o755)
    os.chown(folder, user, -1)
    before = os.geteuid()
    os.seteuid(user)
    yield folder
    os.seteuid(before)
    subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)
    shutil.rmtree(folder)


def look_at_cache(cache: Path) -> tuple[str, str, str]:
    folder, probe, refusal = examine.make_probe(cache)
    context = c.Context(ROOT, cache, folder, probe, refusal, "", lambda: FACTS)
    try:
        if refusal:
            assert look("file locks", context)[1].startswith("not checked")
            assert look("clock", context)[1].startswith("not checked")
        return look("cache", context)
    finally:
        probe.rmdir()


def test_a_cache_that_can_be_written(mine):
    assert look_at_cache(mine) == ("ok", f"{mine} can be written", "")
    assert look_at_cache(mine / "a" / "b") == ("ok", f"{mine / 'a' / 'b'} will be created", "")
    (mine / "store").mkdir(mode=0o700)
    assert look_at_cache(mine)[0] == "ok" and os.listdir(mine) == ["store"]
    assert os.listdir(mine / "store") == []


def test_a_cache_that_cannot_be_written(mine):
    (mine / "store").mkdir(mode=0o500)
    state, found, cure = look_at_cache(mine)
    assert state == "error" and found.endswith("/store cannot be written: Permission denied")
    assert "set LOADER_CACHE_DIR" in cure
    (mine / "store").chmod(0o700)
    mine.chmod(0o555)
    state, found, cure = look_at_cache(mine)
    assert state == "error" and "Permission denied; what is built there serves" in found
    assert "set LOADER_CACHE_DIR" in cure
    assert look_at_cache(mine / "not" / "yet")[0] == "error"
    mine.chmod(0o755)
    (mine / "file").write_text("")
    state, found, _ = look_at_cache(mine / "file")
    assert state == "error" and "Not a directory" in found


@pytest.mark.parametrize("name", ["store", "work"])
def test_a_cache_that_others_can_write(name, mine):
    (mine / name).mkdir()
    (mine / name).chmod(0o777)
    state, found, cure = look_at_cache(mine)
    assert (
        state == "error" and "can be written by others (mode 777)" in found and "chmod 700" in cure
    )
    (mine / name).rmdir()
    (mine / name).symlink_to("/tmp")
    state, found, cure = look_at_cache(mine)
    assert (state, cure) == ("error", "remove it") and "no link" in found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_somebody_else(mine):
    (mine / "store").mkdir(mode=0o755)
    user = os.geteuid()
    os.seteuid(0)
    os.chown(mine / "store", 1234, -1)
    os.seteuid(user)
    state, found, cure = look_at_cache(mine)
    assert state == "error" and "belongs to user 1234, not to you" in found
    assert cure == "set LOADER_CACHE_DIR to a folder of your own"


def test_a_parent_that_everybody_can_write(mine):
    (mine / "cache").mkdir()
    mine.chmod(0o777)
    state, found, cure = look_at_cache(mine / "cache")
    assert state == "error" and f"{mine}/cache lies in {mine}, where anybody can rename" in found
    assert cure.startswith("chmod o-w that folder")
    mine.chmod(0o755)
    assert look_at_cache(mine / "cache")[0] == "ok"
    mine.chmod(0o1777)
    assert look_at_cache(mine / "cache")[0] == "ok"


def test_layers_that_are_only_read(context, mine):
    def look_at_layer(layer):
        return examine.guarded("cache", partial(system.layer, layer), context)

    assert look_at_layer(mine / "none").state == "warning"
    mine.chmod(0o555)
    assert look_at_layer(mine) == Finding("cache", "ok", f"{mine} is read")
    mine.chmod(0o755)
    (mine / "store").mkdir()
    (mine / "store").chmod(0o777)
    assert look_at_layer(mine).state == "error"
