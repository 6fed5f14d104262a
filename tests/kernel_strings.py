"""Shared by the tests of kernels from a string: a source with some of everything, its fixtures."""

import importlib
import json
import os

import numpy as np
import pytest
from conftest import ROOT, ended, start_python

import loader

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


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A build cache that the files of these tests share."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp() / "kernel_strings"
        folder.mkdir(exist_ok=True)
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


def in_a_new_process(code: str, cache, **environment) -> dict:
    """What the code prints as JSON."""
    env = {**os.environ, "LOADER_CACHE_DIR": str(cache), "LOADER_BUILD": "lazy", **environment}
    # Python's own compiled files are kept, as they usually are.
    env["PYTHONDONTWRITEBYTECODE"] = ""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = ended(start_python(code, os.getcwd(), env))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
