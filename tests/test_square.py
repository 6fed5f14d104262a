import pytest
import torch
from elementwise import BackwardTests, assert_rounded

import loader


class TestSquare(BackwardTests):
    name, inputs, first = "square", 1, "x"
    one_operation = True

    def test_known_values(self, device):
        x = torch.tensor([-3.0, 0, 0.5], device=device)
        assert loader.square(x).tolist() == [9, 0, 0.25]
        assert loader.square_bw(torch.ones_like(x), x).tolist() == [-6, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_bound_of_rounding_lets_no_more_through(dtype):
    """Of x * x: two eps of itself and two of x's, moved through the slope 2 x."""
    x = (torch.linspace(1, 2, 50, dtype=torch.float64) + 0.1).requires_grad_()
    exact, eps = x * x, torch.finfo(dtype).eps
    assert_rounded(exact.to(dtype), exact, [x])
    with pytest.raises(AssertionError, match="off by"):
        assert_rounded((exact * (1 + 6 * eps)).to(dtype), exact, [x])
