"""Operators on DTensors: equal to one process, whatever the placements; tests/ranks.py has those."""

import contextlib
import os
import re

import dtensor_cases
import pytest
import ranks
import torch
from conftest import ROOT, ended, start_python
from torch.distributed.tensor import Replicate, Shard

import loader
from loader.jit.operators.sharding import Shapes

R, S = Replicate(), Shard

# Arguments as they are, the result, and its gradients: where ranks need nothing of each other.
SERVED = [
    ("trilinear_interpolation", "S0 S0", "S0 S0 S0"),  # points
    ("trilinear_interpolation", "S2 R", "S1 S2 P"),  # features
    ("bilinear_interpolation", "S0 S0", "S0 S0 S0"),
    ("bilinear_interpolation", "S2 R", "S1 S2 P"),
    ("square", "S1", "S1 S1"),
    ("add2", "S2 S2", "S2 R R"),  # the gradient that arrives, which is whole here
    ("grid_sample", "S0 S0", "S0 S0 S0"),  # images
    ("grid_sample", "S1 R", "S1 S1 P"),  # channels
    ("grid_sample", "R S2", "S3 P S2"),  # places
    ("grid_sample_volume", "S1 R", "S1 S1 P"),
    ("grid_sample_volume", "R S1", "S2 P S1"),
    ("apply_lut3d", "S1 R", "S1 S1 P"),  # pixels
    ("hash_grid_encoding", "S0 R", "S0 S0 P"),  # points
    ("hash_grid_encoding_even", "R S0", "S1 P S0"),  # levels
    ("convolve2d", "S0 R", "S0 S0 P"),  # images
    ("mine", "S0 S0", "S0 S0 S0"),
]
COMPILED = [(name, given) for name, given, _ in SERVED[::4]]
COMPILED += [("hash_grid_encoding_even", "R S0"), ("add2", "S1 S0")]
NAMES = [name for name in dtensor_cases.MAKE]


@pytest.fixture
def group():
    """The session's four ranks."""
    return ranks.group()


def placements(text: str) -> list:
    """Of "S0 R", for each of two arguments one for a mesh of one dimension."""
    return [[R if word == "R" else S(int(word[1]))] for word in text.split()]


def test_every_operator_has_a_case():
    named = {dtensor_cases.operator(name) for name in dtensor_cases.MAKE}
    assert {getattr(loader, unit) for unit in loader._session.units} <= named


@pytest.mark.parametrize(("name", "given", "expected"), SERVED)
def test_parts_are_computed_without_a_word_between_ranks(group, name, given, expected):
    for sizes in ((4,), (2,)):
        shown, words = group.run("dtensor_cases:compare", name, 3, sizes, placements(given))[0]
        count = len(given.split())
        assert shown[:count] == given.split()
        assert shown[count : 2 * count + 1] == expected.split()
        assert words == 0


@pytest.mark.parametrize("name", NAMES)
def test_any_placement_gives_what_one_process_gives(group, name):
    counts = group.run("dtensor_cases:drawn", name, range(6), double=True)
    assert counts[0] > 2


@pytest.mark.parametrize(("name", "given"), COMPILED)
def test_compiled(group, name, given):
    assert group.run("dtensor_cases:compiled", name, (2,), placements(given))[:2] == [True, True]


def test_transforms_go_as_far_as_those_of_dtensors(group):
    group.run("dtensor_cases:transformed")


def test_an_option_is_part_of_what_is_remembered(group):
    """Modes of one convolution have outputs of their own sizes."""
    for seed in range(6):
        group.run("dtensor_cases:compare", "convolve2d", seed, (4,), placements("S0 R"))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("refused", (4,)), "trilinear_interpolation: feats (N, 8, F) and points (N, 3) must have"),
        (("other_mesh",), "mesh"),
        (("mixed",), "mixed torch.Tensor and DTensor"),
    ],
)
def test_what_does_not_fit_is_refused_by_every_rank(group, case, message):
    function, *args = case
    with pytest.raises(ranks.Failed) as raised:
        group.run(f"dtensor_cases:{function}", *args)
    for error in raised.value.errors:
        assert error.startswith("RuntimeError")
        assert message in error


def test_a_rank_that_is_killed_is_noticed_by_the_others():
    with contextlib.closing(ranks.Ranks(2)) as group, pytest.raises(ranks.Failed) as raised:
        group.run("dtensor_cases:die", 1)
    assert raised.value.errors[1] == ""
    # Gloo's words for that: reset where bytes were under way to it.
    said = "^RuntimeError: .*gloo/transport/tcp/.*Connection (closed|reset) by peer"
    assert re.search(said, raised.value.errors[0])


BEFORE = """
import os, sys, torch, loader
kept = len(sys.meta_path)
loader.square(torch.ones(2))
assert "torch.distributed.tensor" not in sys.modules
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
assert len(sys.meta_path) == kept
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = distribute_tensor(torch.arange(3.0), init_device_mesh("cpu", (1,)), [Shard(0)])
assert loader.square(x).full_tensor().tolist() == [0, 1, 4]
dist.destroy_process_group()
"""


def test_an_operator_that_was_loaded_before_there_were_dtensors_takes_them():
    done = ended(start_python(BEFORE, ROOT, dict(os.environ)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text", ["(N, F)", "(N, F) -> N", "(N, N) -> (N)", "(N, 1.5) -> (N)", "N -> (N)"]
)
def test_what_is_no_shapes_is_refused(text):
    with pytest.raises(ValueError, match="sharding: expected shapes as"):
        Shapes(text)


def test_a_name_of_a_size_that_may_not_be_cut_is_found_by_check():
    @loader.operator(name="dtensor_tests::soft", sharding="(N, F) -> (N, F)")
    def soft(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(1)

    with pytest.raises(AssertionError, match="sharding: results in halves along F differ"):
        soft.check(torch.randn(4, 6))
    dtensor_cases.mine.check(torch.randn(4, 6), torch.randn(4))


def test_shapes_that_are_not_the_operator_s_are_refused():
    with pytest.raises(ValueError, match="the shapes of 1 tensor arguments and 1 results"):

        @loader.operator(name="dtensor_tests::one", sharding="(N), (N) -> (N)")
        def one(x: torch.Tensor) -> torch.Tensor:
            return x.clone()


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_two_gpus_give_what_one_gives(gpus, name):
    counts = gpus.run("dtensor_cases:drawn", name, range(12), double=True, meshes=((2,),))
    assert counts[0] > 2


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "given"), COMPILED)
def test_two_gpus_give_what_one_gives_when_compiled(gpus, name, given):
    assert gpus.run("dtensor_cases:compiled", name, (2,), placements(given)) == [True, True]
