// Interpolation inside narrow cells, of up to eight features: a thread has a whole point, or two,
// so that its weights are computed once and no sum crosses threads. Cells of a block's points that
// are one run in memory pass through shared memory as whole words, wherever they begin, and each
// thread picks its own there; what lies apart, it reads itself.
#pragma once
#include "multilinear.h"
#include "multilinear_points.cuh"
#include "short.cuh"
#include "vector.cuh"

namespace narrow {

constexpr int kThreads = 128;

/// The cells of a block's points in shared memory, kTimes to a thread. Threads read their own in
/// units of 16 bytes, or 8 where a cell is no multiple of that; where a cell is a power of two of
/// them, they are permuted by the point's number, so that no bank is met twice.
template <typename T, int kElements, int kTimes>
struct Tile {
    static constexpr int kBytes = kElements * sizeof(T), kPerWord = 16 / sizeof(T);
    using Unit = std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
    static constexpr int kUnits = kBytes / sizeof(Unit), kPerUnit = sizeof(Unit) / sizeof(T);
    static constexpr bool kPermuted = sizeof(Unit) == 16 && (kUnits & (kUnits - 1)) == 0;
    static constexpr int kWords = kBytes * kThreads * kTimes / 16;
    uint4 words[kWords + 1];  // one more where cells begin within the first

    __device__ static int place(int word) {
        if constexpr (kPermuted) {
            constexpr int kRows = kUnits < 8 ? 8 / kUnits : 1, kMask = kUnits < 8 ? kUnits - 1 : 7;
            return word ^ (word / (kUnits * kRows) & kMask);
        } else {
            return word;
        }
    }
    /// Reads the words of memory that `count` cells lie in; returns how many bytes the first has
    /// before them.
    __device__ int fetch(const T* cells, int count) {
        constexpr int kEach = (kWords + kThreads - 1) / kThreads;
        const int before = int(reinterpret_cast<uintptr_t>(cells) % 16);
        const auto from =
            reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(cells) - before);
        const int all = (before + count * kBytes + 15) / 16;
        uint4 moved[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            if (const int i = j * kThreads + threadIdx.x; i < all) moved[j] = from[i];
        const bool longer = threadIdx.x == 0 && all > kWords;
        const uint4 last = longer ? from[kWords] : uint4{};
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            if (const int i = j * kThreads + threadIdx.x; i < all && i < kWords)
                words[place(i)] = moved[j];
        if (longer) words[kWords] = last;
        __syncthreads();
        return before;
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
    /// Unit j of cell i.
    __device__ Unit& unit(int i, int j) {
        if constexpr (sizeof(Unit) == 16)
            return words[place(i * kUnits + j)];
        else
            return reinterpret_cast<Unit*>(words)[i * kUnits + j];
    }
};

/// One point's cell, (K, F), to and from its block's tile, where it is the i-th.
template <typename T, int K, int F, int kTimes>
struct OwnCell {
    using Block = Tile<T, K * F, kTimes>;
    static constexpr int kUnits = Block::kUnits, kPerUnit = Block::kPerUnit;
    static constexpr bool kWhole = kPerUnit == Block::kPerWord;
    Vector<T, kPerUnit> units[kUnits];

    __device__ void get(Block& tile, int i, int before) {
        if (before == 0) {
#pragma unroll
            for (int j = 0; j < kUnits; ++j)
                units[j] = bit_copy<Vector<T, kPerUnit>>(tile.unit(i, j));
        } else if constexpr (kWhole) {
            uint4 low = tile.unit(i, 0);
#pragma unroll
            for (int j = 0; j < kUnits; ++j) {
                const uint4 high = tile.unit(i, j + 1);
                units[j] = bit_copy<Vector<T, kPerUnit>>(window<T>(low, high, before));
                low = high;
            }
        } else {
            read(reinterpret_cast<const T*>(reinterpret_cast<char*>(tile.words) + before) +
                 i * K * F);
        }
    }
    __device__ void read(const T* cell) {
#pragma unroll
        for (int j = 0; j < kUnits; ++j)
            if constexpr (kWhole) {
                units[j] = load_anywhere(cell + j * kPerUnit);
            } else {
#pragma unroll
                for (int k = 0; k < kPerUnit; ++k) units[j].at[k] = cell[j * kPerUnit + k];
            }
    }
    __device__ void put(Block& tile, int i) const {
#pragma unroll
        for (int j = 0; j < kUnits; ++j) tile.unit(i, j) = bit_copy<typename Block::Unit>(units[j]);
    }
    __device__ T& at(int k, int f) {
        return units[(k * F + f) / kPerUnit].at[(k * F + f) % kPerUnit];
    }
};

/// A block's points: kThreads of them, or twice as many where their cells are tiny.
template <typename Cell, typename T, int F>
struct BlockOf {
    using A = Acc<T>;
    static constexpr int K = 1 << Cell::D, kTimes = K * F * sizeof(T) <= 16 ? 2 : 1;
    static constexpr int kMost = kThreads * kTimes;
    using Own = OwnCell<T, K, F, kTimes>;
    int64_t first;
    int count;

    __device__ explicit BlockOf(int64_t N) : first(int64_t(blockIdx.x) * kMost) {
        count = N - first < kMost ? int(N - first) : kMost;
    }
    /// This thread's i-th.
    __device__ static int place(int i) { return i * kThreads + int(threadIdx.x); }
    __device__ int64_t point(int i) const { return first + min(place(i), count - 1); }

    /// The cells, through the block's tile where they are one run in memory.
    __device__ void get(typename Own::Block& tile, const MultilinearParams& p,
                        Own (&cells)[kTimes]) const {
        const T* const feats = static_cast<const T*>(p.feats);
        if (F > 4 || p.feats_stride[0] == K * F) {
            const int before = tile.fetch(feats + first * K * F, count);
#pragma unroll
            for (int i = 0; i < kTimes; ++i) cells[i].get(tile, place(i), before);
            if (before > 0 && p.grad_feats) __syncthreads();  // cells share words that are put
        } else {
#pragma unroll
            for (int i = 0; i < kTimes; ++i) cells[i].read(feats + point(i) * p.feats_stride[0]);
        }
    }
};

template <typename Cell, typename T, int F>
__global__ void __launch_bounds__(kThreads) forward(MultilinearParams p) {
    using Block = BlockOf<Cell, T, F>;
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D, kPerWord = 16 / sizeof(T), kTimes = Block::kTimes;
    __shared__ typename Block::Own::Block tile;
    const Block block(p.N);
    LoadedPoint<A, Cell::D> points[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) points[i].read(p, block.point(i));
    typename Block::Own cells[kTimes];
    block.get(tile, p, cells);
    T* const out = static_cast<T*>(p.out) + block.first * F;
    T sums[kTimes][F];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
        const auto at = points[i].template in<Cell>();
        A acc[F] = {};
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const A w = at.weight(k);
#pragma unroll
            for (int f = 0; f < F; ++f) acc[f] += w * value_of(cells[i].at(k, f), p.dtype);
        }
#pragma unroll
        for (int f = 0; f < F; ++f) sums[i][f] = stored<T>(acc[f], p.dtype);
    }
    if constexpr ((F & (F - 1)) == 0) {
#pragma unroll
        for (int i = 0; i < kTimes; ++i) {
            Vector<T, F> row;
#pragma unroll
            for (int f = 0; f < F; ++f) row.at[f] = sums[i][f];
            const int n = block.place(i);
            if (n < block.count) reinterpret_cast<Vector<T, F>*>(out)[n] = row;
        }
    } else {
        __syncthreads();
        T* const rows = reinterpret_cast<T*>(tile.words);
#pragma unroll
        for (int i = 0; i < kTimes; ++i)
#pragma unroll
            for (int f = 0; f < F; ++f) rows[block.place(i) * F + f] = sums[i][f];
        __syncthreads();
        const int whole = block.count * F / kPerWord;
        for (int i = threadIdx.x; i < whole; i += kThreads)
            reinterpret_cast<uint4*>(out)[i] = tile.words[i];
        for (int i = whole * kPerWord + threadIdx.x; i < block.count * F; i += kThreads)
            out[i] = rows[i];
    }
}

template <typename Cell, typename T, int F, bool kPoints>
__global__ void __launch_bounds__(kThreads) backward(MultilinearParams p) {
    using Block = BlockOf<Cell, T, F>;
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D, kTimes = Block::kTimes;
    __shared__ typename Block::Own::Block tile;
    const Block block(p.N);
    LoadedPoint<A, Cell::D> points[kTimes];
    T grads[kTimes][F];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
        points[i].read(p, block.point(i));
        const T* const row =
            static_cast<const T*>(p.grad_out) + block.point(i) * p.grad_out_stride[0];
#pragma unroll
        for (int f = 0; f < F; ++f) grads[i][f] = row[f * p.grad_out_stride[1]];
    }
    typename Block::Own cells[kTimes];
    if constexpr (kPoints) block.get(tile, p, cells);
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
        const auto at = points[i].template in<Cell>();
        A g[F];
#pragma unroll
        for (int f = 0; f < F; ++f) g[f] = value_of(grads[i][f], p.dtype);
        if constexpr (kPoints) {
            A dot[K] = {}, sums[Cell::D] = {};
#pragma unroll
            for (int k = 0; k < K; ++k)
#pragma unroll
                for (int f = 0; f < F; ++f) dot[k] += g[f] * value_of(cells[i].at(k, f), p.dtype);
#pragma unroll
            for (int axis = 0; axis < Cell::D; ++axis)
#pragma unroll
                for (int k = 0; k < K; ++k) sums[axis] += at.slope(k, axis) * dot[k];
            if (block.place(i) < block.count) store_gradient(p, block.point(i), sums);
        }
        if (!p.grad_feats) continue;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const A w = at.weight(k);
#pragma unroll
            for (int f = 0; f < F; ++f) cells[i].at(k, f) = stored<T>(w * g[f], p.dtype);
        }
        // A thread overwrites no cell but its own, which it has read.
        cells[i].put(tile, block.place(i));
    }
    if (p.grad_feats) tile.flush(static_cast<T*>(p.grad_feats) + block.first * K * F, block.count);
}

template <typename Cell, typename T, int F>
inline const char* launch_forward(const MultilinearParams& p, cudaStream_t stream) {
    constexpr int kMost = BlockOf<Cell, T, F>::kMost;
    forward<Cell, T, F><<<unsigned(ceil_div(p.N, kMost)), kThreads, 0, stream>>>(p);
    return launch_error();
}
template <typename Cell, typename T, int F>
inline const char* launch_backward(const MultilinearParams& p, cudaStream_t stream) {
    const auto kernel = p.grad_points ? backward<Cell, T, F, true> : backward<Cell, T, F, false>;
    constexpr int kMost = BlockOf<Cell, T, F>::kMost;
    kernel<<<unsigned(ceil_div(p.N, kMost)), kThreads, 0, stream>>>(p);
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

/// Whether these kernels take the call: each cell is one run, of F that they know, and where F is
/// 8, of float64 and of cells that lie apart it was measured to be quicker than what is made for
/// any F.
template <typename T>
inline bool fits(const MultilinearParams& p, int corners) {
    if (p.feats && (p.feats_stride[2] != 1 || p.feats_stride[1] != p.F)) return false;
    const int64_t row = p.F * int64_t(sizeof(T)), cell = corners * row;
    const bool apart = p.feats && p.feats_stride[0] != corners * p.F;
    if (sizeof(T) == 8) return p.F == 1 && !p.out && !apart;
    if (apart) return p.F <= 4 && row < 16 && cell <= (p.out ? 48 : 64);
    return p.F <= 4 || p.F == 8;
}

}  // namespace narrow
