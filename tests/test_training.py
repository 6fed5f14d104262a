"""The examples that learn, in several processes: what is learned is what one process learns."""

import os
import re
import socket

import pytest
import ranks
import torch
from conftest import ROOT, ended, start_program

for package in ("matplotlib", "skimage"):
    pytest.importorskip(package, reason="the examples need it")

HOW = [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")]


@pytest.fixture
def group():
    """The session's four ranks."""
    return ranks.group()


@pytest.fixture(scope="module")
def alone():
    """What one process learns of the image."""
    return ranks.group().run("training_cases:image", 1, "")[0]


@pytest.mark.parametrize(("size", "how"), HOW)
def test_an_image_is_learned_as_by_one_process(group, alone, size, how):
    found = group.run("training_cases:image", size, how)
    for losses, learned, _ in found[:size]:
        torch.testing.assert_close(losses, alone[0], rtol=1e-4, atol=0)
        close(learned, alone[1])
    assert found[size:] == [None] * (4 - size)


def close(learned: dict, expected: dict) -> None:
    """Adam divides by the size of a gradient, so that one of rounding errors alone moves a weight by
    the learning rate, 0.02 a step: few weights may differ.
    """
    assert learned.keys() == expected.keys()
    for name, x in learned.items():
        off = (x - expected[name]).abs()
        assert off.median() < 1e-6, name
        assert (off > 1e-3).float().mean() < 1e-3, name


@pytest.mark.parametrize(("size", "how"), [(2, "ddp"), (4, "fsdp")])
def test_a_volume_is_recovered_as_by_one_process(group, size, how):
    expected = group.run("training_cases:volume", 1, "")[0]
    for history in group.run("training_cases:volume", size, how)[:size]:
        torch.testing.assert_close(history, expected, rtol=1e-4, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_gpus_learn_what_one_learns(gpus, how):
    case = "training_cases:image"
    expected, learned, _ = gpus.run(case, 1, "", device="cuda")[0]
    for losses, found, _ in gpus.run(case, 2, how, device="cuda"):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
        close(found, learned)
    expected = gpus.run("training_cases:volume", 1, "", device="cuda")[0]
    for history in gpus.run("training_cases:volume", 2, how, device="cuda"):
        torch.testing.assert_close(history, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("first", "then"),
    [((4, "fsdp"), (2, "ddp")), ((2, "ddp"), (4, "fsdp")), ((4, "fsdp"), (2, "fsdp"))],
)
def test_a_checkpoint_goes_on_in_another_number_of_processes(group, alone, tmp_path, first, then):
    folder = str(tmp_path / "checkpoint")
    group.run("training_cases:image", *first, folder, until=3)
    found = group.run("training_cases:image", *then, folder)
    for losses, learned, begun in found[: then[0]]:
        assert begun == 3
        torch.testing.assert_close(losses, alone[0][3:], rtol=1e-4, atol=0)
        close(learned, alone[1])


def test_a_checkpoint_of_several_goes_on_alone(group, alone, tmp_path):
    folder = str(tmp_path / "checkpoint")
    group.run("training_cases:image", 2, "fsdp", folder, until=3)
    losses, learned, begun = group.run("training_cases:image", 1, "", folder)[0]
    assert begun == 3
    torch.testing.assert_close(losses, alone[0][3:], rtol=1e-4, atol=0)
    close(learned, alone[1])


def test_an_example_as_torchrun_starts_it(tmp_path):
    """Two processes with its environment; too few steps to recover anything."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    program = [ROOT / "examples" / "fit_volume.py", "--device", "cpu", "--steps", 2]
    program += ["--parallel", "fsdp", "--out", tmp_path / "fit.png"]
    started = [
        start_program(program, ROOT, os.environ | world | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    first, second = map(ended, started)
    assert (first.returncode, second.returncode) == (1, 0), first.stderr + second.stderr
    assert "not recovered" in first.stderr
    assert re.search(r"2 steps in [\d.]+ s on 2 x cpu", first.stdout)
    assert "steps" not in second.stdout


def test_a_batch_that_cannot_be_parted_alike_is_refused(group):
    with pytest.raises(ranks.Failed) as raised:
        group.run("training_cases:unlike")
    assert {*raised.value.errors} == {
        "ValueError: a batch of 10 cannot be parted alike between 4 processes; take a multiple of 4"
    }
