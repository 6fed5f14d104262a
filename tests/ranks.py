"""A group of processes, started once, that run functions sent to all of them.

`group().run("module:function", ...)` calls a function in every rank, of a module in tests/, and
returns what each rank returned. Ranks 0 and 1 alone are a mesh of two, and so on (`mesh`). A group
of its own, to kill a rank of, is `Ranks(2)`; one of two GPUs `Ranks(2, "nccl")`.
"""

import importlib
import os
import pickle  # not as `send` does it, by which tensors go in shared memory
import signal
import tempfile
import traceback
import warnings
from multiprocessing.connection import Client, Listener
from pathlib import Path

TIMEOUT = 60  # seconds, of a collective and of an answer
ROOT = Path(__file__).parent.parent


class Failed(AssertionError):
    """Some ranks raised: `errors` has "Type: message" of each, None of one that did not.

    A rank that has ended has "".
    """

    def __init__(self, errors: list[str | None], text: str):
        super().__init__(text)
        self.errors = errors


class Ranks:
    """`world` processes, forked from one that has imported torch.distributed.tensor and loader."""

    def __init__(self, world: int, backend: str = "gloo", timeout: int = TIMEOUT):
        from conftest import start_python

        self.world, self.in_step, self._timeout = world, True, timeout
        self._folder = tempfile.TemporaryDirectory()
        place = f"{self._folder.name}/socket"
        # Not OMP's: its threads do not live through a fork.
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if backend == "gloo":
            env["CUDA_VISIBLE_DEVICES"] = ""
        code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]}\n"
        given = world, backend, self._folder.name, timeout
        code += f"import torch, ranks; ranks.fork(*{given!r})"
        with Listener(place, backlog=world) as listener:
            self._process = start_python(code, ROOT, env)
            links = [listener.accept() for _ in range(world)]
        self._links = [link for _, link in sorted((link.recv(), link) for link in links)]

    def begin(self, function: str, *args, **named) -> None:
        """Have all ranks begin with a call."""
        for link in self._links:
            link.send_bytes(pickle.dumps((function, args, named)))

    def results(self) -> list:
        """What each rank returns. Raises: Failed where one raises or ends."""
        answers = [self._answer(link) for link in self._links]
        texts = [text for _, _, text in answers]
        if any(error is not None for _, error, _ in answers):
            # Otherwise some may be in a collective that others are not in.
            self.in_step = len({error for _, error, _ in answers}) == 1 and all(texts)
            raise Failed([error for _, error, _ in answers], "\n".join(texts))
        return [result for result, _, _ in answers]

    def _answer(self, link) -> tuple:
        try:
            if not link.poll(self._timeout + 20):
                return None, "no answer", "no answer within the time-out"
            return pickle.loads(link.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None, "", ""

    def run(self, function: str, *args, **named) -> list:
        """Both."""
        self.begin(function, *args, **named)
        return self.results()

    def close(self) -> str:
        """End them. Returns: what they wrote to stderr."""
        for link in self._links:
            link.close()
        said = self._process.communicate(timeout=30)[1]
        self._folder.cleanup()
        return said


_group: Ranks | None = None


def group() -> Ranks:
    """Four ranks, those of the whole session unless they fell out of step."""
    global _group
    if _group is not None and not _group.in_step:
        close()
    _group = _group or Ranks(4)
    return _group


def close() -> None:
    """End the session's group."""
    global _group
    if _group is not None:
        _group.close()
    _group = None


# In the ranks


def fork(world: int, backend: str, folder: str, timeout: int) -> None:
    """Be the parent of all ranks, until they have ended."""
    for once in ("torch._dynamo", "torch.distributed.tensor", "loader"):
        importlib.import_module(once)

    children = []
    for rank in range(world):
        children.append(os.fork())
        if children[-1] == 0:
            serve(rank, world, backend, folder, timeout)
    for child in children:
        os.waitpid(child, 0)


def serve(rank: int, world: int, backend: str, folder: str, timeout: int) -> None:
    """Answer messages until there are no more."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # torch 2.10's of itself, when it writes a checkpoint.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    link = Client(f"{folder}/socket")
    link.send(rank)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            message = link.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            function, args, named = pickle.loads(message)
            module, _, name = function.partition(":")
            found = getattr(importlib.import_module(module), name)(*args, **named)
            answer = pickle.dumps((found, None, ""))
        except BaseException as error:  # as that of a checkpoint is
            said = f"{type(error).__name__}: {error}"
            answer = pickle.dumps((None, said, f"rank {rank}: {traceback.format_exc()}"))
        link.send_bytes(answer)


def mesh(*sizes: int):
    """A mesh of the first ranks; None in a rank that is not in it."""
    import math

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if sizes not in _meshes:
        count = math.prod(sizes)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        _meshes[sizes] = DeviceMesh(
            device, torch.arange(count, device="cpu").view(sizes)
        )  # all ranks make it
    return _meshes[sizes] if dist.get_rank() < math.prod(sizes) else None


_meshes: dict[tuple[int, ...], object] = {}
