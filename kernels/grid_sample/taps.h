// What grid_sample's kernels for the CPU share: reading points, their taps along an axis, vectors.
#pragma once
#pragma GCC optimize("no-trapping-math")  // comparisons may be vectorised
// What is cleared is added to: memset takes large pieces past the cache.
#pragma GCC optimize("no-tree-loop-distribute-patterns")
#ifdef __AVX512F__  // gathers of 16 are slower than two of 8
#pragma GCC target("prefer-vector-width=256")
#endif
#include <algorithm>
#include <type_traits>

#include "grid_sample.h"
#include "lanes.h"

// Once compiled for all callers: a kernel file should take seconds.
#define NOINLINE __attribute__((noinline))

constexpr int kBlock = 128;  // points

/// The taps of a block of points along one axis.
template <typename A>
struct Axis {
    int32_t index[4][kBlock];  // -1 outside
    A weight[4][kBlock], slope[4][kBlock];
    bool inside;  // all of them
};

/// Where positions lie after padding, as `padded` says, for finite ones of moderate size.
template <typename A>
NOINLINE void pad(const A* from, A* to, A* sign, int n, A size, Padding padding,
                  bool align_corners) {
    const A low = align_corners ? A(0) : A(-0.5), span = align_corners ? size - 1 : size;
    const A last = size - 1;
    if (padding == Padding::kReflection && span > 0) {
        for (int i = 0; i < n; ++i) {
            const A x = fabs(from[i] - low), lengths = floor(x / span);
            A rest = x - lengths * span;
            rest = rest < 0 ? rest + span : rest;
            const bool odd = lengths != 2 * floor(lengths / 2);
            const A at = (odd ? span - rest : rest) + low;
            const A way = (from[i] - low < 0) != odd ? A(-1) : A(1);
            sign[i] = (at > 0) & (at < last) ? way : A(0);
            to[i] = at > 0 ? (at < last ? at : last) : A(0);
        }
    } else if (padding != Padding::kZeros) {
        for (int i = 0; i < n; ++i) {
            const A x = from[i];
            sign[i] = (x > 0) & (x < last) ? A(1) : A(0);
            to[i] = x > 0 ? (x < last ? x : last) : A(0);
        }
    } else {
        for (int i = 0; i < n; ++i) to[i] = from[i], sign[i] = 1;
    }
}

/// `Taps::of` for n coordinates, in vectors where all are of moderate size.
template <int kTaps, typename A>
void find_taps(const A* x, int n, const Window& in, Padding padding, bool align_corners,
               bool slopes, Axis<A>& axis) {
    const A size = A(in.whole), most = std::min(A(1 << 30) / size, A(1 << 20));
    int strange = 0, outside = 0;
    for (int i = 0; i < n; ++i) strange |= !(fabs(x[i]) < most);
    if (strange) {
        for (int i = 0; i < n; ++i) {
            using T = Taps<A, kTaps>;
            const T taps = slopes ? T::template of<true>(x[i], in, padding, align_corners)
                                  : T::template of<false>(x[i], in, padding, align_corners);
            for (int k = 0; k < kTaps; ++k) {
                // Outside a weight may be NaN, which counts only for a cubic's, as torch has it.
                const bool counts =
                    taps.index[k] >= 0 || (kTaps == 4 && taps.weight[k] != taps.weight[k]);
                axis.index[k][i] = taps.index[k], axis.weight[k][i] = counts ? taps.weight[k] : 0;
                if (slopes) axis.slope[k][i] = counts ? taps.slope[k] : 0;
                outside |= taps.index[k] < 0;
            }
        }
        axis.inside = !outside;
        return;
    }
    A at[kBlock] = {}, sign[kBlock], moved[kBlock];
    const A per_unit = pixels_per_unit(size, align_corners);
    for (int i = 0; i < n; ++i) at[i] = unnormalized(x[i], size, align_corners);
    const auto set_index = [&](int k, int i, int to) {
        to -= in.first;
        const bool out = (to < 0) | (to >= in.size);
        axis.index[k][i] = out ? -1 : to;
        outside |= out;
    };
    if constexpr (kTaps == 4) {
        for (int i = 0; i < n; ++i) {
            A weight[4], slope[4];
            const A u = at[i] - floor(at[i]);
            Taps<A, 4>::cubic(weight, u), Taps<A, 4>::cubic_slope(slope, u, per_unit);
            for (int k = 0; k < 4; ++k) axis.weight[k][i] = weight[k], axis.slope[k][i] = slope[k];
        }
        for (int k = 0; k < 4; ++k) {
            A whole[kBlock];
            for (int i = 0; i < n; ++i) whole[i] = floor(at[i]) + (k - 1);
            pad(whole, moved, sign, n, size, padding, align_corners);
            for (int i = 0; i < n; ++i) set_index(k, i, int(moved[i]));
        }
    } else {
        pad(at, moved, sign, n, size, padding, align_corners);
        if constexpr (kTaps == 1) {
            for (int i = 0; i < n; ++i) {
                set_index(0, i, int(rint(moved[i])));
                axis.weight[0][i] = 1, axis.slope[0][i] = 0;
            }
        } else {
            for (int i = 0; i < n; ++i) {
                const A first = floor(moved[i]);
                axis.weight[0][i] = (first + 1) - moved[i], axis.weight[1][i] = moved[i] - first;
                set_index(0, i, int(first)), set_index(1, i, int(first) + 1);
            }
            if (slopes)
                for (int i = 0; i < n; ++i)
                    axis.slope[0][i] = -per_unit * sign[i], axis.slope[1][i] = per_unit * sign[i];
        }
    }
    axis.inside = !outside;
}

/// `dispatch` among the types that are accumulated in A.
template <typename A, typename Body>
void dispatch_to(DType dtype, const Body& body) {
    if constexpr (std::is_same_v<A, double>)
        body(double());
    else if (dtype == DType::kFloat)
        body(float());
    else
        dtype == DType::kHalf ? body(Half()) : body(BFloat16());
}

/// Values of `count` points from point `first` on.
template <typename T, typename A>
NOINLINE void read_points(const T* __restrict from, const PointsView& view, int64_t first,
                          int count, A* __restrict to) {
    for (int i = 0; i < count;) {
        const int64_t p = first + i;
        const int run = int(std::min<int64_t>(count - i, view.count[1] - p % view.count[1]));
        const T* row = from + view.at(p);
        const int64_t stride = view.stride[2];
        const auto copy = [&](auto step) {
            for (int j = 0; j < run; ++j) to[i + j] = A(load(row[j * step]));
        };
        if (stride == 1) {
            if constexpr (std::is_same_v<A, Acc<T>>)
                load_run(row, run, to + i);
            else
                copy(std::integral_constant<int, 1>());
        } else if (stride == 2)
            copy(std::integral_constant<int, 2>());
        else if (stride == 3)
            copy(std::integral_constant<int, 3>());
        else
            copy(stride);
        i += run;
    }
}

/// An image that is sampled, or to which is added.
struct Field {
    void* data;  // null: none
    int64_t stride[5];
    bool rows;  // channels are neighbours, and taken as vectors
};

/// The fields of a job; `copy`: those that are read are copies, in the type that is computed in.
struct Fields {
    bool copy;
    Field input, upstream, target;
};

/// What of one image is to be done by planes_cpu.cpp or cubic_cpu.rest.cpp.
struct Part {
    int64_t image;
    int64_t begin, end;    // points, from the beginning of a block on
    bool points, scatter;  // results at the points; the gradient to the input
    int64_t channels[2];   // of the latter: [begin, end), and places along the slowest axis
    int64_t rows[2];
};
/// Of float32 and of float64.
OCTET_KERNEL void grid_sample_planes_cpu(const GridSampleParams* p, const Part* part);
OCTET_KERNEL void grid_sample_planes_double_cpu(const GridSampleParams* p, const Part* part);
