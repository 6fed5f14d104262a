// What grid_sample's kernels share: parameters, and where along an axis a coordinate samples.
//
// out[b, c, p] = sum over the taps (z, y, x) of point p of w_z w_y w_x input[b, c, z, y, x]. An
// axis has one tap (nearest), two (linear) or four (cubic); those that lie outside count as zeros.
// Coordinates, also NaN, infinite and huge ones, are treated as torch's CUDA kernels treat them.
#pragma once
#include <math.h>  // with the overloads for float in the global namespace

#include "common.h"
#include "dims.h"

/// Codes of `aten::grid_sampler_2d`.
enum class Interpolation : int32_t { kLinear, kNearest, kCubic };
enum class Padding : int32_t { kZeros, kBorder, kReflection };

/// Where the points of one image lie in a tensor: up to three dimensions, merged where that can be.
struct PointsView {
    int64_t count[2], stride[3];  // of the middle and the innermost dimension; in elements

    HD int64_t at(int64_t p) const { return p < count[1] ? p * stride[2] : beyond_first_row(p); }
    HD_ONCE int64_t beyond_first_row(int64_t p) const { return at_inline(p); }
    HD int64_t at_inline(int64_t p) const {
        if (p < count[1]) return p * stride[2];
        const int64_t row = p / count[1], x = p % count[1];
        return row / count[0] * stride[0] + row % count[0] * stride[1] + x * stride[2];
    }
};

/// The view of points in up to three dimensions, outermost first.
inline PointsView view_of(int64_t dims, const int64_t* size, const int64_t* stride) {
    int64_t merged[3], step[3];
    int64_t* const steps[] = {step};
    const int n = merge_dims(dims, size, &stride, 1, 3, merged, steps);
    // The innermost dimension comes last, missing ones first.
    const auto from_end = [n](const int64_t* of, int i, int64_t missing) {
        return i < n ? of[n - 1 - i] : missing;
    };
    PointsView view;
    view.count[1] = from_end(merged, 0, 1), view.count[0] = from_end(merged, 1, 1);
    for (int i = 0; i < 3; ++i) view.stride[2 - i] = from_end(step, i, 0);
    return view;
}

/// Pixels [first, first + size) of an axis of an image of `whole` pixels, which coordinates and
/// padding are those of.
struct Window {
    int first, size, whole;
};

/// Images B, channels C, points P of one image; arrays over axes in the order z, y, x, where z has
/// size 1 in two dimensions. Three jobs: without `grad_out` the forward, to `out`; with it the
/// gradients to `grad_input` and `grad_grid`; where `to_grad_input` or `to_grad_grid` are given
/// too, the gradients of those: `out` is then that to `grad_out`. A result is null where not asked
/// for.
/// A kernel reads its parameters through a cache that is cold when it begins, 64 bytes at a time:
/// what many kernels read lies together, behind what few do.
struct GridSampleParams {
    void* scratch;              // as many bytes as `grid_sample_scratch_*` asks for
    const void* to_grad_input;  // as input: what arrives for grad_input in the second derivative
    const void* to_grad_grid;   // as grid: likewise
    const struct GridSampleRest* rest;  // where `needs_rest`
    int64_t to_grad_input_stride[5], to_grad_grid_stride[2];
    PointsView to_grad_grid_points, grid_points;
    int32_t threads;     // of the CPU's pool
    int32_t phase;       // of the CPU's work, from 0 on
    bool scattered;      // neighbouring points lie far apart; grid_sample_scratch_cpu looks
    bool deterministic;  // the same bits in every run

    PointsView grad_out_points;
    int64_t grad_out_stride[2];  // b and c
    int64_t grad_input_stride[5];
    const void* grad_out;  // (B, C, P)
    void* grad_input;      // as input
    void* grad_grid;       // (B, P, D), contiguous

    void* out;          // (B, C, P), contiguous
    const void* input;  // (B, C, size...)
    const void* grid;   // (B, P, D): x, y, z in [-1, 1]
    int64_t B, C, P;
    int64_t input_stride[5];              // b, c, z, y, x, in elements; z's is 0 in two dimensions
    int64_t grid_stride[2];               // b and coordinate
    int32_t D;                            // 2 or 3
    int32_t size[3], first[3], whole[3];  // of the window that the input is; see Window
    Interpolation interpolation;
    Padding padding;
    DType dtype;       // of input, grad_input and, but on the CPU, out and grad_out
    DType grid_dtype;  // of grid and grad_grid
    bool align_corners;
    DType out_dtype;  // of the CPU's out and grad_out: dtype, or 16 bits where that is float32

    HD Window window(int axis) const { return {first[axis], size[axis], whole[axis]}; }
};

struct PixelRuns;
struct GridSampleJob;
struct GridSampleRows;
struct Fields;
struct Part;
struct CUstream_st;

/// Bicubic interpolation of volumes, and second derivatives of all that is bicubic.
OCTET_KERNEL void grid_sample_cubic_cpu(const GridSampleParams* p, const Fields* fields,
                                        const Part* part);
OCTET_KERNEL const char* grid_sample_cubic(GridSampleJob& job, int V, CUstream_st* stream);
/// All that is float64, items [begin, end) of the phase.
OCTET_KERNEL void grid_sample_double_cpu(const GridSampleParams* p, int64_t begin, int64_t end);
/// On the GPU all other second derivatives, and all else in 16 and 64 bits.
OCTET_KERNEL const char* grid_sample_second(GridSampleJob& job, int V, CUstream_st* stream);
OCTET_KERNEL const char* grid_sample_forward_16bit(GridSampleJob& job, int V, CUstream_st* stream);
OCTET_KERNEL const char* grid_sample_backward_16bit(GridSampleJob& job, int V, CUstream_st* stream);
OCTET_KERNEL const char* grid_sample_forward_double(GridSampleJob& job, int V, CUstream_st* stream);
OCTET_KERNEL const char* grid_sample_backward_double(GridSampleJob& job, int V,
                                                     CUstream_st* stream);
/// The gradient to an input of 16 bits, by runs of pixels.
OCTET_KERNEL const char* grid_sample_pixel_runs(const GridSampleJob& job, const PixelRuns& runs,
                                                CUstream_st* stream);
/// Null, or the error's text.
OCTET_KERNEL const char* grid_sample_rows_cuda(const GridSampleRows* p, void* stream);
/// Points [begin, end) of all images.
OCTET_KERNEL void grid_sample_rows_cpu(const GridSampleRows* p, int64_t begin, int64_t end);

/// What few calls need and compilers take more than half of their time for: functions in a library
/// of their own, which is loaded when one is needed.
struct GridSampleRest {
    decltype(&grid_sample_cubic_cpu) cubic_cpu;
    decltype(&grid_sample_double_cpu) double_cpu;
    decltype(&grid_sample_cubic) cubic;
    decltype(&grid_sample_second) second;
    decltype(&grid_sample_forward_16bit) forward_16bit;
    decltype(&grid_sample_backward_16bit) backward_16bit;
    decltype(&grid_sample_forward_double) forward_double;
    decltype(&grid_sample_backward_double) backward_double;
    decltype(&grid_sample_pixel_runs) pixel_runs;
    decltype(&grid_sample_rows_cpu) rows_cpu;
    decltype(&grid_sample_rows_cuda) rows_cuda;
};

inline bool needs_rest(const GridSampleParams& p, bool on_gpu) {
    const bool second = p.to_grad_input || p.to_grad_grid;
    if (p.interpolation == Interpolation::kCubic && (p.D == 3 || second)) return true;
    return p.dtype == DType::kDouble || (on_gpu && (second || p.dtype != DType::kFloat));
}

/// Whether a backward reads the input.
inline bool reads_input(const GridSampleParams& p) {
    return p.grad_grid && p.interpolation != Interpolation::kNearest;
}

/// Bytes of scratch memory that the job is to be given.
OCTET_KERNEL int64_t grid_sample_scratch_cuda(const GridSampleParams* p);
OCTET_KERNEL int64_t grid_sample_scratch_cpu(GridSampleParams* p);

/// Null, or the error's text.
OCTET_KERNEL const char* grid_sample_cuda(const GridSampleParams* p, void* stream);
/// How many items a phase of the work has, 0 where there is no such phase.
OCTET_KERNEL int64_t grid_sample_items_cpu(const GridSampleParams* p);
/// Items [begin, end) of a phase.
OCTET_KERNEL void grid_sample_cpu(const GridSampleParams* p, int64_t begin, int64_t end);

/// Where along one axis the points of a grid sample: the first pixel that each has a tap on.
struct GridSampleRows {
    const void* grid;  // (B, P, D)
    int32_t* out;      // (B, P), contiguous; -1 for points without any
    int64_t B, P;
    PointsView points;
    int64_t stride[2];  // of the grid's images and coordinates
    int64_t coordinate;
    int32_t whole;  // pixels along the axis
    Interpolation interpolation;
    Padding padding;
    bool align_corners;
    bool exact;  // positions are computed in float64, as of an image of that type
    DType grid_dtype;

    HD Window window() const { return {0, whole, whole}; }
};

/// Position in pixels of a coordinate, and by how much it moves with it.
template <typename A>
HD inline A unnormalized(A x, A size, bool align_corners) {
    return align_corners ? (x + 1) / 2 * (size - 1) : ((x + 1) * size - 1) / 2;
}
template <typename A>
HD inline A pixels_per_unit(A size, bool align_corners) {
    return (align_corners ? size - 1 : size) / 2;
}

/// Whether a position this many lengths out is mirrored an odd number of times. Beyond the range
/// of int each processor converts in its own way, as torch's kernels on it do.
template <typename A>
HD inline bool is_odd(A lengths) {
#ifdef __CUDA_ARCH__
    return int(floor(lengths)) & 1;
#else
    return lengths < A(2147483648.0) && (int(lengths) & 1);
#endif
}

/// A position, and the sign of its movement with the one that it was made of.
template <typename A>
struct Moved {
    A at, slope;
};

/// Mirrored at the borders (with corners aligned at the outermost pixels' centres, else at their
/// edges) until it lies between.
template <typename A>
HD inline Moved<A> reflected(A x, A size, bool align_corners) {
    const A low = align_corners ? A(0) : A(-0.5), span = align_corners ? size - 1 : size;
    if (span == 0) return {0, 0};
    x -= low;
    const A slope = x < 0 ? A(-1) : A(1);
    x = fabs(x);
    const A rest = fmod(x, span);
    return is_odd(x / span) ? Moved<A>{span - rest + low, -slope} : Moved<A>{rest + low, slope};
}

/// A position moved into the image as `padding` says. Zeros leave it where it is.
/// NaN goes to the first pixel; where `slope` is wanted it stays, so that it has no gradient.
template <typename A>
HD inline A padded(A x, A size, Padding padding, bool align_corners, A* slope) {
    A sign = 1;
    if (padding == Padding::kReflection) {
        const Moved<A> mirrored = reflected(x, size, align_corners);
        x = mirrored.at, sign = mirrored.slope;
    }
    if (padding != Padding::kZeros) {
        const A last = size - 1;
        if (x <= 0 || (x != x && !slope)) {
            x = 0, sign = 0;
        } else if (x >= last) {
            x = last, sign = 0;
        }
    }
    if (slope) *slope *= sign;
    return x;
}

/// A whole position as an index, -1 where there is no pixel.
template <typename A>
HD inline int index_of(A x, const Window& in) {
    if (!(x >= 0 && x < A(in.whole))) return -1;
    const int i = int(x) - in.first;
    return unsigned(i) < unsigned(in.size) ? i : -1;
}

/// The pixels along one axis that a coordinate samples, -1 for those outside, and their weights.
template <typename A, int kTaps>
struct Taps {
    int index[kTaps];
    A weight[kTaps];
    A slope[kTaps];  // derivative of the weight by the coordinate; where wanted

    /// `kSlope`: for a gradient.
    template <bool kSlope>
    HD static Taps of(A coordinate, const Window& in, Padding padding, bool align_corners) {
        const A size = A(in.whole);
        Taps t;
        A x = unnormalized(coordinate, size, align_corners);
        A slope = pixels_per_unit(size, align_corners);
        if constexpr (kTaps == 4) {
            const A first = floor(x), u = x - first;
            cubic(t.weight, u);
            if (kSlope) cubic_slope(t.slope, u, slope);
            for (int k = 0; k < 4; ++k)
                t.index[k] = index_of(
                    padded(first + (k - 1), size, padding, align_corners, (A*)nullptr), in);
        } else {
            x = padded(x, size, padding, align_corners, kSlope ? &slope : nullptr);
            if constexpr (kTaps == 1) {
                t.index[0] = index_of(rint(x), in);
                t.weight[0] = 1, t.slope[0] = 0;
            } else {
                const A first = floor(x);
                t.weight[0] = (first + 1) - x, t.weight[1] = x - first;
                t.slope[0] = -slope, t.slope[1] = slope;
                // Whole numbers of this size are neither NaN nor beyond an int.
                const bool near = first >= -1 && first < size;
                const int i = near ? int(first) - in.first : -2;
                t.index[0] = unsigned(i) < unsigned(in.size) ? i : -1;
                t.index[1] = unsigned(i + 1) < unsigned(in.size) ? i + 1 : -1;
            }
        }
        return t;
    }

    /// Keys (1981), with a = -0.75.
    HD static void cubic(A (&w)[kTaps], A t) {
        constexpr A a = -0.75;
        const auto outer = [](A x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
        const auto inner = [](A x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
        w[0] = outer(t + 1), w[1] = inner(t), w[2] = inner(1 - t), w[3] = outer(2 - t);
    }
    HD static void cubic_slope(A (&w)[kTaps], A t, A scale) {
        constexpr A a = -0.75;
        const auto outer = [](A x) { return (3 * a * x - 10 * a) * x + 8 * a; };
        const auto inner = [](A x) { return (3 * (a + 2) * x - 2 * (a + 3)) * x; };
        w[0] = scale * outer(t + 1), w[1] = scale * inner(t);
        w[2] = -scale * inner(1 - t), w[3] = -scale * outer(2 - t);
    }
    /// Second derivatives; `scale` is the square of that of the slopes.
    HD static void cubic_curve(A (&w)[kTaps], A t, A scale) {
        constexpr A a = -0.75;
        const auto outer = [](A x) { return 6 * a * x - 10 * a; };
        const auto inner = [](A x) { return 6 * (a + 2) * x - 2 * (a + 3); };
        w[0] = scale * outer(t + 1), w[1] = scale * inner(t);
        w[2] = scale * inner(1 - t), w[3] = scale * outer(2 - t);
    }
};
