"""`loader.accelerate_torch()`: torch's own grid_sample on this library's kernels.

`F.grid_sample` ends in a few operators of torch's, `aten::grid_sampler_2d` and so on, and whoever
samples a grid calls these: kornia, spatial transformers, compiled code. For the CPU, and for CUDA
where the build is for it, they get other kernels (include/grid_sample_aten.h), below autograd, so
that all above it stays torch's: derivatives, autocast, fake tensors, vmap. What our kernels refuse
they hand to torch's.

torch's dispatcher keeps the kernels of one operator in a list, of which the first is called, and
takes one out again at any time; so leaving restores what was there.
"""

import ctypes
import functools
import os
import threading

import torch
from torch.utils._python_dispatch import _disable_current_modes

from loader.jit.extension.torchs import accelerate_extensions
from loader.jit.live import swap
from loader.jit.operators.frame import library

from . import grid_sample_compile

__all__ = ["accelerate_torch"]  # a public name of loader's


class Acceleration:
    """torch's grid_sample runs on this library's kernels: from the call on, until `close()`.

    Usable in a `with` block, whose end closes it. While several are open, that of the last one
    counts.

    Attributes:
        devices: the types of device this holds for; () once closed.
    """

    def __init__(self, extensions: bool = False):
        self._open, self._wants_extensions, self._extensions = False, extensions, None
        self.__enter__()

    def __enter__(self):
        """Itself; opened again if it was closed."""
        with _kernels.lock:
            if not self._open:
                _kernels.acquire()
                if self._wants_extensions:
                    self._extensions = accelerate_extensions()
                self._open = True
        return self

    def __exit__(self, *error) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """End it; where it was the only one, all is as torch made it."""
        with _kernels.lock:
            if self._open:
                self._open = False
                if self._extensions:
                    self._extensions.close()
                _kernels.release()

    @property
    def devices(self) -> tuple[str, ...]:
        """`("cpu",)` or `("cpu", "cuda")`: what the build has kernels for."""
        return ("cpu", "cuda")[: len(_kernels.handles)] if self._open else ()

    def __repr__(self) -> str:
        """The devices, or that it is closed."""
        return f"<loader.accelerate_torch: {', '.join(self.devices) or 'closed'}>"


class _Kernels:
    """Our kernels in torch's dispatcher, as long as anybody wants them there."""

    def __init__(self):
        self.users, self.handles = 0, []
        self.unlock()
        os.register_at_fork(after_in_child=self.unlock)  # a thread that held it is not there

    def unlock(self) -> None:
        self.lock = threading.RLock()

    def acquire(self) -> None:
        if not self.users:
            self.handles = self._register()
            grid_sample_compile.begin()
        self.users += 1

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            grid_sample_compile.end()
            handles, self.handles = self.handles, []
            _withdraw(handles)

    def renew(self) -> None:
        """Take the kernels from the library that is in use now, since an edit changed it."""
        if self.users:
            before, self.handles = self.handles, self._register()
            _withdraw(before)

    def _register(self) -> list[int]:
        library("grid_sample")
        return torch.ops.octet.grid_sample_replace_aten(_takes_cubic_volumes())


@functools.cache  # asked first while the kernels in the dispatcher are torch's
def _takes_cubic_volumes() -> bool:
    """True if F.grid_sample samples volumes bicubically, as it does from torch 2.15 on."""
    with _disable_current_modes():
        volume, grid = (torch.zeros(1, 1, 1, 1, n, device="cpu") for n in (1, 3))
        try:
            torch.grid_sampler_3d(volume, grid, 2, 0, False)
        except RuntimeError:
            return False
    return True


def _withdraw(handles: list[int]) -> None:
    remove = ctypes.PyDLL("libtorch_cpu.so").aoti_torch_delete_library_object
    for handle in handles:
        remove(ctypes.c_void_p(handle))


_kernels = _Kernels()


def accelerate_torch(extensions: bool = False) -> Acceleration:
    """Have PyTorch's own `F.grid_sample` run on the kernels of `loader.grid_sample`.

        with loader.accelerate_torch():
            out = kornia.geometry.warp_perspective(image, homography, (height, width))

    or once for the whole process, without `with`; `close()` of what comes back ends that. In
    between every caller of `aten::grid_sampler_2d`, `_3d` and their backwards gets them, on the
    CPU, and on CUDA devices where the build is for those: models as they stand, under autograd,
    autocast, `torch.func` and `torch.compile`. Results differ from torch's by rounding, and where
    torch's are wrong (`loader.grid_sample` says where). Arguments that `loader.grid_sample` or this
    torch refuses, and an input and a grid of two dtypes, reach torch's own kernels, with its
    results and errors. `torch.use_deterministic_algorithms(True)` is heeded, and on CUDA raises no
    longer.

    It holds for the whole process, all its threads, and processes forked from it; begin and end it
    while no other thread samples. A function compiled before is compiled once more at its first
    call in between; after the end it is what it was. That is by a guard on `F.grid_sample`: a
    function that itself calls `torch.grid_sampler` or `torch.ops.aten` keeps what it was compiled
    to, until `torch.compiler.reset()`.

    With `extensions` torch's `load`, `load_inline` and `BuildExtension` are loader's as well, which
    `accelerate_extensions()` does alone.

    Returns: an `Acceleration`, to be closed by `with` or by `close()`; without either it holds
        until the process ends.

    Raises: loader.BuildError, the kernels could not be compiled; torch is as it was then.
    """
    return Acceleration(extensions)


def _renew() -> None:
    with _kernels.lock:
        _kernels.renew()


swap.FOLLOWERS.append(_renew)
