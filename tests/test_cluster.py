"""Ranks of a cluster on one empty cache, as torchrun starts them: who builds, who waits for whom."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import Checkout

from loader.jit.build import others
from loader.jit.cache.lock import FileLock

USE = "import torch, loader; assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3"
# Waits with torch imported until all are there.
RANK = """
import os, pathlib, time, torch
gate = pathlib.Path(os.environ["GATE"])
(gate / os.environ["RANK"]).touch()
while not (gate / "go").exists():
    time.sleep(0.05)
"""


def ranks(checkout, count, folder, **changes):
    """So many ranks of nodes of eight, at the point where they import loader; `changes` by rank."""
    gate = folder / "gate"
    gate.mkdir()
    of = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": 8, "OMP_NUM_THREADS": 1, "GATE": gate}
    of |= {"PYTHONDONTWRITEBYTECODE": None}
    started = [
        checkout.start(RANK + USE, **of, RANK=r, LOCAL_RANK=r % 8, **changes.get(f"rank{r}", {}))
        for r in range(count)
    ]
    while len(os.listdir(gate)) < count:
        time.sleep(0.05)
        assert all(process.poll() is None for process in started)
    (gate / "go").touch()
    return started


def test_64_ranks_compile_once(tmp_path, counting):
    """Every eighth of them has no compiler; all others say for whom they wait."""
    checkout = counting(Checkout(tmp_path, only="square"))
    without = {f"rank{r}": {"CXX": "no-such-compiler"} for r in range(7, 64, 8)}
    slow = {f"rank{r}": {"SLOW": "2"} for r in range(64) if f"rank{r}" not in without}
    started = ranks(checkout, 64, tmp_path, **without, **slow)
    ended = [(process.communicate(timeout=200), process.returncode) for process in started]
    assert all(status == 0 for _, status in ended), [err for (_, err), s in ended if s]
    assert checkout.compiled() == 2 and len(checkout.entries()) == 1
    said = [err for (_, err), _ in ended]
    builders = [err for err in said if "built 1 of 1 (square)" in err]
    assert len(builders) == 1
    waited = [err for err in said if "waiting for process" in err]
    assert len(waited) == 63 and all("is building square" in err for err in waited)


def test_a_rank_without_a_compiler_takes_what_a_second_builder_makes(tmp_path, counting):
    """The first one is killed with its compilers."""
    checkout = counting(Checkout(tmp_path, only="square"))
    first = checkout.start(USE, start_new_session=True, SLOW="30", WORLD_SIZE=3)
    while checkout.compiled() < 2:
        time.sleep(0.02)
        assert first.poll() is None
    without = checkout.start(USE, CXX="no-such-compiler", WORLD_SIZE=3)
    assert f"waiting for process {first.pid}" in without.stderr.readline()
    second = checkout.start(USE, WORLD_SIZE=3)
    assert f"waiting for process {first.pid}" in second.stderr.readline()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    for process in (second, without):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


def test_ranks_that_look_who_builds_do_not_take_each_other_for_that(tmp_path):
    """Or they would wait for ever, each time as patient as before."""
    path = tmp_path / "square-0.lock"
    path.touch()
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: others.holder(tmp_path, "square"), range(8000))]
    assert found == [None] * 8000
    with FileLock(path) as lock:
        lock.note()
        assert others.holder(tmp_path, "square")["pid"] == os.getpid()


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_without_a_compiler_that_nobody_builds_for_says_so(checkout, world):
    """One that is alone does not wait."""
    code = f"from loader.jit.build import others; others.PATIENCE = 1.5; {USE}"
    done = checkout.run(code, CXX="no-such-compiler", WORLD_SIZE=world, LOADER_BUILD="lazy")
    assert done.returncode == 1
    assert "no C++ compiler: `no-such-compiler` is not on PATH" in done.stderr
    waited = "loader: waiting for a rank that has a compiler, which is building square"
    assert (waited in done.stderr) is (world == 2)
    assert ("no other rank built square in 2 s" in done.stderr) is (world == 2)
