// Cells of points for grid_sample's linear and nearest interpolation on the GPU: where their
// corners lie, with which weights.
#pragma once
#include "job.cuh"

constexpr unsigned kAll = ~0u;

/// The cell of a point: its first corner, which may lie outside, where in it the point lies, and
/// which corners are in the image. Nearest interpolation has the first corner alone.
template <typename A, int D>
struct Cell {
    int base;        // offset in units, negative where the corner lies outside
    A part[D];       // x, y, z in [0, 1)
    uint32_t flags;  // two bits an axis: its first and second pixel lie in the image; from bit 8 on
                     // two an axis: the point moves with the coordinate, and against it; bit 16:
                     // the first x is odd

    __device__ bool valid(int k) const {
        bool all = true;
#pragma unroll
        for (int d = 0; d < D; ++d) all = all && (flags >> (2 * d + (k >> d & 1)) & 1);
        return all;
    }
    __device__ bool whole() const { return (flags & ((1u << 2 * D) - 1)) == (1u << 2 * D) - 1; }
    __device__ Cell from(int lane) const {
        Cell other;
        other.base = __shfl_sync(kAll, base, lane);
#pragma unroll
        for (int d = 0; d < D; ++d) other.part[d] = __shfl_sync(kAll, part[d], lane);
        other.flags = __shfl_sync(kAll, flags, lane);
        return other;
    }
    __device__ A weight(int k) const {
        A w = k & 1 ? part[0] : 1 - part[0];
#pragma unroll
        for (int d = 1; d < D; ++d) w *= k >> d & 1 ? part[d] : 1 - part[d];
        return w;
    }
    /// All weights; the compiler shares what they have in common.
    __device__ void weights(A (&w)[1 << D]) const {
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) w[k] = weight(k);
    }
    /// Gradients by the position, in pixels, where corner k's value counts dot[k].
    __device__ void slopes(const A (&dot)[1 << D], A (&grad)[D]) const {
        A left[1 << D];
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) left[k] = dot[k];
        A along[D][1 << (D - 1)];  // differences along x, y, z, then their means over the others
#pragma unroll
        for (int d = 0; d < D; ++d) {
            const int half = 1 << (D - 1 - d);
            const auto mean = [&](A a, A b) { return (1 - part[d]) * a + part[d] * b; };
#pragma unroll
            for (int e = 0; e < d; ++e)
#pragma unroll
                for (int k = 0; k < half; ++k)
                    along[e][k] = mean(along[e][2 * k], along[e][2 * k + 1]);
#pragma unroll
            for (int k = 0; k < half; ++k) {
                along[d][k] = left[2 * k + 1] - left[2 * k];
                left[k] = mean(left[2 * k], left[2 * k + 1]);
            }
        }
#pragma unroll
        for (int d = 0; d < D; ++d) grad[d] = along[d][0];
    }
    /// Which corners of a column, those of one x, lie in the image along the other axes.
    __device__ uint32_t column() const {
        const uint32_t y = flags >> 2 & 3;
        if constexpr (D == 2) return y;
        return (flags & 16 ? y : 0) | (flags & 32 ? y << 2 : 0);
    }
    __device__ void column_weights(A (&w)[1 << (D - 1)]) const {
#pragma unroll
        for (int k = 0; k < 1 << (D - 1); ++k) {
            w[k] = k & 1 ? part[1] : 1 - part[1];
            if constexpr (D == 3) w[k] *= k & 2 ? part[2] : 1 - part[2];
        }
    }
    /// A column's part of the gradients by the position, in pixels. `weight`: those of the column's
    /// corners; `along`: the column's; `second`: it is the second along x.
    __device__ void column_slopes(const A (&dot)[1 << (D - 1)], const A (&weight)[1 << (D - 1)],
                                  A along, bool second, A (&grad)[D]) const {
        A sum = 0;
#pragma unroll
        for (int k = 0; k < 1 << (D - 1); ++k) sum += weight[k] * dot[k];
        grad[0] = second ? sum : -sum;
        if constexpr (D == 2) {
            grad[1] = along * (dot[1] - dot[0]);
        } else {
            grad[1] = along * ((1 - part[2]) * (dot[1] - dot[0]) + part[2] * (dot[3] - dot[2]));
            grad[2] = along * ((1 - part[1]) * (dot[2] - dot[0]) + part[1] * (dot[3] - dot[1]));
        }
    }
    /// By how many pixels the position moves with coordinate d.
    __device__ A moved(int d, const GridSampleParams& p) const {
        const uint32_t sign = flags >> (8 + 2 * d) & 3;
        const A scale = pixels_per_unit(A(p.size[2 - d]), p.align_corners);
        return sign == 0 ? A(0) : sign == 1 ? scale : -scale;
    }
};

/// Coordinates of a point: read early, so that much is under way at a time.
template <typename A, int D>
struct Coordinates {
    A x[D];

    Coordinates() = default;
    /// Point i of the launch; `image`: where the grid of its image begins, in bytes.
    __device__ Coordinates(const GridSampleJob& job, const char* image, int i) {
        if (job.packed) {
            const auto* at = reinterpret_cast<const float*>(image + int64_t(i) * job.point_step);
#pragma unroll
            for (int d = 0; d < D; ++d) x[d] = __ldg(at + d);
        } else {
            read(job, image, i, x);
        }
    }
    /// Any strides and dtype. Not inlined, as is all that is rarely needed: the kernels' own code
    /// stays short.
    __device__ __noinline__ static void read(const GridSampleJob& job, const char* image, int i,
                                             A (&x)[D]) {
        const GridSampleParams& p = job.p;
        const int64_t from = p.grid_points.at(job.first + i);
        for (int d = 0; d < D; ++d)
            x[d] = load_as<A>(p.grid_dtype, image, from + d * p.grid_stride[1]);
    }
};

/// Where the grid of an image begins.
__device__ inline const char* grid_of(const GridSampleJob& job, int64_t b) {
    return static_cast<const char*>(job.p.grid) +
           b * job.p.grid_stride[0] * element_size(job.p.grid_dtype);
}

/// Of a sign, as Cell::flags has it: 1 for a positive one, 2 for a negative one.
template <typename A>
__device__ inline uint32_t bits_of(A sign) {
    return sign > 0 ? 1 : sign < 0 ? 2 : 0;
}

/// The cell of a point that may lie anywhere.
template <bool kSlope, typename A, int D>
__device__ __noinline__ Cell<A, D> any_cell(const GridSampleJob& job, const Offsets& steps,
                                            Coordinates<A, D> at) {
    const GridSampleParams& p = job.p;
    Cell<A, D> cell;
    cell.base = 0, cell.flags = 0;
    const bool nearest = p.interpolation == Interpolation::kNearest;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        const int size = p.size[2 - d];
        A sign = 1;
        A u = padded(unnormalized(at.x[d], A(size), p.align_corners), A(size), p.padding,
                     p.align_corners, kSlope ? &sign : nullptr);
        if (nearest) u = rint(u), sign = 0;
        const A first = floor(u);
        const bool near = first >= -1 && first < A(size);  // neither NaN nor beyond an int
        const int i = near ? int(first) : -1;
        cell.part[d] = near ? u - first : A(0);
        cell.base += i * steps.step[2 - d];
        cell.flags |= uint32_t(near && i >= 0) << 2 * d |
                      uint32_t(near && i + 1 < size && !nearest) << (2 * d + 1) |
                      bits_of(sign) << (8 + 2 * d);
    }
    return cell;
}

/// The cell of a point. `kSlope`: for a gradient.
template <bool kSlope, typename A, int D>
__device__ inline Cell<A, D> cell_of(const GridSampleJob& job, const Offsets& steps,
                                     const Coordinates<A, D>& at) {
    const GridSampleParams& p = job.p;
    if (p.padding == Padding::kReflection) return any_cell<kSlope>(job, steps, at);
    const bool nearest = p.interpolation == Interpolation::kNearest;
    Cell<A, D> cell;
    cell.base = 0, cell.flags = 0;
    bool near = true;  // some corner may lie in the image; neither NaN nor beyond an int
#pragma unroll
    for (int d = 0; d < D; ++d) {
        const auto [half, size, less, scale, least, most] = job.template axis<A>(2 - d);
        A u = ((at.x[d] + 1) * half * size - less) * scale;
        if (kSlope) {
            near = near && u == u;
            cell.flags |= uint32_t(u > least && u < most) << (8 + 2 * d);
        }
        u = fmin(fmax(u, least), most);
        if (nearest) u = rint(u);
        const A first = floor(u);
        near = near && first >= -1 && first < A(p.size[2 - d]);
        const int i = int(first);
        cell.part[d] = u - first;
        cell.base += i * steps.step[2 - d];
        cell.flags |= uint32_t(i >= 0) << 2 * d | uint32_t(i + 1 < p.size[2 - d] && !nearest)
                                                      << (2 * d + 1);
        if (kSlope && d == 0) cell.flags |= uint32_t(i & 1) << 16;
    }
    if (near) return cell;
    cell.flags = 0, cell.base = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) cell.part[d] = 0;
    return cell;
}

/// V channels of the corners, from the first pixel's on; zeros for those outside of the image.
template <typename T, int V, int D>
__device__ inline void load_corners(const Offsets& steps, const char* in,
                                    const Cell<Acc<T>, D>& cell, Vector<T, V> (&value)[1 << D]) {
    const char* first = in + int64_t(cell.base) * steps.unit;
    asm("" : "+l"(first));  // one sum for each corner, not one for each part of it
    const auto at = [&](int k) {
        return load_constant<T, V>(reinterpret_cast<const T*>(first + steps.corner[k]));
    };
    if (cell.whole()) {
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) value[k] = at(k);
    } else {
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) {
            value[k] = {};
            if (cell.valid(k)) value[k] = at(k);
        }
    }
}

constexpr int kMostLanes = 8;  // threads that share a point

/// 32 points of a warp's channels: in rows of points in memory, of channels in registers.
template <typename T, int V>
struct Stage {
    T at[V * kMostLanes + 1][33];

    /// Channel j of thread `lane` of a group. Groups and lanes then lie in different banks.
    __device__ T* row(int lane, int j, int lanes) { return at[j * lanes + lane]; }
};
