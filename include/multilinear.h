// Interpolation inside a cell of 2^D corners, linear along each axis: what trilinear_interpolation
// (D = 3) and bilinear_interpolation (D = 2) share, on the CPU and in CUDA.
//   out[n, f] = sum_k weight_k(points[n]) * feats[n, k, f]
//   weight_k  = product over the axes of t or 1 - t, with t = (x + 1) / 2
#pragma once
#include "corners.h"

struct MultilinearParams {
    const void* feats;     // (N, 2^D, F); null where only grad_feats is asked for
    const void* points;    // (N, D), position in the cell, each in [-1, 1]
    const void* grad_out;  // (N, F); backward only
    void* out;             // (N, F); forward only, contiguous, every element is written
    void* grad_feats;      // (N, 2^D, F), contiguous, or null where not asked for
    void* grad_points;     // (N, D), contiguous, or null where not asked for
    int64_t N, F;
    int64_t feats_stride[3], points_stride[2], grad_out_stride[2];  // in elements
    DType dtype, points_dtype;  // of feats, grad_out and out; of points
};

/// Where a point lies along each axis of its cell: high[d] = (x_d + 1) / 2 and low[d] = 1 -
/// high[d], each from x directly, so that neither loses digits where the other is small.
template <typename Cell, typename A>
struct Position {
    A low[Cell::D], high[Cell::D];

    HD Position(const MultilinearParams& p, int64_t n) {
        for (int d = 0; d < Cell::D; ++d) {
            const int64_t i = n * p.points_stride[0] + d * p.points_stride[1];
            set(d, load_as<A>(p.points_dtype, p.points, i));
        }
    }
    /// Of the D coordinates at `x`.
    HD explicit Position(const A* x) {
        for (int d = 0; d < Cell::D; ++d) set(d, x[d]);
    }
    HD void set(int d, A x) {
        high[d] = (A(1) + x) / 2;
        low[d] = (A(1) - x) / 2;
    }
    /// The share of corner k. A product per axis: a last weight as 1 - a - b - c would cancel.
    /// Written out, as is its derivative, and not by `corner_share`: of that nvcc makes up to twice
    /// the instructions where k is known at run time only.
    HD A weight(int k) const {
        A w = 1;
        for (int d = 0; d < Cell::D; ++d) w *= k >> Cell::bit(d) & 1 ? high[d] : low[d];
        return w;
    }
    /// The derivative of corner k's share by coordinate `axis` of the point.
    HD A slope(int k, int axis) const {
        A w = k >> Cell::bit(axis) & 1 ? A(0.5) : A(-0.5);
        for (int d = 0; d < Cell::D; ++d)
            if (d != axis) w *= k >> Cell::bit(d) & 1 ? high[d] : low[d];
        return w;
    }
};

/// Declares the launchers of interpolation X, forward where p->out is set, else backward: `X_cuda`,
/// null or the error's text, for float32, its parts for float64 and for float16 and bfloat16, and
/// `X_cpu`, of points [begin, end).
#define OCTET_MULTILINEAR_LAUNCHERS(X)                                                  \
    OCTET_KERNEL const char* X##_cuda(const MultilinearParams* p, void* stream);        \
    OCTET_KERNEL const char* X##_double_cuda(const MultilinearParams* p, void* stream); \
    OCTET_KERNEL const char* X##_16bit_cuda(const MultilinearParams* p, void* stream);  \
    OCTET_KERNEL void X##_cpu(const MultilinearParams* p, int64_t begin, int64_t end);

/// What few calls need, in a library of its own: the parts for other elements on a GPU.
struct MultilinearRest {
    const char* (*of_double)(const MultilinearParams* p, void* stream);
    const char* (*of_16bit)(const MultilinearParams* p, void* stream);

    auto of(DType dtype) const { return dtype == DType::kDouble ? of_double : of_16bit; }
};
inline bool needs_rest(const MultilinearParams& p, bool on_gpu) {
    return on_gpu && p.dtype != DType::kFloat;
}
