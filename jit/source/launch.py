"""A kernel as a Python function: what is passed gets checked, packed and launched.

The way to a launch is short, a few microseconds: converters are made once for a signature, grids
that were seen before are known to be good, and one call of struct packs all arguments.
"""

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence

import torch

from .signature import Parameter

_MOST_THREADS = 1024  # in a block, on all GPUs there are
_GRID, _BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)


class _Arguments:
    """Room for the arguments of one launch: their bytes, and the address of each."""

    def __init__(self, parameters: Sequence[Parameter]):
        code, offsets, at = "=", [], 0
        for parameter in parameters:
            offsets.append(at)
            room = -(-max(parameter.size or 0, 1) // 16) * 16  # each one aligned for any type
            code += f"{parameter.code}{room - (parameter.size or 0)}x"
            at += room
        self._bytes = ctypes.create_string_buffer(at + 16)
        start = -(-ctypes.addressof(self._bytes) // 16) * 16
        self._shift = start - ctypes.addressof(self._bytes)
        self._pack = struct.Struct(code).pack_into
        self._addresses = (ctypes.c_void_p * (len(offsets) + 1))(*(start + o for o in offsets))
        self.address = ctypes.addressof(self._addresses)

    def fill(self, values: Sequence) -> int:
        """Put the values there; the address of their addresses."""
        self._pack(self._bytes, self._shift, *values)
        return self.address


class _Function:
    """The part that CPU and CUDA share: the signature and the checks.

    Attributes:
        name: as it was asked for.
        parameters: one for each parameter of the kernel.
    """

    def __init__(self, name: str, types: Sequence[str] | None, names: Sequence[str]):
        if types is None:
            raise NotImplementedError(
                f'get_function: the types of {name} cannot be told: extern "C" stands in a header; '
                "leave it out there"
            )
        self.name, self._types = name, types
        self._names = names if len(names) == len(types) else [""] * len(types)
        self._free: list[_Arguments] = []
        self._bind(None)

    def _bind(self, sizes: Sequence[int] | None) -> None:
        """Make the parameters; `sizes` are the compiler's, which tell those of structs."""
        known = sizes or [None] * len(self._types)
        self.parameters = [
            Parameter(self.name, i, name, kind, size)
            for i, (name, kind, size) in enumerate(
                zip(self._names, self._types, known, strict=True)
            )
        ]
        for parameter, size in zip(self.parameters, known, strict=True):
            if size is not None and parameter.size != size:
                raise RuntimeError(
                    f"{self.name}: {parameter.label} takes {size} bytes, not the "
                    f"{parameter.size} of {parameter.type}"
                )
        self._converters = [p.convert for p in self.parameters]
        self._pointers = [i for i, p in enumerate(self.parameters) if p.pointer]

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

    def _sizes(self, name: str, given, most: tuple[int, int, int]) -> tuple[int, int, int]:
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

    def _shape(self, grid, block, shared, most_threads: int, why: str) -> tuple[int, ...]:
        """Grid, block and shared bytes, checked."""
        blocks = self._sizes("grid", grid, _GRID)
        threads = self._sizes("block", block, _BLOCK)
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

    def __init__(self, name: str, number: int, types: list[str], library, names: Sequence[str]):
        super().__init__(name, types, names)
        self._number, self._library = number, library
        self._bind(library.sizes(number))

    def __call__(self, *args, grid=1, block, shared: int = 0, stream=None) -> None:
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
        arguments = _Arguments(self.parameters)
        failure = self._library.run(self._number, shape, arguments.fill(values))
        if failure:
            null = [p.label for p, x in zip(self.parameters, args, strict=True) if x is None]
            told = f"; {', '.join(null)} {'are null pointers' if null[1:] else 'is a null pointer'}"
            raise RuntimeError(f"{self.name}: {failure}{told if null else ''}")

    def __repr__(self) -> str:
        """The signature, and where it runs."""
        return f"<{self.signature} on the CPU>"


class _Loaded:
    """A kernel on one device: the driver's handle, its limits, grids that are known to be good."""

    def __init__(self, handle: int, device: int):
        from . import driver

        self.handle, self.device, self.shapes = handle, device, {}
        self.most_threads = driver.attribute(handle, driver.MAX_THREADS)
        self.registers = driver.attribute(handle, driver.REGISTERS)
        self.static_shared = driver.attribute(handle, driver.STATIC_SHARED)
        self.local = driver.attribute(handle, driver.LOCAL)
        facts = torch.cuda.get_device_properties(device)
        self.most_shared = getattr(facts, "shared_memory_per_block_optin", 48 << 10)
        self.allowed = (48 << 10) - self.static_shared  # dynamic shared memory, without asking


class CudaFunction(_Function):
    """A kernel on the GPUs of this machine: `f(out, x, n, grid=..., block=..., shared=...)`."""

    def __init__(
        self,
        name: str,
        symbol: str,
        types: list[str] | None,
        module: Callable[[int], tuple[int, str]],
        names: Sequence[str],
        arch: str,
    ):
        super().__init__(name, types, names)
        self._module, self._arch = module, arch
        self._on: dict[int, _Loaded] = {}
        if torch.cuda.is_available():
            self._load(torch.cuda.current_device())

    def _load(self, index: int) -> _Loaded:
        """The kernel on a device, loaded there."""
        from . import driver

        self._launch, self._again = driver.library().cuLaunchKernel, driver.launch_again
        with torch.cuda.device(index):
            driver.enter()
            loaded = _Loaded(driver.function(*self._module(index)), index)
            if not self._on:
                self._bind(driver.parameter_sizes(loaded.handle))
        self._on[index] = loaded
        return loaded

    def __call__(self, *args, grid=1, block, shared: int = 0, stream=None) -> None:
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
            arguments = self._free.pop()
        except IndexError:
            arguments = _Arguments(self.parameters)
        address = arguments.fill(values)
        if index == torch._C._cuda_getDevice():
            status = self._launch(on.handle, *shape, stream, address, None)
            if status:
                self._again(status, self.name, on.handle, *shape, stream, address, None)
        else:
            with torch.cuda.device(index):
                status = self._launch(on.handle, *shape, stream, address, None)
                if status:
                    self._again(status, self.name, on.handle, *shape, stream, address, None)
        self._free.append(arguments)  # the driver has copied them

    def _new_shape(self, on: _Loaded, grid, block, shared) -> tuple[int, ...]:
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

            with torch.cuda.device(on.device):
                driver.enter()
                driver.allow_shared(on.handle, shared)
            on.allowed = shared
        if len(on.shapes) > 1000:
            on.shapes.clear()
        if not isinstance(grid, list) and not isinstance(block, list):
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

    def _raw(self, stream, index: int) -> int:
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
