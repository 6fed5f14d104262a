"""Shapes checked by named sizes: the same words for tensors with data and without."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import loader
from loader.jit.operators.shapes import Sizes


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda s: s.match("points", torch.ones(4, 2), "(N, 3)"),
            "op: points must be (N, 3), got (4, 2)",
        ),
        (
            lambda s: s.match("points", torch.ones(3, 3), "(N, 3)", "a cure"),
            "op: feats (N, 8, F) and points (N, 3) must have the same N, got (4, 8, 2) and (3, 3)",
        ),
        (
            lambda s: s.match("points", torch.ones(3), "(N, 3)", "a cure"),
            "op: points must be (N, 3), got (3,); a cure",
        ),
        (
            lambda s: s.match_known("grad_out", torch.ones(4, 5), "(N, F)"),
            "op: grad_out must be (N, F) = (4, 2), got (4, 5)",
        ),
        (
            lambda s: s.match_known("grad_out", torch.ones(3, 5), "(N, G)"),
            "op: grad_out must be (N, G) = (4, G), got (3, 5)",
        ),
        (
            lambda s: s.match("lut", torch.ones(4, 4, 5), "(S, S, S), indexed [r, g, b]"),
            "op: lut must be (S, S, S), indexed [r, g, b], got (4, 4, 5)",
        ),
        (
            lambda s: s.match("image", torch.ones(2, 5, 4), "(..., 3)"),
            "op: image must be (..., 3), got (2, 5, 4)",
        ),
    ],
)
def test_the_message_says_which_size_what_was_expected_and_what_came(call, message):
    sizes = Sizes("op")
    sizes.match("feats", torch.ones(4, 8, 2), "(N, 8, F)")
    assert (sizes["N"], sizes["F"]) == (4, 2)
    with pytest.raises(RuntimeError) as caught:
        call(sizes)
    assert str(caught.value) == message


def test_what_fits_binds_its_sizes():
    sizes = Sizes("op")
    sizes.match("image", torch.ones(3), "(..., 3)")
    sizes.match("table", torch.ones(2, 5, 5), "(..., S, S)")
    sizes.match_known("out", torch.ones(5, 7), "(S, K)")
    assert (sizes["S"], sizes["K"]) == (5, 7)


@pytest.mark.parametrize(
    "name, shapes, options",
    [
        ("trilinear_interpolation", ((4, 7, 2), (4, 3)), ()),
        ("trilinear_interpolation", ((4, 8, 2), (5, 3)), ()),
        ("bilinear_interpolation", ((4, 4, 2), (4, 3)), ()),
        ("apply_lut3d", ((4, 4), (5, 5, 5, 3)), ("trilinear",)),
        ("apply_lut3d", ((4, 3), (5, 5, 4, 3)), ("trilinear",)),
        ("apply_lut3d", ((2, 4, 3), (3, 5, 5, 5, 3)), ("trilinear",)),
        ("hash_grid_encoding", ((4, 3), (5, 64)), (None, 16, 2.0)),
        ("hash_grid_encoding", ((4, 3), (5, 64, 0)), (None, 16, 2.0)),
        ("convolve2d", ((4,), (3, 3)), ("same", "zero")),
        ("convolve2d", ((4, 4), (0, 3)), ("same", "zero")),
        ("add2", ((4, 3), (3, 4)), ()),
    ],
)
def test_torch_compile_refuses_in_the_words_of_the_operator(name, shapes, options):
    """The fake kernel is what torch.compile and torch.export ask."""
    getattr(loader, name)
    operator = getattr(torch.ops.octet, name)
    with pytest.raises(RuntimeError) as real:
        operator(*map(torch.ones, shapes), *options)
    with FakeTensorMode(), pytest.raises(RuntimeError) as fake:
        operator(*map(torch.ones, shapes), *options)
    assert str(fake.value).splitlines()[0] in str(real.value)
