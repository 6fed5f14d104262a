// What the CUDA kernels of hash_grid_encoding share; see launch.cu.
#pragma once
#include <type_traits>

#include "hash_grid_encoding.h"
#include "short.cuh"
#include "vector.cuh"

namespace {

constexpr int kThreads = 256;

/// A point, read once for all levels unless it is in double.
template <int D, typename A>
struct Point {
    const HashGridParams& p;
    int64_t n;
    float x[D];

    __device__ Point(const HashGridParams& params, int64_t index) : p(params), n(index) {
        if (p.points_dtype == DType::kDouble) return;
#pragma unroll
        for (int d = 0; d < D; ++d)
            x[d] = load_as<float>(p.points_dtype, p.points,
                                  n * p.points_stride[0] + d * p.points_stride[1]);
    }
    __device__ Corners<D, A> in(const HashLevel& level) const {
        Corners<D, A> c;
        c.scale = level.scale;
        c.directed = p.along != nullptr;
#pragma unroll
        for (int d = 0; d < D; ++d) {
            if (p.points_dtype == DType::kDouble) {
                double place;
                c.cell[d] = cell_of(static_cast<const double*>(
                                        p.points)[n * p.points_stride[0] + d * p.points_stride[1]],
                                    level.scale, &place);
                c.place[d] = A(place);
            } else {
                float place;
                c.cell[d] = cell_of(x[d], level.scale, &place);
                c.place[d] = place;
            }
            if (c.directed)
                c.along[d] = load_as<A>(p.points_dtype, p.along,
                                        n * p.along_stride[0] + d * p.along_stride[1]);
        }
        return c;
    }
};

/// F elements `step` apart; `whole` says that they may be moved as words.
template <int F, typename T>
__device__ inline void load_features(const T* from, int64_t step, bool whole, DType dtype,
                                     Acc<T> (&to)[F]) {
    constexpr int V = F * sizeof(T) < 16 ? F : 16 / sizeof(T);
    if (whole) {
#pragma unroll
        for (int i = 0; i < F; i += V) {
            const auto word = load_vector<T, V>(from + i);
#pragma unroll
            for (int v = 0; v < V; ++v) to[i + v] = value_of(word.at[v], dtype);
        }
    } else {
#pragma unroll
        for (int f = 0; f < F; ++f) to[f] = value_of(from[f * step], dtype);
    }
}

/// Whether rows of F elements are words in memory, whatever the indices of the outer dimensions.
inline bool whole_rows(const void* data, DType dtype, int F, int64_t inner, const int64_t* outer,
                       int count) {
    const int64_t size = dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
    const int64_t word = F * size < 16 ? F * size : 16;
    bool whole = (inner == 1 || F == 1) && reinterpret_cast<uintptr_t>(data) % word == 0;
    for (int d = 0; d < count; ++d) whole = whole && outer[d] * size % word == 0;
    return whole;
}
inline bool whole_table(const HashGridParams& p, int F) {
    return whole_rows(p.table, p.dtype, F, p.table_stride[2], p.table_stride, 2);
}
inline bool whole_grad_out(const HashGridParams& p, int F) {
    const int64_t outer[] = {p.grad_out_stride[0], p.F * p.grad_out_stride[1]};
    return whole_rows(p.grad_out, p.dtype, F, p.grad_out_stride[1], outer, 2);
}

/// Adds F neighbouring numbers in memory, in any order among threads.
template <int F>
__device__ inline void add_features(double* to, const double (&x)[F]) {
#pragma unroll
    for (int f = 0; f < F; ++f) atomicAdd(to + f, x[f]);
}
template <int F>
__device__ inline void add_features(float* to, const float (&x)[F]) {
#if __CUDA_ARCH__ >= 900
    if constexpr (F == 2) {
        asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x[0]), "f"(x[1])
                     : "memory");
    } else if constexpr (F >= 4) {
#pragma unroll
        for (int f = 0; f < F; f += 4)
            asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + f), "f"(x[f]),
                         "f"(x[f + 1]), "f"(x[f + 2]), "f"(x[f + 3])
                         : "memory");
    } else {
        atomicAdd(to, x[0]);
    }
#else
#pragma unroll
    for (int f = 0; f < F; ++f) atomicAdd(to + f, x[f]);
#endif
}

/// Adds F shares to the sums from `at` on or, where the result must not depend on the order of
/// additions, to those that `fixed` makes the accumulator of.
template <typename A, int F, typename Fixed>
__device__ inline void add_shares(const HashGridParams& p, A* sums, const Fixed& fixed, int64_t at,
                                  const A (&x)[F]) {
    if (p.deterministic) {
        const FixedPoint accumulator = fixed();
#pragma unroll
        for (int f = 0; f < F; ++f) accumulator.add(at + f, x[f]);
    } else {
        add_features(sums + at, x);
    }
}

/// grad_points from the groups' sums, in a fixed order.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    sum_groups_kernel(const __grid_constant__ HashGridParams p, int groups) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, count = p.N * p.D;
    if (i >= count) return;
    A sum = 0;
    for (int g = 0; g < groups; ++g) sum += static_cast<const A*>(p.scratch)[g * count + i];
    store_as(p.points_dtype, p.out, i, sum);
}

/// Sums of the groups of levels, to the points.
template <typename A>
void sum_groups(const HashGridParams& p, cudaStream_t stream) {
    const int groups = int(ceil_div(p.L, hash_grid_group(p)));
    sum_groups_kernel<A>
        <<<unsigned(ceil_div(p.N * p.D, kThreads)), kThreads, 0, stream>>>(p, groups);
}

}  // namespace
