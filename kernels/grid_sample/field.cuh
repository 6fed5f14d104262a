// grid_sample's gradient to an input that fits in shared memory, by linear or nearest
// interpolation, where points are many beside its pixels. Each block sums its points there and adds
// what they come to to memory once: additions to the same few pixels wait for each other, in the L2
// cache far longer.
#pragma once
#include "linear_backward.cuh"

/// Channels [blockIdx.z * job.field, + job.field), all of whose pixels shared memory holds, side by
/// side along x. Neighbouring points in the same cell, or in the next along x, add up within the
/// warp first.
template <typename T, int D>
__global__ void __launch_bounds__(kFieldThreads, 2)
    field_backward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    extern __shared__ double shared[];
    A* const field = reinterpret_cast<A*>(shared);
    constexpr int K = 1 << D;
    constexpr uint32_t kBits = (1u << 2 * D) - 1;
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int pixels = p.size[0] * p.size[1] * p.size[2];
    const int c0 = blockIdx.z * job.field, C = min(job.field, int(p.C) - c0);
    const int64_t b = blockIdx.y;
    for (int j = threadIdx.x; j < C * pixels; j += kFieldThreads) field[j] = 0;
    __syncthreads();
    const char* const grid = grid_of(job, b);
    const T* const grad_out =
        static_cast<const T*>(p.grad_out) + b * p.grad_out_stride[0] + c0 * p.grad_out_stride[1];
    int corner[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
        corner[k] = (k & 1) + (k >> 1 & 1) * p.size[2] + (k >> 2) * p.size[2] * p.size[1];
    // Each warp of a block has another part of the points: those that neighbour would add to the
    // same pixels, and wait.
    constexpr int kWarps = kFieldThreads / 32;
    const int part = (int(p.P) - 1) / (kWarps * 32) * 32 + 32, lane = threadIdx.x % 32;
    const int begin = int(threadIdx.x / 32) * part, end = min(begin + part, int(p.P));
    for (int first = begin + blockIdx.x * 32; first < end; first += gridDim.x * 32) {
        const bool inside = first + lane < end;
        const int i = inside ? first + lane : end - 1;
        auto cell = cell_of<true>(job, job.sums, Coordinates<A, D>(job, grid, i));
        if (!inside) cell.flags = 0;
        const Runs runs(cell.base, cell.flags & kBits, 1);
        A weight[K];
        cell.weights(weight);
        uint32_t mine = 0;
#pragma unroll
        for (int k = 0; k < K; ++k)
            mine |= uint32_t(cell.valid(k) && runs.head && !(k % 2 && runs.gives)) << k;
        const T* from = grad_out + p.grad_out_points.at(i);
        A* to = field + cell.base;
#pragma unroll 1
        for (int c = 0; c < C; ++c, from += p.grad_out_stride[1], to += pixels) {
            const A grad = inside ? A(value_of(*from, p.dtype)) : A(0);
            A part[K];
#pragma unroll
            for (int k = 0; k < K; ++k) part[k] = weight[k] * grad;
            if (runs.reach > 1) runs.sum(part);
            runs.pass_on(part);
#pragma unroll
            for (int k = 0; k < K; ++k)
                if (mine >> k & 1) atomicAdd(to + corner[k], part[k]);
        }
    }
    __syncthreads();
    A* const sums =
        static_cast<A*>(p.grad_input) + b * p.grad_input_stride[0] + c0 * p.grad_input_stride[1];
    for (int j = threadIdx.x; j < pixels; j += kFieldThreads) {
        const int row = j / p.size[2], x = j - row * p.size[2];
        const int z = row / p.size[1], y = row - z * p.size[1];
        A* to = sums + x * p.grad_input_stride[4] + y * p.grad_input_stride[3] +
                z * p.grad_input_stride[2];
        for (int c = 0; c < C; ++c, to += p.grad_input_stride[1])
            if (const A sum = field[c * pixels + j]; sum != 0) add_one<A>(job, to, sum);
    }
}

/// job.sums: steps of pixels that lie side by side. At most 65535 images.
template <typename T>
const char* launch_field(const GridSampleJob& job, cudaStream_t stream) {
    const GridSampleParams& p = job.p;
    const int bytes = job.field * p.size[0] * p.size[1] * p.size[2] * int(sizeof(Acc<T>));
    const auto kernel = p.D == 3 ? field_backward<T, 3> : field_backward<T, 2>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    const dim3 blocks(unsigned(job.field_blocks), unsigned(p.B),
                      unsigned(ceil_div(p.C, job.field)));
    kernel<<<blocks, kFieldThreads, bytes, stream>>>(job);
    return launch_error();
}
