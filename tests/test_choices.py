"""Why calls go the way they go: `loader.explain(function, ...)` and LOADER_VERBOSE."""

import os
import re

import pytest
import torch
from conftest import ROOT, ended, start_python

import loader
from loader.jit.operators import choices

LUT = torch.rand(17, 17, 17, 3)


def ways(table):
    """The rows of a table of choices, each with the ways that were not taken."""
    found = []
    for operator, what, way, model, why in table.rows:
        if operator:
            found.append([operator, what, way, model, why, {}])
        else:
            found[-1][-1][way.removeprefix("not ")] = model
    return found


def us(text):
    number, unit = text.split()
    return float(number) * {"us": 1, "ms": 1000}[unit]


@pytest.mark.parametrize(("side", "taken"), [(8, "lut itself"), (100, "a copy in fours")])
def test_the_way_taken_is_the_one_that_the_model_says_takes_least(side, taken):
    table = loader.explain(loader.apply_lut3d, torch.rand(side, side, 3), LUT)
    ((operator, what, way, model, why, others),) = ways(table)
    assert (operator, what, way) == ("apply_lut3d", "table", taken) and why
    assert us(model) <= min(us(other) for other in others.values())
    assert "not " in str(table) and "<table>" in table._repr_html_()


def test_gradients_that_arguments_ask_for_are_told_of_too_and_grad_stays_as_it_is():
    image = torch.rand(40, 40, 3, requires_grad=True)
    found = ways(loader.explain(loader.apply_lut3d, image, LUT))
    assert len(found) == 1 and image.grad is None  # both say the same, once
    x = torch.rand(1, 8, 9, 9).half().requires_grad_()
    grid = torch.rand(1, 4, 4, 2).half() * 2 - 1
    what = [row[1] for row in ways(loader.explain(loader.grid_sample, x, grid, mode="bilinear"))]
    assert {"layout", "layout, of gradients"} < {*what} and x.grad is None


def test_conversion_of_16_bit_images_is_weighed_against_what_it_saves():
    x = torch.rand(1, 1, 64, 64).half()
    few, many = (torch.rand(1, n, n, 2).half() * 2 - 1 for n in (4, 200))
    for grid, taken in ((few, "an element at a time"), (many, "float32 from end to end")):
        found = {row[1]: row for row in ways(loader.explain(loader.grid_sample, x, grid))}
        assert found["precision of 16 bits"][2] == taken


def test_an_operator_with_one_way_says_so():
    ((operator, _, _, _, why, _),) = ways(loader.explain(loader.square, torch.rand(3)))
    assert operator == "square" and "one way for all calls" in why


def test_nobody_hears_once_a_call_is_explained_or_has_failed():
    with pytest.raises(RuntimeError, match="lut must"):
        loader.explain(loader.apply_lut3d, torch.rand(4, 4, 3), LUT[0])
    loader.grid_sample(torch.rand(1, 1, 4, 4), torch.rand(1, 2, 2, 2))
    asked = [library for library in choices.libraries() if hasattr(library, "octet_tell_choices")]
    assert len(asked) >= 2
    with choices.LISTENERS.heard() as found:
        pass
    loader.apply_lut3d(torch.rand(4, 4, 3), LUT)
    assert found == []


@pytest.mark.cuda
def test_a_library_that_a_call_loads_is_heard():
    """What float64 needs on a GPU is loaded by the first call that does."""
    code = """
import torch, loader
points, table = torch.rand(40_000, 2).cuda(), torch.rand(4, 50, 2).double().cuda()
print(loader.explain(loader.hash_grid_encoding, points, table.requires_grad_()))
"""
    done = ended(start_python(code, ROOT, dict(os.environ)))
    assert done.returncode == 0, done.stderr
    assert "gradient to table" in done.stdout


def test_options_belong_to_a_call():
    with pytest.raises(TypeError, match="'mode' is an option of a call; name its function"):
        loader.explain("grid_sample", mode="nearest")


def test_verbose_says_each_choice_once_on_stderr():
    code = """
import torch, loader
lut = torch.rand(17, 17, 17, 3)
for side in (4, 8, 100, 200):
    loader.apply_lut3d(torch.rand(side, side, 3), lut)
"""

    def told(verbose):
        environment = os.environ | {"LOADER_VERBOSE": verbose}
        done = ended(start_python(code, ROOT, environment))
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if "apply_lut3d: table" in line]

    lines = told("1")
    assert len(lines) == 2 and "lut itself" in lines[0] and "a copy in fours" in lines[1]
    assert re.search(r"by the model: lut itself [\d.]+ us, a copy in fours [\d.]+ us", lines[0])
    assert told("0") == []
