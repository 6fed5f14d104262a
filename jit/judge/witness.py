"""What runs in a confined process: loads code, calls it as it is told to, and hands out tensors.

A candidate shares this process, and may do with it what it likes. So nothing that is said here is
believed but the tensors, which another process compares; the rest makes a mistake's cause clear.
"""

import contextlib
import copy
import functools
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BuildError
from ..live.guard import Guard
from . import exhibits, heap, seccomp, tamper, tolerance
from .exhibits import Layout, Mapped
from .forms import Form, Source, Unusable
from .gpu import Gpu

_TEXT = 8000  # characters of an error
_LONGEST = 1 << 16  # of one as plain data


class Witness:
    """One role, `candidate` or `reference`, in its process."""

    def __init__(self, role: str, folder: str, known: dict, device: str):
        self._gpu = Gpu(role == "candidate") if device == "cuda" else None
        self._role, self._folder = role, Path(folder)
        self._known = known  # what could be tampered with, as it was before
        self._form: Form | None = None
        self._exact: Callable | None = None
        self._mapped: Mapped | None = None
        self._inputs: list[Tensor] = []
        self._kept: list[list[Tensor]] = []  # results of earlier calls
        self._held: list[Tensor] = []  # what arguments of calls that are timed are made of
        self._timed: list[list[Tensor]] = []  # results of these
        self._guard = Guard(role == "candidate")
        self._types: list[str] = []
        self.files: list[int] = []  # to go with the answer
        if self._gpu:  # where no processor is timed
            heap.keep()

    def wake(self, share: float, files: list[int]) -> dict:
        """Have a GPU, and a share of its memory, before others' code is there; how large it is."""
        if not self._gpu:
            return {"memory": 0}
        try:
            return {"memory": self._gpu.wake(share)}
        except RuntimeError as error:
            raise Unusable(f"no GPU for the process that is to use it: {error}") from None

    def load(self, source: list, text: str | None, classes: list[str]) -> dict:
        """Load the file, the text of which may be given."""
        os.chdir(self._folder)
        where, path = Source(*source), None
        if text is not None:
            path = self._folder / Path(where.path).name
            path.write_text(text)
        self._form = Form(where, tuple(classes), path)
        arguments = self._form.init_inputs() if self._role == "reference" else None
        return {"init": arguments if arguments is None else self._packed(arguments)}

    def make(self, init: Any, seed: int, files: list[int], compiled: bool = False) -> dict:
        """Make the model with its initial arguments."""
        assert self._form
        tensors = exhibits.unpack(init["layout"], files[0], 1 << 40) if files else []
        with torch.no_grad():
            self._form.make(exhibits.unflatten(init["tree"], tensors), seed)
            if self._gpu and isinstance(self._form.function, torch.nn.Module):
                self._form.function.cuda()
            if self._role == "reference":
                self._exact = _doubled(self._form.function)
            if compiled:
                self._form.function = torch.compile(self._form.function)
        return {}

    def inputs(self, name: str, seed: int, files: list[int]) -> dict:
        """Draw arguments."""
        assert self._form
        arguments = self._form.inputs(name, seed)
        if isinstance(arguments, Tensor):
            arguments = (arguments,)
        if not isinstance(arguments, tuple | list):
            raise Unusable(f"{name}() must return a list of arguments, got {type(arguments)!r}")
        return {"arguments": self._packed(list(arguments))}

    def place(self, tree: Any, layout: list, size: int, files: list[int]) -> dict:
        """Map the memory by which arguments come from now on."""
        self._mapped = Mapped(files[0], Layout.read(layout, size))
        self._mapped.guard()
        self._inputs = self._mapped.tensors
        self._tree = tree
        return {}

    def call(self, guarded: bool, keep: bool, seed: int, files: list[int]) -> dict:
        """Call the function with what lies in memory now; its results."""
        assert self._form and self._form.function is not None and self._mapped
        arguments = self._arguments(os.fstat(files[0]).st_size if files else 0)
        torch.manual_seed(seed)
        self._guard = Guard(guarded and self._role == "candidate" and not self._gpu)
        with torch.no_grad(), self._guard:
            result = self._form.function(*arguments)
        outside = self._guard.outside() if guarded else ""
        tree, tensors = self._results(result)
        given, late = tensors, False
        if self._gpu:
            given, late = self._gpu.in_order(tensors)
            outside = self._gpu.outside()
            for mine, x in zip(self._mapped.tensors, self._inputs, strict=True):
                mine.copy_(x)
        info = {
            "outside": outside,
            "late": late,
            "devices": [x.device.type for x in tensors],
            "types": self._types,
            "aliases": self._aliases(tensors),
            "patched": tamper.changed(self._known),
        }
        if keep:
            self._kept.append(tensors)
        return {"results": self._packed(None, tree, given, files)} | info

    def _arguments(self, results: int = 0) -> Any:
        """What lies in memory now, on the device; `results`: bytes that may come of it."""
        assert self._mapped
        if self._gpu:
            self._inputs = self._gpu.take(self._mapped.tensors, results)
        return exhibits.unflatten(self._tree, self._inputs)

    def again(self, number: int, files: list[int]) -> dict:
        """The results of an earlier call, as they are now."""
        return {"results": self._packed(None, {"plain": None}, self._kept[number], files)}

    def exact(self, seed: int, precision: str, closely: bool, files: list[int]) -> dict:
        """The reference's results in float64, and by how much each element may differ."""
        assert self._exact
        arguments = self._arguments()
        torch.manual_seed(seed)
        with contextlib.nullcontext() if self._gpu else heap.kept():
            found = tolerance.bounds(self._exact, arguments, precision, closely)
            tensors = [x for pair in found.pairs for x in pair]
            results = self._packed(None, {"plain": None}, tensors)
        return {"results": results, "rule": found.rule}

    def lock(self, files: list[int]) -> dict:
        """Give up new processes and programs."""
        seccomp.forbid_processes()
        return {}

    def batch(
        self,
        layout: list,
        size: int,
        out: list,
        out_size: int,
        count: int,
        empty: bool,
        files: list[int],
    ) -> dict:
        """Map arguments, call, put the results down; `empty`: the same without the call."""
        one = Layout.read(layout, size)
        first = Mapped(files[0], one.repeated(one.period, count))
        last, narrow = _rows(files[1], out, out_size, count)
        wide = len(first.tensors) // count
        with torch.no_grad():
            for i in range(count):
                tensors = self._one(first.tensors[wide * i : wide * (i + 1)], empty)
                for place, x in zip(last[narrow * i :], tensors, strict=False):
                    place.copy_(x)
        return {}

    def hold(self, layout: list, size: int, files: list[int]) -> dict:
        """Have numbers on the GPU, of which the arguments of calls are made; no clock runs."""
        given, self._timed = Mapped(files[0], Layout.read(layout, size)), []
        self._held = [
            memory.cuda().as_strided(place.shape, place.stride)
            for memory, place in zip(given.memory, given.layout.places, strict=True)
        ]
        for x in self._held:  # so that code of the GPU that the clock needs is there
            exhibits.fingerprint(exhibits.turned(x, 1, 0.5) if x.is_floating_point() else x, 1)
        return {}

    def timed(self, turns: list, seed: int, empty: bool, files: list[int]) -> dict:
        """Call with arguments made of what is held; fingerprints of the results, and times."""
        assert self._gpu
        with torch.no_grad():
            calls = []
            for turn in turns:
                given = [exhibits.turned(x, *how) for x, how in zip(self._held, turn, strict=True)]
                calls.append((functools.partial(self._one, given, empty), given))
            taken = self._gpu.timed(calls)
            self._timed = taken.results
            prints = [[exhibits.fingerprint(x, seed) for x in each] for each in taken.results]
            numbers = [[x.item() for x in each] for each in prints]
        return {"claimed_ms": taken.claimed, "idle_ms": taken.idle, "prints": numbers}

    def fetch(self, which: list[int], out: list, out_size: int, files: list[int]) -> dict:
        """Put the results of these calls down."""
        last, narrow = _rows(files[0], out, out_size, len(which))
        for i, call in enumerate(which):
            for place, x in zip(last[narrow * i :], self._timed[call], strict=False):
                place.copy_(x)
        return {}

    def copying(self, size: int, files: list[int]) -> dict:
        """How long a copy of so many bytes takes on the GPU."""
        assert self._gpu
        return {"ms": self._gpu.copying(size)}

    def _one(self, given: list[Tensor], empty: bool) -> list[Tensor]:
        assert self._form and self._form.function is not None
        if empty:
            return next(iter(self._kept), [])
        return self._results(self._form.function(*exhibits.unflatten(self._tree, given)))[1]

    def _results(self, result: Any) -> tuple[Any, list[Tensor]]:
        tensors: list[Tensor] = []
        try:
            tree = exhibits.flatten(result, tensors)
        except TypeError as error:
            raise TypeError(f"the result is {error}") from None
        self._types = [type(x).__name__ for x in tensors]
        with torch._C.DisableTorchFunctionSubclass():
            return tree, [x.detach() for x in tensors]

    def _packed(
        self,
        value: Any,
        tree: Any = None,
        tensors: list[Tensor] | None = None,
        files: Sequence[int] = (),
    ) -> dict:
        """Put tensors into the file that came along, where they fit, or into one of our own."""
        if tensors is None:
            tensors = []
            try:
                tree = exhibits.flatten(value, tensors)
            except TypeError as error:
                raise Unusable(f"an argument is {error}") from None
        plain = [_plain(x) for x in tensors]
        if files:
            layout = exhibits.put(plain, files[0])
        else:
            layout, file = exhibits.pack(plain)
            self.files.append(file)
        return {"tree": tree, "layout": layout.json()}

    def _aliases(self, tensors: list[Tensor]) -> list[list]:
        """Which results lie in an argument's memory, or in that of an earlier result."""
        found: list[list] = []
        spans = [("input", i, _span(x)) for i, x in enumerate(self._inputs)]
        spans += [("result", i, _span(x)) for i, kept in enumerate(self._kept) for x in kept]
        for number, x in enumerate(tensors):
            first, last = _span(x)
            found += [[number, what, i] for what, i, (a, b) in spans if first < b and a < last]
        return found


def _rows(file: int, out: list, size: int, count: int) -> tuple[list[Tensor], int]:
    """Map the memory for results of so many calls; its tensors, and how many a call has."""
    layout = Layout.read(out, size)
    return Mapped(file, layout.repeated(layout.period, count)).tensors, len(layout.places)


def _plain(x: Tensor) -> Tensor:
    x = x.detach()
    if x.layout is not torch.strided or x.is_quantized:
        raise Unusable(f"a tensor of layout {x.layout} cannot be judged; return a strided one")
    x = x.cpu().resolve_conj().resolve_neg()
    if type(x) is not Tensor:
        x = x.clone().as_subclass(Tensor)
    return x


def _span(x: Tensor) -> tuple[int, int]:
    if not x.numel() or (type(x) is not Tensor and not isinstance(x, torch.nn.Parameter)):
        return 0, 0
    first = x.data_ptr()
    reach = 1 + sum((s - 1) * t for s, t in zip(x.shape, x.stride(), strict=True))
    return first, first + reach * x.element_size()


def _doubled(function: Any) -> Any:
    """The same in float64, with the same weights."""
    if not isinstance(function, torch.nn.Module):
        return function
    with contextlib.suppress(Exception):
        return copy.deepcopy(function).double()
    return function


def live(role: str, folder: str, known: dict, device: str, channel: socket.socket) -> None:
    """Answer orders until the channel is closed."""
    witness = Witness(role, folder, known, device)
    while True:
        data, files, _, _ = socket.recv_fds(channel, 1 << 20, 8)
        if not data:
            return
        order = json.loads(data)
        witness.files = []
        try:
            what = order.pop("do")
            answer = getattr(witness, what)(**order, **({} if what == "load" else {"files": files}))
        except BaseException as error:
            answer = {"error": _told(error), "kind": _kind(error)}
            if isinstance(error, BuildError) and len(json.dumps(error.as_dict())) < _LONGEST:
                answer["build"] = error.as_dict()
        for file in files:
            os.close(file)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        socket.send_fds(channel, [json.dumps(answer).encode()], witness.files)
        for file in witness.files:
            os.close(file)


def _kind(error: BaseException) -> str:
    if isinstance(error, RuntimeError | Unusable) and "out of memory" in str(error):
        return "memory"
    if isinstance(error, Unusable):
        return "unusable"
    if isinstance(error, BuildError):
        return "build"
    if isinstance(error, RuntimeError) and "CUDA error:" in str(error):
        return "lost"  # an assertion on the GPU, or an illegal address: each later call raises too
    return "exited" if isinstance(error, SystemExit) else "raised"


def _told(error: BaseException) -> str:
    if isinstance(error, BuildError | Unusable):
        return str(error)[:_TEXT]
    lines = traceback.format_exception(error)
    left_out = str(Path(__file__).parent), "importlib", "torch/nn/modules/module.py"
    kept = [line for line in lines if not any(part in line for part in left_out)]
    return "".join(kept).strip()[-_TEXT:]


def resumed(role: str, folder: str, device: str, channel: int) -> None:
    """Live as a witness in a Python that was started anew, under a tool that looks on."""
    live(role, folder, tamper.known(), device, socket.socket(fileno=channel))
