import torch
from interpolation import InterpolationTests

import loader


class TestBilinear(InterpolationTests):
    name, D = "bilinear_interpolation", 2
    corner_order = "corner i + 2j at (i, j)"

    @staticmethod
    def bit(axis):
        return axis

    def test_known_values(self, device):
        """A quarter of the way along the first axis, which is the fastest among the corners."""
        feats = torch.arange(4.0, device=device).view(1, 4, 1)  # i + 2j
        points = torch.tensor([[-0.5, -1], [-1, -0.5]], device=device)
        out = loader.bilinear_interpolation(feats.expand(2, 4, 1), points)
        assert out.flatten().tolist() == [0.25, 0.5]
