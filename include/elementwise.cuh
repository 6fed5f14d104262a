// The CUDA kernels of elementwise operators; see elementwise.h.
// Traffic decides: for float32, 4 bytes read per input and element and 4 written per output.
// Data that lies in rows is moved as 16-byte words, one per thread and tensor, wherever rows begin;
// anything else element by element, neighbouring threads having neighbouring elements of the
// output.
#pragma once
#include "dims.h"
#include "elementwise.h"
#include "short.cuh"
#include "vector.cuh"

constexpr int kThreads = 256;
constexpr int64_t kSmall = 1 << 20;  // elements of 4 bytes

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
/// Division of numbers below 2^31 by one that is known before the launch.
struct Divisor {
    unsigned by, factor, shift;

    Divisor() = default;
    explicit Divisor(int64_t divisor) : by(unsigned(divisor)), shift(0) {
        while (uint64_t(1) << shift < by) ++shift;
        factor = unsigned(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - by)) / by + 1);
    }
    __device__ unsigned quotient(unsigned n) const { return (__umulhi(n, factor) + n) >> shift; }
};

/// Outputs that are one run in memory, and inputs of the same shape with any strides.
template <int N, int M>
struct Strided : Flat<N, M> {
    int dims;
    bool small;  // all indices are below 2^31
    DType dtype;
    int64_t size[kMaxDims], in_stride[N][kMaxDims];
    Divisor divisor[kMaxDims];

    explicit Strided(const ElementwiseParams& p) : Flat<N, M>(p), dims(p.dims), dtype(p.dtype) {
        small = p.numel < int64_t(1) << 31;
        for (int d = 0; d < dims; ++d) {
            size[d] = p.size[d];
            if (small) divisor[d] = Divisor(p.size[d]);
            for (int n = 0; n < N; ++n) in_stride[n][d] = p.in_stride[n][d];
        }
    }
    /// Where element i of the outputs lies in each input; its place in the innermost dimension.
    __device__ int64_t place(int64_t i, int64_t (&at)[N]) const {
        int64_t column = 0;
#pragma unroll
        for (int n = 0; n < N; ++n) at[n] = 0;
#pragma unroll 1
        for (int d = dims - 1; d > 0; --d) {
            const int64_t outer = small ? int64_t(divisor[d].quotient(unsigned(i))) : i / size[d];
            const int64_t index = i - outer * size[d];
            if (d == dims - 1) column = index;
#pragma unroll
            for (int n = 0; n < N; ++n) at[n] += index * in_stride[n][d];
            i = outer;
        }
#pragma unroll
        for (int n = 0; n < N; ++n) at[n] += i * in_stride[n][0];
        return dims == 1 ? i : column;
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

/// `kWords` vectors to a thread, the first `whole` of all, and after them the elements that fill no
/// vector. `kAligned`: vectors of the inputs begin on words.
template <typename Function, typename T, int N, int M, bool kAligned>
__global__ void __launch_bounds__(kThreads) flat_kernel(Flat<N, M> p, int64_t whole) {
    constexpr auto all = std::make_index_sequence<N>();
    constexpr int V = 16 / sizeof(T), kWords = kAligned || N > 2 ? 1 : 2;
    const int64_t first = int64_t(blockIdx.x) * (kThreads * kWords) + threadIdx.x;
    Acc<T> x[N];
    Vector<T, V> in[kWords][N];
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (const int64_t i = first + w * kThreads; i < whole) {
                const T* from = static_cast<const T*>(p.in[n]) + i * V;
                in[w][n] = kAligned ? load_vector<T, V>(from) : load_anywhere(from);
            }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const int64_t i = first + w * kThreads;
        if (i < whole) {
            Vector<T, V> out[M];
#pragma unroll
            for (int j = 0; j < V; ++j) {
#pragma unroll
                for (int n = 0; n < N; ++n) x[n] = load(in[w][n].at[j]);
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
}

/// V neighbours in a row whose elements are 0, 1 or 2 apart.
template <typename T, int V>
__device__ inline Vector<T, V> load_row(const T* from, int64_t step) {
    if (step == 1) return load_anywhere(from);
    Vector<T, V> x;
    if (step == 0) {
#pragma unroll
        for (int j = 0; j < V; ++j) x.at[j] = *from;
        return x;
    }
    // Not one element further than the last that is asked for.
    const auto low = load_anywhere(from), high = load_anywhere(from + V - 1);
#pragma unroll
    for (int j = 0; j < V; ++j) x.at[j] = 2 * j < V ? low.at[2 * j] : high.at[2 * j - (V - 1)];
    return x;
}

/// A vector to a thread, from rows of at least one; the last one's row may end within it.
template <typename Function, typename T, int N, int M>
__global__ void __launch_bounds__(kThreads) rows_kernel(Strided<N, M> p) {
    constexpr auto all = std::make_index_sequence<N>();
    constexpr int V = 16 / sizeof(T);
    const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * V;
    if (i >= p.numel) return;
    int64_t at[N], next[N];
    Vector<T, V> in[N], out[M];
    const int64_t length = p.size[p.dims - 1];
    const int64_t left = length - p.place(i, at);
    const bool whole = i + V <= p.numel;
    if (left < V && whole) p.place(i + left, next);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const T* data = static_cast<const T*>(p.in[n]);
        const int64_t step = p.in_stride[n][p.dims - 1];
        if (left >= V) {
            in[n] = load_row<T, V>(data + at[n], step);
        } else {
            const auto low = load_row<T, V>(data + at[n] - (V - left) * step, step);
            const auto high = whole ? load_row<T, V>(data + next[n], step) : low;
            in[n] = bit_copy<Vector<T, V>>(window<T>(bit_copy<uint4>(low), bit_copy<uint4>(high),
                                                     unsigned(V - left) * unsigned(sizeof(T))));
        }
    }
    Acc<T> x[N];
#pragma unroll
    for (int j = 0; j < V; ++j) {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = value_of(in[n].at[j], p.dtype);
        const auto y = several(call<Function>(x, all));
#pragma unroll
        for (int m = 0; m < M; ++m) out[m].at[j] = stored<T>(y.at[m], p.dtype);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
        if (M > 1 && !p.out[m]) continue;
        T* to = static_cast<T*>(p.out[m]) + i;
        if (whole)
            store_vector(to, out[m]);
        else
            for (int j = 0; j < V; ++j)
                if (j < left) to[j] = out[m].at[j];
    }
}

/// Element by element, `kEach` of them to a thread whose loads are under way together: neighbouring
/// threads have neighbours of the output.
template <typename Function, typename T, int kEach, int N, int M>
__global__ void __launch_bounds__(kThreads) strided_kernel(Strided<N, M> p) {
    const int64_t first = int64_t(blockIdx.x) * (kThreads * kEach) + threadIdx.x;
    T in[kEach][N];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int64_t i = first + e * kThreads;
        int64_t at[N];
        if (i < p.numel) {
            p.place(i, at);
#pragma unroll
            for (int n = 0; n < N; ++n) in[e][n] = static_cast<const T*>(p.in[n])[at[n]];
        }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int64_t i = first + e * kThreads;
        Acc<T> x[N];
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = value_of(in[e][n], p.dtype);
        const auto y = several(call<Function>(x, std::make_index_sequence<N>()));
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (i < p.numel && (M == 1 || p.out[m]))
                static_cast<T*>(p.out[m])[i] = stored<T>(y.at[m], p.dtype);
    }
}

/// The same with dimensions in the order in which the outputs have them in memory, which is dense.
inline ElementwiseParams in_memory_order(const ElementwiseParams& p, int tensors) {
    int order[kMaxDims];
    for (int d = 0; d < p.dims; ++d) {
        int place = d;
        for (; place > 0 && p.out_stride[0][order[place - 1]] < p.out_stride[0][d]; --place)
            order[place] = order[place - 1];
        order[place] = d;
    }
    ElementwiseParams sorted = p;
    int64_t size[kMaxDims], stride[kMaxInputs + 1][kMaxDims];
    const int64_t* strides[kMaxInputs + 1];
    int64_t* merged[kMaxInputs + 1];
    for (int i = 0; i <= tensors; ++i) {
        strides[i] = stride[i];
        merged[i] = i < tensors ? sorted.in_stride[i] : sorted.out_stride[0];
        for (int d = 0; d < p.dims; ++d)
            stride[i][d] = (i < tensors ? p.in_stride[i] : p.out_stride[0])[order[d]];
    }
    for (int d = 0; d < p.dims; ++d) size[d] = p.size[order[d]];
    sorted.dims = merge_dims(p.dims, size, strides, tensors + 1, kMaxDims, sorted.size, merged);
    return sorted;
}

}  // namespace elementwise

template <typename Function>
inline const char* elementwise_cuda(const ElementwiseParams& given, void* stream) {
    using namespace elementwise;
    constexpr int N = inputs<Function>, M = outputs<Function>;
    const auto queue = static_cast<cudaStream_t>(stream);
    const ElementwiseParams p = given.dims == 1 ? given : in_memory_order(given, N);
    bool flat = p.dims == 1, rows = true, aligned = true, placed = true;
    for (int n = 0; n < N; ++n) {
        const int64_t step = p.in_stride[n][p.dims - 1];
        flat = flat && step == 1, rows = rows && step <= 2;
        aligned = aligned && reinterpret_cast<uintptr_t>(p.in[n]) % 16 == 0;
    }
    for (int m = 0; m < M; ++m) placed = placed && reinterpret_cast<uintptr_t>(p.out[m]) % 16 == 0;
    // What is small needs many threads more than whole words.
    const bool small =
        p.numel < (p.dtype == DType::kHalf || p.dtype == DType::kBFloat16 ? 2 : 1) * kSmall;
    if (flat && placed && (aligned || !small)) {
        dispatch(p.dtype, [&](auto element) {
            using T = decltype(element);
            constexpr int V = 16 / sizeof(T), kWords = N > 2 ? 1 : 2;
            const int64_t whole = p.numel / V, all = whole + p.numel % V;
            const Flat<N, M> data(p);
            if (aligned)
                flat_kernel<Function, T, N, M, true>
                    <<<unsigned(ceil_div(all, kThreads)), kThreads, 0, queue>>>(data, whole);
            else
                flat_kernel<Function, T, N, M, false>
                    <<<unsigned(ceil_div(all, kThreads * kWords)), kThreads, 0, queue>>>(data,
                                                                                         whole);
        });
        return launch_error();
    }
    const Strided<N, M> strided(p);
    const auto launch = [&](auto element) {
        using T = decltype(element);
        constexpr int V = 16 / sizeof(T), kEach = N > 2 ? 1 : 4;
        const bool few = small || sizeof(T) == 8;
        if (!few && rows && placed && p.size[p.dims - 1] >= V)
            rows_kernel<Function, T, N, M>
                <<<unsigned(ceil_div(p.numel, kThreads * V)), kThreads, 0, queue>>>(strided);
        else if (few)
            strided_kernel<Function, T, 1, N, M>
                <<<unsigned(ceil_div(p.numel, kThreads)), kThreads, 0, queue>>>(strided);
        else
            strided_kernel<Function, T, kEach, N, M>
                <<<unsigned(ceil_div(p.numel, kThreads * kEach)), kThreads, 0, queue>>>(strided);
    };
    if (p.dtype == DType::kDouble)
        launch(double{});
    else if (p.dtype == DType::kFloat)
        launch(float{});
    else
        launch(Short{});
    return launch_error();
}
