// Interpolation inside narrow cells, of up to 64 bytes to a row of corners or less: a thread has a
// whole point, so that its weights are computed once and no sum crosses threads. The cells of a
// block's points are one run in memory; they pass through shared memory, where each thread picks
// its own.
#pragma once
#include "multilinear.h"
#include "short.cuh"
#include "vector.cuh"

namespace narrow {

constexpr int kThreads = 128;

/// The cells of a block's points in shared memory. Threads read their own in units of 16 bytes, or
/// 8 where a cell is no multiple of that; where a cell is a power of two of them, they are permuted
/// by the thread's number, so that no bank is met twice.
template <typename T, int kElements>
struct Tile {
    static constexpr int kBytes = kElements * sizeof(T), kPerWord = 16 / sizeof(T);
    using Unit = std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
    static constexpr int kUnits = kBytes / sizeof(Unit), kPerUnit = sizeof(Unit) / sizeof(T);
    static constexpr bool kPermuted = sizeof(Unit) == 16 && (kUnits & (kUnits - 1)) == 0;
    static constexpr int kWords = (kBytes * kThreads) / 16;
    uint4 words[kWords];

    __device__ static int place(int word) {
        if constexpr (kPermuted) {
            constexpr int kRows = kUnits < 8 ? 8 / kUnits : 1, kMask = kUnits < 8 ? kUnits - 1 : 7;
            return word ^ (word / (kUnits * kRows) & kMask);
        } else {
            return word;
        }
    }
    /// `count` cells from anywhere.
    __device__ void fetch(const T* cells, int count) {
        constexpr int kEach = (kWords + kThreads - 1) / kThreads;
        const int whole = count * kElements / kPerWord;
        if (reinterpret_cast<uintptr_t>(cells) % 16 == 0) {
            const auto from = reinterpret_cast<const uint4*>(cells);
            uint4 moved[kEach];
#pragma unroll
            for (int j = 0; j < kEach; ++j)
                if (const int i = j * kThreads + threadIdx.x; i < whole) moved[j] = from[i];
#pragma unroll
            for (int j = 0; j < kEach; ++j)
                if (const int i = j * kThreads + threadIdx.x; i < whole) words[place(i)] = moved[j];
        } else {
            constexpr int kAtOnce = kEach < 4 ? kEach : 4;
#pragma unroll 1
            for (int first = threadIdx.x; first < whole; first += kAtOnce * kThreads) {
                Vector<T, kPerWord> moved[kAtOnce];
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
                    if (const int i = first + j * kThreads; i < whole)
                        moved[j] = load_anywhere(cells + i * kPerWord);
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
                    if (const int i = first + j * kThreads; i < whole)
                        words[place(i)] = bit_copy<uint4>(moved[j]);
            }
        }
        if constexpr (!kPermuted)
            for (int i = whole * kPerWord + threadIdx.x; i < count * kElements; i += kThreads)
                reinterpret_cast<T*>(words)[i] = cells[i];
        __syncthreads();
    }
    /// `count` cells to where a word begins.
    __device__ void flush(T* cells, int count) {
        __syncthreads();
        const int whole = count * kElements / kPerWord;
#pragma unroll
        for (int i = threadIdx.x; i < kWords; i += kThreads)
            if (i < whole) reinterpret_cast<uint4*>(cells)[i] = words[place(i)];
        if constexpr (!kPermuted)
            for (int i = whole * kPerWord + threadIdx.x; i < count * kElements; i += kThreads)
                cells[i] = reinterpret_cast<T*>(words)[i];
    }
    /// Unit j of this thread's cell.
    __device__ Unit& own(int j) {
        if constexpr (sizeof(Unit) == 16)
            return words[place(threadIdx.x * kUnits + j)];
        else
            return reinterpret_cast<Unit*>(words)[threadIdx.x * kUnits + j];
    }
};

/// One thread's cell, (K, F), to and from its block's tile.
template <typename T, int K, int F>
struct OwnCell {
    using Block = Tile<T, K * F>;
    Vector<T, Block::kPerUnit> units[Block::kUnits];

    __device__ void get(Block& tile) {
#pragma unroll
        for (int i = 0; i < Block::kUnits; ++i)
            units[i] = bit_copy<Vector<T, Block::kPerUnit>>(tile.own(i));
    }
    __device__ void put(Block& tile) const {
#pragma unroll
        for (int i = 0; i < Block::kUnits; ++i)
            tile.own(i) = bit_copy<typename Block::Unit>(units[i]);
    }
    __device__ T& at(int k, int f) {
        return units[(k * F + f) / Block::kPerUnit].at[(k * F + f) % Block::kPerUnit];
    }
};

template <typename Cell, typename T, int F>
__global__ void __launch_bounds__(kThreads) forward(MultilinearParams p) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D, kPerWord = 16 / sizeof(T);
    using Own = OwnCell<T, K, F>;
    __shared__ typename Own::Block tile;
    const int64_t first = int64_t(blockIdx.x) * kThreads, n = first + threadIdx.x;
    const int count = p.N - first < kThreads ? int(p.N - first) : kThreads;
    const Position<Cell, A> at(p, n < p.N ? n : p.N - 1);
    tile.fetch(static_cast<const T*>(p.feats) + first * K * F, count);
    Own cell;
    cell.get(tile);
    A acc[F] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const A w = at.weight(k);
#pragma unroll
        for (int f = 0; f < F; ++f) acc[f] += w * value_of(cell.at(k, f), p.dtype);
    }
    if constexpr ((F & (F - 1)) == 0) {
        if (n >= p.N) return;
        Vector<T, F> sums;
#pragma unroll
        for (int f = 0; f < F; ++f) sums.at[f] = stored<T>(acc[f], p.dtype);
        static_cast<Vector<T, F>*>(p.out)[n] = sums;
    } else {
        __syncthreads();
        T* sums = reinterpret_cast<T*>(tile.words);
#pragma unroll
        for (int f = 0; f < F; ++f) sums[threadIdx.x * F + f] = stored<T>(acc[f], p.dtype);
        __syncthreads();
        T* out = static_cast<T*>(p.out) + first * F;
        const int whole = count * F / kPerWord;
        for (int i = threadIdx.x; i < whole; i += kThreads)
            reinterpret_cast<uint4*>(out)[i] = tile.words[i];
        for (int i = whole * kPerWord + threadIdx.x; i < count * F; i += kThreads) out[i] = sums[i];
    }
}

template <typename Cell, typename T, int F, bool kPoints>
__global__ void __launch_bounds__(kThreads) backward(MultilinearParams p) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    using Own = OwnCell<T, K, F>;
    __shared__ typename Own::Block tile;
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

template <typename Cell, typename T, int F>
inline const char* launch_forward(const MultilinearParams& p, cudaStream_t stream) {
    forward<Cell, T, F><<<unsigned(ceil_div(p.N, kThreads)), kThreads, 0, stream>>>(p);
    return launch_error();
}
template <typename Cell, typename T, int F>
inline const char* launch_backward(const MultilinearParams& p, cudaStream_t stream) {
    const auto kernel = p.grad_points ? backward<Cell, T, F, true> : backward<Cell, T, F, false>;
    kernel<<<unsigned(ceil_div(p.N, kThreads)), kThreads, 0, stream>>>(p);
    return launch_error();
}

/// Calls the kernel of p.F features.
template <typename Cell, typename T>
inline const char* launch(const MultilinearParams& p, cudaStream_t stream) {
    if (ceil_div(p.N, kThreads) > 0x7fffffff) return "more points than one CUDA grid can hold";
    const auto of = [&](auto F) {
        if constexpr (sizeof(T) < 8)
            if (p.out) return launch_forward<Cell, T, F>(p, stream);
        return launch_backward<Cell, Stored<T>, F>(p, stream);
    };
    if constexpr (sizeof(T) < 8) {
        if (p.F == 8) return of(std::integral_constant<int, 8>());
        if (p.F == 4) return of(std::integral_constant<int, 4>());
        if (p.F == 3) return of(std::integral_constant<int, 3>());
        if (p.F == 2) return of(std::integral_constant<int, 2>());
    }
    return of(std::integral_constant<int, 1>());
}

/// Whether these kernels take the call: the cells are one run, of F that they know, and where F is
/// 8 (of float64 at all) it was measured to be quicker than what is made for any F.
template <typename T>
inline bool fits(const MultilinearParams& p, int corners) {
    if (p.feats &&
        (p.feats_stride[2] != 1 || p.feats_stride[1] != p.F || p.feats_stride[0] != corners * p.F))
        return false;
    if (sizeof(T) == 8) return p.F == 1 && !p.out;
    const bool aligned = reinterpret_cast<uintptr_t>(p.feats) % 16 == 0;
    return p.F <= 4 || (p.F == 8 && (aligned || (sizeof(T) == 2 && !p.out)));
}

}  // namespace narrow
