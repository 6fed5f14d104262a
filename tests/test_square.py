import torch
from elementwise import BackwardTests

import loader


class TestSquare(BackwardTests):
    name, inputs, first = "square", 1, "x"

    def test_known_values(self, device):
        x = torch.tensor([-3.0, 0, 0.5], device=device)
        assert loader.square(x).tolist() == [9, 0, 0.25]
        assert loader.square_bw(torch.ones_like(x), x).tolist() == [-6, 0, 1]
