// The CUDA kernels of trilinear_interpolation and bilinear_interpolation; formula in multilinear.h.
//
// Bytes per point (D = 3, float32): forward reads 8F + 3 floats and writes F, 36F + 12 bytes; the
// gradient to feats moves the same in the other direction; the gradient to points reads 9F + 3.
// Flops: about 2 per feature read, under half a flop a byte: memory traffic decides. N = 65536,
// F = 256 moves 605 MB, 141 us at 4.28 TB/s.
//
// Two mappings, both with every access to memory in whole runs of 16-byte words:
// - wide cells: `columns` neighbouring threads share a point, V neighbouring features each;
// - narrow cells (F = 1, 2, 4 or 8): a thread has a whole point, so that its weights are computed
//   once and no sum crosses threads. The cells of a block's points are one run in memory; they pass
//   through shared memory, where each thread picks its own.
// No atomics: every sum has a fixed order, so each run gives the same bits.
#pragma once
#include "multilinear.h"
#include "short.cuh"
#include "vector.cuh"

constexpr int kThreads = 128;

template <typename Cell, typename T, int V>
__global__ void __launch_bounds__(kThreads) forward_wide(MultilinearParams p, int columns) {
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
        const Position<Cell, A> at(p, n);  // read late: the cell's loads are under way already
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

/// Both gradients in one pass: grad_out is read once. `kPoints`: the one to points is asked for.
template <typename Cell, typename T, int V, bool kPoints>
__global__ void __launch_bounds__(kThreads) backward_wide(MultilinearParams p, int columns) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    // Threads past the last point do its work again, without storing: the sums below need whole
    // warps.
    const int64_t own = int64_t(blockIdx.x) * (kThreads / columns) + threadIdx.x / columns;
    const int64_t n = own < p.N ? own : p.N - 1;
    const Position<Cell, A> at(p, n);
    const T* feats = static_cast<const T*>(p.feats) + n * p.feats_stride[0];
    const T* grad_out = static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0];
    A dot[K] = {};  // of grad_out with each corner's features
    for (int64_t f = threadIdx.x % columns * V; f < p.F; f += columns * V) {
        Vector<T, V> corner[K];
        if constexpr (kPoints) {
#pragma unroll
            for (int k = 0; k < K; ++k)
                corner[k] =
                    load_vector<T, V>(feats + k * p.feats_stride[1] + f * p.feats_stride[2]);
        }
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
        if constexpr (kPoints) {
#pragma unroll
            for (int k = 0; k < K; ++k)
#pragma unroll
                for (int i = 0; i < V; ++i) dot[k] += g[i] * value_of(corner[k].at[i], p.dtype);
        }
        if (p.grad_feats && own == n) {
            T* grad_feats = static_cast<T*>(p.grad_feats) + n * K * p.F + f;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const A w = at.weight(k);
#pragma unroll
                for (int i = 0; i < V; ++i) corner[k].at[i] = stored<T>(w * g[i], p.dtype);
                store_vector(grad_feats + k * p.F, corner[k]);
            }
        }
    }
    if constexpr (kPoints) {
#pragma unroll
        for (int axis = 0; axis < Cell::D; ++axis) {
            A sum = 0;
#pragma unroll
            for (int k = 0; k < K; ++k) sum += at.slope(k, axis) * dot[k];
            for (int mask = columns / 2; mask > 0; mask /= 2)
                sum += __shfl_xor_sync(~0u, sum, mask);
            if (own == n && threadIdx.x % columns == 0)
                store_as<A>(p.points_dtype, p.grad_points, n * Cell::D + axis, sum);
        }
    }
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
        const A w = Position<Cell, A>(p, n).weight(int(row) & ((1 << Cell::D) - 1));
#pragma unroll
        for (int v = 0; v < V; ++v) x.at[v] = stored<T>(w * value_of(x.at[v], p.dtype), p.dtype);
        store_vector(static_cast<T*>(p.grad_feats) + i * V, x);
    }
}

/// The cells of a block's points in shared memory, in 16-byte words. The words of a cell are
/// permuted by its thread's number, so that neither the threads of a warp reading their own cells
/// nor the block copying all of them meets a bank twice.
template <int kWords>
struct Tile {
    uint4 words[kWords * kThreads];

    __device__ static int place(int thread, int word) {
        constexpr int kRows = kWords < 8 ? 8 / kWords : 1, kMask = kWords < 8 ? kWords - 1 : 7;
        return thread * kWords + (word ^ (thread / kRows & kMask));
    }
    __device__ void fetch(const void* cells, int count) {
        const auto from = static_cast<const uint4*>(cells);
        uint4 moved[kWords];
#pragma unroll
        for (int j = 0; j < kWords; ++j)
            if (const int i = j * kThreads + threadIdx.x; i < count * kWords) moved[j] = from[i];
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const int i = j * kThreads + threadIdx.x;
            words[place(i / kWords, i % kWords)] = moved[j];
        }
        __syncthreads();
    }
    __device__ void flush(void* cells, int count) {
        __syncthreads();
        const auto to = static_cast<uint4*>(cells);
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const int i = j * kThreads + threadIdx.x;
            if (i < count * kWords) to[i] = words[place(i / kWords, i % kWords)];
        }
    }
};

/// One thread's cell, (K, F), to and from its block's tile.
template <typename T, int K, int F>
struct OwnCell {
    static constexpr int kWords = K * F * sizeof(T) / 16, kPerWord = 16 / sizeof(T);
    Vector<T, kPerWord> words[kWords];

    __device__ void get(const Tile<kWords>& tile) {
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            words[i] = bit_copy<Vector<T, kPerWord>>(tile.words[tile.place(threadIdx.x, i)]);
    }
    __device__ void put(Tile<kWords>& tile) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            tile.words[tile.place(threadIdx.x, i)] = bit_copy<uint4>(words[i]);
    }
    __device__ T& at(int k, int f) {
        return words[(k * F + f) / kPerWord].at[(k * F + f) % kPerWord];
    }
};

template <typename Cell, typename T, int F>
__global__ void __launch_bounds__(kThreads) forward_narrow(MultilinearParams p) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    using Own = OwnCell<T, K, F>;
    __shared__ Tile<Own::kWords> tile;
    const int64_t first = int64_t(blockIdx.x) * kThreads, n = first + threadIdx.x;
    const int count = p.N - first < kThreads ? int(p.N - first) : kThreads;
    const Position<Cell, A> at(p, n < p.N ? n : p.N - 1);
    tile.fetch(static_cast<const T*>(p.feats) + first * K * F, count);
    if (n >= p.N) return;
    Own cell;
    cell.get(tile);
    A acc[F] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const A w = at.weight(k);
#pragma unroll
        for (int f = 0; f < F; ++f) acc[f] += w * value_of(cell.at(k, f), p.dtype);
    }
    Vector<T, F> sums;
#pragma unroll
    for (int f = 0; f < F; ++f) sums.at[f] = stored<T>(acc[f], p.dtype);
    static_cast<Vector<T, F>*>(p.out)[n] = sums;
}

template <typename Cell, typename T, int F, bool kPoints>
__global__ void __launch_bounds__(kThreads) backward_narrow(MultilinearParams p) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    using Own = OwnCell<T, K, F>;
    __shared__ Tile<Own::kWords> tile;
    const int64_t first = int64_t(blockIdx.x) * kThreads;
    const int count = p.N - first < kThreads ? int(p.N - first) : kThreads;
    const bool exists = threadIdx.x < count;
    const int64_t n = exists ? first + threadIdx.x : p.N - 1;
    const Position<Cell, A> at(p, n);
    const T* grad_out = static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0];
    A g[F];
#pragma unroll
    for (int f = 0; f < F; ++f) g[f] = value_of(grad_out[f * p.grad_out_stride[1]], p.dtype);
    Own cell;
    if constexpr (kPoints) {
        tile.fetch(static_cast<const T*>(p.feats) + first * K * F, count);
        cell.get(tile);
        A dot[K] = {};
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
            for (int f = 0; f < F; ++f) dot[k] += g[f] * value_of(cell.at(k, f), p.dtype);
#pragma unroll
        for (int axis = 0; axis < Cell::D; ++axis) {
            A sum = 0;
#pragma unroll
            for (int k = 0; k < K; ++k) sum += at.slope(k, axis) * dot[k];
            if (exists) store_as<A>(p.points_dtype, p.grad_points, n * Cell::D + axis, sum);
        }
    }
    if (p.grad_feats) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const A w = at.weight(k);
#pragma unroll
            for (int f = 0; f < F; ++f) cell.at(k, f) = stored<T>(w * g[f], p.dtype);
        }
        // A thread overwrites no cell but its own, which it has read.
        cell.put(tile);
        tile.flush(static_cast<T*>(p.grad_feats) + first * K * F, count);
    }
}

/// Whether vectors of V elements fit: F a multiple of V, every row on a vector's boundary.
template <typename T>
inline bool fits(const MultilinearParams& p, int V) {
    const auto aligned = [&](const void* data, const int64_t* stride, int rows) {
        for (int i = 0; i < rows; ++i)
            if (stride[i] % V != 0) return false;
        return reinterpret_cast<uintptr_t>(data) % (V * sizeof(T)) == 0;
    };
    const int64_t along = p.grad_out ? p.grad_out_stride[1] : 1;
    return p.F % V == 0 && (!p.feats || p.feats_stride[2] == 1) &&
           aligned(p.feats, p.feats_stride, 2) &&
           (along != 1 || aligned(p.grad_out, p.grad_out_stride, 1));
}

template <typename Cell, typename T, int V>
inline const char* launch_wide(const MultilinearParams& p, cudaStream_t stream) {
    const int64_t row = p.F / V;
    if constexpr (V > 1) {
        if (!p.grad_points && !p.out && (row & (row - 1)) == 0 && p.grad_out_stride[1] == 1) {
            int log_row = 0;
            while (int64_t(1) << log_row < row) ++log_row;
            const int64_t blocks = ceil_div((p.N << Cell::D) * row, kThreads * kFlatVectors);
            backward_flat<Cell, T, V><<<unsigned(blocks), kThreads, 0, stream>>>(p, log_row);
            return launch_error();
        }
    }
    const int most = p.grad_points ? 32 : kThreads;  // sums over a point's features stay in a warp
    int columns = 1;
    while (columns < most && columns * V < p.F) columns *= 2;
    const int64_t blocks = ceil_div(p.N, kThreads / columns);
    if (blocks > 0x7fffffff) return "more points than one CUDA grid can hold";
    const auto kernel = p.out           ? forward_wide<Cell, T, V>
                        : p.grad_points ? backward_wide<Cell, T, V, true>
                                        : backward_wide<Cell, T, V, false>;
    kernel<<<unsigned(blocks), kThreads, 0, stream>>>(p, columns);
    return launch_error();
}

template <typename Cell, typename T, int F>
inline const char* launch_narrow(const MultilinearParams& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.N, kThreads);
    if (blocks > 0x7fffffff) return "more points than one CUDA grid can hold";
    const auto kernel = p.out           ? forward_narrow<Cell, T, F>
                        : p.grad_points ? backward_narrow<Cell, T, F, true>
                                        : backward_narrow<Cell, T, F, false>;
    kernel<<<unsigned(blocks), kThreads, 0, stream>>>(p);
    return launch_error();
}

/// Whether the cells are one run in memory that starts on a 16-byte word.
inline bool one_run(const MultilinearParams& p, int corners) {
    const auto address = reinterpret_cast<uintptr_t>(p.feats);
    return !p.feats || (address % 16 == 0 && p.feats_stride[2] == 1 && p.feats_stride[1] == p.F &&
                        p.feats_stride[0] == corners * p.F);
}

template <typename Cell, typename T>
inline const char* launch_elements(const MultilinearParams& p, cudaStream_t stream) {
    constexpr int V = 16 / sizeof(T), K = 1 << Cell::D;
    if constexpr (sizeof(T) < 8) {
        if (one_run(p, K)) {
            if (p.F == 8) return launch_narrow<Cell, T, 8>(p, stream);
            if (p.F == 4) return launch_narrow<Cell, T, 4>(p, stream);
            if (p.F == 2) return launch_narrow<Cell, T, 2>(p, stream);
            if constexpr (K * sizeof(T) >= 16)
                if (p.F == 1) return launch_narrow<Cell, T, 1>(p, stream);
        }
    }
    return fits<T>(p, V) ? launch_wide<Cell, T, V>(p, stream) : launch_wide<Cell, T, 1>(p, stream);
}

/// Forward where `out` is set, else backward. Two files may each compile kernels for some element
/// types, so that nvcc works on them side by side: those of 32 and 64 bits, and those of 16.
template <typename Cell>
inline const char* multilinear_cuda(const MultilinearParams& p, void* stream) {
    const auto queue = static_cast<cudaStream_t>(stream);
    return p.dtype == DType::kDouble ? launch_elements<Cell, double>(p, queue)
                                     : launch_elements<Cell, float>(p, queue);
}
template <typename Cell>
inline const char* multilinear_16bit_cuda(const MultilinearParams& p, void* stream) {
    const auto queue = static_cast<cudaStream_t>(stream);
    // As Short, one type for both, backward takes 3 to 7 % longer.
    return p.dtype == DType::kHalf ? launch_elements<Cell, Half>(p, queue)
                                   : launch_elements<Cell, BFloat16>(p, queue);
}
inline bool is_16bit(DType dtype) { return dtype == DType::kHalf || dtype == DType::kBFloat16; }
