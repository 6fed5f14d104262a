"""Recover a volume that no process holds whole, from its values at points, by gradient descent.

Each rank has a slab of the volume, a parameter of its own, and its own points anywhere in the
whole. `loader.distributed.sample_sharded` samples them, and gradients come to the slab's owner. One
process that holds the whole then does the same steps with all points, and both are compared.

    torchrun --nproc-per-node 2 examples/distributed.py [--steps 40] [--size 16]
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import loader

CHANNELS = 4


def learn(volume: torch.Tensor, sample, values: torch.Tensor, steps: int) -> torch.Tensor:
    """Take steps of Adam from zeros; the sum of squares is over this process's points."""
    found = torch.zeros_like(volume).requires_grad_()
    optimizer = torch.optim.Adam([found], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (sample(found) - values).square().sum().backward()
        optimizer.step()
    return found.detach()


def main() -> None:
    """Learn in all ranks and in one; say how far they and the truth are apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--points", type=int, default=20000, help="of each rank")
    options = parser.parse_args()
    device, own = "cuda" if torch.cuda.is_available() else "cpu", None
    if device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
    dist.init_process_group(device_id=own)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    rank, ranks = mesh.get_local_rank(), mesh.size()

    make = torch.Generator().manual_seed(0)  # the same in every rank
    truth = torch.randn(1, CHANNELS, *[options.size] * 3, generator=make).to(device)
    every = torch.rand(ranks, 1, 1, 1, options.points, 3, generator=make).to(device) * 2 - 1
    grid = every[rank]
    slab = truth.tensor_split(ranks, 2)[rank].contiguous()  # as if it were all there is
    values = loader.distributed.sample_sharded(slab, grid, mesh)

    def sample(found):
        return loader.distributed.sample_sharded(found, grid, mesh)

    mine = learn(slab, sample, values, options.steps)
    slabs: list = [None] * ranks
    dist.all_gather_object(slabs, mine.cpu())
    if rank == 0:
        whole, points = torch.cat(slabs, 2).to(device), torch.cat([*every], 3)
        known = loader.grid_sample(truth, points)
        alone = learn(truth, lambda x: loader.grid_sample(x, points), known, options.steps)
        apart = float((whole - alone).abs().max())
        print(f"{ranks} ranks and one process differ by {apart:.1e} at most")
        error = float((whole - truth).square().mean().sqrt())
        print(f"the volume is {error:.3f} off, of {float(truth.std()):.3f}, by {device}")
        if apart > 1e-3 or error > 0.5:
            sys.exit("that is not what one process finds")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
