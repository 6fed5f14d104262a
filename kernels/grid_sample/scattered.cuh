// grid_sample's gradients of points that are scattered over a field larger than the L2 cache: by
// slabs of the field, see slabs.cuh.
#pragma once
#include "adds.cuh"
#include "to_grid.cuh"

/// Adds a point's gradient of one channel to the corners of its cell, whose first is at `to`.
template <typename T, int D>
__device__ inline void add_corners(const GridSampleJob& job, const Cell<float, D>& cell,
                                   const float (&weight)[1 << D], float grad, char* to) {
#pragma unroll
    for (int k = 0; k < 1 << D; k += 2) {
        char* const first = to + job.sums.corner[k];
        const bool one = cell.valid(k), two = cell.valid(k + 1);
        if (one && two && job.line == Line::kRow) {
            const float both[] = {weight[k] * grad, weight[k + 1] * grad};
            add_line(job, reinterpret_cast<float*>(first), both);
            continue;
        }
        if (one) add_one<T>(job, first, weight[k] * grad);
        if (two) add_one<T>(job, to + job.sums.corner[k + 1], weight[k + 1] * grad);
    }
}

/// A thread to a point, V channels at a time: scattered points have no neighbours to add to first.
/// kReads: with the gradient to the grid. kPixels: words of memory begin elsewhere, as job.line has
/// it.
template <typename T, int V, int D, bool kReads, bool kPixels>
__global__ void __launch_bounds__(kThreads)
    scattered_backward(const __grid_constant__ GridSampleJob job) {
    constexpr int K = 1 << D;
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int64_t b = job.image + blockIdx.y;
    const bool nearest = p.interpolation == Interpolation::kNearest;
    const int C = int(p.C), size = element_size(job.sum_dtype);
    const char* const grid = job.grids.at(blockIdx.y);
    const char* const image = job.inputs.at(blockIdx.y);
    const T* const grad_out = static_cast<const T*>(p.grad_out) + b * p.grad_out_stride[0];
    char* const sums = static_cast<char*>(p.grad_input) + b * p.grad_input_stride[0] * size;
    const int stride = gridDim.x * blockDim.x;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const auto coordinates = [&](int i) {
        return Coordinates<float, D>(job, grid, min(i, job.count - 1));
    };
    Coordinates<float, D> next = coordinates(i);
#pragma unroll 1
    for (; i < job.count; i += stride) {
        const auto spot = spot_of<true>(job, next, nearest);
        next = coordinates(i + stride);
        if (!spot.in_slab(job)) continue;
        const auto cell = spot.in(job.input, spot.flags(p, nearest));
        float weight[K], dot[K] = {};
        cell.weights(weight);
        const T* from = grad_out + p.grad_out_points.at(job.first + i);
        const char* in = image;
        char* to = sums + int64_t(spot.base(job.sums)) * job.sums.unit;
#pragma unroll 1
        for (int c = 0; c < C; c += V) {
            float grad[V];
#pragma unroll
            for (int j = 0; j < V; ++j, from += p.grad_out_stride[1])
                grad[j] = V == 1 || c + j < C ? value_of(*from, p.dtype) : 0;
            if (kReads && kPixels) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    if (c + j >= C) break;
                    Vector<T, 1> value[K];
                    load_corners<T, 1, D>(job, in + j * p.input_stride[1] * int(sizeof(T)), cell,
                                          value);
#pragma unroll
                    for (int k = 0; k < K; ++k)
                        dot[k] += grad[j] * value_of(value[k].at[0], p.dtype);
                }
                in += V * p.input_stride[1] * int(sizeof(T));
            } else if (kReads) {
                Vector<T, V> value[K];
                load_corners<T, V, D>(job, in, cell, value);
#pragma unroll
                for (int k = 0; k < K; ++k)
#pragma unroll
                    for (int j = 0; j < V; ++j)
                        dot[k] += grad[j] * value_of(value[k].at[j], p.dtype);
                in += V * p.input_stride[1] * int(sizeof(T));
            }
            if constexpr (V == 1) {
                add_corners<T>(job, cell, weight, grad[0], to);
            } else {
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    if (!cell.valid(k)) continue;
                    float x[V];
#pragma unroll
                    for (int j = 0; j < V; ++j) x[j] = weight[k] * grad[j];
                    char* const pixel = to + job.sums.corner[k];
                    if constexpr (kPixels)
                        add_line(job, reinterpret_cast<float*>(pixel), x, min(V, C - c));
                    else
                        add_word<V>(job, pixel, x);
                }
            }
            to += V * p.grad_input_stride[1] * size;
        }
        if (!kReads) continue;
        float slope[D];
        cell.slopes(dot, slope);
#pragma unroll
        for (int d = 0; d < D; ++d) slope[d] *= cell.moved(d, job);
        store_slopes(job, blockIdx.y, i, slope);
    }
}
