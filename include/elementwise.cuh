// The CUDA kernels of elementwise operators; see elementwise.h.
// Traffic decides: for float32, 4 bytes read per input and element and 4 written. Contiguous data
// is moved as 16-byte words, one per thread and tensor; anything else element by element.
#pragma once
#include "elementwise.h"
#include "vector.cuh"

constexpr int kThreads = 256;

/// The first `whole` vectors, and after them the elements that fill no vector.
template <typename Function, typename T, int V>
__global__ void __launch_bounds__(kThreads) flat_kernel(ElementwiseParams p, int64_t whole) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const T *a = static_cast<const T*>(p.in[0]), *b = static_cast<const T*>(p.in[1]);
    T* out = static_cast<T*>(p.out);
    if (i < whole) {
        const auto x = load_vector<T, V>(a + i * V), y = load_vector<T, V>(b + i * V);
        Vector<T, V> z;
#pragma unroll
        for (int j = 0; j < V; ++j) z.at[j] = store<T>(Function()(load(x.at[j]), load(y.at[j])));
        store_vector(out + i * V, z);
    } else if (const int64_t j = whole * V + i - whole; j < p.numel) {
        out[j] = store<T>(Function()(load(a[j]), load(b[j])));
    }
}

template <typename Function, typename T>
__global__ void __launch_bounds__(kThreads) strided_kernel(ElementwiseParams p) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= p.numel) return;
    int64_t rest = i, at[3] = {0, 0, 0};
    for (int d = p.dims - 1; d >= 0; --d) {
        const int64_t index = rest % p.size[d];
        rest /= p.size[d];
        for (int j = 0; j < 3; ++j) at[j] += index * p.stride[j][d];
    }
    const T x = static_cast<const T*>(p.in[0])[at[0]], y = static_cast<const T*>(p.in[1])[at[1]];
    static_cast<T*>(p.out)[at[2]] = store<T>(Function()(load(x), load(y)));
}

template <typename Function>
inline const char* elementwise_cuda(const ElementwiseParams& p, void* stream) {
    const auto queue = static_cast<cudaStream_t>(stream);
    const bool flat =
        p.dims == 1 && p.stride[0][0] == 1 && p.stride[1][0] == 1 && p.stride[2][0] == 1;
    const auto address = reinterpret_cast<uintptr_t>(p.in[0]) |
                         reinterpret_cast<uintptr_t>(p.in[1]) | reinterpret_cast<uintptr_t>(p.out);
    dispatch(p.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int V = 16 / sizeof(T);
        const int64_t whole = p.numel / V, tail = p.numel % V;
        if (flat && address % 16 == 0)
            flat_kernel<Function, T, V>
                <<<unsigned(ceil_div(whole + tail, kThreads)), kThreads, 0, queue>>>(p, whole);
        else
            strided_kernel<Function, T>
                <<<unsigned(ceil_div(p.numel, kThreads)), kThreads, 0, queue>>>(p);
    });
    return launch_error();
}
