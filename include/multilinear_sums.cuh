// The gradient to points, and to feats beside it: sums over features of cells in shared memory, of
// any width, alignment and stride.
//
// A point is one thread's, or as few threads' as tiles allow: what each does beside its features
// counts. Gradients to feats are other blocks' of the same launch, so that the sums are the same
// bits whether those are asked for too; grad_out is read twice then.
#pragma once
#include "multilinear_points.cuh"
#include "multilinear_tiles.cuh"
#include "multilinear_wide.cuh"

namespace tiles {

/// Values by corner, each moved on by `by` places.
template <int K, typename A>
__device__ inline void turn(A (&values)[K], int by) {
#pragma unroll
    for (int step = 1; step < K; step *= 2) {
        A moved[K];
#pragma unroll
        for (int k = 0; k < K; ++k) moved[k] = values[(k + K - step) % K];
#pragma unroll
        for (int k = 0; k < K; ++k) values[k] = by & step ? moved[k] : values[k];
    }
}

/// sum_k slope_k,axis * dot[k], an axis folded at a time: 7 steps where D is 3, and not 24
/// products.
template <typename Cell, typename A>
__device__ inline A fold(const Position<Cell, A>& at, const A* dot, int axis) {
    A sums[1 << Cell::D];
#pragma unroll
    for (int k = 0; k < 1 << Cell::D; ++k) sums[k] = dot[k];
#pragma unroll
    for (int bit = Cell::D - 1; bit >= 0; --bit)
#pragma unroll
        for (int d = 0; d < Cell::D; ++d)
            if (Cell::bit(d) == bit)
#pragma unroll
                for (int k = 0; k < 1 << bit; ++k)
                    sums[k] = d == axis ? A(0.5) * (sums[k + (1 << bit)] - sums[k])
                                        : at.low[d] * sums[k] + at.high[d] * sums[k + (1 << bit)];
    return sums[0];
}

constexpr int kAtOnce = 4;  // steps of a thread that has a point to itself

/// The gradient to the points of the `block`-th tile, E neighbouring features at a time, of which
/// every row has a multiple. Cells are some multiple of 8 words apart, so neighbouring points begin
/// at corners of their own, each at the next: they meet no bank twice where a row is an odd number
/// of words. kCell: where wide::are_cells, in words of a feature's corners.
template <typename Cell, typename T, int E, bool kCell>
__device__ inline void sums(const MultilinearParams& p, const Plan& plan, unsigned block,
                            char* memory) {
    using A = Acc<T>;
    constexpr int D = Cell::D, K = 1 << D, kWarps = kThreads / 32, kSize = sizeof(T);
    __shared__ Arrivals arrivals;
    __shared__ A parts[kWarps][D];
    arrivals.prepare();
    char* grads = memory + plan.feats.bytes;
    const int64_t first = int64_t(block) * plan.points;
    const int count = p.N - first < plan.points ? int(p.N - first) : plan.points;
    const int lanes = 1 << plan.log_lanes, lane = threadIdx.x & (lanes - 1);
    const int own = threadIdx.x >> plan.log_lanes;
    const bool here = plan.grad_out.kind != kNone;
    const int along = plan.feats.step[2], step = lanes * E * along;
    const int64_t grad_along = p.grad_out_stride[1] * kSize, grad_step = lanes * E * grad_along;
    // Threads past the last point do nothing until the sums below, which need whole warps.
    const int n = own < count ? own : count - 1;
    const unsigned first_corner =
        kCell ? 0 : unsigned(n) / (E * kSize == 8 ? 16 / K : 32 / K) & (K - 1);
    const T* from = static_cast<const T*>(p.feats) + first * p.feats_stride[0];
    const T* grad_from = static_cast<const T*>(p.grad_out) + first * p.grad_out_stride[0];
    const LoadedPoint<A, D> point(p, first + n);
    const int F = int(p.F);
    A dot[K] = {};
    for (int f0 = 0, turns = 0; f0 < F; f0 += plan.width, ++turns) {
        const int width = F - f0 < plan.width ? F - f0 : plan.width;
        if (turns > 0) __syncthreads();
        const auto feats =
            fetch<K>(memory, from + f0 * p.feats_stride[2], plan.feats, count, width, &arrivals);
        const T* grad_first = grad_from + f0 * p.grad_out_stride[1];
        Placed<1> grad_out{};
        if (here) grad_out = fetch<1>(grads, grad_first, plan.grad_out, count, width, &arrivals);
        arrivals.wait(turns);
        if (own >= count) continue;
        const auto rows = feats.point(n);
        const char* row[K];
        if (feats.even()) {
#pragma unroll
            for (int k = 0; k < K; ++k)
                row[k] =
                    memory + rows.begin + (k + first_corner) % K * rows.pitch + lane * E * along;
        } else {
#pragma unroll
            for (int k = 0; k < K; ++k)
                row[k] = memory + rows.row((k + first_corner) % K) + lane * E * along;
        }
        const char* grad_row =
            (here ? grads + grad_out.row(n, 0)
                  : reinterpret_cast<const char*>(grad_first + n * p.grad_out_stride[0])) +
            lane * E * grad_along;
        const auto add = [&](int at, int grad_at, int64_t grad_next) {
            A g[E];
#pragma unroll
            for (int e = 0; e < E; ++e)
                g[e] = load(*reinterpret_cast<const T*>(grad_row + grad_at + e * grad_next));
            if constexpr (kCell) {
                Vector<T, 1> corner[K];
                wide::load_cell<K>(reinterpret_cast<const T*>(row[0] + at), corner);
#pragma unroll
                for (int k = 0; k < K; ++k) dot[k] += g[0] * load(corner[k].at[0]);
            } else {
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    const auto x = *reinterpret_cast<const Vector<T, E>*>(row[k] + at);
#pragma unroll
                    for (int e = 0; e < E; ++e) dot[k] += g[e] * load(x.at[e]);
                }
            }
        };
        int f = lane * E;
        if (!kCell && lanes == 1 && along == kSize && grad_along == kSize) {
#pragma unroll 1
            for (; f + (kAtOnce - 1) * E < width; f += kAtOnce * E) {
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) add(j * E * kSize, j * E * kSize, kSize);
                grad_row += kAtOnce * E * kSize;
#pragma unroll
                for (int k = 0; k < K; ++k) row[k] += kAtOnce * E * kSize;
            }
        }
#pragma unroll 2
        for (; f < width; f += lanes * E) {
            add(0, 0, grad_along);
            grad_row += grad_step;
#pragma unroll
            for (int k = 0; k < K; ++k) row[k] += step;
        }
    }
    turn(dot, first_corner);
    const auto at = point.template in<Cell>();
    A total[D];
#pragma unroll
    for (int axis = 0; axis < D; ++axis) total[axis] = fold(at, dot, axis);
    for (int mask = (lanes < 32 ? lanes : 32) / 2; mask > 0; mask /= 2)
#pragma unroll
        for (int axis = 0; axis < D; ++axis) total[axis] += __shfl_xor_sync(~0u, total[axis], mask);
    if (lanes > 32) {
#pragma unroll
        for (int axis = 0; axis < D; ++axis)
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][axis] = total[axis];
        __syncthreads();
        for (int warp = 1; warp < lanes / 32 && lane == 0; ++warp)
#pragma unroll
            for (int axis = 0; axis < D; ++axis)
                total[axis] += parts[threadIdx.x / 32 + warp][axis];
    }
    if (own < count && lane == 0) store_gradient(p, first + n, total);
}

constexpr int kSumBlocks = 8;  // to a multiprocessor

/// A share of the blocks, of 2^32, sums up; the others, evenly between them so that both find
/// grad_out in the cache, have the gradient to feats.
template <typename Cell, typename T, int E, bool kCell>
__global__ void __launch_bounds__(kThreads, kSumBlocks)
    backward_both(MultilinearParams p, Plan plan, Plan gradients_plan, unsigned share) {
    extern __shared__ __align__(128) char memory[];
    const unsigned before = p.grad_feats ? __umulhi(blockIdx.x, share) : blockIdx.x;
    if (!p.grad_feats || __umulhi(blockIdx.x + 1, share) > before)
        sums<Cell, T, E, kCell>(p, plan, before, memory);
    else
        gradients<Cell, T>(p, gradients_plan, blockIdx.x - before, memory);
}

template <typename Cell, typename T, int E, bool kCell = false>
inline const char* launch_sums(const MultilinearParams& p, const Plan& plan, cudaStream_t stream) {
    constexpr int K = 1 << Cell::D;
    const int64_t blocks = ceil_div(p.N, plan.points);
    int64_t others = 0;
    int memory = plan.feats.bytes + plan.grad_out.bytes;
    Plan gradients_plan{};
    if (p.grad_feats) {
        MultilinearParams alone = p;
        alone.feats = nullptr;
        gradients_plan = plan_of<T, K>(alone, kThreads).plan;
        others = ceil_div(p.N, gradients_plan.points) * gradients_plan.chunks;
        memory = max(memory, memory_of<Cell, T>(gradients_plan));
    }
    // Rounded up: of all blocks it makes `blocks`, and never more.
    const auto share = unsigned(ceil_div(blocks << 32, blocks + others));
    return start(backward_both<Cell, T, E, kCell>, blocks + others, kThreads, memory, stream, p,
                 plan, gradients_plan, share);
}

/// The gradient to points, and to feats where it is asked for.
template <typename Cell, typename T>
inline const char* launch_sums(const MultilinearParams& p, const Plan& plan, cudaStream_t stream) {
    if (wide::are_cells<T>(p, 1 << Cell::D)) return launch_sums<Cell, T, 1, true>(p, plan, stream);
    if constexpr (sizeof(T) < 8) {
        const auto whole = [&](int64_t stride) { return stride % 2 == 0; };
        if (p.F % 2 == 0 && p.feats_stride[2] == 1 && whole(p.feats_stride[0]) &&
            whole(p.feats_stride[1]) && reinterpret_cast<uintptr_t>(p.feats) % (2 * sizeof(T)) == 0)
            return launch_sums<Cell, T, 2>(p, plan, stream);
    }
    return launch_sums<Cell, T, 1>(p, plan, stream);
}

}  // namespace tiles
