// The CUDA kernels of elementwise operators; see elementwise.h.
// Traffic decides: for float32, 4 bytes read per input and element and 4 written per output.
// Contiguous data is moved as 16-byte words, one per thread and tensor; anything else element by
// element.
#pragma once
#include "elementwise.h"
#include "vector.cuh"

constexpr int kThreads = 256;

namespace elementwise {

/// What the kernels need of ElementwiseParams, for a function of N inputs and M outputs.
template <int N, int M>
struct Flat {
    const void* in[N];
    void* out[M];
    int64_t numel;

    explicit Flat(const ElementwiseParams& p) : numel(p.numel) {
        for (int n = 0; n < N; ++n) in[n] = p.in[n];
        for (int m = 0; m < M; ++m) out[m] = p.out[m];
    }
};
template <int N, int M>
struct Strided : Flat<N, M> {
    int dims;
    int64_t size[kMaxDims], in_stride[N][kMaxDims], out_stride[M][kMaxDims];

    explicit Strided(const ElementwiseParams& p) : Flat<N, M>(p), dims(p.dims) {
        for (int d = 0; d < dims; ++d) {
            size[d] = p.size[d];
            for (int n = 0; n < N; ++n) in_stride[n][d] = p.in_stride[n][d];
            for (int m = 0; m < M; ++m) out_stride[m][d] = p.out_stride[m][d];
        }
    }
};

template <typename Function, typename A, size_t... I>
__device__ auto call(const A (&x)[sizeof...(I)], std::index_sequence<I...>) {
    return Function()(x[I]...);
}
template <typename A>
__device__ Several<A, 1> several(A x) {
    return {x};
}
template <typename A, int Count>
__device__ Several<A, Count> several(Several<A, Count> x) {
    return x;
}

/// The first `whole` vectors, and after them the elements that fill no vector.
template <typename Function, typename T, int V, int N, int M>
__global__ void __launch_bounds__(kThreads) flat_kernel(Flat<N, M> p, int64_t whole) {
    constexpr auto all = std::make_index_sequence<N>();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    Acc<T> x[N];
    if (i < whole) {
        Vector<T, V> in[N], out[M];
#pragma unroll
        for (int n = 0; n < N; ++n)
            in[n] = load_vector<T, V>(static_cast<const T*>(p.in[n]) + i * V);
#pragma unroll
        for (int j = 0; j < V; ++j) {
#pragma unroll
            for (int n = 0; n < N; ++n) x[n] = load(in[n].at[j]);
            const auto y = several(call<Function>(x, all));
#pragma unroll
            for (int m = 0; m < M; ++m) out[m].at[j] = store<T>(y.at[m]);
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (M == 1 || p.out[m]) store_vector(static_cast<T*>(p.out[m]) + i * V, out[m]);
    } else if (const int64_t j = whole * V + i - whole; j < p.numel) {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = load(static_cast<const T*>(p.in[n])[j]);
        const auto y = several(call<Function>(x, all));
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (M == 1 || p.out[m]) static_cast<T*>(p.out[m])[j] = store<T>(y.at[m]);
    }
}

template <typename Function, typename T, int N, int M>
__global__ void __launch_bounds__(kThreads) strided_kernel(Strided<N, M> p) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= p.numel) return;
    int64_t rest = i, in_at[N] = {}, out_at[M] = {};
    for (int d = p.dims - 1; d >= 0; --d) {
        const int64_t index = rest % p.size[d];
        rest /= p.size[d];
#pragma unroll
        for (int n = 0; n < N; ++n) in_at[n] += index * p.in_stride[n][d];
#pragma unroll
        for (int m = 0; m < M; ++m) out_at[m] += index * p.out_stride[m][d];
    }
    Acc<T> x[N];
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = load(static_cast<const T*>(p.in[n])[in_at[n]]);
    const auto y = several(call<Function>(x, std::make_index_sequence<N>()));
#pragma unroll
    for (int m = 0; m < M; ++m)
        if (M == 1 || p.out[m]) static_cast<T*>(p.out[m])[out_at[m]] = store<T>(y.at[m]);
}

}  // namespace elementwise

template <typename Function>
inline const char* elementwise_cuda(const ElementwiseParams& p, void* stream) {
    using namespace elementwise;
    constexpr int N = inputs<Function>, M = outputs<Function>;
    const auto queue = static_cast<cudaStream_t>(stream);
    bool flat = p.dims == 1;
    uintptr_t address = 0;
    for (int n = 0; n < N; ++n) {
        flat = flat && p.in_stride[n][0] == 1;
        address |= reinterpret_cast<uintptr_t>(p.in[n]);
    }
    for (int m = 0; m < M; ++m) {
        flat = flat && p.out_stride[m][0] == 1;
        address |= reinterpret_cast<uintptr_t>(p.out[m]);
    }
    dispatch(p.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int V = 16 / sizeof(T);
        const int64_t whole = p.numel / V, tail = p.numel % V;
        if (flat && address % 16 == 0)
            flat_kernel<Function, T, V, N, M>
                <<<unsigned(ceil_div(whole + tail, kThreads)), kThreads, 0, queue>>>(Flat<N, M>(p),
                                                                                     whole);
        else
            strided_kernel<Function, T, N, M>
                <<<unsigned(ceil_div(p.numel, kThreads)), kThreads, 0, queue>>>(Strided<N, M>(p));
    });
    return launch_error();
}
