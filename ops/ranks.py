"""What operators over several ranks share: the group of a mesh, agreement, exchanges."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16


class Ranks:
    """The ranks of a one-dimensional mesh, and what they do together.

    Every method but `__init__` and `check` is a collective: all ranks have to call it.
    """

    def __init__(self, op: str, mesh: DeviceMesh):
        """Raises: TypeError, ValueError or RuntimeError where the mesh is none to use."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"{op}: mesh must be a torch.distributed.device_mesh.DeviceMesh, got "
                f"{type(mesh).__name__}; make one by init_device_mesh('cuda', (world_size,))"
            )
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ("none are named",)
            raise ValueError(
                f"{op}: mesh must have one dimension, got {mesh.ndim} ({', '.join(names)}); give "
                "that along which the tensor is cut, e.g. mesh['tp']"
            )
        if mesh.get_coordinate() is None:
            raise RuntimeError(
                f"{op}: this process, rank {dist.get_rank()}, is not in the mesh "
                f"{mesh.mesh.tolist()}; only ranks of the mesh may call it"
            )
        self.op, self.group = op, mesh.get_group()
        self.me, self.count = mesh.get_local_rank(), mesh.size()
        self.device_type = mesh.device_type
        on_gpu = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"

    def check(self, name: str, x: object, given: str) -> None:
        """Raise TypeError or RuntimeError for what is no tensor of this rank's; `given` says what
        each rank has to give.
        """
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{self.op}: {name} must be a tensor, got {type(x).__name__}; each rank gives "
                f"{given}"
            )
        if x.dtype not in _DTYPES:
            raise RuntimeError(
                f"{self.op}: {name} must be float32, float64, float16 or bfloat16, got {x.dtype}"
            )
        if x.device.type != self.device_type:
            raise RuntimeError(
                f"{self.op}: {name} must be on a device of the mesh, {self.device_type}, got "
                f"{x.device}"
            )

    def gather(self, numbers: Sequence[int] | Tensor) -> list[list[int]]:
        """Return the numbers of all ranks, as many of each."""
        mine = torch.as_tensor(numbers, dtype=torch.int64).to(self.device)
        if mine.numel() == 0 or self.count == 1:
            return [mine.tolist()] * self.count
        everyone = mine.new_empty(self.count * mine.numel())

        def gathered() -> None:
            dist.all_gather_into_tensor(everyone, mine, group=self.group)
            self._arrived()

        self.done(gathered)
        return everyone.view(self.count, -1).tolist()

    def _arrived(self) -> None:
        """Wait for the GPU, but not for ever: NCCL does not notice that a rank has ended.

        Torch ends the process then, some time after the time-out; nobody could catch that.
        """
        if self.device_type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        seconds = _patience(self.group, self.device)
        end = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > end:
                raise RuntimeError(f"nothing has come for {seconds:g} s")

    def agree(
        self, problem: Exception | None, alike: dict[str, object], own: Sequence[int]
    ) -> list[list[int]]:
        """Return `own` of all ranks, once all of them have no problem and are `alike`.

        Raises: on every rank where that is not so: this rank's problem, or RuntimeError with those
        of others.
        """
        mine = 0 if problem else int.from_bytes(_digest(alike), "little", signed=True) or 1
        rows = self.gather([mine, *own])
        if all(row[0] == mine for row in rows) and not problem:
            return [row[1:] for row in rows]
        told: list = [None] * self.count
        facts = str(problem) if problem else {k: str(v) for k, v in alike.items()}
        dist.all_gather_object(told, facts, group=self.group)
        if problem:
            raise problem
        failed = [f"rank {r}: {x}" for r, x in enumerate(told) if isinstance(x, str)]
        if failed:
            raise RuntimeError(f"{self.op}: other ranks cannot take part; {'; '.join(failed)}")
        name, groups = next(
            (name, [x[name] for x in told]) for name in alike if len({x[name] for x in told}) > 1
        )
        found = ", ".join(f"{x} on rank {r}" for r, x in enumerate(groups[:8]))
        raise RuntimeError(f"{self.op}: {name} must be the same on all ranks, got {found}")

    def exchange(self, x: Tensor, sent: Sequence[int], due: Sequence[int]) -> "Exchange":
        """Begin to send `sent[r]` elements of x, in one dimension, to rank r; `due[r]` come of it.

        Backends differ in the dtypes that they know: bytes go.
        """
        out, size = x.new_empty(sum(due)), x.element_size()
        if self.count == 1:
            return Exchange(self, x, out, None)
        work = self.done(
            lambda: dist.all_to_all_single(
                out.view(torch.uint8),
                x.view(torch.uint8),
                [n * size for n in due],
                [n * size for n in sent],
                group=self.group,
                async_op=True,
            )
        )
        return Exchange(self, x, out, work)

    def swap(self, x: Tensor, sent: Sequence[int], due: Sequence[int]) -> Tensor:
        """Return what `exchange` brings, this rank's own elements among it."""
        if self.count == 1:
            return x
        return self.exchange(x, sent, due).wait()

    def done(self, collective: Callable):
        """Run a collective; its failure says whose it is."""
        try:
            return collective()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.op}: rank {self.me} of {self.count} lost the others, of which one has "
                f"ended or did not call it within the time-out of the process group: {error}"
            ) from error


class Exchange:
    """Elements on their way; `wait` returns those that have come, rank by rank."""

    def __init__(self, ranks: Ranks, sent: Tensor, out: Tensor, work):
        self._ranks, self._out, self._under_way = ranks, out, (work, sent)

    def wait(self) -> Tensor:
        """Return the elements; on a GPU the stream waits for them and not the caller."""
        work, _ = self._under_way
        if work is not None:
            self._ranks.done(work.wait)
        self._under_way = None, None
        return self._out


def _patience(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that a group's collectives may take."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return group._get_backend(device).options._timeout.total_seconds()
    return dist.distributed_c10d.default_pg_timeout.total_seconds()


def _digest(facts: dict[str, object]) -> bytes:
    return hashlib.sha256(repr(list(facts.items())).encode()).digest()[:8]
