// The CUDA kernels of hash_grid_encoding for F = 1, 2, 4 and 8; see launch.cu.
#pragma once
#include "words.cuh"

namespace {

constexpr int kPoints = kThreads / 2;  // two threads to a point

template <typename T, int F>
constexpr int kGroup = F * sizeof(T) < 32 ? 32 / (F * sizeof(T)) : 1;  // as hash_grid_group says

/// out of one group of levels (blockIdx.y) for kPoints points. Rows of the output are collected in
/// shared memory and written by whole sectors.
template <typename T, int D, int F>
__global__ void __launch_bounds__(kThreads, F <= 2 && sizeof(T) <= 4 ? 6 : 1)
    encode_kernel(const __grid_constant__ HashGridParams p, bool whole) {
    using A = Acc<T>;
    constexpr int kRow = kGroup<T, F> * F;
    __shared__ alignas(16) T rows[kPoints * kRow];
    const int first = blockIdx.y * kGroup<T, F>;
    const int levels = min(kGroup<T, F>, int(p.L) - first);
    const int own = threadIdx.x / 2, side = threadIdx.x % 2;
    const int64_t begin = int64_t(blockIdx.x) * kPoints;
    const Point<D, A> point(p, min(begin + own, p.N - 1));
    for (int i = 0; i < levels; ++i) {
        const HashLevel& level = p.level[first + i];
        const T* table = static_cast<const T*>(p.table) + (first + i) * p.table_stride[0];
        const auto corners = point.in(level);
        A feats[1 << (D - 1)][F], sum[F] = {};
#pragma unroll
        for (int j = 0; j < 1 << (D - 1); ++j)
            load_features(table + corners.row(level, 2 * j + side) * p.table_stride[1],
                          p.table_stride[2], whole, p.dtype, feats[j]);
#pragma unroll
        for (int j = 0; j < 1 << (D - 1); ++j) {
            const A weight = corners.weight(2 * j + side);
#pragma unroll
            for (int f = 0; f < F; ++f) sum[f] += weight * feats[j][f];
        }
#pragma unroll
        for (int f = 0; f < F; ++f) {
            sum[f] += __shfl_xor_sync(~0u, sum[f], 1);
            if (f % 2 == side) rows[own * kRow + i * F + f] = stored<T>(sum[f], p.dtype);
        }
    }
    __syncthreads();
    constexpr int V = 16 / sizeof(T), kWords = kRow / V;
    T* out = static_cast<T*>(p.out) + begin * p.L * F + first * F;
    const int here = p.N - begin < kPoints ? int(p.N - begin) : kPoints;
    if (levels == kGroup<T, F> && p.L * F % V == 0) {
        for (int i = threadIdx.x; i < here * kWords; i += kThreads)
            store_vector(out + i / kWords * p.L * F + i % kWords * V,
                         *reinterpret_cast<Vector<T, V>*>(rows + i * V));
    } else {
        for (int i = threadIdx.x; i < here * levels * F; i += kThreads) {
            const int row = i / (levels * F), column = i % (levels * F);
            out[row * p.L * F + column] = rows[row * kRow + column];
        }
    }
}

/// Sums over one group of levels (blockIdx.y) of the gradients to kPoints points.
template <typename T, int D, int F>
__global__ void __launch_bounds__(kThreads)
    points_kernel(const __grid_constant__ HashGridParams p, bool whole, bool whole_grad) {
    using A = Acc<T>;
    const int first = blockIdx.y * kGroup<T, F>;
    const int levels = min(kGroup<T, F>, int(p.L) - first);
    const int side = threadIdx.x % 2;
    const int64_t n = int64_t(blockIdx.x) * kPoints + threadIdx.x / 2;
    const Point<D, A> point(p, min(n, p.N - 1));
    const T* grad_out = static_cast<const T*>(p.grad_out) + point.n * p.grad_out_stride[0];
    A sum[D] = {};
    for (int i = 0; i < levels; ++i) {
        const HashLevel& level = p.level[first + i];
        const T* table = static_cast<const T*>(p.table) + (first + i) * p.table_stride[0];
        const auto corners = point.in(level);
        A grad[F], feats[1 << (D - 1)][F];
        load_features(grad_out + (first + i) * F * p.grad_out_stride[1], p.grad_out_stride[1],
                      whole_grad, p.dtype, grad);
#pragma unroll
        for (int j = 0; j < 1 << (D - 1); ++j)
            load_features(table + corners.row(level, 2 * j + side) * p.table_stride[1],
                          p.table_stride[2], whole, p.dtype, feats[j]);
#pragma unroll
        for (int j = 0; j < 1 << (D - 1); ++j) {
            A dot = 0;
#pragma unroll
            for (int f = 0; f < F; ++f) dot += grad[f] * feats[j][f];
#pragma unroll
            for (int d = 0; d < D; ++d) sum[d] += corners.slope(2 * j + side, d) * dot;
        }
    }
#pragma unroll
    for (int d = 0; d < D; ++d) {
        sum[d] += __shfl_xor_sync(~0u, sum[d], 1);
        if (side == 0 && n < p.N)
            static_cast<A*>(p.scratch)[(blockIdx.y * p.N + n) * D + d] = sum[d];
    }
}

/// Calls `body` with D and F as constants.
template <typename Body>
void by_shape(const HashGridParams& p, const Body& body) {
    const auto by_features = [&](auto D) {
        switch (p.F) {
            case 1: return body(D, std::integral_constant<int, 1>{});
            case 2: return body(D, std::integral_constant<int, 2>{});
            case 4: return body(D, std::integral_constant<int, 4>{});
            default: return body(D, std::integral_constant<int, 8>{});
        }
    };
    if (p.D == 2)
        by_features(std::integral_constant<int, 2>{});
    else
        by_features(std::integral_constant<int, 3>{});
}

template <typename T>
const char* encode(const HashGridParams& p, cudaStream_t stream) {
    const dim3 grid(unsigned(ceil_div(p.N, kPoints)), unsigned(ceil_div(p.L, hash_grid_group(p))));
    by_shape(p, [&](auto D, auto F) {
        encode_kernel<T, D(), F()><<<grid, kThreads, 0, stream>>>(p, whole_table(p, F()));
    });
    return launch_error();
}

template <typename T>
const char* points_gradient(const HashGridParams& p, cudaStream_t stream) {
    const dim3 grid(unsigned(ceil_div(p.N, kPoints)), unsigned(ceil_div(p.L, hash_grid_group(p))));
    by_shape(p, [&](auto D, auto F) {
        points_kernel<T, D(), F()>
            <<<grid, kThreads, 0, stream>>>(p, whole_table(p, F()), whole_grad_out(p, F()));
    });
    sum_groups<Acc<T>>(p, stream);
    return launch_error();
}

}  // namespace
