"""Kernels from a string: constants, names, arguments, errors, the store, on the CPU and on GPUs."""

import copy
import ctypes
import importlib
import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch._subclasses import FakeTensorMode

import loader
from loader.jit.errors import BuildError
from loader.jit.errors import literal as source_place
from loader.jit.source import constants, nvrtc, signature
from loader.jit.source import text as kernel_text
from loader.jit.source.launch import CudaFunction

sm = importlib.import_module("loader.jit.source.module")
source_build = importlib.import_module("loader.jit.source.build")

SOURCE = """
#include "common.h"
/* extern "C" __global__ void none() {} */
struct Pair {
    int a;
    float b;
};
typedef const unsigned char* Bytes;
extern "C" __global__ void __launch_bounds__(256)
    scale(float* __restrict__ out, const float* x, const float factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * x[i] + OFFSET;
}
extern "C" {
__global__ void count(int bins[256], Bytes x, long long n) {
    for (long long i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[x[i]], 1);
}
}
namespace math {
template <typename T, int N>
__global__ void power(T* out, const T* x, Pair p) {
    T y = 1;
    for (int i = 0; i < N; ++i) y *= x[threadIdx.x];
    out[threadIdx.x] = y + T(p.a) * T(p.b);
}
#if RADIUS > 3
__global__ void fill(double* out, int8_t a, uint16_t b, size_t c, float d, double e, bool f) {
    constexpr int side = 2 * RADIUS + 1;
    int table[side];
    for (int i = 0; i < side; ++i) table[i] = i;
    const double values[] = {double(a), double(b), double(c), d, e, double(f), SHARE, double(FLAG),
                             double(table[side - 1])};
    if (threadIdx.z == 1 && blockIdx.y == 2)
        out[4 * threadIdx.y + blockIdx.x * blockDim.x + threadIdx.x] = values[threadIdx.y];
}
#else
__global__ void fill(float* out) { out[0] = load(Half{0x3c00}); }
#endif
}  // namespace math
"""
SETTINGS = {"OFFSET": np.float32(0.5), "RADIUS": 4, "SHARE": 0.1, "FLAG": True}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A build cache of this file's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("LOADER_CACHE_DIR", str(folder))
        patch.setattr(source_build, "_builds", {})
        yield folder


@pytest.fixture
def module(device, cache):
    return loader.source_module(SOURCE, device=device, **SETTINGS)


@pytest.fixture
def for_gpu(cache):
    """The same compiled for a GPU that need not be there."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings compiles for GPUs")
    return loader.source_module(SOURCE, arch="9.0", device="cuda", **SETTINGS)


# What is computed


def test_kernels_compute_what_they_say(module, device):
    x, out = torch.rand(1000, device=device), torch.empty(1000, device=device)
    assert module.get_function("scale")(out, x, 2.0, 1000, grid=(4, 1), block=256) is None
    assert torch.equal(out, 2 * x + 0.5)
    values = torch.randint(256, (10000,), dtype=torch.uint8, device=device)
    bins = torch.zeros(256, dtype=torch.int32, device=device)
    module.get_function("count")(bins, values, len(values), grid=7, block=(32,))
    assert torch.equal(bins, torch.bincount(values, minlength=256).int())


@pytest.mark.parametrize("name", ["math::fill", "fill"])
def test_constants_and_scalars_arrive_with_their_types(module, device, name):
    """Through `#if`, the size of an array, and every way to pass a number."""
    out = torch.zeros(9, 4, dtype=torch.float64, device=device)
    fill = module.get_function(name)
    numbers = np.int8(-5), 65535, 2**63, np.float32(0.1), 0.1, np.bool_(True)
    fill(out, *numbers, grid=(2, 3), block=(2, 9, 2))
    values = [-5.0, 65535.0, 2.0**63, float(np.float32(0.1)), 0.1, 1.0, 0.1, 1.0, 8.0]
    assert out.tolist() == [[value] * 4 for value in values]


def test_templates_are_made_when_named(module, device):
    for name, dtype in (
        ("math::power<float, 3>", torch.float32),
        ("power<double,2>", torch.float64),
    ):
        x = torch.rand(64, dtype=dtype, device=device)
        out = torch.empty_like(x)
        power = module.get_function(name)
        power(out, x, struct.pack("if", 2, 1.5), grid=1, block=64)
        torch.testing.assert_close(out, x ** int(name[-2]) + 3)
        assert module.get_function(name) is power
    with pytest.raises(BuildError, match="the source does not compile"):
        module.get_function("power<Nothing, 3>")


def test_a_struct_is_passed_as_its_bytes(module, device):
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))

    power = module.get_function("power<float, 3>")
    x = torch.zeros(1, device=device)
    forms = Pair(2, 1.5), np.array((2, 1.5), dtype=[("a", "i4"), ("b", "f4")])[()]
    for form in (*forms, struct.pack("if", 2, 1.5)):
        out = torch.empty_like(x)
        power(out, x, form, grid=1, block=1)
        assert out.item() == 3
    for wrong in (3, 1.5, b"123", x, "ab"):
        with pytest.raises(TypeError, match="p is a Pair by value: pass 8 bytes"):
            power(x, x, wrong, grid=1, block=1)


def test_vectors_and_addresses(device):
    mod = loader.source_module(
        """
        __global__ void f(float4* out, const float2* x, void* p, double (*table)[2], float m[][3]) {
            out[threadIdx.x] = make_float4(x[0].x, x[0].y, p == nullptr, table[1][0] + m[1][2]);
        }
        """,
        device=device,
    )
    out = torch.zeros(2, 4, device=device)
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, device=device)
    f, m = mod.get_function("f"), torch.arange(6.0, device=device)
    for x in (torch.tensor([1.0, 2.0], device=device), torch.tensor([1 + 2j], device=device)):
        f(out, x, None, table, m, grid=1, block=2)
        assert out.tolist() == [[1, 2, 1, 8]] * 2
    with pytest.raises(RuntimeError, match="out must lie at a multiple of 16 bytes"):
        f(torch.zeros(9, device=device)[1:], x, None, table, m, grid=1, block=2)
    with pytest.raises(RuntimeError, match="x is a lazy conjugate"):
        f(out, x.conj(), None, table, m, grid=1, block=2)


def test_a_dtype_is_a_constant(device):
    source = "__global__ void f(T* x) { x[threadIdx.x] = sizeof(T); }"
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool):
        x = torch.zeros(2, dtype=dtype, device=device)
        loader.source_module(source, device=device, T=dtype).get_function("f")(x, grid=1, block=2)
        assert x.tolist() == [dtype.itemsize] * 2


# Bad input: one clear error each, before anything is launched


def test_a_kernel_that_does_not_exist(module):
    cases = {
        "scal": "there is no kernel 'scal'; there are count, math::fill, scale, math::power<...>; "
        "did you mean 'scale'?",
        "power": "'power' is a template: name what it is to be made for, such as \"power<float>\"",
        "root<float>": "there is no kernel 'root<float>'; there are count",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError) as error:
            module.get_function(name)
        assert message in str(error.value)
    with pytest.raises(TypeError, match="name must be text, got int"):
        module.get_function(3)


X = torch.rand(64)
BAD_CALLS = [
    (lambda f, x: f(x, x, 2.0, grid=1, block=1), TypeError, "scale takes 4 arguments, got 3: scale(float* out, float const* x, float factor, int n)"),
    (lambda f, x: f(x, x, 2.0, 3, 4, grid=1, block=1), TypeError, "takes 4 arguments, got 5"),
    (lambda f, x: f(x, x.double(), 2.0, 3, grid=1, block=1), RuntimeError, "scale: x must be float32 (float const*), got float64; pass x.to(torch.float32), or change the kernel"),
    (lambda f, x: f(x[::2], x, 2.0, 3, grid=1, block=1), RuntimeError, "scale: out must be contiguous, got shape (32,) with strides (2,); pass out.contiguous()"),
    (lambda f, x: f(x, x.cpu().numpy(), 2.0, 3, grid=1, block=1), TypeError, "scale: x must be a tensor (float const*), got ndarray; pass torch.from_numpy(it)"),
    (lambda f, x: f(x, [1.0], 2.0, 3, grid=1, block=1), TypeError, "scale: x must be a tensor (float const*), got list"),
    (lambda f, x: f(x, x, "2", 3, grid=1, block=1), TypeError, "scale: factor must be a number (float), got str '2'"),
    (lambda f, x: f(x, x, 1e39, 3, grid=1, block=1), RuntimeError, "scale: factor must be within the range of float (float), got float 1e+39"),
    (lambda f, x: f(x, x, 2.0, 3.5, grid=1, block=1), TypeError, "scale: n must be an integer (int), got float 3.5"),
    (lambda f, x: f(x, x, 2.0, 2**31, grid=1, block=1), RuntimeError, "scale: n must be in [-2147483648, 2147483647] (int), got int 2147483648"),
    (lambda f, x: f(x, x, 2.0, x.sum().int(), grid=1, block=1), TypeError, "scale: n must be an integer (int), got a tensor of shape (); pass its .item()"),
    (lambda f, x: f(x, x.clone().requires_grad_(), 2.0, 3, grid=1, block=1), RuntimeError, "scale: x requires grad, and no gradient flows through a kernel from a string; pass x.detach()"),
    (lambda f, x: f(x, x, 2.0, 3, grid=1, block=(32, 64)), ValueError, "scale: block must have at most "),
    (lambda f, x: f(x, x, 2.0, 3, grid=1, block=(1, 1, 65)), ValueError, "scale: block.z must be from 1 to 64, got 65"),
    (lambda f, x: f(x, x, 2.0, 3, grid=-1, block=1), ValueError, "scale: grid.x must be from 1 to 2147483647, got -1"),
    (lambda f, x: f(x, x, 2.0, 3, grid=(1, 0), block=1), ValueError, "scale: grid.y must be from 1 to 65535, got 0"),
    (lambda f, x: f(x, x, 2.0, 3, grid=(1, 1, 1, 1), block=1), TypeError, "scale: grid must be an int or up to three of them"),
    (lambda f, x: f(x, x, 2.0, 3, grid=1, block=2.5), TypeError, "scale: block must be an int or up to three of them, got 2.5"),
    (lambda f, x: f(x, x, 2.0, 3, grid=1, block=1, shared=-4), ValueError, "scale: shared must be bytes, 0 or more, got -4"),
    (lambda f, x: f(x, x, 2.0, 3, grid=1), TypeError, "block"),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, message", BAD_CALLS)
def test_a_bad_call(module, device, call, kind, message):
    x = X.to(device)
    with pytest.raises(kind) as error:
        call(module.get_function("scale"), x)
    assert message in str(error.value)
    assert torch.equal(x.cpu(), X)


def test_gradients_are_refused_only_where_they_would_be_lost(module, device):
    x = torch.rand(3, device=device, requires_grad=True)
    out = torch.empty(3, device=device)
    with torch.no_grad():
        module.get_function("scale")(out, x, 1.0, 3, grid=1, block=3)
    assert torch.equal(out, x + 0.5)


@pytest.mark.parametrize(
    "source, kind, message",
    [
        (b"x", TypeError, "source must be text (str), got bytes; decode it"),
        (None, TypeError, "source must be text (str), got NoneType"),
        (Path("x.cu"), TypeError, "source must be text (str), got PosixPath; pass its read_text()"),
        ("a\0b", ValueError, "source must be text, got a string with null characters"),
    ],
)
def test_a_source_that_is_no_text(source, kind, message):
    with pytest.raises(kind) as error:
        loader.source_module(source)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("a-b", 1, "must be a C++ identifier such as IMAGE_W, got 'a-b'"),
        ("größe", 1, "must be a C++ identifier"),
        ("", 1, "must be a C++ identifier"),
        ("int", 1, "int cannot be a constant's name: it is a keyword of C++"),
        ("threadIdx", 1, "it is a name of CUDA's own"),
        ("__CUDA_ARCH__", 1, "it is reserved for the compiler"),
        ("_R", 1, "it is reserved for the compiler"),
        ("R", "4", "must be an int, a float, a bool or a torch.dtype, got str '4'"),
        ("R", [4], "got list [4]; data goes in as an argument"),
        ("R", None, "got NoneType None"),
        ("R", float("nan"), "must be finite, got nan"),
        ("R", 1 << 64, "must fit into 64 bits"),
    ],
)
def test_a_constant_that_is_none(name, value, message):
    with pytest.raises((TypeError, ValueError)) as error:
        loader.source_module("", **{name: value})
    assert message in str(error.value)


def test_constants_as_cxx_spells_them():
    values = {"A": 3, "B": -4, "C": 0.5, "D": np.float32(0.1), "E": False, "F": 1 << 40}
    values |= {"G": -(1 << 63), "H": (1 << 64) - 1, "I": -1e-30, "J": np.int8(-3), "K": torch.int16}
    assert constants.definitions(values) == {
        "A": "3", "B": "(-4)", "C": "0.5", "D": "0.1f", "E": "false", "F": "1099511627776LL",
        "G": "(-9223372036854775807LL-1)", "H": "18446744073709551615ULL", "I": "(-1e-30)",
        "J": "(-3)", "K": "short",
    }  # fmt: skip


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device": "mps"}, 'device must be "cuda" or "cpu", got \'mps\''),
        ({"device": "cpu", "arch": "9.0"}, "arch is for CUDA"),
        ({"arch": "hopper"}, 'arch must be such as "9.0" or "sm_90a", got \'hopper\''),
        ({"options": "-G"}, "options must be a list, got '-G'; pass ['-G']"),
        ({"include_dirs": ["/nowhere"]}, "include_dirs: /nowhere is no folder"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((TypeError, ValueError)) as error:
        loader.source_module("", **options)
    assert message in str(error.value)


def test_no_gpu_and_no_architecture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pytest.raises(RuntimeError, match=r'torch sees no GPU here: pass arch="9\.0"'):
        loader.source_module("", device="cuda")


BROKEN = """
__global__ void f(float* out) {
    out[0] = missing;
}
"""


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cuda", "arch": "9.0"}])
def test_errors_are_shown_at_the_line_of_the_string(options):
    if "arch" in options:
        pytest.importorskip("cuda.bindings.nvrtc")
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().split("\n"), 1)
        if "= missing;" in text
    )
    with pytest.raises(BuildError) as error:
        loader.source_module(BROKEN, **options)
    first, where, quoted, caret, *_ = str(error.value).split("\n")
    assert first == "source_module: the source does not compile:"
    assert where.startswith(f"{__file__}:{line}:14: error: ") and "missing" in where
    assert quoted == f"{line:>5} |     out[0] = missing;" and caret.index("^") == quoted.index("m")
    with pytest.raises(BuildError, match=r"source:3:14: error: .*missing"):
        loader.source_module(BROKEN.replace("f(", "g("), **options)


def test_a_literal_is_found_line_by_line():
    """The caller's file and the line where the text begins."""

    def place(source):
        return source_place.locate(source, 1)

    here = place.__code__.co_firstlineno
    assert place("one\ntwo") is None  # an escape: its lines are not the file's
    indented = """first
        second
    third"""
    assert place(indented) == (__file__, here + 5)
    assert place("x\n" + indented) is None


# On the CPU only


@pytest.mark.parametrize(
    "line, what",
    [
        ("__shared__ float s[4];", "__shared__ (shared memory)"),
        ("__syncthreads();", "__syncthreads (barriers)"),
        ("int i = __shfl_sync(~0, 1, 0);", "__shfl_sync (warps)"),
        ("BARRIER", "__syncthreads (barriers)"),
        ('asm("exit;");', "asm (inline PTX)"),
        ("f<<<1, 1>>>(x);", "<<< (launches from within a kernel)"),
        ("__half h;", "__half (CUDA's 16-bit and 8-bit types)"),
        ("\n#include <cooperative_groups.h>", "<cooperative_groups.h>, a header for GPUs"),
    ],
)
def test_what_needs_a_gpu_is_refused_with_its_line(line, what):
    source = f"// __shared__\n#define BARRIER __syncthreads()\n__global__ void f(float* x) {{\n{line}\n}}\n"
    number = 5 if line[0] == "\n" else 4
    with pytest.raises(NotImplementedError) as error:
        loader.source_module(source, device="cpu")
    assert f"line {number} of the source: {what} cannot run on the CPU" in str(error.value)


def test_what_a_launch_on_the_cpu_refuses():
    scale = loader.source_module(SOURCE, device="cpu", **SETTINGS).get_function("scale")
    with pytest.raises(NotImplementedError, match="scale: there are no streams on the CPU"):
        scale(X, X, 1.0, 1, grid=1, block=1, stream=0)
    with pytest.raises(NotImplementedError, match="there is no shared memory on the CPU"):
        scale(X, X, 1.0, 1, grid=1, block=1, shared=8)
    with pytest.raises(RuntimeError, match="x must be on the CPU, for which this module was made"):
        scale(X, X.to("meta"), 1.0, 1, grid=1, block=1)


FAULTS = """
__device__ int deep(int n) {
    volatile int room[1000];
    room[0] = n;
    return deep(n + 1) + room[0];
}
__global__ void copy(float* out, const float* x, int n) {
    for (int i = 0; i < n; ++i) out[i] = x[i];
}
__global__ void far(float* out, long long at) { out[at] = 1; }
__global__ void share(int* out, int n) { out[0] = 12 / n; }
__global__ void endless(int* out) { out[0] = deep(0); }
__global__ void throws() { throw 3; }
__global__ void perhaps(float* out, const float* x) { out[0] = x ? x[0] : 5; }
"""


def test_a_fault_in_a_kernel_is_an_error_and_not_the_end_of_the_process():
    """In a process of its own, with Python's own handlers, which are there again afterwards."""
    code = f"""
import faulthandler, json, loader, torch
faulthandler.enable()
mod = loader.source_module({FAULTS!r}, device="cpu")
x, i = torch.ones(4), torch.zeros(1, dtype=torch.int32)
calls = [lambda: mod.copy(None, x, 4, block=1), lambda: mod.copy(x, None, 4, block=1),
         lambda: mod.copy(None, None, 4, block=1), lambda: mod.far(x, 1 << 44, block=1),
         lambda: mod.share(i, 0, block=1), lambda: mod.endless(i, block=1),
         lambda: mod.throws(block=1), lambda: mod.copy(None, None, 0, block=1)]
said = []
for call in calls:
    try:
        said.append(str(call()))
    except RuntimeError as error:
        said.append(str(error))
mod.share(i, 4, block=1), mod.perhaps(x, None, block=1)
print(json.dumps({{"said": said, "then": [i.item(), x[0].item()]}}))
"""
    found = in_a_new_process(code, cache=Path(os.environ["LOADER_CACHE_DIR"]))
    nothing = "a read or write at address 0x0, where nothing is"
    assert found["said"][:3] == [
        f"copy: {nothing}; out is a null pointer",
        f"copy: {nothing}; x is a null pointer",
        f"copy: {nothing}; out, x are null pointers",
    ]
    assert found["said"][3].startswith("far: a read or write at address 0x")
    assert found["said"][4].startswith("share: an integer divided by zero, at the instruction 0x")
    assert found["said"][5].startswith("endless: a read or write at address 0x")
    assert found["said"][6].startswith("throws: an exception of C++, thread (0, 0, 0) of block")
    assert found["said"][7] == "None"
    assert found["then"] == [3, 5.0]


def test_a_fault_elsewhere_is_left_to_its_own_handler():
    """A launch in another thread does not make a message of it."""
    done = subprocess.run(
        [sys.executable, "-c", f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import ctypes, faulthandler, threading, torch, loader
mod = loader.source_module("__global__ void f(volatile int* x) {{ while (!x[0]) ++x[1]; }}", device="cpu")
faulthandler.enable()
x = torch.zeros(2, dtype=torch.int32)
launch = threading.Thread(target=mod.f, args=(x,), kwargs={{"block": 1}}, daemon=True)
launch.start()
while not x[1]:
    assert launch.is_alive()
ctypes.string_at(0)
"""],
        env={**os.environ, "LOADER_BUILD": "lazy"}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr and "string_at" in done.stderr


def no_memory():
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def fake():
    with FakeTensorMode():
        return torch.empty(4)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: X.to("meta"), "must be on the CPU, for which this module was made, got meta"),
        (X.to_sparse, "must be dense, got torch.sparse_coo; pass x.to_dense()"),
        (X[None].to_sparse_csr, "must be dense, got torch.sparse_csr; pass x.to_dense()"),
        (torch.tensor([1 + 2j]).conj().imag.clone, None),
        (lambda: torch.tensor([1 + 2j]).conj().imag, "is lazily negated; pass it with .resolve_neg()"),
        (no_memory, "has no memory of its own"),
        (fake, "has no memory of its own"),
        (lambda: torch.empty(0), None),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_values_in_memory(make, message):
    scale = loader.source_module(SOURCE, device="cpu", **SETTINGS).scale
    x, out = make(), torch.empty(1)
    if message is None:
        return scale(out, x, 1.0, x.numel(), block=1)
    with pytest.raises(RuntimeError) as error:
        scale(out, x, 1.0, 1, block=1)
    assert str(error.value).startswith(f"scale: x {message}")
    with pytest.raises(RuntimeError, match="x has no memory of its own"):
        torch.func.vmap(lambda x: scale(out, x, 1.0, 1, block=1))(torch.ones(2, 1))


@pytest.mark.parametrize("kind", ["float", "double", "__nv_bfloat16"])
def test_numbers_beyond_a_type(kind):
    convert = signature.Parameter("f", 0, "x", kind).convert
    with pytest.raises(RuntimeError, match="f: x must be within the range of "):
        convert(10**400)
    if kind != "double":
        with pytest.raises(RuntimeError, match="f: x must be within the range of "):
            convert(3.4028236e38)
    assert convert(float("inf")) in (float("inf"), 0x7F80)


# Kernels as attributes


def test_kernels_are_attributes(module):
    assert module.scale is module.get_function("scale") and module.fill.name == "fill"
    assert {"scale", "count", "fill", "get_function"} <= {*dir(module)}
    with pytest.raises(AttributeError, match=r"no kernel 'scal'; .*; did you mean 'scale'\?"):
        module.scal  # noqa: B018
    with pytest.raises(AttributeError, match="'power' is a template: name what it is to be made"):
        module.power  # noqa: B018
    assert not hasattr(module, "__array__") and not hasattr(module, "_ipython_display_")
    assert copy.copy(module).scale is module.scale
    with pytest.raises(AttributeError):  # before there are any kernels
        type(module).__new__(type(module)).scale  # noqa: B018


def test_without_a_grid_there_is_one_block(module, device):
    x, out = torch.rand(10, device=device), torch.zeros(10, device=device)
    module.scale(out, x, 2.0, 10, block=4)
    assert torch.equal(out[:4], 2 * x[:4] + 0.5) and not out[4:].any()


def test_a_kernel_that_asserts_raises():
    """And does not end the process, which a failed assert in C++ does."""
    mod = loader.source_module(
        "#include <cassert>\n__global__ void f(int n) { assert(int(threadIdx.x) < n); }",
        device="cpu",
    )
    mod.get_function("f")(2, grid=1, block=2)
    with pytest.raises(RuntimeError) as error:
        mod.get_function("f")(1, grid=(3, 2), block=(1, 2)) or mod.get_function("f")(
            1, grid=1, block=4
        )
    assert str(error.value).startswith(
        "f: assert(int(threadIdx.x) < n) failed in line 2, thread (1,"
    )


def test_threads_may_launch_at_once():
    scale = loader.source_module(SOURCE, device="cpu", **SETTINGS).get_function("scale")
    outs = [torch.empty(5000) for _ in range(8)]
    x = torch.rand(5000)

    def work(i):
        for _ in range(20):
            scale(outs[i], x, 2.0**i, 5000, grid=20, block=256)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(torch.equal(out, 2**i * x + 0.5) for i, out in enumerate(outs))


# Builds and the store


def test_one_build_for_each_set_of_constants(monkeypatch, tmp_path):
    """Nothing is compiled twice, in a process or after it; headers and options count."""
    pytest.importorskip("cuda.bindings.nvrtc")
    compiled, compile = [], nvrtc.compile
    monkeypatch.setattr(nvrtc, "compile", lambda *a, **k: compiled.append(a) or compile(*a, **k))
    (tmp_path / "mine.h").write_text("#define MINE 1\n")

    def make(forget=False, **changes):
        if forget:
            monkeypatch.setattr(source_build, "_builds", {})
        options = {"arch": "9.0", "device": "cuda", "include_dirs": [tmp_path], "N": 1, **changes}
        loader.source_module(
            '#include "mine.h"\n__global__ void f(int* x) { x[0] = N + MINE; }', **options
        )
        return len(compiled)

    assert (make(), make(), make(forget=True)) == (1, 1, 1)
    assert (make(N=2), make(N=1.0), make(N=True), make(N=2, forget=True)) == (2, 3, 4, 4)
    assert make(options=["--use_fast_math"]) == 5
    (tmp_path / "mine.h").write_text("#define MINE 2\n")
    assert (make(), make(arch="8.0")) == (6, 7)


def test_a_damaged_build_is_made_anew(monkeypatch, cache):
    for options, name in (({"device": "cpu"}, "cpu"), ({"device": "cuda", "arch": "9.0"}, "sm_90")):
        if name != "cpu":
            pytest.importorskip("cuda.bindings.nvrtc")
        source = f"__global__ void damaged_{name}(int* x) {{ x[0] = 1; }}"
        loader.source_module(source, **options)
        entry = max(
            (cache / "store").glob("source_module-*"), key=lambda path: path.stat().st_mtime_ns
        )
        assert json.loads((entry / "manifest.json").read_text())["inputs"]["target"] == name
        content = bytearray((entry / "library.so").read_bytes())
        content[len(content) // 2] ^= 1
        (entry / "library.so").unlink()
        (entry / "library.so").write_bytes(content)
        monkeypatch.setattr(source_build, "_builds", {})
        assert loader.source_module(source, **options).kernels == [f"damaged_{name}"]
        manifest = json.loads((entry / "manifest.json").read_text())
        del manifest["text"]
        (entry / "manifest.json").write_text(json.dumps(manifest))
        monkeypatch.setattr(source_build, "_builds", {})
        assert loader.source_module(source, **options).kernels == [f"damaged_{name}"]


def test_a_cache_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOADER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"compiled anew in each process: the build cache"):
        mod = loader.source_module("__global__ void f(int* x) { x[0] = 7; }", device="cpu")
    x = torch.zeros(1, dtype=torch.int32)
    mod.get_function("f")(x, grid=1, block=1)
    assert x.item() == 7


def test_never_build_is_kept_to(monkeypatch):
    monkeypatch.setenv("LOADER_BUILD", "never")
    with pytest.raises(
        BuildError, match=r"no build of this source with these constants.*LOADER_BUILD=never"
    ):
        loader.source_module("__global__ void never() {}", device="cpu")


def test_of_two_processes_one_compiles_and_the_other_waits(tmp_path):
    log, go, compiler = tmp_path / "log", tmp_path / "go", tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\necho $$ >> "{log}"\nwhile [ ! -e "{go}" ]; do sleep 0.02; done\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import loader, torch
print("asks", flush=True)
x = torch.zeros(1, dtype=torch.int32)
loader.source_module("__global__ void f(int* x) {{ x[0] = 7; }}", device="cpu").f(x, block=1)
print(x.item())
"""
    env = {
        **os.environ,
        "CXX": str(compiler),
        "LOADER_CACHE_DIR": str(tmp_path / "cache"),
        "LOADER_BUILD": "lazy",
    }
    two = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in two] == ["asks\n"] * 2
    while not log.exists():
        time.sleep(0.02)
    time.sleep(1)  # the other one comes to its compiler too, if it does not wait
    go.touch()
    assert [process.communicate(timeout=100)[0] for process in two] == ["7\n"] * 2
    assert len(log.read_text().split()) == 2  # to preprocess, to compile


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
    assert found["a::b::f"].template and found["a::b::f"].parameters == ("x", "")
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
    function, seen = CudaFunction("f", "f", types, None, names, "90"), []

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


# The cell magic


def test_the_cell_magic_makes_a_module():
    space = {"R": 4}
    cell = "__global__ void f(int* x) { x[threadIdx.x] = RADIUS + N; }"
    sm.magic("mod RADIUS=R N=-1 device=cpu", cell, space)
    x = torch.zeros(2, dtype=torch.int32)
    space["mod"].get_function("f")(x, grid=1, block=2)
    assert x.tolist() == [3, 3]
    for line, message in {
        "": "a name must come first",
        "3d": "a name must come first",
        "mod N": "constants are NAME=VALUE, got 'N'",
        "mod N=what": "the constant N must be a number, True, False or a variable, got 'what'",
        "mod N='": "cannot be split into words",
    }.items():
        with pytest.raises(ValueError, match=message):
            sm.magic(line, cell, space)
    with pytest.raises(BuildError, match="cell:3:1: error"):
        sm.magic("bad device=cpu", "\nnothing here", space)


def test_the_cell_magic_in_ipython(monkeypatch):
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="IPython runs cells")
    shell = shells.InteractiveShell.instance()
    try:
        shell.register_magic_function(
            lambda line, cell: sm.magic(line, cell, shell.user_ns), "cell", "cuda"
        )
        code = "%%cuda mod N=5 device=cpu\n__global__ void f(int* x) { x[0] = N; }\n"
        assert shell.run_cell(code, store_history=True).success
        run = "import torch; x = torch.zeros(1, dtype=torch.int32); mod.get_function('f')(x, grid=1, block=1); x.item()"
        assert shell.run_cell(run).result == 5
        done = shell.run_cell("%%cuda mod device=cpu\n\n__global__ void f(int* x) { x[0] = y; }\n")
        assert re.search(r"\bIn\[\d+\]:3:", str(done.error_in_exec))
    finally:
        shells.InteractiveShell.clear_instance()


# Processes of their own: times, and what is not imported


def in_a_new_process(code: str, cache, **environment) -> dict:
    """What the code prints as JSON."""
    env = {**os.environ, "LOADER_CACHE_DIR": str(cache), "LOADER_BUILD": "lazy", **environment}
    # Python's own compiled files are kept, as they usually are.
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache.parent / "python")}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TIMED = """
import json, sys, time, torch, loader
SOURCE = '''%s'''
if torch.cuda.is_available(): torch.ones(1, device="cuda").sum().item()
start = time.perf_counter()
mod = loader.source_module(SOURCE, **%s)
mod.get_function("scale")
print(json.dumps({"ms": 1e3 * (time.perf_counter() - start), "bound": "cuda.bindings.nvrtc" in sys.modules}))
"""
SHORT = (
    "__global__ void scale(float* x, float f, int n) { if (threadIdx.x < n) x[threadIdx.x] *= f; }"
)


def test_a_warm_call_loads_no_compiler(tmp_path):
    """Cold and warm times are those of `python -m loader bench source_module`; this one is loose."""
    pytest.importorskip("cuda.bindings.nvrtc")
    code = TIMED % (SHORT, {"arch": "9.0", "device": "cuda"})
    cold, warm = (in_a_new_process(code, tmp_path, CUDA_VISIBLE_DEVICES="") for _ in range(2))
    assert cold["bound"] and not warm["bound"]
    assert warm["ms"] < cold["ms"] and warm["ms"] < 100


@pytest.mark.cuda
def test_cold_and_warm_times_on_a_gpu(tmp_path):
    code = TIMED % (SHORT, {})
    cold = [in_a_new_process(code, tmp_path / str(i))["ms"] for i in range(3)]
    warm = [in_a_new_process(code, tmp_path / "0")["ms"] for _ in range(3)]
    assert min(cold) <= 500, cold
    assert min(warm) <= 5, warm


# On GPUs


@pytest.mark.cuda
def test_launch_overhead():
    mod = loader.source_module(SOURCE, device="cuda", **SETTINGS)
    scale, x = mod.get_function("scale"), torch.rand(64, device="cuda")
    out, samples = torch.empty_like(x), []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            scale(out, x, 2.0, 64, grid=1, block=64)
        samples.append((time.perf_counter() - start) / 100 * 1e6)
    assert statistics.median(samples) <= 10


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
