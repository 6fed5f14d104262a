import pytest
import torch
from elementwise import ElementwiseTests

import loader


class TestAdd2(ElementwiseTests):
    name, inputs, first = "add2", 2, "a"
    one_operation = True

    def test_known_values(self, device):
        a, b = torch.tensor([[1.0, -2.0], [0.5, 4.0]], device=device)
        assert loader.add2(a, b).tolist() == [1.5, 2.0]
        grads = loader.add2_bw(a, a, b)
        assert all(torch.equal(grad, a) for grad in grads)

    def test_refuses_what_does_not_fit(self):
        for b, message in (
            (torch.ones(4), "b must have the shape of a, (3,), got (4,); expand it first, e.g. with torch.broadcast_tensors"),
            (torch.ones(3).double(), "b must have the dtype of a, float32, got float64; convert one of them with .to()"),
        ):  # fmt: skip
            with pytest.raises(RuntimeError) as caught:
                loader.add2(torch.ones(3), b)
            assert str(caught.value) == f"add2: {message}"
