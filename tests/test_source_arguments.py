"""Kernels from a string: each bad argument gets one clear error, and no launch ends the process."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import kernel_strings
import numpy as np
import pytest
import torch
from conftest import ROOT
from kernel_strings import SETTINGS, SOURCE, in_a_new_process
from torch._subclasses import FakeTensorMode

import loader
from loader.jit.source import constants, signature

cache, module = kernel_strings.cache, kernel_strings.module  # fixtures
pytestmark = pytest.mark.usefixtures("cache")

X = torch.rand(64)


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


def test_a_byte_order_mark_is_no_part_of_the_source():
    marked = '\ufeffextern "C" __global__ void fill(float* x) { x[threadIdx.x] = 1; }'
    fill, x = loader.source_module(marked, device="cpu").get_function("fill"), torch.zeros(3)
    fill(x, grid=1, block=3)
    assert x.tolist() == [1, 1, 1]


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


# On the CPU only


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
    convert = signature.Parameter("f", 0, "x", kind, {"float": 4, "double": 8}.get(kind, 2)).convert
    with pytest.raises(RuntimeError, match="f: x must be within the range of "):
        convert(10**400)
    if kind != "double":
        with pytest.raises(RuntimeError, match="f: x must be within the range of "):
            convert(3.4028236e38)
    assert convert(float("inf")) in (float("inf"), 0x7F80)


@pytest.mark.parametrize("kind, bytes", [("float3", 4), ("float4", 16), ("double4", 16)])
def test_a_vector_is_aligned_as_compilers_have_it(kind, bytes):
    convert = signature.Parameter("f", 0, "x", f"{kind}*", 8).convert
    x = torch.zeros(32, dtype=torch.float64 if kind == "double4" else torch.float32)
    place = bytes // x.itemsize  # torch's own memory begins at a multiple of 64
    assert convert(x[place:]) == x.data_ptr() + bytes
    if place > 1:
        with pytest.raises(RuntimeError, match=f"must lie at a multiple of {bytes} bytes"):
            convert(x[place + 1 :])


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
