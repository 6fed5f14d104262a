"""`loader.distributed.sample_sharded` and `encode_sharded` on several processes, under gloo."""

import os

import pytest
import ranks
from conftest import ROOT, ended, start_program


@pytest.fixture
def group():
    return ranks.group()


CASE = {
    "sizes": [11, 6, 7],
    "rows": None,
    "dim": 2,
    "images": 1,
    "channels": 3,
    "dtype": "float32",
    "grid_dtype": "float32",
    "mode": "bilinear",
    "padding": "zeros",
    "corners": False,
    "last": False,
    "counts": None,
    "spread": 1.3,
    "one_place": False,
    "strange": False,
    "needs": (1, 1),
    "limit": 1 << 30,
    "seed": 1,
}
LISTED = {
    "parts of one row, smaller than a bicubic's reach": {
        "rows": [1, 1, 1, 8],
        "mode": "bicubic",
        "padding": "reflection",
    },
    "ranks without rows": {"rows": [0, 5, 0, 6], "mode": "bicubic", "padding": "border"},
    "all rows on the last rank": {"rows": [0, 0, 0, 11]},
    "ranks without points": {"rows": [3, 3, 3, 2], "counts": [0, 90, 0, 1]},
    "nobody has points": {"rows": [3, 3, 3, 2], "counts": [0, 0, 0, 0]},
    "all points in one part, in rounds": {
        "rows": [3, 3, 3, 2],
        "counts": [700, 500, 0, 300],
        "one_place": True,
        "limit": 30000,
    },
    "points that are no numbers or far away": {
        "rows": [3, 3, 3, 2],
        "strange": True,
        "padding": "reflection",
    },
    "cut along the innermost axis": {"rows": [2, 2, 1, 2], "dim": 4, "last": True},
    "an image of 16 bits with the channels last": {
        "sizes": [40, 31],
        "rows": [10, 12, 9, 9],
        "channels": 16,
        "dtype": "float16",
        "last": True,
        "counts": [900, 900, 900, 900],
    },
    "one rank": {"rows": [11], "counts": [200]},
}


@pytest.mark.parametrize("name", LISTED)
def test_as_grid_sample_of_the_whole(group, name):
    case = CASE | LISTED[name]
    world = len(case["rows"])
    case["counts"] = case["counts"] or [150, 0, 61, 200]
    group.run("sharded_cases:check", case, world)


@pytest.mark.parametrize("world", [2, 4])
def test_as_grid_sample_of_the_whole_at_random(group, world, request):
    seed = request.config.getoption("--sharded-seed") + 1000 * world
    group.run("sharded_cases:draws", seed, 40, world)


@pytest.mark.cuda
def test_two_gpus_sample_as_one(gpus, request):
    seed = request.config.getoption("--sharded-seed") + 9000
    for first in range(seed, seed + 200, 40):
        gpus.run("sharded_cases:draws", first, 40, 2, "cuda")


LEVELS = [
    ([3, 2, 0, 4], [50, 0, 1, 90], "float32", (1, 1)),
    ([0, 5], [64, 64], "bfloat16", (0, 1)),
    ([4], [30], "float64", (1, 0)),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("levels", "counts", "dtype", "needs"), LEVELS[1:])
def test_two_gpus_encode_as_one(gpus, levels, counts, dtype, needs):
    gpus.run("sharded_cases:encode", levels, counts, dtype, 3, needs, "cuda")


@pytest.mark.parametrize(("levels", "counts", "dtype", "needs"), LEVELS)
def test_levels_as_the_whole_table(group, levels, counts, dtype, needs):
    group.run("sharded_cases:encode", levels, counts, dtype, 3, needs)


def test_compiled_code_calls_it(group):
    group.run("sharded_cases:compiled")


WRONG = {
    "channels": (
        "RuntimeError: sample_sharded: shape of shard, but for its rows, must be the same on all "
        "ranks, got (1, 2, -1, 5, 4) on rank 0, (1, 1, -1, 5, 4) on rank 1"
    ),
    "dtype": (
        "RuntimeError: sample_sharded: dtype of shard must be the same on all ranks, got "
        "torch.float32 on rank 0, torch.float64 on rank 1"
    ),
    "other mode": "mode, padding_mode and align_corners, by number, must be the same on all ranks",
    "gradient": "wish for gradients must be the same on all ranks, got False on rank 0, True on",
    "limit": "limit must be the same on all ranks, got 1073741824 on rank 0, 999 on rank 1",
    "small limit": "limit must be 504 bytes or more for a point of each of 2 ranks for each other",
    "no rows": "some rank's shard must have rows, got none on all ranks",
    "two dimensions": "ValueError: sample_sharded: mesh must have one dimension, got 2",
    "no mesh": "TypeError: sample_sharded: mesh must be a torch.distributed.device_mesh.DeviceMesh",
}
MISSING = {
    "missing": (
        "TypeError: sample_sharded: shard must be a tensor, got NoneType; each rank gives its "
        "part, of no rows if it has none"
    ),
    "grid": "RuntimeError: grid_sample: grid must be (N, D_out, H_out, W_out, 3) for an input",
    "mode": "ValueError: grid_sample: mode must be 'bilinear', 'nearest' or 'bicubic', got 'cubic'",
    "device": "RuntimeError: sample_sharded: grid must be on a device of the mesh, cpu, got meta",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_ranks_do_not_agree_on_is_told_by_all(group, wrong):
    said = group.run("sharded_cases:refuse", wrong, 2)[:2]
    assert all(WRONG[wrong] in text for text in said), said


@pytest.mark.parametrize("wrong", MISSING)
def test_a_fault_of_one_rank_is_told_by_all(group, wrong):
    others, own = group.run("sharded_cases:refuse", wrong, 2)[:2]
    assert MISSING[wrong] in own
    assert "RuntimeError: sample_sharded: other ranks cannot take part; rank 1: " in others
    assert MISSING[wrong].partition(": ")[2] in others


def test_a_rank_that_is_not_in_the_mesh_is_told(group):
    said = group.run("sharded_cases:outsider")
    assert all(
        "is not in the mesh [0, 1]; only ranks of the mesh may call it" in s for s in said[2:]
    )


def test_a_rank_that_is_killed_is_an_error_on_the_others():
    alone = ranks.Ranks(2)
    with pytest.raises(ranks.Failed) as failed:
        alone.run("sharded_cases:abandoned")
    alone.close()
    error, ended = failed.value.errors
    assert ended == ""
    assert "sample_sharded: rank 0 of 2 lost the others, of which one has ended" in error


@pytest.mark.cuda
def test_a_rank_that_is_killed_ends_the_one_on_another_gpu(gpus):
    """NCCL does not notice: torch ends the process once the time-out is over, and says why."""
    alone = ranks.Ranks(2, "nccl", timeout=8)
    with pytest.raises(ranks.Failed) as failed:
        alone.run("sharded_cases:abandoned")
    said = alone.close()
    error, ended = failed.value.errors
    assert ended == ""
    assert "Watchdog caught collective operation timeout" in error + said


def test_the_example_under_torchrun_finds_what_one_process_finds():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [ROOT / "examples/distributed.py", "--size", "12", "--points", "4000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = ended(start_program(words, ROOT, environment))
    assert done.returncode == 0, done.stderr
    assert "2 ranks and one process differ by" in done.stdout


def test_what_is_under_way_keeps_to_the_limit(group):
    """Three ranks' points go to one: more than that at once, without a limit."""
    limit = 20000
    assert max(group.run("sharded_cases:skewed", 1 << 30)) > 3 * limit
    assert max(group.run("sharded_cases:skewed", limit)) <= limit


def test_a_rank_that_does_not_call_is_an_error_after_the_time_out(group):
    said = group.run("sharded_cases:absent")[0]
    assert "rank 0 of 2 lost the others, of which one has ended or did not call it" in said
