// grid_sample's forward on the GPU, for linear and nearest interpolation.
//
// A warp works on 32 points (or a multiple). Each thread finds the cell of one point; then groups
// of threads share the channels of a point, V at a time, and take its cell by shuffles, so that
// finding cells costs as little as with one thread to a point.
#pragma once
#include "cell.cuh"
#include "general.cuh"

/// V > 1. A warp takes 32 points at a time, a group of threads as many of them as it has threads.
/// `kAlone`: one thread to a point takes all channels.
template <typename T, int V, int D, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    linear_forward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    __shared__ Stage<T, kAlone ? 0 : V> stages[kThreads / 32];
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, lanes = kAlone ? 1 : 1 << job.lanes_log2;
    const int stride = blockDim.x * gridDim.x, C = int(p.C);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t b = job.image + blockIdx.y;
    const char* grid = grid_of(job, b);
    const auto coordinates = [&](int i) {
        return Coordinates<A, D>(job, grid, i < job.count ? i : job.count - 1);
    };
    const int lane = kAlone ? 0 : in_warp & (lanes - 1), first = in_warp - lane;
    const char* in =
        static_cast<const char*>(p.input) + (b * p.input_stride[0] + lane * V) * int(sizeof(T));
    T* out = static_cast<T*>(p.out) + b * p.C * p.P + job.first + i;
    Stage<T, kAlone ? 0 : V>& stage = stages[threadIdx.x / 32];
    T* const staged = &stage.row(lane, 0, lanes)[first];
    Coordinates<A, D> next = coordinates(i);
#pragma unroll 1
    for (; i - in_warp < job.count; i += stride, out += stride) {
        const Cell<A, D> own = cell_of<false>(job, job.input, next);
        next = coordinates(i + stride);
        T* to = out;
#pragma unroll 1
        for (int c0 = 0; c0 < C; c0 += V * lanes) {
#pragma unroll 1
            for (int r = 0; r < lanes; ++r) {
                const Cell<A, D> cell = kAlone ? own : own.from(first + r);
                if (!kAlone && c0 + lane * V >= C) continue;
                A weight[1 << D];
                cell.weights(weight);
                Vector<T, V> value[1 << D];
                load_corners(job.input, in + c0 * int(sizeof(T)), cell, value);
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    A sum = 0;
#pragma unroll
                    for (int k = 0; k < 1 << D; ++k) sum += weight[k] * load(value[k].at[j]);
                    if (!kAlone)
                        staged[j * lanes * 33 + r] = store<T>(sum);
                    else if (j < C && i < job.count)
                        to[j * p.P] = store<T>(sum);
                }
            }
            if (kAlone) break;
            __syncwarp();
            const bool full = c0 + V * lanes <= C;
#pragma unroll 1
            for (int l = 0; l < lanes; ++l)
#pragma unroll
                for (int j = 0; j < V; ++j, to += p.P)
                    if (i < job.count && (full || c0 + l * V + j < C))
                        *to = stage.row(l, j, lanes)[in_warp];
            __syncwarp();
        }
    }
}

/// V = 1: a thread to a point, U channels at a time, R times; or threads that share a point.
template <typename T, int D, int U, int R>
__global__ void __launch_bounds__(kThreads)
    linear_forward_any(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, lanes = 1 << job.lanes_log2;
    const int points = 32 >> job.lanes_log2;
    const int64_t b = job.image + blockIdx.y;
    const int i0 =
        (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * points * R + (in_warp & (points - 1));
    if (i0 >= job.count) return;
    const char* grid = grid_of(job, b);
    const auto coordinates = [&](int r) {
        const int i = i0 + r * points;
        return Coordinates<A, D>(job, grid, i < job.count ? i : job.count - 1);
    };
    Coordinates<A, D> at[R];
#pragma unroll
    for (int r = 0; r < R; ++r) at[r] = coordinates(r);
    const char* in = static_cast<const char*>(p.input) + b * p.input_stride[0] * int(sizeof(T));
    T* out = static_cast<T*>(p.out) + b * p.C * p.P + job.first + i0;
    const int C = int(p.C);
    const int64_t c_step = p.input_stride[1] * int(sizeof(T));
#pragma unroll
    for (int r = 0; r < R; ++r, out += points) {
        if (r > 0 && i0 + r * points >= job.count) return;
        const Cell<A, D> cell = cell_of<false>(job, job.input, at[r]);
        A weight[1 << D];
        cell.weights(weight);
#pragma unroll 1
        for (int c = in_warp >> (5 - job.lanes_log2); c < C; c += U * lanes) {
            Vector<T, 1> value[U][1 << D];
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (u == 0 || c + u * lanes < C)
                    load_corners(job.input, in + (c + u * lanes) * c_step, cell, value[u]);
#pragma unroll
            for (int u = 0; u < U; ++u) {
                if (u > 0 && c + u * lanes >= C) break;
                A sum = 0;
#pragma unroll
                for (int k = 0; k < 1 << D; ++k)
                    sum += weight[k] * value_of(value[u][k].at[0], p.dtype);
                out[(c + u * lanes) * p.P] = stored<T>(sum, p.dtype);
            }
            if (U == 1) break;
        }
    }
}

template <typename T, int V, int D>
const char* launch_linear_forward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (V > 1)
        return launch_points(
            job.lanes_log2 ? linear_forward<T, V, D, false> : linear_forward<T, V, D, true>, job,
            32, stream, job.processors * 8);
    using S = Stored<T>;
    const int each = 32 >> job.lanes_log2;
    if (job.general) return launch_points(wide_forward<S, D>, job, each, stream);
    const bool large = each == 32 && job.p.B * job.p.P >= 1 << 18;
    if (large && job.p.C == 1)
        return launch_points(linear_forward_any<S, D, 1, 4>, job, each * 4, stream);
    if constexpr (D == 2) {
        if (large && job.p.C >= 8)
            return launch_points(linear_forward_any<S, D, 8, 1>, job, each, stream);
        if (large) return launch_points(linear_forward_any<S, D, 4, 2>, job, each * 2, stream);
    }
    return launch_points(linear_forward_any<S, D, 4, 1>, job, each, stream);
}
template <typename T, int V>
const char* launch_forward(GridSampleJob& job, cudaStream_t stream) {
    if (job.p.interpolation == Interpolation::kCubic)
        return launch_points(cubic_forward<Stored<T>, V, 2>, job, 32 >> job.lanes_log2, stream);
    return (job.p.D == 3 ? launch_linear_forward<T, V, 3> : launch_linear_forward<T, V, 2>)(job,
                                                                                            stream);
}
