// The CPU loops of trilinear_interpolation and bilinear_interpolation; formula in multilinear.h.
// One point after the other; the innermost loops run along the features, so that the compiler turns
// them into vector instructions.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "multilinear.h"

/// Below so many features all corners are read side by side, with sums in registers.
constexpr int64_t kWide = 32;
/// So many features of a cell are gathered at a time where they have to be converted or collected.
constexpr int64_t kStaged = 64;

/// out[f] = sum_k weight_k feats[k * step + f]. `kF`: F, or 0 where it is known at run time only;
/// the short loops of small F gain twofold from knowing it.
template <int kF, typename Cell, typename A>
inline void forward_cell(const Position<Cell, A>& at, int64_t F, const A* feats, int64_t step,
                         A* __restrict out) {
    constexpr int K = 1 << Cell::D;
    A weight[K];
    for (int k = 0; k < K; ++k) weight[k] = at.weight(k);
    for (int64_t f = 0; f < (kF ? kF : F); ++f) {
        A sum = 0;
        for (int k = 0; k < K; ++k) sum += weight[k] * feats[k * step + f];
        out[f] = sum;
    }
}

/// Writes `grad_feats` (2^D, F) and adds to `grad_points`; either may be null.
template <int kF, typename Cell, typename A>
inline void backward_cell(const Position<Cell, A>& at, int64_t F, const A* feats, int64_t step,
                          const A* grad_out, A* __restrict grad_feats, A* __restrict grad_points) {
    constexpr int D = Cell::D, K = 1 << D;
    F = kF ? kF : F;
    if (grad_feats) {
        for (int k = 0; k < K; ++k) {
            const A weight = at.weight(k);
            for (int64_t f = 0; f < (kF ? kF : F); ++f)
                grad_feats[k * F + f] = weight * grad_out[f];
        }
    }
    if (!grad_points) return;
    A slope[3][K];
#pragma GCC unroll 3
    for (int axis = 0; axis < D; ++axis)
#pragma GCC unroll 8
        for (int k = 0; k < K; ++k) slope[axis][k] = at.slope(k, axis);
    A x = 0, y = 0, z = 0;
#pragma omp simd reduction(+ : x, y, z)
    for (int64_t f = 0; f < (kF ? kF : F); ++f) {
        A by[3] = {};
        for (int k = 0; k < K; ++k)
            for (int axis = 0; axis < D; ++axis) by[axis] += slope[axis][k] * feats[k * step + f];
        x += grad_out[f] * by[0];
        y += grad_out[f] * by[1];
        z += grad_out[f] * by[2];
    }
    grad_points[0] += x, grad_points[1] += y;
    if (D == 3) grad_points[2] += z;
}

/// float and double with neighbouring features, F below kWide: straight from memory to memory.
template <typename Cell, typename A, int kF>
void narrow_points(const MultilinearParams& p, int64_t begin, int64_t end) {
    constexpr int K = 1 << Cell::D;
    for (int64_t n = begin; n < end; ++n) {
        const Position<Cell, A> at(p, n);
        const A* feats = static_cast<const A*>(p.feats) + n * p.feats_stride[0];
        if (p.out) {
            forward_cell<kF>(at, p.F, feats, p.feats_stride[1], static_cast<A*>(p.out) + n * p.F);
            continue;
        }
        A grad_points[Cell::D] = {};
        backward_cell<kF>(at, p.F, feats, p.feats_stride[1],
                          static_cast<const A*>(p.grad_out) + n * p.grad_out_stride[0],
                          p.grad_feats ? static_cast<A*>(p.grad_feats) + n * K * p.F : nullptr,
                          p.grad_points ? grad_points : nullptr);
        for (int axis = 0; p.grad_points && axis < Cell::D; ++axis)
            store_as<A>(p.points_dtype, p.grad_points, n * Cell::D + axis, grad_points[axis]);
    }
}

/// The same for larger F, corner after corner with sums in the first-level cache: a hardware
/// prefetcher follows few runs in one page, and eight at once took twice as long (F = 256).
template <typename Cell, typename A>
void wide_points(const MultilinearParams& p, int64_t begin, int64_t end) {
    constexpr int K = 1 << Cell::D;
    constexpr int64_t kBlock = 512;
    A sum[kBlock];
    for (int64_t n = begin; n < end; ++n) {
        const Position<Cell, A> at(p, n);
        const A* feats = static_cast<const A*>(p.feats) + n * p.feats_stride[0];
        for (int64_t first = 0; p.out && first < p.F; first += kBlock) {
            const int64_t width = std::min(p.F - first, kBlock);
            A* out = static_cast<A*>(p.out) + n * p.F + first;
            for (int k = 0; k < K; ++k) {
                const A weight = at.weight(k);
                const A* corner = feats + k * p.feats_stride[1] + first;
                if (k == 0)
                    for (int64_t f = 0; f < width; ++f) sum[f] = weight * corner[f];
                else if (k < K - 1)
                    for (int64_t f = 0; f < width; ++f) sum[f] += weight * corner[f];
                else
                    for (int64_t f = 0; f < width; ++f) out[f] = sum[f] + weight * corner[f];
            }
        }
        const A* grad_out = static_cast<const A*>(p.grad_out) + n * p.grad_out_stride[0];
        A grad_points[Cell::D] = {};
        for (int k = 0; !p.out && k < K; ++k) {
            if (p.grad_feats) {
                const A weight = at.weight(k);
                A* __restrict grad = static_cast<A*>(p.grad_feats) + (n * K + k) * p.F;
                for (int64_t f = 0; f < p.F; ++f) grad[f] = weight * grad_out[f];
            }
            if (p.grad_points) {
                const A* corner = feats + k * p.feats_stride[1];
                A dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t f = 0; f < p.F; ++f) dot += grad_out[f] * corner[f];
                for (int axis = 0; axis < Cell::D; ++axis)
                    grad_points[axis] += at.slope(k, axis) * dot;
            }
        }
        for (int axis = 0; p.grad_points && axis < Cell::D; ++axis)
            store_as<A>(p.points_dtype, p.grad_points, n * Cell::D + axis, grad_points[axis]);
    }
}

/// Any element type, any strides: kStaged features of a cell at a time are gathered into buffers of
/// the accumulating type and computed there.
template <typename Cell, typename T>
void staged_points(const MultilinearParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    constexpr int D = Cell::D, K = 1 << D;
    A cell[K * kStaged], grad_cell[K * kStaged], row[kStaged];
    // A whole narrow cell that lies in one run is one loop of K * F and not K short ones.
    const bool whole = p.F <= kStaged && p.feats_stride[2] == 1 && p.feats_stride[1] == p.F;
    for (int64_t n = begin; n < end; ++n) {
        const Position<Cell, A> at(p, n);
        A grad_points[D] = {};
        for (int64_t first = 0; first < p.F; first += kStaged) {
            const int64_t width = std::min(p.F - first, kStaged);
            const T* feats =
                static_cast<const T*>(p.feats) + n * p.feats_stride[0] + first * p.feats_stride[2];
            if (p.feats && whole)
                gather(feats, 1, K * width, cell);
            else if (p.feats)
                for (int k = 0; k < K; ++k)
                    gather(feats + k * p.feats_stride[1], p.feats_stride[2], width,
                           cell + k * width);
            if (p.out) {
                forward_cell<0>(at, width, cell, width, row);
                T* out = static_cast<T*>(p.out) + n * p.F + first;
                for (int64_t f = 0; f < width; ++f) out[f] = store<T>(row[f]);
                continue;
            }
            gather(static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0] +
                       first * p.grad_out_stride[1],
                   p.grad_out_stride[1], width, row);
            backward_cell<0>(at, width, cell, width, row, p.grad_feats ? grad_cell : nullptr,
                             p.grad_points ? grad_points : nullptr);
            if (!p.grad_feats) continue;
            T* grad_feats = static_cast<T*>(p.grad_feats) + n * K * p.F + first;
            const int runs = width == p.F ? 1 : K;
            for (int k = 0; k < runs; ++k)
                for (int64_t i = 0; i < K / runs * width; ++i)
                    grad_feats[k * p.F + i] = store<T>(grad_cell[k * width + i]);
        }
        for (int axis = 0; p.grad_points && axis < D; ++axis)
            store_as<A>(p.points_dtype, p.grad_points, n * D + axis, grad_points[axis]);
    }
}

/// Points [begin, end); forward where `out` is set, else backward.
template <typename Cell>
void multilinear_cpu(const MultilinearParams& p, int64_t begin, int64_t end) {
    const bool dense = (!p.feats || p.feats_stride[2] == 1) && (p.out || p.grad_out_stride[1] == 1);
    const auto direct = [&](auto element) {
        using A = decltype(element);
        const auto run = p.F == 4      ? narrow_points<Cell, A, 4>
                         : p.F < kWide ? narrow_points<Cell, A, 0>
                                       : wide_points<Cell, A>;
        run(p, begin, end);
    };
    if (dense && p.dtype == DType::kFloat) return direct(float{});
    if (dense && p.dtype == DType::kDouble) return direct(double{});
    dispatch(p.dtype, [&](auto element) { staged_points<Cell, decltype(element)>(p, begin, end); });
}
