"""Kernels from a string on GPUs."""

import threading

import kernel_strings
import pytest
import torch
from kernel_strings import SETTINGS, SOURCE

import loader
from loader.jit.source import driver

cache = kernel_strings.cache  # fixtures
pytestmark = pytest.mark.usefixtures("cache")


class Counting:
    """A library whose calls are noted."""

    def __init__(self, library):
        self.library, self.calls = library, []

    def __getattr__(self, name):
        function = getattr(self.library, name)
        return lambda *arguments: self.calls.append(name) or function(*arguments)


@pytest.mark.cuda
def test_a_launch_is_one_call_of_the_driver(monkeypatch):
    """What it takes the host is told by `python -m loader bench source_module`."""
    counting = Counting(driver.library())
    monkeypatch.setattr(driver, "library", lambda: counting)
    scale = loader.source_module(SOURCE, device="cuda", **SETTINGS).get_function("scale")
    x = torch.rand(64, device="cuda")
    out = torch.empty_like(x)
    scale(out, x, 2.0, 64, grid=1, block=64)
    assert "cuFuncGetAttribute" in counting.calls
    counting.calls.clear()
    for _ in range(100):
        scale(out, x, 2.0, 64, grid=1, block=64)
    assert counting.calls == ["cuLaunchKernel"] * 100
    assert torch.equal(out, 2 * x + 0.5)


@pytest.mark.cuda
def test_what_a_function_shows_on_a_gpu():
    mod = loader.source_module(SOURCE, device="cuda", **SETTINGS)
    scale = mod.get_function("scale")
    major, minor = torch.cuda.get_device_capability()
    assert " registers, 0 bytes shared, up to 256 threads" in repr(scale)
    assert repr(scale).endswith(f"sm_{major}{minor}>")
    x = torch.rand(64, device="cuda")
    with pytest.raises(ValueError, match="block must have at most 256 threads"):
        scale(x, x, 1.0, 1, grid=1, block=257)
    with pytest.raises(RuntimeError, match=r"x must be on a CUDA device, got cpu; pass x.cuda\(\)"):
        scale(x, x.cpu(), 1.0, 1, grid=1, block=1)


@pytest.mark.cuda
def test_shared_memory_of_all_sizes():
    mod = loader.source_module(
        """
        extern __shared__ float room[];
        __global__ void turn(float* out, const float* x, int n) {
            for (int i = threadIdx.x; i < n; i += blockDim.x) room[n - 1 - i] = x[i];
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = room[i];
        }
        """
    )
    turn = mod.get_function("turn")
    most = torch.cuda.get_device_properties().shared_memory_per_block_optin
    for size in (100, 12 << 10, most // 4, 200):  # floats: below and above 48 KiB
        x = torch.rand(size, device="cuda")
        out = torch.empty_like(x)
        turn(out, x, size, grid=1, block=256, shared=4 * size)
        assert torch.equal(out, x.flip(0))
    with pytest.raises(ValueError, match=f"shared must be at most {most} bytes on this GPU"):
        turn(out, x, size, grid=1, block=256, shared=most + 4)


@pytest.mark.cuda
def test_sixteen_bit_types():
    mod = loader.source_module(
        """
        #include <cuda_fp16.h>
        #include <cuda_bf16.h>
        __global__ void f(__half* a, __nv_bfloat16* b, __half c, __nv_bfloat16 d) {
            a[threadIdx.x] = __float2half(2.f * __half2float(a[threadIdx.x]) + __half2float(c));
            b[threadIdx.x] = __float2bfloat16(__bfloat162float(b[threadIdx.x]) + __bfloat162float(d));
        }
        """
    )
    a, b = (
        torch.ones(4, dtype=torch.float16, device="cuda"),
        torch.ones(4, dtype=torch.bfloat16, device="cuda"),
    )
    mod.get_function("f")(a, b, 0.5, 1.5, grid=1, block=4)
    assert a.tolist() == [2.5] * 4 and b.tolist() == [2.5] * 4


@pytest.mark.cuda
def test_streams_and_graphs():
    """The current stream, one that is named, and one that is being captured."""
    scale = loader.source_module(SOURCE, device="cuda", **SETTINGS).get_function("scale")
    x, out = torch.rand(1000, device="cuda"), torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.add_(1)
        scale(out, x, 2.0, 1000, grid=4, block=256)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, 2 * x + 0.5)
    scale(out, x, 4.0, 1000, grid=4, block=256, stream=side)
    side.synchronize()
    assert torch.equal(out, 4 * x + 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(out, x, 8.0, 1000, grid=4, block=256)
    x.add_(1)
    graph.replay()
    assert torch.equal(out, 8 * x + 0.5)


@pytest.mark.cuda
def test_a_new_thread_may_launch():
    """It has no context of its own at first."""
    scale = loader.source_module(SOURCE, device="cuda", **SETTINGS).get_function("scale")
    x, out, failed = torch.rand(1000, device="cuda"), torch.zeros(1000, device="cuda"), []

    def work():
        try:
            scale(out, x, 2.0, 1000, grid=4, block=256)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed and torch.equal(out, 2 * x + 0.5)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_is_used():
    scale = loader.source_module(SOURCE, device="cuda", **SETTINGS).get_function("scale")
    for index in (1, 0, 1):
        x = torch.rand(1000, device=f"cuda:{index}")
        out = torch.empty_like(x)
        scale(out, x, 2.0, 1000, grid=4, block=256)
        assert torch.equal(out, 2 * x + 0.5) and torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match=r"x is on cuda:0, out on cuda:1; pass x.to\('cuda:1'\)"):
        scale(out, x.to("cuda:0"), 2.0, 1000, grid=4, block=256)
    with pytest.raises(RuntimeError, match="stream is on cuda:0, the tensors on cuda:1"):
        scale(out, x, 2.0, 1000, grid=4, block=256, stream=torch.cuda.Stream("cuda:0"))


@pytest.mark.cuda
def test_a_kernel_within_an_autograd_function():
    scale = loader.source_module(SOURCE, device="cuda", **SETTINGS).get_function("scale")

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.empty_like(x)
            scale(out, x, 3.0, x.numel(), grid=1, block=256)
            return out

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    x = torch.rand(200, device="cuda", requires_grad=True)
    Scale.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
