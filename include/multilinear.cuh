// The CUDA kernels of trilinear_interpolation and bilinear_interpolation; formula in multilinear.h.
//
// Bytes per point (D = 3, float32): forward reads 8F + 3 floats and writes F, 36F + 12 bytes; the
// gradient to feats moves the same in the other direction; the gradient to points reads 9F + 3.
// Flops: about 2 per feature read, under half a flop a byte: memory traffic decides. N = 65536,
// F = 256 moves 605 MB, 141 us at 4.28 TB/s.
//
// Mapping: a point belongs to `columns * Split` neighbouring threads of one warp. `columns` of them
// lie along the features, V neighbouring features each, so that a corner is read as one run of
// 16-byte words. Where a corner is shorter than 64 bytes (F = 4 in float32), Split = 4 threads take
// every fourth corner, which keeps a warp's loads contiguous, and add up through shuffles.
// No atomics: every sum stays inside a warp, in a fixed order, so each run gives the same bits.
#pragma once
#include "multilinear.h"
#include "vector.cuh"

constexpr int kThreads = 256;

/// The point, the features and the corners of this thread.
template <int Split>
struct Share {
    int64_t n;    // past the last point in the last warp; shuffles need the warp whole
    int column;   // features [column * V, column * V + V), and so on in steps of columns * V
    int part;     // corners part, part + Split, ...
    bool exists;  // whether there is such a point

    __device__ Share(int64_t N, int columns) {
        const int lanes = columns * Split, lane = threadIdx.x % lanes;
        n = int64_t(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
        column = lane % columns;
        part = lane / columns;
        exists = n < N;
        n = exists ? n : N - 1;
    }
};

/// Adds up `acc` over the Split = 4 threads, `columns` lanes apart, that hold the same features.
/// Each ends with its own quarter of the sums in front (all of it where V < 4): for V = 4 that
/// takes 3 shuffles, where all sums in all threads would take 8.
template <int V, typename A>
__device__ inline void reduce_scatter(A (&acc)[V], int part, int columns) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const int bit = 2 >> step, width = V >> step, half = width / 2;
        if (half == 0) {
            acc[0] += __shfl_xor_sync(~0u, acc[0], bit * columns);
            continue;
        }
        const bool upper = part & bit;
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
            if (i >= half) break;
            const A mine = upper ? acc[i + half] : acc[i], theirs = upper ? acc[i] : acc[i + half];
            acc[i] = mine + __shfl_xor_sync(~0u, theirs, bit * columns);
        }
    }
}

template <typename Cell, typename T, int V, int Split>
__global__ void __launch_bounds__(kThreads) forward_kernel(MultilinearParams p, int columns) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    const Share<Split> share(p.N, columns);
    const Position<Cell, A> at(p, share.n);
    const T* feats = static_cast<const T*>(p.feats) + share.n * p.feats_stride[0];
    T* out = static_cast<T*>(p.out) + share.n * p.F;
    for (int64_t f = int64_t(share.column) * V; f < p.F; f += columns * V) {
        A acc[V] = {};
#pragma unroll
        for (int j = 0; j < K / Split; ++j) {
            const int k = j * Split + share.part;
            const auto corner =
                load_streaming<T, V>(feats + k * p.feats_stride[1] + f * p.feats_stride[2]);
            const A w = at.weight(k);
#pragma unroll
            for (int i = 0; i < V; ++i) acc[i] += w * load(corner.at[i]);
        }
        constexpr int kKept = V >= Split ? V / Split : 1, kCopies = kKept * Split / V;
        if (Split > 1) reduce_scatter(acc, share.part, columns);
        Vector<T, kKept> sums;
#pragma unroll
        for (int i = 0; i < kKept; ++i) sums.at[i] = store<T>(acc[i]);
        if (share.exists && share.part % kCopies == 0)
            store_streaming(out + f + share.part / kCopies * kKept, sums);
    }
}

/// Both gradients in one pass: grad_out is read once. Each is written only where it is asked for.
template <typename Cell, typename T, int V, int Split>
__global__ void __launch_bounds__(kThreads) backward_kernel(MultilinearParams p, int columns) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    const Share<Split> share(p.N, columns);
    const Position<Cell, A> at(p, share.n);
    const T* feats = static_cast<const T*>(p.feats) + share.n * p.feats_stride[0];
    const T* grad_out = static_cast<const T*>(p.grad_out) + share.n * p.grad_out_stride[0];
    T* grad_feats = static_cast<T*>(p.grad_feats) + share.n * K * p.F;
    A dot[K / Split] = {};  // of grad_out with each corner's features
    for (int64_t f = int64_t(share.column) * V; f < p.F; f += columns * V) {
        A g[V];
        if (p.grad_out_stride[1] == 1) {
            const auto row = load_streaming<T, V>(grad_out + f);
#pragma unroll
            for (int i = 0; i < V; ++i) g[i] = load(row.at[i]);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) g[i] = load(grad_out[(f + i) * p.grad_out_stride[1]]);
        }
        if (p.grad_points) {
#pragma unroll
            for (int j = 0; j < K / Split; ++j) {
                const int k = j * Split + share.part;
                const auto corner =
                    load_streaming<T, V>(feats + k * p.feats_stride[1] + f * p.feats_stride[2]);
#pragma unroll
                for (int i = 0; i < V; ++i) dot[j] += g[i] * load(corner.at[i]);
            }
        }
        if (p.grad_feats && share.exists) {
#pragma unroll
            for (int j = 0; j < K / Split; ++j) {
                const int k = j * Split + share.part;
                const A w = at.weight(k);
                Vector<T, V> corner;
#pragma unroll
                for (int i = 0; i < V; ++i) corner.at[i] = store<T>(w * g[i]);
                store_streaming(grad_feats + k * p.F + f, corner);
            }
        }
    }
    if (!p.grad_points) return;
#pragma unroll
    for (int axis = 0; axis < Cell::D; ++axis) {
        A sum = 0;
#pragma unroll
        for (int j = 0; j < K / Split; ++j) sum += at.slope(j * Split + share.part, axis) * dot[j];
        for (int mask = columns * Split / 2; mask > 0; mask /= 2)
            sum += __shfl_xor_sync(~0u, sum, mask);
        if (share.exists && share.part == 0 && share.column == 0)
            store_as<A>(p.points_dtype, p.grad_points, share.n * Cell::D + axis, sum);
    }
}

/// Whether vectors of V elements fit: F a multiple of V, every row of feats on a vector's boundary.
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

template <typename Cell, typename T, int V, int Split>
inline const char* launch(const MultilinearParams& p, cudaStream_t stream) {
    int columns = 1;
    while (columns < 32 / Split && columns * V < p.F) columns *= 2;
    const int64_t blocks = ceil_div(p.N, kThreads / (columns * Split));
    if (blocks > 0x7fffffff) return "more points than one CUDA grid can hold";
    const auto kernel = p.out ? forward_kernel<Cell, T, V, Split> : backward_kernel<Cell, T, V, Split>;
    kernel<<<unsigned(blocks), kThreads, 0, stream>>>(p, columns);
    return launch_error();
}

/// Picks the widest vectors that fit; forward where `out` is set, else backward.
template <typename Cell>
inline const char* multilinear_cuda(const MultilinearParams& p, void* stream) {
    const auto queue = static_cast<cudaStream_t>(stream);
    const char* error = nullptr;
    dispatch(p.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int V = 16 / sizeof(T);
        if constexpr (V == 2) {
            error = fits<T>(p, V) ? launch<Cell, T, V, 1>(p, queue) : launch<Cell, T, 1, 1>(p, queue);
        } else {
            if (fits<T>(p, V) && p.F > 2 * V) error = launch<Cell, T, V, 1>(p, queue);
            else if (fits<T>(p, V)) error = launch<Cell, T, V, 4>(p, queue);
            else if (fits<T>(p, V / 2) && p.F == V / 2) error = launch<Cell, T, V / 2, 4>(p, queue);
            else error = launch<Cell, T, 1, 1>(p, queue);
        }
    });
    return error;
}
