"""Kernels from a string: what they compute, on the CPU and on GPUs; their names, the cell magic."""

import copy
import ctypes
import importlib
import re
import struct

import kernel_strings
import numpy as np
import pytest
import torch

import loader
from loader.jit.errors import BuildError

sm = importlib.import_module("loader.jit.source.module")

cache, module = kernel_strings.cache, kernel_strings.module  # fixtures
pytestmark = pytest.mark.usefixtures("cache")


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
