// grid_sample's gradient to the input on the GPU, for nearest interpolation of V = 1.
#pragma once
#include "point_backward.cuh"

/// Nearest, V = 1: a thread to a point, or several, whose gradient goes to one pixel. Neighbouring
/// points of the same pixel add up within the warp first. A thread takes U channels at a time,
/// which lie side by side where kPixels, as job.line has it.
template <typename T, int D, int U, bool kPixels, bool kRow>
__global__ void __launch_bounds__(kThreads)
    nearest_backward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    follow();
    each_in_row<kRow>(job, [&](unsigned block) {
        const GridSampleParams& p = job.p;
        const ThreadPoint at(job, block, blockIdx.y);
        const int i = at.inside ? at.i : job.count - 1;
        const Cell<A, D> cell =
            cell_of<true>(job, job.sums, Coordinates<A, D>(job, grid_of(job, at.b), i));
        const bool valid = at.inside && cell.valid(0), alone = at.lanes == 1;
        const Runs runs(cell.base, valid, job.sums.step[2]);
        const bool longer = alone && runs.reach > 1, mine = valid && (!alone || runs.head);
        const int first = int(blockIdx.z);  // channel, where each has blocks of its own
        const int C = gridDim.z > 1 ? first + 1 : int(p.C), size = element_size(job.sum_dtype);
        const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                            p.grad_out_points.at(job.first + i);
        char* const to = static_cast<char*>(p.grad_input) + at.b * p.grad_input_stride[0] * size +
                         int64_t(cell.base) * job.sums.unit;
        const int next = kPixels ? 1 : at.lanes, begin = first + at.lane * (kPixels ? U : 1);
#pragma unroll 1
        for (int c0 = begin; c0 - begin + first < C; c0 += U * at.lanes) {
            A grad[U];
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const int c = c0 + u * next;
                grad[u] = c < C && at.inside
                              ? A(value_of(grad_out[c * p.grad_out_stride[1]], p.dtype))
                              : A(0);
            }
            if (longer) runs.sum(grad);
            if constexpr (kPixels) {
                if (mine && c0 < C)
                    add_line(job, reinterpret_cast<float*>(to) + c0, grad, min(U, C - c0));
            } else {
#pragma unroll
                for (int u = 0; u < U; ++u)
                    if (const int c = c0 + u * next; mine && c < C)
                        add_one<T>(job, to + c * p.grad_input_stride[1] * size, grad[u]);
            }
        }
        if (!p.grad_grid || first > 0) return;
        A none[D] = {};
        store_grad_grid<D>(job, at, none);
    });
}

template <typename T, int D>
const char* launch_nearest(GridSampleJob& job, cudaStream_t stream) {
    const auto launch = [&](auto U, auto pixels) {
        constexpr int kOnce = decltype(U)::value;
        constexpr bool kPixels = decltype(pixels)::value;
        return launch_in_rows(nearest_backward<T, D, kOnce, kPixels, true>,
                              nearest_backward<T, D, kOnce, kPixels, false>, job,
                              32 >> job.lanes_log2, stream, job.planes ? int(job.p.C) : 1);
    };
    using std::integral_constant;
    if constexpr (sizeof(T) < 8)
        if (job.line == Line::kPixel)
            return channels_at_once(job.p.C) == 4
                       ? launch(integral_constant<int, 4>{}, std::true_type{})
                       : launch(integral_constant<int, 8>{}, std::true_type{});
    return job.p.C == 1 ? launch(integral_constant<int, 1>{}, std::false_type{})
                        : launch(integral_constant<int, 4>{}, std::false_type{});
}
