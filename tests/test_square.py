import pytest
import torch
from elementwise import DTYPES, ElementwiseTests

import loader


class TestSquare(ElementwiseTests):
    name, inputs, first = "square", 1, "x"

    def test_known_values(self, device):
        x = torch.tensor([-3.0, 0, 0.5], device=device)
        assert loader.square(x).tolist() == [9, 0, 0.25]
        assert loader.square_bw(torch.ones_like(x), x).tolist() == [-6, 0, 1]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_registered_backward_passes_opcheck(self, dtype, device):
        (x,) = self.sample(device, dtype)
        x = x[:3, :2].requires_grad_()
        torch.library.opcheck(torch.ops.octet.square_backward.default, (x, x))

    def test_backward_refuses_another_shape(self):
        with pytest.raises(
            RuntimeError, match=r"^square: x must have the shape of grad_out, \(3,\)"
        ):
            loader.square_bw(torch.ones(3), torch.ones(4))
