"""Train a small model through the operators, built in any of the three ways.

    python examples/three_ways/train.py [--compiler {jit,setup,cmake} ...] [--steps 200]

A volume of features and a small network, with add2 as its skip connection, learn a function of
space. Without --compiler all three ways train, each in a process of its own, and the losses must be
equal to the last bit. Fails too where the loss does not fall.
"""

import argparse
import hashlib
import os
import struct
import sys

import ways

# cuBLAS gives the same bits in every run only with this; it reads it when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SIDE, CHANNELS, POINTS = 8, 16, 4096


def make_model(loader):
    """A volume (S, S, S, C) of learnt features, and a network on what is interpolated in it."""
    import torch
    from torch import nn

    class Model(nn.Module):
        """Positions (N, 3) in [0, 1] to values (N,)."""

        def __init__(self):
            super().__init__()
            self.grid = nn.Parameter(0.1 * torch.randn(SIDE, SIDE, SIDE, CHANNELS))
            self.hidden = nn.Linear(CHANNELS, CHANNELS)
            self.head = nn.Linear(CHANNELS, 1)

        def forward(self, positions):
            """Gather each point's eight corners, interpolate, run the network."""
            at = positions * (SIDE - 1)
            cell = at.floor().clamp(0, SIDE - 2)
            x, y, z = cell.long().unbind(1)
            steps = [(i * SIDE + j) * SIDE + k for i in (0, 1) for j in (0, 1) for k in (0, 1)]
            corners = ((x * SIDE + y) * SIDE + z)[:, None] + x.new_tensor(steps)
            rows = self.grid.flatten(0, 2).index_select(0, corners.flatten())
            feats = loader.trilinear_interpolation(rows.unflatten(0, (-1, 8)), 2 * (at - cell) - 1)
            return self.head(loader.add2(feats, torch.relu(self.hidden(feats)))).squeeze(1)

    return Model()


def train(loader, device: str, steps: int) -> list[float]:
    """Fit sin(5x) cos(4y) + z; the loss of each step."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums split among threads would depend on how many there are
    torch.use_deterministic_algorithms(True)
    model = make_model(loader).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        positions = torch.rand(POINTS, 3).to(device)
        x, y, z = positions.unbind(1)
        loss = (model(positions) - (torch.sin(5 * x) * torch.cos(4 * y) + z)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"step {step:>4}  loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    """Train in one way, or in several and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", choices=ways.WAYS, nargs="+", default=[*ways.WAYS])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    chosen = [*dict.fromkeys(options.compiler)]
    if len(chosen) > 1:
        rest = "--device", options.device, "--steps", str(options.steps)
        outputs = ways.each_in_a_process(__file__, chosen, *rest)
        for way, text in outputs.items():
            print(f"{way}\n{text}", end="")
        if len({*outputs.values()}) > 1:
            sys.exit("the losses differ between the builds")
        print(f"losses bit-equal in {', '.join(chosen)}")
        return

    ways.build(chosen[0])
    losses = train(ways.load(chosen[0]), options.device, options.steps)
    print(f"digest {hashlib.sha256(struct.pack(f'{len(losses)}d', *losses)).hexdigest()[:16]}")
    if not losses[-1] < losses[0] / 5:
        sys.exit(f"not learnt: the loss went from {losses[0]:.3g} to {losses[-1]:.3g} only")


if __name__ == "__main__":
    main()
