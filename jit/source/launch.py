"""A kernel as a Python function: what is passed gets checked, packed and launched.

The way to a launch is short, a few microseconds: converters are made once for a signature, grids
that were seen before are known to be good, and one call of struct packs all arguments.
"""

import contextlib
import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from .signature import Kernel, Parameter

Size = int | Sequence[int]
_MOST_THREADS = 1024  # in a block, on all GPUs there are
_GRID, _BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)
# Attributes of a function, as the driver numbers them: threads in a block, bytes of static shared
# and of local memory, registers.
_ATTRIBUTES, _MOST_DYNAMIC_SHARED = (0, 1, 3, 4), 8


def _room(parameters: Sequence[Parameter]) -> Callable[[Sequence], int]:
    """Return what puts arguments into memory that is its own, and gives their addresses' place."""
    codes = [f"{p.code}{-p.size % 16}x" for p in parameters]  # each one aligned for any type
    packing = struct.Struct("=" + "".join(codes))
    memory = ctypes.create_string_buffer(packing.size + 16)
    start = -ctypes.addressof(memory) % 16
    ends = accumulate((struct.calcsize(f"={code}") for code in codes), initial=start)
    places = [ctypes.addressof(memory) + end for end in ends]
    addresses = (ctypes.c_void_p * len(places))(*places)
    pack, address = packing.pack_into, ctypes.addressof(addresses)

    def fill(values: Sequence, _kept: object = addresses) -> int:
        pack(memory, start, *values)
        return address

    return fill


class _Function:
    """The part that CPU and CUDA share: the signature and the checks.

    Attributes:
        name: as it was asked for.
        parameters: one for each parameter of the kernel.
    """

    def __init__(self, name: str, kernel: Kernel):
        if kernel.types is None:
            raise NotImplementedError(
                f'get_function: the types of {name} cannot be told: extern "C" stands in a header; '
                "leave it out there"
            )
        self.name, self._kernel = name, kernel
        there = len(kernel.types)
        names = kernel.names if len(kernel.names) == there else [""] * there
        known = zip(range(there), names, kernel.types, kernel.sizes, strict=True)
        self.parameters = [Parameter(name, *facts) for facts in known]
        self._converters = [p.convert for p in self.parameters]
        self._pointers = [i for i, p in enumerate(self.parameters) if p.pointer]
        self._free: list[Callable[[Sequence], int]] = []  # room that no launch uses

    @property
    def signature(self) -> str:
        """`conv(float* out, float const* pic, int n)`."""
        return f"{self.name}({', '.join(map(str, self.parameters))})"

    def _values(self, args: tuple) -> list:
        """The arguments as they are packed."""
        if len(args) != len(self._converters):
            raise TypeError(
                f"{self.name} takes {len(self._converters)} arguments, got {len(args)}: "
                f"{self.signature}"
            )
        return [convert(x) for convert, x in zip(self._converters, args, strict=True)]

    def _sizes(self, name: str, given: Any, most: tuple[int, ...]) -> tuple[int, ...]:
        """A grid's or block's three sizes."""
        words = given if isinstance(given, (tuple, list, torch.Size)) else (given,)
        try:
            sizes = tuple(operator.index(word) for word in words)
        except TypeError:
            sizes = ()
        if not 1 <= len(sizes) <= 3:
            raise TypeError(
                f"{self.name}: {name} must be an int or up to three of them, got {given!r:.80}"
            )
        sizes = (*sizes, 1, 1)[:3]
        for axis, size, limit in zip("xyz", sizes, most, strict=True):
            if not 1 <= size <= limit:
                raise ValueError(
                    f"{self.name}: {name}.{axis} must be from 1 to {limit}, got {size} in "
                    f"{given!r:.80}"
                )
        return sizes

    def _shape(
        self, grid: Size, block: Size, shared: int, most_threads: int, why: str
    ) -> tuple[int, ...]:
        """Grid, block and shared bytes, checked."""
        blocks, threads = self._sizes("grid", grid, _GRID), self._sizes("block", block, _BLOCK)
        count = threads[0] * threads[1] * threads[2]
        if count > most_threads:
            raise ValueError(
                f"{self.name}: block must have at most {most_threads} threads{why}, got "
                f"{' x '.join(map(str, threads))} = {count}"
            )
        if not isinstance(shared, int) or shared < 0:
            raise ValueError(f"{self.name}: shared must be bytes, 0 or more, got {shared!r:.80}")
        return (*blocks, *threads, shared)


class CpuFunction(_Function):
    """A kernel that is looped over grid and block by the CPU, for small cases."""

    def __init__(self, name: str, kernel: Kernel, run: Callable):
        super().__init__(name, kernel)
        self._run = run

    def __call__(
        self, *args: Any, grid: Size = 1, block: Size, shared: int = 0, stream: Any = None
    ) -> None:
        """Run the kernel to its end on CPU tensors."""
        values = self._values(args)
        for i in self._pointers:
            if args[i] is not None and args[i].device.type != "cpu":
                raise RuntimeError(
                    f"{self.name}: {self.parameters[i].label} must be on the CPU, for which this "
                    f'module was made, got {args[i].device}; leave out device="cpu"'
                )
        shape = self._shape(grid, block, shared, _MOST_THREADS, "")
        if shared or stream is not None:
            what = "is no shared memory" if shared else "are no streams"
            raise NotImplementedError(f"{self.name}: there {what} on the CPU")
        fill = _room(self.parameters)  # which has to outlive the run
        if failure := self._run(self._kernel.symbol, shape, fill(values)):
            null = [p.label for p, x in zip(self.parameters, args, strict=True) if x is None]
            told = f"; {', '.join(null)} {'are null pointers' if null[1:] else 'is a null pointer'}"
            raise RuntimeError(f"{self.name}: {failure}{told if null else ''}")

    def __repr__(self) -> str:
        """The signature, and where it runs."""
        return f"<{self.signature} on the CPU>"


class _Loaded:
    """A kernel on one device: the driver's handle, its limits, grids that are known to be good."""

    def __init__(self, handle: ctypes.c_void_p, device: int):
        from .driver import ask

        self.handle, self.shapes = handle, dict[tuple, tuple[int, ...]]()
        self.most_threads, self.static_shared, self.local, self.registers = (
            ask("attributes", "cuFuncGetAttribute", which, handle, kind=ctypes.c_int).value
            for which in _ATTRIBUTES  # the first one loads the code onto the device
        )
        facts = torch.cuda.get_device_properties(device)
        self.most_shared = getattr(facts, "shared_memory_per_block_optin", 48 << 10)
        self.allowed = (48 << 10) - self.static_shared  # dynamic shared memory, without asking


class CudaFunction(_Function):
    """A kernel on the GPUs of this machine: `f(out, x, n, grid=..., block=..., shared=...)`.

    `load` gives the driver's handle of it on the device whose index it gets.
    """

    def __init__(self, name: str, kernel: Kernel, load: Callable, arch: str):
        super().__init__(name, kernel)
        self._handle, self._arch = load, arch
        self._on: dict[int, _Loaded] = {}
        if torch.cuda.is_available():
            self._load(torch.cuda.current_device())

    def _load(self, index: int) -> _Loaded:
        """The kernel on a device, loaded there."""
        from . import driver

        self._launch, self._again = driver.library().cuLaunchKernel, driver.launch_again
        with torch.cuda.device(index):
            driver.enter()
            self._on[index] = _Loaded(self._handle(index), index)
        return self._on[index]

    def __call__(
        self, *args: Any, grid: Size = 1, block: Size, shared: int = 0, stream: Any = None
    ) -> None:
        """Launch the kernel on the device of the tensors, in torch's current stream there.

        Args:
            args: one for each parameter: tensors for pointers (None for a null pointer), numbers,
                bytes for a struct.
            grid: blocks, an int or up to three.
            block: threads in a block, an int or up to three.
            shared: bytes of dynamic shared memory.
            stream: another one, a torch.cuda.Stream; what is used there must not be freed before.

        Raises: TypeError, ValueError or RuntimeError, before the launch.
        """
        values = self._values(args)
        index = -1
        for i in self._pointers:
            if args[i] is not None:
                device = args[i].get_device()
                if device != index or device < 0:
                    if index >= 0 or device < 0:
                        raise self._wrong_device(args, i, index)
                    index = device
        if index < 0:
            index = torch.cuda.current_device()
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(*args, grid=grid, block=block, shared=shared, stream=stream)
        on = self._on.get(index) or self._load(index)
        try:
            shape = on.shapes.get((grid, block, shared))
        except TypeError:  # a list
            shape = None
        if shape is None:
            shape = self._new_shape(on, grid, block, shared)
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(index)
        else:
            stream = self._raw(stream, index)
        try:
            fill = self._free.pop()
        except IndexError:
            fill = _room(self.parameters)
        launch = on.handle, *shape, stream, fill(values), None
        if status := self._launch(*launch):
            self._again(status, self.name, *launch)
        self._free.append(fill)  # the driver has copied them

    def _new_shape(self, on: _Loaded, grid: Size, block: Size, shared: int) -> tuple[int, ...]:
        """A grid, block and shared memory of which this function has not heard yet."""
        few = ""
        if on.most_threads < _MOST_THREADS:
            few = f", as it was compiled ({on.registers} registers)"
        shape = self._shape(grid, block, shared, on.most_threads, few)
        if shared + on.static_shared > on.most_shared:
            raise ValueError(
                f"{self.name}: shared must be at most {on.most_shared - on.static_shared} bytes on "
                f"this GPU, beside {on.static_shared} static ones, got {shared}"
            )
        if shared > on.allowed:
            from . import driver

            driver.enter()
            status = driver.library().cuFuncSetAttribute(on.handle, _MOST_DYNAMIC_SHARED, shared)
            driver.check(status, "shared memory")
            on.allowed = shared
        if len(on.shapes) > 1000:
            on.shapes.clear()
        with contextlib.suppress(TypeError):  # a list
            on.shapes[grid, block, shared] = shape
        return shape

    def _wrong_device(self, args: tuple, i: int, index: int) -> RuntimeError:
        parameter, device = self.parameters[i], args[i].device
        name = parameter.name or "x"
        if device.type == "cuda":
            first = next(self.parameters[j].label for j in self._pointers if args[j] is not None)
            return RuntimeError(
                f"{self.name}: {parameter.label} is on {device}, {first} on cuda:{index}; pass "
                f"{name}.to('cuda:{index}')"
            )
        return RuntimeError(
            f"{self.name}: {parameter.label} must be on a CUDA device, got {device}; pass "
            f'{name}.cuda(), or make the module with device="cpu"'
        )

    def _raw(self, stream: Any, index: int) -> int:
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(
                f"{self.name}: stream must be a torch.cuda.Stream, got {type(stream).__name__}"
            )
        if stream.device_index != index:
            raise RuntimeError(
                f"{self.name}: stream is on cuda:{stream.device_index}, the tensors on cuda:{index}"
            )
        return stream.cuda_stream

    def __repr__(self) -> str:
        """The signature, and what the kernel takes of the GPU."""
        for on in self._on.values():
            spilled = f", {on.local} bytes spilled or local" if on.local else ""
            return (
                f"<{self.signature}: {on.registers} registers, {on.static_shared} bytes shared, up "
                f"to {on.most_threads} threads{spilled}, sm_{self._arch}>"
            )
        return f"<{self.signature}: compiled for sm_{self._arch}, not loaded>"
