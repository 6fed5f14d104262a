"""Every operator on its samples, beside its reference: what `make matrix` runs on another's build."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import loader

for name in loader._session.units:
    ours, reference = getattr(loader, name), getattr(loader, f"{name}_reference")
    side = loader._session.module(name)
    for case in side.samples("cpu"):
        leaves = [
            x.detach().requires_grad_()
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for x in case
        ]
        out, expected = ours(*leaves), reference(*leaves)
        assert out.dtype == expected.dtype and out.shape == expected.shape, name
        if out.dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            out.backward(torch.ones_like(out))
        elif out.is_floating_point():
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
assert {row["result"] for row in loader.receipt().units.values()} == {"hit"}, loader.receipt()
