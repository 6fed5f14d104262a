// grid_sample's backward on the GPU, for linear and nearest interpolation; mapping as in
// linear_forward.cuh.
#pragma once
#include "general.cuh"
#include "nearest_backward.cuh"
#include "scattered.cuh"

/// Times 32 points that a warp takes in the backward: a group of few threads takes several of the
/// points of a line one after the other.
HD inline int tiles_of(int lanes) { return lanes < 8 ? 8 / lanes : 1; }

/// V > 1, float or 16-bit elements, sums in float. Two threads share V channels of a point: one has
/// the corners at even x, the other those at odd x, side by side in memory. A group of threads
/// takes neighbouring points one after the other, and a thread adds up what goes to the same
/// corners: it goes to memory when the column of corners changes, every other step along x.
template <typename T, int V, int D>
__global__ void __launch_bounds__(kThreads, D == 3 ? 6 : 8)
    linear_backward(const __grid_constant__ GridSampleJob job) {
    constexpr int K = 1 << (D - 1);  // corners of a column
    __shared__ Stage<T, V> stages[kThreads / 32];
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, lanes = 1 << job.lanes_log2, shares = lanes / 2;
    const int tiles = tiles_of(lanes), C = int(p.C);
    const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (int64_t(warp) * 32 * tiles >= job.count) return;
    const int64_t b = job.image + blockIdx.y;
    const int lane = in_warp & (lanes - 1), first = in_warp - lane, share = lane / 2;
    const int i0 = (warp * 32 + first) * tiles + lane;
    const char* in =
        static_cast<const char*>(p.input) + (b * p.input_stride[0] + share * V) * int(sizeof(T));
    const int size = element_size(job.sum_dtype);
    char* const to =
        static_cast<char*>(p.grad_input) + (b * p.grad_input_stride[0] + share * V) * size;
    const T* grad_out = static_cast<const T*>(p.grad_out) + b * p.grad_out_stride[0];
    Stage<T, V>& stage = stages[threadIdx.x / 32];
    const T* const staged = &stage.row(share, 0, shares)[first];
    const char* grid = grid_of(job, b);
    const auto coordinates = [&](int t) {
        const int i = i0 + t * lanes;
        return Coordinates<float, D>(job, grid, i < job.count ? i : job.count - 1);
    };
    float own_grad[D], sum[K][V];
    // With several shares of the channels cells are found anew for each; there is one tile then.
#pragma unroll 1
    for (int c0 = 0; c0 < C; c0 += V * shares) {
        const bool real = c0 + share * V < C;
        char* const sums = to + c0 * size;
        int column = 0;      // offset of the column whose corners are being summed
        uint32_t valid = 0;  // which of them lie in the image
        const auto flush = [&] {
            char* at = sums + int64_t(column) * job.sums.unit;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (!(valid >> k & 1)) continue;
                char* const corner = at + job.sums.corner[2 * k];
                add_word<V>(job, corner, sum[k]);
            }
        };
        Coordinates<float, D> next = coordinates(0);
#pragma unroll 1
        for (int t = 0; t < tiles; ++t) {
            const int i = i0 + t * lanes;
            const bool inside = i < job.count;
            Cell<float, D> own = cell_of<true>(job, job.sums, next);
            if (!inside) own.flags = 0;
            if (t + 1 < tiles) next = coordinates(t + 1);
            __syncwarp();
            const T* row = grad_out + c0 * p.grad_out_stride[1] +
                           p.grad_out_points.at_inline(job.first + (inside ? i : job.count - 1));
#pragma unroll 2
            for (int l = 0; l < shares; ++l) {
#pragma unroll
                for (int j = 0; j < V; ++j, row += p.grad_out_stride[1])
                    stage.row(l, j, shares)[in_warp] = c0 + l * V + j < C ? *row : T{};
            }
            __syncwarp();
#pragma unroll
            for (int d = 0; d < D; ++d)
                if (c0 == 0) own_grad[d] = 0;
#pragma unroll 1
            for (int r = 0; r < lanes; ++r) {
                const Cell<float, D> cell = own.from(first + r);
                float grad[V], grad_grid[D] = {};
#pragma unroll
                for (int j = 0; j < V; ++j) grad[j] = load(staged[j * shares * 33 + r]);
                // Bit 16 says whether the cell's first x is odd.
                const uint32_t side = (cell.flags >> 16 ^ uint32_t(lane)) & 1;
                const uint32_t bits = real && cell.flags >> side & 1 ? cell.column() : 0;
                if (bits != 0) {
                    const int base = cell.base + int(side) * job.sums.step[2];
                    using W = typename Word<sizeof(T) * V>::type;
                    W value[K];
                    if (job.reads) {
                        const char* at = in + c0 * int(sizeof(T)) + int64_t(base) * job.input.unit;
#pragma unroll
                        for (int k = 0; k < K; ++k) {
                            value[k] = {};
                            if (bits >> k & 1)
                                value[k] =
                                    __ldg(reinterpret_cast<const W*>(at + job.input.corner[2 * k]));
                        }
                    }
                    float weight[K];
                    cell.column_weights(weight);
                    const float along = side ? cell.part[0] : 1 - cell.part[0];
                    if (p.grad_input) {
                        if (base != column || bits != valid) {
                            flush();
#pragma unroll
                            for (int k = 0; k < K; ++k)
#pragma unroll
                                for (int j = 0; j < V; ++j) sum[k][j] = 0;
                            column = base, valid = bits;
                        }
#pragma unroll
                        for (int k = 0; k < K; ++k)
#pragma unroll
                            for (int j = 0; j < V; ++j) sum[k][j] += along * weight[k] * grad[j];
                    }
                    if (job.reads) {
                        float dot[K] = {};
#pragma unroll
                        for (int k = 0; k < K; ++k) {
                            keep(value[k]);
                            const auto each = bit_copy<Vector<T, V>>(value[k]);
#pragma unroll
                            for (int j = 0; j < V; ++j) dot[k] += grad[j] * load(each.at[j]);
                        }
                        cell.column_slopes(dot, weight, along, side, grad_grid);
                    }
                }
                if (!job.reads) continue;
#pragma unroll
                for (int d = 0; d < D; ++d) {
                    for (int m = 1; m < lanes; m *= 2)
                        grad_grid[d] += __shfl_xor_sync(kAll, grad_grid[d], m);
                    if (lane == r) own_grad[d] += grad_grid[d];
                }
            }
            if (p.grad_grid && inside && c0 + V * shares >= C)
#pragma unroll
                for (int d = 0; d < D; ++d)
                    store_as(p.grid_dtype, p.grad_grid, (b * p.P + job.first + i) * D + d,
                             job.reads ? own.moved(d, job) * own_grad[d] : 0);
        }
        if (p.grad_input) flush();
    }
}

template <typename T, int V, int D, bool kPixels>
const char* launch_scattered(GridSampleJob& job, cudaStream_t stream) {
    return launch_points(job.reads ? scattered_backward<T, V, D, true, kPixels>
                                   : scattered_backward<T, V, D, false, kPixels>,
                         job, 32, stream, kSlabBlocks * job.processors);
}

/// Words of V > 1 channels.
template <typename T, int V, int D>
const char* launch_words_backward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (V == 4)
        if (job.alone) return launch_grid_backward_words<T, D>(job, stream);
    if (!job.p.grad_input) return launch_words_to_grid<T, V, false>(job, stream);
    if (job.slabs) return launch_scattered<T, V, D, false>(job, stream);
    return launch_points(linear_backward<T, V, D>, job, 32 * tiles_of(1 << job.lanes_log2), stream);
}

/// V = 1.
template <typename T, int D>
const char* launch_linear_backward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (sizeof(T) < 8)
        if (job.slabs && job.p.grad_input)
            return job.line == Line::kPixel ? launch_scattered<T, 4, D, true>(job, stream)
                                            : launch_scattered<T, 1, D, false>(job, stream);
    const int each = 32 >> job.lanes_log2;
    if (job.general) return launch_points(backward_kernel<T, 1, D, 2>, job, each, stream);
    if (job.alone) return launch_grid_backward<T, D>(job, stream);
    constexpr int U = D == 2 ? 4 : 2;
    if (job.p.interpolation == Interpolation::kNearest) {
        if constexpr (sizeof(T) == 2) return grid_sample_nearest_16bit(job, stream);
        if constexpr (sizeof(T) == 4) return grid_sample_nearest(job, stream);
        if constexpr (sizeof(T) == 8) return launch_nearest<T, D>(job, stream);
    }
    if constexpr (sizeof(T) < 8) {
        if (job.line == Line::kPixel)
            return launch_points(linear_backward_any<T, D, kPixelChannels, true>, job, each,
                                 stream);
        if (job.line == Line::kRow && each == 32 &&
            (job.narrow == Narrow::kPlanar || !job.p.grad_grid))
            return launch_points(job.p.C == 1 ? rows_backward<T, D, 1> : rows_backward<T, D, U>,
                                 job, each, stream);
    }
    return launch_points(
        job.p.C == 1 ? linear_backward_any<T, D, 1, false> : linear_backward_any<T, D, U, false>,
        job, each, stream);
}

template <typename T, int V>
const char* launch_backward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (V == 1 && sizeof(T) < 8)
        if (job.p.interpolation == Interpolation::kCubic && job.line == Line::kPixel)
            return launch_points(cubic_pixels<Stored<T>>, job, 32, stream);
    if (job.p.interpolation == Interpolation::kCubic)
        return launch_points(backward_kernel<Stored<T>, V, 2, 4>, job, 32 >> job.lanes_log2,
                             stream);
    if constexpr (V > 1)
        return (job.p.D == 3 ? launch_words_backward<T, V, 3>
                             : launch_words_backward<T, V, 2>)(job, stream);
    else
        return (job.p.D == 3 ? launch_linear_backward<Stored<T>, 3>
                             : launch_linear_backward<Stored<T>, 2>)(job, stream);
}
