"""Kernels from a string compiled for GPUs that need not be there: names, types, packed arguments."""

import ctypes
import struct
from types import SimpleNamespace

import kernel_strings
import pytest
import torch
from kernel_strings import SETTINGS, SOURCE

import loader
from loader.jit.source import signature
from loader.jit.source import text as kernel_text
from loader.jit.source.constants import SCALARS
from loader.jit.source.launch import CudaFunction
from loader.jit.source.signature import Kernel

cache, for_gpu = kernel_strings.cache, kernel_strings.for_gpu  # fixtures
pytestmark = pytest.mark.usefixtures("cache")

X = torch.rand(64)


# Compiling for a GPU needs none


def test_types_come_from_the_compiler(for_gpu):
    assert for_gpu.kernels == ["count", "math::fill", "scale"]
    assert repr(for_gpu.get_function("count")).startswith(
        "<count(int* bins, unsigned char const* x, long long n)"
    )
    power = for_gpu.get_function("power<double, 5>")
    assert "power<double, 5>(double* out, double const* x, Pair p)" in repr(power)
    other = loader.source_module(SOURCE, arch="8.0", device="cuda", **{**SETTINGS, "RADIUS": 1})
    assert "fill(float* out)" in repr(other.get_function("fill"))
    assert repr(other).startswith(
        "<source_module for sm_80, FLAG=true, OFFSET=0.5f, RADIUS=1, SHARE"
    )


@pytest.mark.parametrize(
    "source",
    [
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n__global__ void f(__half* a, __nv_bfloat16* b) {}",
        "#include <cstdint>\n#include <math.h>\n__global__ void f(int64_t* a, float* b) { b[0] = M_PI * INFINITY; }",
        "float twice(float x) { return 2 * x; }\n__global__ void f(float* a, float* b) { *a = twice(*b); }",
        "#define KERNEL extern \"C\" __global__ void\nKERNEL f(float* a, float* b) {}",
    ],
)  # fmt: skip
def test_sources_as_people_write_them(source):
    """Helper functions without __device__, headers that nvcc has, kernels behind a macro."""
    pytest.importorskip("cuda.bindings.nvrtc")
    function = loader.source_module(source, arch="9.0", device="cuda").get_function("f")
    assert [parameter.pointer for parameter in function.parameters] == [True, True]


def test_an_architecture_newer_than_the_compiler_gets_ptx():
    pytest.importorskip("cuda.bindings.nvrtc")
    mod = loader.source_module("__global__ void f(int* x) {}", arch="99.0", device="cuda")
    assert mod.kernels == ["f"]
    assert mod._build.code.startswith(b"//")


def test_the_driver_is_needed_for_a_launch_only(for_gpu, monkeypatch):
    from loader.jit.source import driver

    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    driver.library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="cannot be launched here: NVIDIA's driver is missing"):
        driver.library()


def test_the_scanner_reads_kernels():
    text = 'const char* s = "__global__ void no(int i) {"; // __global__ void no(int)\n'
    text += "namespace a::b { template <class T, int N = (1 > 0)> __global__ static void __launch_bounds__(N, 2) f(T* x, const int) {} }\n"
    text += "__global__ void g(float (&x)[3], unsigned int, void (*h)(int, int), float y[2][N]);\n"
    found = {k.name: k for k in kernel_text.kernels(text)}
    assert found.keys() == {"a::b::f", "g"}
    assert found["a::b::f"].template and found["a::b::f"].parameters == ["x", ""]
    assert (
        not found["g"].template
        and len(found["g"].parameters) == 4
        and found["g"].parameters[3] == "y"
    )
    assert kernel_text.with_cxx_names(
        'extern "C" __global__ "extern \\"C\\"" extern "C" __device__'
    ) == ('extern "C++" __global__ "extern \\"C\\"" extern "C" __device__')


def test_symbols_give_names_and_types():
    split = signature.split_symbol
    assert split("_Z4convPfPKfi") == ("conv", ["float*", "float const*", "int"])
    assert split("_ZN1a1tIfLi3EEEvPT_y") == ("a::t<float, 3>", ["float*", "unsigned long long"])
    assert split("_Z4nonev") == ("none", []) and split("plain") == ("plain", None)


def fake_launch(types, names):
    """A CUDA function whose launches are noted, with the arguments that the driver would read."""
    sizes = [8 if "*" in kind else struct.calcsize(SCALARS[kind][0]) for kind in types]
    function, seen = CudaFunction("f", Kernel("f", types, sizes, names, "f"), None, "90"), []

    def launch(handle, *rest):
        *shape, stream, address, extra = rest
        places = (ctypes.c_void_p * len(types)).from_address(address)
        packed = [
            struct.unpack_from(f"={p.code}", ctypes.string_at(at, p.size))[0]
            for p, at in zip(function.parameters, places, strict=True)
        ]
        seen.append((handle, tuple(shape), stream, packed, extra))
        return 0

    function._launch = launch
    function._on[0] = SimpleNamespace(
        handle=11, shapes={}, most_threads=512, registers=64, static_shared=16, most_shared=1000,
        allowed=1000, device=0, local=0,
    )  # fmt: skip
    return function, seen


def test_arguments_are_packed_as_the_driver_reads_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    types = ["float*", "bool", "signed char", "unsigned short", "int", "unsigned long", "__half",
             "__nv_bfloat16", "float", "double"]  # fmt: skip
    function, seen = fake_launch(types, [""] * 10)
    arguments = None, True, -3, 65535, -7, 2**64 - 1, 0.5, 1.0, 0.25, 1e300
    for _ in range(2):
        function(*arguments, grid=[3, 2], block=(16, 8), shared=128)
    packed = [0, True, -3, 65535, -7, 2**64 - 1, 0.5, 0x3F80, 0.25, 1e300]
    assert seen == [(11, (3, 2, 1, 16, 8, 1, 128), 77, packed, None)] * 2
    for wrong, message in (
        (
            {"block": 513},
            "at most 512 threads, as it was compiled .64 registers., got 513 x 1 x 1 = 513",
        ),
        (
            {"block": 1, "shared": 985},
            "shared must be at most 984 bytes on this GPU, beside 16 static",
        ),
        ({"block": 1, "stream": 5}, "stream must be a torch.cuda.Stream, got int"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            function(*arguments, grid=1, **wrong)
    with pytest.raises(
        RuntimeError, match=r"argument 1 must be on a CUDA device, got cpu; pass x\.cuda"
    ):
        function(X, *arguments[1:], grid=1, block=1)
    assert len(seen) == 2
