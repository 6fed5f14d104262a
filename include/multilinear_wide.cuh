// Interpolation inside cells whose features go straight from memory to registers and back:
// `columns` neighbouring threads share a point, V neighbouring features each. V is a 16-byte word
// where every row is a whole number of them; 1 where what a tile would take lies too far apart.
#pragma once
#include "multilinear.h"
#include "multilinear_points.cuh"
#include "short.cuh"
#include "vector.cuh"

namespace wide {

constexpr int kThreads = 128;

template <typename Cell, typename T, int V>
__global__ void __launch_bounds__(kThreads) forward(MultilinearParams p, int columns) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    const int64_t n = int64_t(blockIdx.x) * (kThreads / columns) + threadIdx.x / columns;
    if (n >= p.N) return;
    const T* feats = static_cast<const T*>(p.feats) + n * p.feats_stride[0];
    T* out = static_cast<T*>(p.out) + n * p.F;
    for (int64_t f = threadIdx.x % columns * V; f < p.F; f += columns * V) {
        Vector<T, V> corner[K], sums;
#pragma unroll
        for (int k = 0; k < K; ++k)
            corner[k] = load_vector<T, V>(feats + k * p.feats_stride[1] + f * p.feats_stride[2]);
        // Read late: the cell's loads are under way already.
        const auto at = LoadedPoint<A, Cell::D>(p, n).template in<Cell>();
        A acc[V] = {};
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const A w = at.weight(k);
#pragma unroll
            for (int i = 0; i < V; ++i) acc[i] += w * value_of(corner[k].at[i], p.dtype);
        }
#pragma unroll
        for (int i = 0; i < V; ++i) sums.at[i] = stored<T>(acc[i], p.dtype);
        store_vector(out + f, sums);
    }
}

/// The corners of one feature, which lie side by side, in words of memory.
template <int K, typename T>
__device__ inline void load_cell(const T* from, Vector<T, 1> (&corner)[K]) {
    constexpr int kWord = K * sizeof(T) < 16 ? K : 16 / sizeof(T);
#pragma unroll
    for (int k = 0; k < K; k += kWord) {
        const auto word = load_vector<T, kWord>(from + k);
#pragma unroll
        for (int i = 0; i < kWord; ++i) corner[k + i].at[0] = word.at[i];
    }
}

constexpr int kCells = 4;  // to a thread

/// Forward of such features, whichever points they are of.
template <typename Cell, typename T>
__global__ void __launch_bounds__(kThreads) forward_cells(MultilinearParams p) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    const int64_t first = int64_t(blockIdx.x) * (kThreads * kCells), begin = first / p.F;
    const unsigned F = unsigned(p.F), rest = unsigned(first - begin * p.F) + threadIdx.x;
    const T* const feats = static_cast<const T*>(p.feats);
    Vector<T, 1> corner[kCells][K];
    int64_t point[kCells];
#pragma unroll
    for (int j = 0; j < kCells; ++j) {
        const unsigned at = rest + j * kThreads, n = at / F, f = at - n * F;
        point[j] = begin + n;
        if (point[j] < p.N)
            load_cell<K>(feats + point[j] * p.feats_stride[0] + int64_t(f) * K, corner[j]);
    }
#pragma unroll
    for (int j = 0; j < kCells; ++j) {
        if (point[j] >= p.N) return;
        const auto at = LoadedPoint<A, Cell::D>(p, point[j]).template in<Cell>();
        A sum = 0;
#pragma unroll
        for (int k = 0; k < K; ++k) sum += at.weight(k) * value_of(corner[j][k].at[0], p.dtype);
        static_cast<T*>(p.out)[first + threadIdx.x + j * kThreads] = stored<T>(sum, p.dtype);
    }
}

/// Whether a feature's corners lie side by side, and features too, in words of memory.
template <typename T>
inline bool are_cells(const MultilinearParams& p, int K) {
    const int word = K * sizeof(T) < 16 ? K * int(sizeof(T)) : 16;
    return p.feats && p.feats_stride[1] == 1 && p.feats_stride[2] == K && p.F > 1 &&
           p.F < 1 << 30 && p.feats_stride[0] * int64_t(sizeof(T)) % word == 0 &&
           reinterpret_cast<uintptr_t>(p.feats) % word == 0;
}

/// The gradient to points, and to feats where it is asked for: grad_out is read once.
template <typename Cell, typename T, int V>
__global__ void __launch_bounds__(kThreads) backward_both(MultilinearParams p, int columns) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    // Threads past the last point do its work again, without storing: the sums below need whole
    // warps.
    const int64_t own = int64_t(blockIdx.x) * (kThreads / columns) + threadIdx.x / columns;
    const int64_t n = own < p.N ? own : p.N - 1;
    const LoadedPoint<A, Cell::D> point(p, n);
    const T* feats = static_cast<const T*>(p.feats) + n * p.feats_stride[0];
    const T* grad_out = static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0];
    A dot[K] = {};  // of grad_out with each corner's features
#pragma unroll 1
    for (int64_t f = threadIdx.x % columns * V; f < p.F; f += columns * V) {
        Vector<T, V> corner[K];
#pragma unroll
        for (int k = 0; k < K; ++k)
            corner[k] = load_vector<T, V>(feats + k * p.feats_stride[1] + f * p.feats_stride[2]);
        A g[V];
        if (p.grad_out_stride[1] == 1) {
            const auto row = load_vector<T, V>(grad_out + f);
#pragma unroll
            for (int i = 0; i < V; ++i) g[i] = value_of(row.at[i], p.dtype);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i)
                g[i] = value_of(grad_out[(f + i) * p.grad_out_stride[1]], p.dtype);
        }
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
            for (int i = 0; i < V; ++i) dot[k] += g[i] * value_of(corner[k].at[i], p.dtype);
        if (p.grad_feats && own == n) {
            T* grad_feats = static_cast<T*>(p.grad_feats) + n * K * p.F + f;
            const auto at = point.template in<Cell>();
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const A w = at.weight(k);
#pragma unroll
                for (int i = 0; i < V; ++i) corner[k].at[i] = stored<T>(w * g[i], p.dtype);
            }
            if (V == 1 && p.F == 1) {  // neighbours: single ones would reach memory in parts
                constexpr int kWord = K * sizeof(T) < 16 ? K : 16 / sizeof(T);
#pragma unroll
                for (int k = 0; k < K; k += kWord) {
                    Vector<T, kWord> word;
#pragma unroll
                    for (int i = 0; i < kWord; ++i) word.at[i] = corner[k + i].at[0];
                    store_vector(grad_feats + k, word);
                }
            } else {
#pragma unroll
                for (int k = 0; k < K; ++k) store_vector(grad_feats + k * p.F, corner[k]);
            }
        }
    }
    const auto at = point.template in<Cell>();
    A sums[Cell::D] = {};
#pragma unroll
    for (int axis = 0; axis < Cell::D; ++axis) {
#pragma unroll
        for (int k = 0; k < K; ++k) sums[axis] += at.slope(k, axis) * dot[k];
        for (int mask = columns / 2; mask > 0; mask /= 2)
            sums[axis] += __shfl_xor_sync(~0u, sums[axis], mask);
    }
    if (own == n && threadIdx.x % columns == 0) store_gradient(p, n, sums);
}

constexpr int kFlatVectors = 2;  // to a thread

/// The gradient to feats alone, where a corner is 2^log_row vectors: written from end to end as one
/// run, which memory takes 6 % faster than rows a corner apart. grad_out comes from the cache.
template <typename Cell, typename T, int V>
__global__ void __launch_bounds__(kThreads) backward_flat(MultilinearParams p, int log_row) {
    using A = Acc<T>;
    const int64_t first = int64_t(blockIdx.x) * (kThreads * kFlatVectors) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kFlatVectors; ++j) {
        const int64_t i = first + j * kThreads, row = i >> log_row, n = row >> Cell::D;
        if (n >= p.N) return;
        const int64_t f = (i & ((int64_t(1) << log_row) - 1)) * V;
        const T* grad_out = static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0];
        Vector<T, V> x = load_vector<T, V>(grad_out + f);
        const auto at = LoadedPoint<A, Cell::D>(p, n).template in<Cell>();
        const A w = at.weight(int(row) & ((1 << Cell::D) - 1));
#pragma unroll
        for (int v = 0; v < V; ++v) x.at[v] = stored<T>(w * value_of(x.at[v], p.dtype), p.dtype);
        store_vector(static_cast<T*>(p.grad_feats) + i * V, x);
    }
}

/// Whether every row of feats, and of grad_out, is a whole number of vectors.
template <typename T>
inline bool fits(const MultilinearParams& p, int V) {
    const auto whole = [&](const void* data, const int64_t* stride, int rows) {
        for (int i = 0; i < rows; ++i)
            if (stride[i] % V != 0) return false;
        return reinterpret_cast<uintptr_t>(data) % (V * sizeof(T)) == 0;
    };
    const int64_t along = p.grad_out ? p.grad_out_stride[1] : 1;
    return p.F % V == 0 && (!p.feats || p.feats_stride[2] == 1) &&
           whole(p.feats, p.feats_stride, 2) &&
           (along != 1 || whole(p.grad_out, p.grad_out_stride, 1));
}

/// Whether `backward_flat` takes the call.
template <typename T>
inline bool is_flat(const MultilinearParams& p) {
    const int64_t row = p.F / int64_t(16 / sizeof(T));
    return (row & (row - 1)) == 0 && p.grad_out_stride[1] == 1;
}

template <typename Cell, typename T>
inline const char* launch_flat(const MultilinearParams& p, cudaStream_t stream) {
    constexpr int V = 16 / sizeof(T);
    int log_row = 0;
    while (int64_t(V) << log_row < p.F) ++log_row;
    const int64_t blocks = ceil_div((p.N << Cell::D) << log_row, int64_t(kThreads) * kFlatVectors);
    backward_flat<Cell, T, V><<<unsigned(blocks), kThreads, 0, stream>>>(p, log_row);
    return launch_error();
}

/// Forward, or the gradient to points and, where it is asked for, to feats.
template <typename Cell, typename T, int V>
inline const char* launch(const MultilinearParams& p, cudaStream_t stream) {
    const int most = p.out ? kThreads : 32;  // sums over a point's features stay in a warp
    int columns = 1;
    while (columns < most && columns * V < p.F) columns *= 2;
    const int64_t blocks = ceil_div(p.N, kThreads / columns);
    if (blocks > 0x7fffffff) return "more points than one CUDA grid can hold";
    const auto kernel = p.out ? forward<Cell, T, V> : backward_both<Cell, T, V>;
    kernel<<<unsigned(blocks), kThreads, 0, stream>>>(p, columns);
    return launch_error();
}

/// The forward of cells as `are_cells` says.
template <typename Cell, typename T>
inline const char* launch_cells(const MultilinearParams& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.N * p.F, int64_t(kThreads) * kCells);
    if (blocks > 0x7fffffff) return "more features than one CUDA grid can hold";
    forward_cells<Cell, T><<<unsigned(blocks), kThreads, 0, stream>>>(p);
    return launch_error();
}

}  // namespace wide
