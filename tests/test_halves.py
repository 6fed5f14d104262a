"""A CUDA source in two gives what it gives as a whole, or is left whole."""

import ctypes
import re
import shutil
import subprocess
from collections import Counter

import pytest

from loader.jit.errors import cxx
from loader.jit.extension.halves import LINKED_STUBS, halves

KERNEL = "__global__ void k(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }\n"
LAUNCH = "void go(torch::Tensor x) { k<<<1, 256>>>(x.data_ptr<float>(), 256); }\n"
# All that is taken, without torch's headers: a class of its own stands for tensors.
ALL = """
#include <cuda_fp16.h>
#include <cfloat>
#include "scale.h"
#define HD __host__ __device__ __forceinline__
#define THREADS 64
#ifndef BLOCKS
#define BLOCKS 2
#endif
#if THREADS > 32
#define HALF (THREADS / 2)
#else
#define HALF 1
#endif
namespace torch { struct Tensor { float* data; int size; }; }

__constant__ float taps[9];
__device__ int counter;
static int calls = 0;
const int kRows = 4;
enum class Mode { Add, Multiply };
struct Params { float* x; int n; float scale; };
struct Sum { __device__ float operator()(float a, float b) const { return a + b + threadIdx.x; } };

__host__ __device__ float clamped(float x) { return x < 0 ? 0 : x > FLT_MAX ? FLT_MAX : x; }
HD int blocks_for(int n) { return (n + THREADS - 1) / THREADS; }
template <typename T> __device__ __forceinline__ T twice(T x) { return x + x; }
template <> __device__ __forceinline__ float twice<float>(float x) { return 2 * x; }

extern "C" __global__ void __launch_bounds__(THREADS, 2) plain(const float* __restrict__ x, float* y) {
    __shared__ float kept[THREADS];
    kept[threadIdx.x] = clamped(x[threadIdx.x]) * taps[threadIdx.x % 9];
    __syncthreads();
#if HALF > 16
    y[threadIdx.x] = Sum()(kept[threadIdx.x], kept[(threadIdx.x + HALF) % THREADS]);
#else
    y[threadIdx.x] = 0;
#endif
    atomicAdd(&counter, 1);
}
static __global__ void by_struct(Params p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.x[i] = scaled(twice(p.x[i]), p.scale) * kRows;
}
namespace ops {
namespace {
template <typename T, Mode mode, int rows = 2>
__global__ void templated(T* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n * rows) x[i] = mode == Mode::Add ? twice(x[i]) : x[i] * x[i];
}
}  // namespace
template <typename T>
void run(T* x, int n, Mode mode) {
    if (mode == Mode::Add) templated<T, Mode::Add><<<blocks_for(n), THREADS>>>(x, n);
    else templated<T, Mode::Multiply, kRows><<<dim3{1, 2, 3}, THREADS, 4 * sizeof(T)>>>(x, n);
}
}  // namespace ops

static void set_taps(const float* values) { cudaMemcpyToSymbol(taps, values, sizeof(taps)); }

int go(torch::Tensor x, cudaStream_t stream) {
    ++calls;
    int count = 0;
    set_taps(x.data);
    cudaMemcpyFromSymbol(&count, counter, sizeof(counter));
    plain<<<BLOCKS, THREADS, 0, stream>>>(x.data, x.data);
    by_struct<<<blocks_for(x.size), THREADS>>>(Params{x.data, x.size, clamped(2)});
    ops::run(x.data, x.size, Mode::Add);
    ops::templated<double, Mode::Multiply, 1><<<1, 1>>>(nullptr, 0);
    cudaFuncSetAttribute(plain, cudaFuncAttributeMaxDynamicSharedMemorySize, 1024);
    void* arguments[] = {&x.data, &x.data};
    static_assert(sizeof(max(x.size, 3u)) == 4 && sizeof(min(1L, 2UL)) == 8);
    count = min(count, 3) + max(1.5, 2.5f);
    cudaLaunchCooperativeKernel((void*)plain, dim3(1), dim3(1), arguments, 0, stream);
    auto chosen = x.size ? ops::templated<float, Mode::Add, 3> : ops::templated<float, Mode::Multiply, 3>;
    chosen<<<1, 1>>>(x.data, x.size);
    return x.size > 1 ? (plain<<<1, 1>>>(x.data, x.data), 1) : calls + int(sizeof(taps));
}
"""
SCALE = (
    "#pragma once\ninline __host__ __device__ float scaled(float x, float s) { return x * s; }\n"
)


def header(name, file):
    return ("scale.h", SCALE) if name == "scale.h" else None


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stderr}{done.stdout}"
    return done.stdout


def bodies(ptx):
    """Each function's instructions, and what is declared, under names that both ways share."""
    masked = re.sub(r"\b_?[\w$]*_Z\w+|\$L__\w+", "F", re.sub(r"(?m)^\s*//.*\n", "", ptx))
    masked = re.sub(r"(?m)^\.(?:visible|weak) ", "", masked)
    return Counter(re.split(r"(?m)^(?=\.(?:func|global|const|extern|entry)\b)", masked)[1:])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_both_ways_give_the_same_code_for_the_gpu_and_a_library_that_loads(tmp_path):
    split = halves(ALL, "x.cu", header)
    (tmp_path / "scale.h").write_text(SCALE)
    (tmp_path / "whole.cu").write_text(ALL)
    (tmp_path / "host.cpp").write_text(split.host)
    here, nvcc = {"cwd": tmp_path}, ["nvcc", "-std=c++17", "-arch=sm_90", "-Xcompiler=-fPIC"]
    toolkit = shutil.which("nvcc").removesuffix("/bin/nvcc")
    run("c++", "-std=c++17", "-fPIC", f"-I{toolkit}/include", "-c", "host.cpp", **here)
    lacking = [
        line.split()[0] for line in run("nm", "-u", "-fposix", "host.o", **here).splitlines()
    ]
    (tmp_path / "device.cu").write_text(
        split.with_instances(cxx.demangled("\n".join(lacking)).split("\n"))
    )
    assert "torch" not in (tmp_path / "device.cu").read_text()
    run(*nvcc, *LINKED_STUBS, "-c", "device.cu", **here)
    run("c++", "-shared", "device.o", "host.o", f"-L{toolkit}/lib64", "-lcudart",
        "-Wl,-z,defs", f"-Wl,-rpath,{toolkit}/lib64", "-o", "library.so", **here)  # fmt: skip
    ctypes.CDLL(str(tmp_path / "library.so"))
    for name in ("whole", "device"):
        run(*nvcc, "-ptx", f"{name}.cu", **here)
    whole, device = (bodies((tmp_path / f"{name}.ptx").read_text()) for name in ("whole", "device"))
    assert whole == device and sum("st.global" in body for body in whole) == 7


# What cannot be told from the text, or needs nvcc and torch in one function.
WHOLE = {
    "a macro that hides a launch": "#define GO(k, ...) k<<<1, 256>>>(__VA_ARGS__)\n",
    "a macro that hides a kernel": "#define KERNEL(name) __global__ void name\n",
    "a macro that opens a namespace": "#define BEGIN namespace n {\n",
    "a header that is not there": '#include "mine.h"\n',
    "a header that may hold anything": "#include <cutlass/cutlass.h>\n",
    "a specialised kernel": "template <typename T> __global__ void t(T);\n"
    "template <> __global__ void t<int>(int) {}\n",
    "a specialised function of both sides": "template <> __host__ __device__ int f<int>() {}\n",
    "dynamic parallelism": "__global__ void parent(float* x) { child<<<1, 1>>>(x); }\n",
    "a kernel that takes a tensor's class": "__global__ void t(at::TensorBase x) {}\n",
    "tensors in shared memory": "__global__ void t() { __shared__ at::Scalar x; }\n",
    "a lambda for the GPU beside torch": "void f(at::Tensor x) { g([=] __device__ (int i) {}); }\n",
    "a function for the GPU beside torch": "__device__ int d() { return 1; }\n"
    "int f(at::Tensor x) { return d(); }\n",
    "a function that keeps something, on both sides": "static inline __host__ __device__ int f() {\n"
    "    static int n; return n++; }\n",
    "managed memory of both sides": "__managed__ int m;\nint f(at::Tensor x) { return m; }\n",
    "cub on the host": "#include <cub/cub.cuh>\n"
    "void f(at::Tensor x) { cub::DeviceReduce::Sum(nullptr, 0); }\n",
    "thrust on the host": "#include <thrust/sort.h>\n"
    "void f(at::Tensor x) { thrust::sort(thrust::device, a, b); }\n",
    "a launch of what is no kernel here": "void f(at::Tensor x) { other<<<1, 1>>>(x); }\n",
    "a condition that asks for nvcc": "void f(at::Tensor x) {\n#ifdef __CUDACC__\n#endif\n}\n",
    "a version of nvcc's": "#if __CUDACC_VER_MAJOR__ > 11\n#endif\n",
    "a branch that parts brackets": "void f(at::Tensor x) {\n#if A\nif (x) {\n#else\n{\n#endif\n}}\n",
    "a macro defined in a function": "void f() {\n#define N 4\n}\n",
    "a header in a namespace": "namespace n {\n#include <vector>\n}\n",
    "assembly": 'asm("");\n',
    "names of ours": "int octet_configure;\n",
}  # fmt: skip


def test_what_cannot_be_told_stays_whole():
    assert halves(KERNEL + LAUNCH, "x.cu") is not None
    for what, text in WHOLE.items():
        assert halves(text + KERNEL + LAUNCH, "x.cu") is None, what


def parts(text):
    split = halves(text + KERNEL + LAUNCH, "x.cu")
    return split.device, split.host


def test_each_half_has_what_it_needs():
    libraries = "#include <cublas_v2.h>\n#include <cudnn.h>\n#include <curand_kernel.h>\n"
    device, host = parts(libraries + "static cublasHandle_t handle = make();\n")
    assert "cublas" not in device and "curand_kernel.h" in device
    assert "cublas_v2.h" in host and "handle = make()" in host
    device, host = parts(
        "#include <cub/block/block_reduce.cuh>\nnamespace cg = cooperative_groups;\n"
    )
    assert "cub/" in device and "cub/" not in host and "cooperative_groups" not in host
    device, host = parts(
        "#include <torch/extension.h>\n#include <pybind11/stl.h>\nusing at::Tensor;\n"
    )
    assert "torch" not in device and "pybind" not in device and "using at::Tensor;" in host
    # A launcher without torch goes to nvcc as it is; the host has its declaration.
    lone = "inline void start(float* x, int n = 1) { cub::f(x); k<<<1, 2>>>(x, n); }\n"
    device, host = parts(KERNEL.replace(" k(", " other(") + lone + "void f() { start(nullptr); }\n")
    assert "cub::f(x); k<<<1, 2>>>(x, n);" in device and "inline void start" not in device
    assert "void start(float* x, int n = 1);" in host and "cub" not in host
    # Of what the GPU has the host's half gets only what it names.
    device, host = parts("__host__ __device__ float unused(float x) { return x; }\n")
    assert "unused" in device and "unused" not in host
    # A constant whose value is computed when the library is loaded is computed once.
    use = "void use() { cub::f(once, name, next()); }\n"
    device, host = parts(
        "const int once = count();\nconst char* name = nullptr;\nconst int two = 2;\n"
        "static inline int next() { static int n; return n++; }\n" + use
    )
    assert use in device and "once = count()" in host and "static int n" in host
    assert not re.search("count|nullptr|static int n|two", device)


def test_kernels_may_name_what_torch_has_for_them():
    device, host = parts(
        "template <typename T> C10_LAUNCH_BOUNDS_1(256) __global__ void t(\n"
        "    torch::PackedTensorAccessor32<T, 2, torch::RestrictPtrTraits> x) { x[0][0] = 1; }\n"
        "void f(at::Tensor x) {\n"
        "    t<c10::Half><<<1, 1>>>(x.packed_accessor32<c10::Half, 2, torch::RestrictPtrTraits>());\n"
        "}\n"
    )
    assert "#include <ATen/core/TensorAccessor.h>" in device
    assert "torch/" not in device and "LAUNCH_BOUNDS" not in host


def test_a_template_kernel_gets_the_instances_that_the_host_asks_for():
    text = "template <typename T>\n" + KERNEL.replace("float", "T").replace(" k(", " t(")
    text += "torch::Tensor f(torch::Tensor x) { t<scalar_t><<<1, 256>>>(p, q, 3); }\n"
    split = halves(text, "x.cu")
    assert "template <typename T> void t(T* x, int n);" in split.host
    assert "(!octet_configure(1, 256) ? (void)0 : t<scalar_t>(p, q, 3));" in split.host
    asked = [
        "void t<float>(float const*, float*, int)",
        "void t<c10::Half>(c10::Half const*)",
        "f()",
    ]
    whole = split.with_instances(asked)
    assert (
        f"template __global__ {asked[0]};" in whole and "f()" not in whole.partition("instances")[2]
    )
    assert "#include <c10/util/Half.h>" in whole
    for odd in ("void t<main::{lambda(int)#1}>(int)", "void t<at::Tensor>(at::Tensor)"):
        assert split.with_instances([odd]) is None


def test_launches_are_expressions_wherever_they_stand():
    _, host = parts(
        "void f(at::Tensor x) { if (a) k<<<1, 2>>>(p, 1); else ::k<<<g(1, 2), b>>>(p, 2); }\n"
    )
    assert "if (a) (!octet_configure(1, 2) ? (void)0 : k(p, 1));" in host
    assert "else (!octet_configure(g(1, 2), b) ? (void)0 : ::k(p, 2));" in host


def test_a_source_without_anything_for_the_gpu_needs_no_nvcc():
    split = halves("#include <cublas_v2.h>\nint f(at::Tensor x) { return 1; }\n", "x.cu")
    assert not split.for_nvcc and "int f(at::Tensor x)" in split.host
