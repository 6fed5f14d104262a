// The gradient to the table of hash_grid_encoding on the GPU; see launch.cu.
#pragma once
#include "choices.h"
#include "crowded.cuh"
#include "points.cuh"

namespace {

/// The gradient of table levels [first, first + levels), added to `sums` (levels, T, F) or
/// `memory`. grad_out's type is told apart at run time: a load for each level, beside 2^D
/// additions.
template <typename A, int D, int F>
__global__ void __launch_bounds__(kThreads)
    table_kernel(const __grid_constant__ HashGridParams p, int first, int levels, A* sums,
                 unsigned long long* memory, bool whole_grad) {
    const int side = threadIdx.x % 2;
    const int64_t n = int64_t(blockIdx.x) * kPoints + threadIdx.x / 2;
    if (n >= p.N) return;
    const Point<D, A> point(p, n);
    const auto fixed = [&] { return FixedPoint(memory, levels * p.T * F, p.N << D); };
    for (int i = 0; i < levels; ++i) {
        const HashLevel& level = p.level[first + i];
        const int64_t at = n * p.grad_out_stride[0] + (first + i) * F * p.grad_out_stride[1];
        A grad[F];
        const auto get = [&](auto element) {
            using T = decltype(element);
            load_features(static_cast<const T*>(p.grad_out) + at, p.grad_out_stride[1], whole_grad,
                          p.dtype, grad);
        };
        if constexpr (sizeof(A) == 8)
            get(double{});
        else if (p.dtype == DType::kFloat)
            get(float{});
        else if (p.dtype == DType::kHalf)
            get(Half{});
        else
            get(BFloat16{});
        const auto corners = point.in(level);
#pragma unroll
        for (int j = 0; j < 1 << (D - 1); ++j) {
            const A weight = corners.weight(2 * j + side);
            const int64_t place = (i * p.T + corners.row(level, 2 * j + side)) * F;
            A addend[F];
#pragma unroll
            for (int f = 0; f < F; ++f) addend[f] = weight * grad[f];
            add_shares(p, sums, fixed, place, addend);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) round_kernel(T* out, const float* sums, int64_t count) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count) out[i] = store<T>(sums[i]);
}

/// The bound on an addend where weights are slopes: times D scale |along|.
__global__ void scale_bound_kernel(unsigned long long* largest, double factor) {
    const double bound = __longlong_as_double(largest[0]) * __longlong_as_double(largest[1]);
    largest[1] = __double_as_longlong(fmin(bound * factor, 0x1p1023));
}

/// Tells in which way the levels are summed.
inline void tell_sums(const Crowded& crowded, int64_t levels) {
    constexpr auto op = "hash_grid_encoding", what = "gradient to table", memory = "sums in memory";
    if (crowded.count == 0)
        return tell_choice(op, what, memory,
                           "no level has few rows and many points, or fixed point");
    const char* const taken =
        crowded.count < levels ? "coarse levels summed in shared memory" : "sums in shared memory";
    tell_choice(op, what, taken, "few rows, to which additions in memory would wait",
                {{taken, crowded.here}, {memory, crowded.in_memory}});
}

/// One group of levels after the other: zeros, sums, and where they are not the output yet, the
/// rounding, all within the L2.
template <typename A>
const char* table_gradient(const HashGridParams& p, cudaStream_t stream) {
    const bool rounded = p.dtype == DType::kHalf || p.dtype == DType::kBFloat16;
    const int64_t size = rounded ? 2 : sizeof(A);
    auto* largest = static_cast<unsigned long long*>(p.scratch);
    unsigned long long* memory = largest + 1;
    if (p.deterministic) {
        cudaMemsetAsync(largest, 0, 16, stream);
        const Strided grad{
            p.grad_out, p.dtype, 2, {p.N, p.L * p.F}, {p.grad_out_stride[0], p.grad_out_stride[1]}};
        find_largest(grad, p.along ? largest : memory, stream);
        if (p.along) {
            const Strided along{
                p.along, p.points_dtype, 2, {p.N, p.D}, {p.along_stride[0], p.along_stride[1]}};
            find_largest(along, memory, stream);
            float scale = 0;
            for (int64_t l = 0; l < p.L; ++l)
                scale = scale > p.level[l].scale ? scale : p.level[l].scale;
            scale_bound_kernel<<<1, 1, 0, stream>>>(largest, 2.0 * p.D * scale);
        }
    }
    const unsigned blocks = unsigned(ceil_div(p.N, kPoints));
    const int group = int(hash_grid_group(p));
    Crowded told{0};
    for (int first = 0; first < p.L; first += group) {
        const int levels = group < p.L - first ? group : int(p.L) - first;
        const int64_t places = levels * p.T * p.F;
        void* out = static_cast<char*>(p.out) + first * p.T * p.F * size;
        A* sums = static_cast<A*>(rounded ? p.scratch : out);
        if (p.deterministic)
            cudaMemsetAsync(memory + 1, 0, 8 * (fixed_point_words(places) - 1), stream);
        else
            cudaMemsetAsync(sums, 0, places * sizeof(A), stream);
        const Crowded crowded = crowded_of<A>(p, first, levels);
        if (crowded.count > 0) add_crowded(p, crowded, sums, stream);
        told.count += crowded.count;
        told.here += crowded.here, told.in_memory += crowded.in_memory;
        const int next = first + crowded.count, rest = levels - crowded.count;
        A* const others = sums + crowded.count * p.T * p.F;
        if (blocks > 0 && rest > 0 && !own_kernels(p))
            p.rest->table_any(&p, next, rest, others, memory, stream);
        else if (blocks > 0 && rest > 0)
            by_shape(p, [&](auto D, auto F) {
                table_kernel<A, D(), F()><<<blocks, kThreads, 0, stream>>>(
                    p, next, rest, others, memory, whole_grad_out(p, F()));
            });
        const auto finish = [&](auto element) {
            using T = decltype(element);
            if (p.deterministic)
                finish_fixed_point(static_cast<T*>(out), memory, places, p.N << p.D, stream);
            else if constexpr (sizeof(T) == 2)
                round_kernel<<<unsigned(ceil_div(places, kThreads)), kThreads, 0, stream>>>(
                    static_cast<T*>(out), sums, places);
        };
        if constexpr (sizeof(A) == 8)
            finish(double{});
        else if (p.dtype == DType::kFloat)
            finish(float{});
        else if (p.dtype == DType::kHalf)
            finish(Half{});
        else
            finish(BFloat16{});
    }
    tell_sums(told, p.L);
    return launch_error();
}

}  // namespace
