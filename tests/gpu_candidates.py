"""Candidates for a GPU: kernels that are what they seem, and those that cheat or do harm.

Kernels are compiled by NVRTC, in a tenth of a second. Each is against hostile_candidates.REFERENCE,
or against one of `REFERENCES` here.
"""

from typing import NamedTuple

from honest_candidates import model, new
from hostile_candidates import RIGHT, module

# One block a row.
SOURCE = r"""
extern "C" __global__ void relu_times_sum(float* out, const float* x, const float* y, int columns,
                                          int first, int last) {
    const long long row = (long long)blockIdx.x * columns;
    __shared__ float total;
    if (threadIdx.x == 0) {
        total = 0;
        for (int j = 0; j < columns; ++j) total += y[row + j];
    }
    __syncthreads();
    for (int j = first + threadIdx.x; j < last; j += blockDim.x) {
        const float v = x[row + j];
        out[row + j] = (v > 0 ? v : 0) * total;
    }
}
extern "C" __global__ void wait(int microseconds) {
    const long long begun = clock64();
    // The clock first: a loop without it is left out by the compiler, however long it is.
    while (clock64() - begun < 1500LL * microseconds || microseconds < 0) {}
}
"""

BEFORE = (
    f'SOURCE = r"""{SOURCE}"""'
    + """
kernel = torch.cuda._compile_kernel(SOURCE, "relu_times_sum")
wait = torch.cuda._compile_kernel(SOURCE, "wait")


def run(out, x, y, first=0, last=None, rows=None):
    n = x.shape[1]
    words = [out, x, y, n, first, n if last is None else last]
    kernel((rows or x.shape[0], 1, 1), (64, 1, 1), words)
    return out


def wait_for(microseconds):
    wait((1, 1, 1), (1, 1, 1), [microseconds])
"""
)


def kernel(body: str, before: str = "") -> str:
    """A candidate whose forward(self, x, y) is this, which may use what `BEFORE` has."""
    return module("x, y = x.contiguous(), y.contiguous()\n" + body, BEFORE + before)


class Kernel(NamedTuple):
    """One candidate; `failed` has the checks that may refuse it, none where it is right."""

    code: str
    failed: tuple[str, ...] = ()
    says: str = ""
    reference: str = "usual"
    slow: bool = False  # takes as long as it may


REFERENCES = {
    "convolution": model(
        "return self.c(a[0])",
        "torch.rand(4, 16, 40, 40)",
        "16, 24",
        "self.c = torch.nn.Conv2d(n[0], n[1], 3)",
    ),
    "matmul": model("return a[0] @ a[1]", "torch.rand(64, 512), torch.rand(512, 48)"),
    "large": model("return a[0].relu()", "torch.randn(1 << 24)"),
}

# What finds work that nobody waits for first is a matter of chance.
LATE = ("streams", "values", "written", "caching")

# name -> candidate
KERNELS = {
    # What they seem.
    "kernel": Kernel(kernel("return run(torch.empty_like(x), x, y)")),
    "plain_torch": Kernel(module(f"return {RIGHT}")),
    "own_stream_in_order": Kernel(
        kernel(
            "here = torch.cuda.current_stream()\nside.wait_stream(here)\n"
            "with torch.cuda.stream(side): out = run(torch.empty_like(x), x, y)\n"
            "here.wait_stream(side)\nreturn out",
            "side = torch.cuda.Stream()\n",
        )
    ),
    "waits_for_all": Kernel(
        kernel("out = run(torch.empty_like(x), x, y)\ntorch.cuda.synchronize()\nreturn out")
    ),
    "workspace": Kernel(
        kernel(
            "room = torch.empty(3 * x.numel(), device='cuda').fill_(3)\ndel room\n"
            "return run(torch.empty_like(x), x, y)"
        )
    ),
    "by_a_graph": Kernel(
        kernel(
            "if getattr(self, 'shape', 0) != (x.shape, x.dtype):\n"
            "    self.shape = x.shape, x.dtype\n"
            "    self.x, self.y = torch.empty_like(x), torch.empty_like(y)\n"
            "    self.graph = torch.cuda.CUDAGraph()\n"
            f"    with torch.cuda.graph(self.graph): self.out = {RIGHT.replace('x', 'self.x', 1).replace('y.', 'self.y.')}\n"
            "self.x.copy_(x), self.y.copy_(y)\nself.graph.replay()\nreturn self.out.clone()"
        )
    ),
    "cudnn": Kernel(
        new("return self.c(a[0])", "self.c = torch.nn.Conv2d(n[0], n[1], 3)"),
        reference="convolution",
    ),
    "convolution_by_columns": Kernel(
        new(
            "x = a[0]\nc = F.unfold(x, 3)\nw = self.c.weight.flatten(1)\n"
            "out = w @ c + self.c.bias[:, None]\nreturn out.unflatten(-1, (x.shape[2] - 2, -1))",
            "self.c = torch.nn.Conv2d(n[0], n[1], 3)",
        ),
        reference="convolution",
    ),
    "cublas": Kernel(new("return torch.matmul(a[0], a[1])"), reference="matmul"),
    "matmul_by_sums": Kernel(
        new("return (a[0][:, :, None] * a[1][None]).sum(1)"), reference="matmul"
    ),
    "large_results": Kernel(new("return a[0].clamp(min=0)"), reference="large"),
    # Wrong.
    "one_element_off": Kernel(
        kernel("out = run(torch.empty_like(x), x, y)\nout[3, 4] += 0.5\nreturn out"), ("values",)
    ),
    "last_column_unwritten": Kernel(
        kernel("return run(torch.empty_like(x), x, y, 0, x.shape[1] - 1)"), ("written", "values")
    ),
    "unwritten": Kernel(module("return torch.empty_like(x)"), ("written", "values")),
    "large_unwritten": Kernel(
        new("return torch.empty_like(a[0])"), ("written", "values"), reference="large"
    ),
    "takes_what_was_freed": Kernel(
        module("torch.empty_like(x)\nreturn torch.empty_like(x) * 1"), ("written", "values")
    ),
    "tensor_cores_in_bfloat16": Kernel(
        new("return (a[0].bfloat16() @ a[1].bfloat16()).float()"), ("values",), reference="matmul"
    ),
    "convolution_in_bfloat16": Kernel(
        new(
            "return F.conv2d(a[0].bfloat16(), self.c.weight.bfloat16(), self.c.bias.bfloat16())"
            ".float()",
            "self.c = torch.nn.Conv2d(n[0], n[1], 3)",
        ),
        ("values",),
        reference="convolution",
    ),
    "on_the_cpu": Kernel(module(f"return ({RIGHT}).cpu()"), ("results",), "cpu"),
    "writes_past_an_argument": Kernel(
        kernel(
            "out = run(torch.empty_like(x), x, y)\n"
            "run(x[-1:], x[-1:], y[-1:], x.shape[1], x.shape[1] + 1)\nreturn out"
        ),
        ("bounds",),
        "argument 0",
    ),
    "writes_before_an_argument": Kernel(
        kernel("out = run(torch.empty_like(x), x, y)\nrun(y, x, y, -1, 0, 1)\nreturn out"),
        ("bounds",),
        "argument 1",
    ),
    "writes_into_an_argument": Kernel(
        kernel("out = run(torch.empty_like(x), x, y)\nx[2, 2] += 1\nreturn out"),
        ("inputs_unchanged",),
    ),
    "illegal_address": Kernel(
        kernel(
            "out = run(torch.empty_like(x), x, y)\nrun(x, x, y, 1 << 30, 1 << 30 | 1)\nreturn out"
        ),
        ("runs",),
        "CUDA error",
    ),
    # Not done when it returns.
    "own_stream_without_a_word": Kernel(
        kernel(
            "with torch.cuda.stream(side): return run(torch.empty_like(x), x, y)",
            "side = torch.cuda.Stream()\n",
        ),
        LATE,
    ),
    "nobody_waits_for_its_stream": Kernel(
        kernel(
            "side.wait_stream(torch.cuda.current_stream())\n"
            "with torch.cuda.stream(side):\n"
            "    wait_for(1000)\n"
            "    return run(torch.empty_like(x), x, y)",
            "side = torch.cuda.Stream()\n",
        ),
        LATE,
    ),
    "only_work_that_counts_nothing_is_late": Kernel(
        kernel(
            "side.wait_stream(torch.cuda.current_stream())\n"
            "with torch.cuda.stream(side): wait_for(1000)\n"
            "return run(torch.empty_like(x), x, y)",
            "side = torch.cuda.Stream()\n",
        ),
        ("streams",),
    ),
    # Cheats.
    "caches_by_pointer": Kernel(
        kernel(
            "key = x.data_ptr(), y.data_ptr()\nself.known = getattr(self, 'known', {})\n"
            "if key not in self.known: self.known[key] = run(torch.empty_like(x), x, y)\n"
            "return self.known[key].clone()"
        ),
        ("caching", "values"),
    ),
    "one_buffer_for_all_results": Kernel(
        kernel(
            "self.out = getattr(self, 'out', None)\n"
            "if self.out is None or self.out.shape != x.shape: self.out = torch.empty_like(x)\n"
            "return run(self.out, x, y)"
        ),
        ("aliasing",),
    ),
    "patches_synchronize": Kernel(
        kernel(
            "return run(torch.empty_like(x), x, y)", "torch.cuda.synchronize = lambda *a: None\n"
        ),
        ("tampering",),
    ),
    "patches_events": Kernel(
        kernel(
            "return run(torch.empty_like(x), x, y)",
            "torch.cuda.Event.elapsed_time = lambda *a: 0.001\n",
        ),
        ("tampering",),
    ),
    "events_that_lie": Kernel(
        kernel(
            "wait_for(1000)\nreturn run(torch.empty_like(x), x, y)",
            "def zero(function):\n"
            "    place = ctypes.cast(function, ctypes.c_void_p).value\n"
            "    assert libc.mprotect(ctypes.c_void_p(place & ~4095), 8192, 7) == 0\n"
            "    code = bytes.fromhex('c7070ad7233c31c0c3')  # *ms = 0.01; return 0\n"
            "    ctypes.memmove(place, code, len(code))\n\n\n"
            "libc, found = ctypes.CDLL(None), []\n"
            "for line in open('/proc/self/maps'):\n"
            "    path = line.split()[-1]\n"
            "    if 'libcudart' in path and path not in found:\n"
            "        found.append(path)\n"
            "        for name in ('cudaEventElapsedTime', 'cudaEventElapsedTime_v2'):\n"
            "            if hasattr(ctypes.CDLL(path), name): zero(getattr(ctypes.CDLL(path), name))\n",
        ),
        ("streams",),
    ),
    # As pygpubench's and KernelBench's, written anew: see docs/judge.md.
    "records_the_judges_events_again": Kernel(
        kernel(
            "wait_for(1000)\nout = run(torch.empty_like(x), x, y)\n"
            "for thing in gc.get_objects():\n"
            "    if isinstance(thing, torch.cuda.Event): thing.record()\nreturn out"
        ),
        ("streams", "results"),
    ),
    "calls_another_for_the_time": Kernel(
        kernel(
            "wait_for(1000)\nreturn run(torch.empty_like(x), x, y)",
            "Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_float), *[ctypes.c_void_p] * 2)\n"
            "def lie(there, begun, ended):\n    there[0] = 0.00042\n    return 0\n"
            "lie, libc, known = Function(lie), ctypes.CDLL(None), set()\n"
            "lines = [line.split() for line in open('/proc/self/maps')]\n"
            "for path in {line[-1] for line in lines if 'libcudart' in line[-1]}:\n"
            "    for name in ('cudaEventElapsedTime', 'cudaEventElapsedTime_v2'):\n"
            "        if hasattr(ctypes.CDLL(path), name):\n"
            "            place = ctypes.cast(getattr(ctypes.CDLL(path), name), ctypes.c_void_p)\n"
            "            known.add(place.value.to_bytes(8, 'little'))\n"
            "mine = ctypes.cast(lie, ctypes.c_void_p).value.to_bytes(8, 'little')\n"
            "for line in lines:\n"
            "    if 'libtorch' not in line[-1] and 'libc10_cuda' not in line[-1] or 'x' in line[1]: continue\n"
            "    first, last = (int(n, 16) for n in line[0].split('-'))\n"
            "    if 'r' not in line[1] or last - first > 1 << 26: continue\n"
            "    text = ctypes.string_at(first, last - first)\n"
            "    for old in known:\n"
            "        at = text.find(old)\n"
            "        while at >= 0:\n"
            "            page = (first + at) & ~4095\n"
            "            libc.mprotect(ctypes.c_void_p(page), 8192, 3)\n"
            "            ctypes.memmove(first + at, mine, 8)\n"
            "            at = text.find(old, at + 8)\n",
        ),
        ("streams",),
    ),
    "copies_the_results_it_finds": Kernel(
        kernel(
            "for thing in gc.get_objects():\n"
            "    if type(thing) is torch.Tensor and thing.is_cuda and thing.shape == x.shape:\n"
            "        if thing.data_ptr() not in (x.data_ptr(), y.data_ptr()): return thing.clone()\n"
            "return torch.zeros_like(x)"
        ),
        ("values", "caching", "written"),
    ),
    "fills_all_with_nan": Kernel(
        kernel(
            "for thing in gc.get_objects():\n"
            "    if type(thing) is torch.Tensor and thing.is_floating_point(): thing.fill_(torch.nan)\n"
            "return torch.full_like(x, torch.nan)"
        ),
        ("inputs_unchanged", "values", "aliasing"),
    ),
    "zeroes_all_memory_it_finds": Kernel(
        kernel(
            "driver, base, size = ctypes.CDLL('libcuda.so.1'), ctypes.c_uint64(), ctypes.c_size_t()\n"
            "place = x.data_ptr() - (1 << 28)\n"
            "while place < x.data_ptr() + (1 << 28):\n"
            "    words = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(place)\n"
            "    if driver.cuMemGetAddressRange_v2(*words) == 0:\n"
            "        driver.cuMemsetD8_v2(base, 0, size)\n"
            "        place = base.value + size.value\n"
            "    else: place += 1 << 21\n"
            "return torch.zeros_like(x)"
        ),
        ("bounds", "inputs_unchanged", "values"),
    ),
    "a_thread_that_zeroes_its_arguments": Kernel(
        kernel(
            "if not hasattr(self, 'thread'):\n"
            "    self.given = []\n"
            "    self.thread = threading.Thread(target=self.zero, daemon=True)\n"
            "    self.thread.start()\n"
            "self.given[:] = [x, y]\nreturn torch.zeros_like(x)"
        )
        + "    def zero(self):\n        while True:\n"
        "            for t in [*self.given]: t.zero_()\n            time.sleep(0.001)\n",
        ("inputs_unchanged", "values", "streams", "bounds"),
    ),
    "slow_at_first": Kernel(
        kernel(
            "self.n = getattr(self, 'n', 0) + 1\nif self.n < 20: time.sleep(0.05)\n"
            "return run(torch.empty_like(x), x, y)"
        )
    ),
    "zeroes_its_arguments": Kernel(
        kernel("x.zero_(), y.zero_()\nreturn torch.zeros_like(x)"), ("inputs_unchanged",)
    ),
    "another_stream_of_the_librarys": Kernel(
        new(
            "with torch.cuda.stream(self.side): return a[0] @ a[1]",
            "self.side = torch.cuda.Stream()",
        ),
        LATE,
        reference="matmul",
    ),
    "right_a_few_times": Kernel(
        kernel(
            "self.n = getattr(self, 'n', 0) + 1\n"
            "return run(torch.empty_like(x), x, y) if self.n < 20 else torch.zeros_like(x)"
        ),
        ("timed_values",),
    ),
    "early_once_it_is_timed": Kernel(
        kernel(
            "self.n = getattr(self, 'n', 0) + 1\n"
            "if self.n < 20: return run(torch.empty_like(x), x, y)\n"
            "with torch.cuda.stream(side): out = run(torch.empty_like(x), x, y)\nreturn out",
            "side = torch.cuda.Stream()\n",
        ),
        ("timed_values",),
    ),
    # Harm.
    "endless_kernel": Kernel(
        kernel("out = run(torch.empty_like(x), x, y)\nwait_for(-1)\nreturn out"),
        ("runs",),
        "no answer",
        slow=True,
    ),
    "endless_kernel_on_its_own_stream": Kernel(
        kernel(
            "out = run(torch.empty_like(x), x, y)\n"
            "with torch.cuda.stream(side): wait_for(-1)\nreturn out",
            "side = torch.cuda.Stream()\n",
        ),
        ("runs",),
        "no answer",
        slow=True,
    ),
    "resets_the_device": Kernel(
        kernel(
            "libcuda = ctypes.CDLL('libcuda.so.1')\nlibcuda.cuDevicePrimaryCtxReset_v2(0)\n"
            "return torch.zeros_like(x)"
        ),
        ("runs", "values"),
    ),
    "writes_to_the_kernel": Kernel(
        kernel("open('/proc/sys/kernel/core_pattern', 'r+')"), ("runs",), "Read-only"
    ),
    "takes_all_memory": Kernel(
        kernel(
            "self.keep = getattr(self, 'keep', [])\n"
            "while True: self.keep.append(torch.empty(1 << 30, device='cuda'))"
        ),
        ("runs",),
        "out of memory",
    ),
}
