"""Shared by the examples that learn: one process, or several that `torchrun` has started.

    torchrun --nproc-per-node 2 examples/fit_image.py --parallel fsdp

Each process takes its part of a batch. With "ddp" (DistributedDataParallel) each has all that is
learned, and gradients are averaged; with "fsdp" (`fully_shard`) each has its part of that too, as
DTensors, whole only while a module runs. Either learns what one process learns, within rounding.
"""

import contextlib
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

OPTIONS = {
    "parallel": {"choices": ("ddp", "fsdp"), "default": "ddp"},
    "checkpoint": {"type": Path, "metavar": "FOLDER"},
}


class Together:
    """The processes that learn: those of a mesh, or without one this process alone.

    Attributes:
        rank, size: which of how many processes this is.
        device: the one it computes on.
    """

    def __init__(self, device: str = "cpu", mesh: DeviceMesh | None = None, how: str = "ddp"):
        self._mesh, self._how = mesh, how
        self.rank, self.size = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
        self.device = torch.device(device)

    @classmethod
    def started(cls, device: str, how: str) -> "Together":
        """As torchrun has started this process; alone where it has not."""
        if "WORLD_SIZE" not in os.environ:
            return cls(device)
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        kind = torch.device(device).type
        dist.init_process_group("gloo" if kind == "cpu" else None)
        mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
        return cls(device, mesh, how)

    def __str__(self) -> str:
        """`cpu`, or `2 x cpu`."""
        return f"{self.size} x {self.device.type}" if self.size > 1 else self.device.type

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model, to be called by all processes; made of the same numbers in each."""
        if self._mesh is None:
            return model
        if self._how == "ddp":
            return DistributedDataParallel(model, process_group=self._mesh.get_group())
        for part in model.children():
            fully_shard(part, mesh=self._mesh)
        return fully_shard(model, mesh=self._mesh)

    def part(self, batch: int) -> slice:
        """The part of a batch for this process; parts are equal, or means had to be weighed."""
        if batch % self.size:
            raise ValueError(
                f"a batch of {batch} cannot be parted alike between {self.size} processes; "
                f"take a multiple of {self.size}"
            )
        return slice(self.rank * batch // self.size, (self.rank + 1) * batch // self.size)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all processes of what each has, for a report."""
        x = x.detach().clone()
        if self._mesh is not None:
            dist.all_reduce(x, group=self._mesh.get_group())
        return x / self.size

    def save(self, folder: Path, step: int, **state) -> None:
        """Write a checkpoint, each process its part; `load` reads it in any number of them."""
        if not (folder / str(step) / ".metadata").exists():
            with _quiet():
                dcp.save(state, checkpoint_id=folder / str(step), **self._among())

    def load(self, folder: Path, **state) -> None:
        """Fill `state` from the checkpoint of the latest step, where there is one that is whole."""
        steps = [int(file.parent.name) for file in folder.glob("*/.metadata")]
        if steps:
            with _quiet():
                dcp.load(state, checkpoint_id=folder / str(max(steps)), **self._among())
            if self.rank == 0:
                print(f"goes on after step {max(steps)}")

    def _among(self) -> dict:
        if self._mesh is None:
            return {"no_dist": True}
        return {"process_group": self._mesh.get_group()}

    def close(self) -> None:
        """End the group of processes that `started` made."""
        if self._mesh is not None:
            dist.destroy_process_group()


class Learned:
    """A model with its optimizer, as a checkpoint has them: by names, whole or in parts."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._both = model, optimizer

    def state_dict(self) -> dict:
        """What a checkpoint holds."""
        model, optimizer = get_state_dict(*self._both)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        """Take it back."""
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(*self._both, model_state_dict=model, optim_state_dict=optimizer)


@contextlib.contextmanager
def _quiet():
    """Without the warning that there is no process but this."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def whole(x: Tensor) -> Tensor:
    """All of a tensor of which each process may have a part."""
    return x.full_tensor() if isinstance(x, DTensor) else x
