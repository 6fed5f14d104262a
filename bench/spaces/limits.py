"""How fast the device does what it cannot do without: arithmetic, and handing out sectors.

Measured in the run itself. Memory is not among these: a copy of as many bytes stands beside each
case.
"""

from functools import partial

import torch

import harness
import loader
from spaces import SECTOR, Task

_KERNELS = """
template <typename T> __global__ void multiply_add(T* out, int rounds) {
    T x[8];
    for (int i = 0; i < 8; ++i) x[i] = T(threadIdx.x + i);
    for (int r = 0; r < rounds; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = x[i] * T(0.999) + T(0.001);
    T sum = 0;
    for (int i = 0; i < 8; ++i) sum += x[i];
    if (sum == T(-1)) out[0] = sum;
}
__global__ void gather(unsigned* out, const unsigned* table, unsigned mask, int rounds) {
    unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) * 2654435761u, sum = 0;
    for (int r = 0; r < rounds; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            at = at * 1664525u + 1013904223u;
            sum += __ldcg(table + 8 * (at >> 8 & mask));
        }
    if (sum == 1) out[0] = sum;
}
__global__ void touch(unsigned* out, const uint4* all, int apart) {
    const unsigned first = blockIdx.x * blockDim.x * 8 + threadIdx.x;
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += __ldcg(all + (first + i * blockDim.x) * apart).x;
    if (sum == 1) out[0] = sum;
}
"""
_BLOCK, _ROUNDS = 256, 256


class Limits:
    """Operations in a microsecond of float32 and of float64, and sectors on a GPU.

    `line`: bytes that memory hands out at least: sectors so far apart take as long as all.
    """

    def __init__(self, timer: harness.Timer):
        self.flops, self.sectors, self.line = {}, None, 64
        if timer.device.type == "cpu":
            for dtype in (torch.float32, torch.float64):
                a = torch.rand(512, 512, dtype=dtype)
                us = timer({"product": lambda a=a: a @ a})["product"]["median"]
                self.flops[dtype] = 2 * 512**3 / us
            return
        grid = 8 * torch.cuda.get_device_properties(timer.device).multi_processor_count
        module, launch = loader.source_module(_KERNELS), {"grid": grid, "block": _BLOCK}
        per_launch = 8 * grid * _BLOCK * _ROUNDS
        for dtype, name in ((torch.float32, "float"), (torch.float64, "double")):
            out = torch.empty(1, dtype=dtype, device=timer.device)
            run = module.get_function(f"multiply_add<{name}>")
            us = self._median(timer, lambda run=run, out=out: run(out, _ROUNDS, **launch))
            self.flops[dtype] = 2 * per_launch / us
        table = torch.zeros(1 << 24, dtype=torch.uint8, device=timer.device).view(torch.uint32)
        out, mask = torch.empty_like(table[:1]), table.nbytes // SECTOR - 1
        us = self._median(timer, lambda: module.gather(out, table, mask, _ROUNDS, **launch))
        self.sectors = per_launch / us
        every = {}
        all_of_it = torch.zeros(1 << 29, dtype=torch.uint8, device=timer.device).view(torch.uint32)
        for line in (SECTOR, 2 * SECTOR, 4 * SECTOR):
            blocks, apart = all_of_it.nbytes // (8 * _BLOCK * line), line // 16
            launch = {"grid": blocks, "block": _BLOCK}
            touch = partial(module.touch, out, all_of_it, apart, **launch)
            every[line] = self._median(timer, touch)
        self.line = max(line for line, us in every.items() if us > 0.8 * every[SECTOR])

    @staticmethod
    def _median(timer, run) -> float:
        return timer({"run": run})["run"]["median"]

    def __str__(self):
        """All of them."""
        text = ", ".join(f"{str(k)[6:]} {v / 1e6:.3g} Tflop/s" for k, v in self.flops.items())
        if self.sectors:
            text += f", L2 {SECTOR * self.sectors / 1e6:.3g} TB/s"
        return text + f", memory in lines of {self.line} bytes"

    def of(self, task: Task, dtype: str, copy_us: float) -> tuple[float, str]:
        """Return the least time that a task can take, and what binds it."""
        wide = torch.float64 if dtype == "float64" else torch.float32
        us = {"bytes": copy_us, "flops": task.flops / self.flops[wide]}
        if self.sectors:
            us["sectors"] = task.sectors / self.sectors
        binds = max(us, key=us.get)
        return us[binds], binds
