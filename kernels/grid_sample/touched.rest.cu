// Sums of 16-bit gradients where the field is far larger than what is added to it: only those of
// pixels that points touch become zero before, and go to the gradient, rounded, after; which is
// zero elsewhere. Points that share a pixel write the same.
#include "cell.cuh"
#include "general.cuh"

template <int D, int kTaps, bool kAfter>
__global__ void __launch_bounds__(kThreads)
    touched_kernel(const __grid_constant__ GridSampleJob job) {
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    if (!at.inside) return;
    int index[3][kTaps] = {};  // along x, y, z; as the kernels that sum find it, -1 outside
    if constexpr (kTaps == 4) {
        const PointTaps<float, D, 4, true> point(job, at);
#pragma unroll
        for (int d = 0; d < D; ++d)
#pragma unroll
            for (int k = 0; k < 4; ++k) index[d][k] = point.axis[d].index[k];
    } else {
        const Coordinates<float, D> coordinates(job, grid_of(job, at.b), at.i);
        const Spot<float, D> spot = spot_of<true>(job, coordinates);
#pragma unroll
        for (int d = 0; d < D; ++d)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                index[d][k] = spot.flags >> (2 * d + k) & 1 ? spot.index[d] + k : -1;
    }
    for (int64_t c = at.lane; c < p.C; c += at.lanes) {
        float* const sums = static_cast<float*>(p.grad_input) + at.b * p.grad_input_stride[0] +
                            c * p.grad_input_stride[1];
        Short* const to = static_cast<Short*>(job.rounded) + at.b * job.rounded_stride[0] +
                          c * job.rounded_stride[1];
#pragma unroll
        for (int z = 0; z < (D == 3 ? kTaps : 1); ++z)
#pragma unroll
            for (int y = 0; y < kTaps; ++y) {
                if (index[2][z] < 0 || index[1][y] < 0) continue;
                const auto row = [&](const int64_t(&stride)[5]) {
                    return index[2][z] * stride[2] + index[1][y] * stride[3];
                };
                float* const from = sums + row(p.grad_input_stride);
                float value[kTaps];
#pragma unroll
                for (int x = 0; x < kTaps; ++x) {
                    if (index[0][x] < 0) continue;
                    float& sum = from[index[0][x] * p.grad_input_stride[4]];
                    if (kAfter)
                        value[x] = sum;
                    else
                        sum = 0;
                }
#pragma unroll
                for (int x = 0; x < kTaps; ++x)
                    if (kAfter && index[0][x] >= 0)
                        to[row(job.rounded_stride) + index[0][x] * job.rounded_stride[4]] =
                            stored<Short>(value[x], p.dtype);
            }
    }
}

template <bool kAfter>
const char* touched(GridSampleJob& job, cudaStream_t stream) {
    job.lanes_log2 = 0;  // channels side by side: threads too
    while (job.p.grad_input_stride[1] == 1 && job.lanes_log2 < 4 && 1 << job.lanes_log2 < job.p.C)
        ++job.lanes_log2;
    const bool cubic = job.p.interpolation == Interpolation::kCubic;
    const auto kernel = job.p.D == 3
                            ? (cubic ? touched_kernel<3, 4, kAfter> : touched_kernel<3, 2, kAfter>)
                            : (cubic ? touched_kernel<2, 4, kAfter> : touched_kernel<2, 2, kAfter>);
    return launch_points(kernel, job, 32 >> job.lanes_log2, stream);
}

const char* grid_sample_touched(const GridSampleJob& job, bool after, cudaStream_t stream) {
    GridSampleJob own = job;
    return (after ? touched<true> : touched<false>)(own, stream);
}
