// Bicubic images on the GPU where all of a point's taps lie in the image: no border rule, and
// offsets of 32 bits that the compiler knows along x.
#pragma once
#include <type_traits>

#include "cell.cuh"

/// Along an axis, the second of a position's four pixels, and their weights; false unless all lie
/// in the image. Then padding has no part in it, and offsets are multiples of a step.
__device__ inline bool inner_taps(const GridSampleJob& job, int d, float x, int& index,
                                  float (&weight)[4]) {
    const AxisOf<float>& axis = job.axes[d];
    const Window in = job.p.window(d);
    const float u = fmin(fmax((x + 1) * axis.scale + axis.shift, -3.f), float(in.whole) + 2);
    float part;
    index = pixel_of(u, false, part) - in.first;
    Taps<float, 4>::cubic(weight, part);
    return index >= 1 && index + 2 < in.size;
}

/// An image's point, all of whose taps lie in the image, as those of the points beside it do; false
/// where that is not so.
template <typename T>
__device__ inline bool inner_cubic(const GridSampleJob& job, const ThreadPoint& at) {
    const GridSampleParams& p = job.p;
    const Coordinates<float, 2> place(job, grid_of(job, at.b), at.i);
    float across[4], down[4];
    int x, y;
    const bool inner_x = inner_taps(job, 2, place.x[0], x, across);
    const bool inner = inner_taps(job, 1, place.x[1], y, down) && inner_x;
    // A warp that would go both ways goes the general one alone.
    if (!__all_sync(__activemask(), inner)) return false;
    const int x_step = job.input.step[2] * job.input.unit;
    const int64_t y_step = int64_t(job.input.step[1]) * job.input.unit;
    const int begin = int(blockIdx.z) * at.lanes + at.lane, each = at.lanes * int(gridDim.z);
    const int64_t c_step = p.input_stride[1] * each * int(sizeof(T));
    const char* channel =
        static_cast<const char*>(p.input) +
        (at.b * p.input_stride[0] + begin * p.input_stride[1]) * int(sizeof(T)) +
        int64_t((x - 1) * job.input.step[2] + (y - 1) * job.input.step[1]) * job.input.unit;
    T* out = static_cast<T*>(p.out) + (at.b * p.C + begin) * p.P + at.q;
    const auto sample = [&](auto neighbours) {
        const int step = decltype(neighbours)::value ? int(sizeof(T)) : x_step;
#pragma unroll 1
        for (int c = begin; c < p.C; c += each, channel += c_step, out += each * p.P) {
            T value[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    value[k][j] = load_constant<T, 1>(
                                      reinterpret_cast<const T*>(channel + k * y_step + j * step))
                                      .at[0];
            float sum = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float line = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) line += across[j] * value_of(value[k][j], p.dtype);
                sum += down[k] * line;
            }
            *out = stored<T>(sum, p.dtype);
        }
    };
    if (x_step == int(sizeof(T)))
        sample(std::true_type{});
    else
        sample(std::false_type{});
    return true;
}
