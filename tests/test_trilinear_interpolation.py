import torch
from interpolation import InterpolationTests

import loader


class TestTrilinear(InterpolationTests):
    name, D = "trilinear_interpolation", 3
    corner_order = "corner 4i + 2j + l at (i, j, l)"

    @staticmethod
    def bit(axis):
        return 2 - axis

    def test_known_values(self, device):
        """A quarter of the way along the first axis, which is the slowest among the corners."""
        feats = torch.arange(8.0, device=device).view(1, 8, 1)  # 4i + 2j + l
        points = torch.tensor([[-0.5, -1, -1], [-1, -0.5, -1], [-1, -1, -0.5]], device=device)
        out = loader.trilinear_interpolation(feats.expand(3, 8, 1), points)
        assert out.flatten().tolist() == [1.0, 0.5, 0.25]

    def test_alias_of_the_reference(self):
        assert loader.trilinear_interpolation_py is loader.trilinear_interpolation_reference
