// grid_sample's gradient to a 16-bit input of four channels or more side by side, of which few
// pixels are added to: sums in float take memory for the whole field, but only those of pixels that
// points touch are set to zero, before, and rounded, behind the kernel that adds. Passes over the
// whole field would take four times the bytes of the gradient itself, which is set to zero as a
// whole.
//
// Of fewer channels, or of planes, sums share sectors of memory with pixels that nothing touches:
// these kernels took 1.3 to 5 times as long as the passes (H100, 600 drawn cases).
#pragma once
#include "cell.cuh"

/// The gradient, beside job.p.grad_input, which its sums are.
struct Rounded {
    uint16_t* data;
    int64_t b_stride;
    Offsets steps;
    bool words;  // four channels of a pixel make a word of memory
};

/// Of the pixels that a point touches: sets their sums to zero, or rounds them where kRound; four
/// channels at a time. Pixels that points share are written more than once, the same.
template <int D, bool kRound>
__global__ void __launch_bounds__(kThreads)
    touch_kernel(const __grid_constant__ GridSampleJob job, const __grid_constant__ Rounded to) {
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    if (!at.inside) return;
    const bool nearest = job.p.interpolation == Interpolation::kNearest;
    const Coordinates<float, D> coordinates(job, grid_of(job, at.b), at.i);
    const auto spot = spot_of<true>(job, coordinates, nearest);
    const auto cell = spot.in(job.sums, spot.flags(job.p, nearest));
    if (!cell.near()) return;
    float* const sums = static_cast<float*>(p.grad_input) + at.b * p.grad_input_stride[0];
    char* const first = reinterpret_cast<char*>(sums) + int64_t(cell.base) * job.sums.unit;
    char* const target = reinterpret_cast<char*>(to.data + at.b * to.b_stride) +
                         int64_t(spot.base(to.steps)) * to.steps.unit;
#pragma unroll 1
    for (int c = at.lane * 4; c < int(p.C); c += 4 * at.lanes) {
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) {
            if (!cell.valid(k)) continue;
            float* const sum = reinterpret_cast<float*>(first + job.sums.corner[k]) + c;
            if constexpr (kRound) {
                const auto x = load_vector<float, 4>(sum);
                Vector<Short, 4> word;
#pragma unroll
                for (int j = 0; j < 4; ++j) word.at[j] = stored<Short>(x.at[j], p.dtype);
                Short* const pixel = reinterpret_cast<Short*>(target + to.steps.corner[k]) + c;
                if (to.words) {
                    store_vector(pixel, word);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (c + j < p.C) pixel[j] = word.at[j];
            } else {
                store_vector(sum, Vector<float, 4>{});
            }
        }
    }
}

/// Launches `touch_kernel` for all points.
template <bool kRound>
const char* touch(GridSampleJob job, const Rounded& to, cudaStream_t stream) {
    int lanes_log2 = 0;
    while (lanes_log2 < 2 && 4 << lanes_log2 < job.p.C) ++lanes_log2;
    job.lanes_log2 = lanes_log2;
    const auto kernel = job.p.D == 2 ? touch_kernel<2, kRound> : touch_kernel<3, kRound>;
    return launch_points(kernel, job, 32 >> job.lanes_log2, stream, 0x7fffffff, 1, 0, to);
}
