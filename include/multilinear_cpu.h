// The CPU loops of trilinear_interpolation and bilinear_interpolation; formula in multilinear.h.
// One point after the other; the innermost loops run along the features, so that the compiler turns
// them into vector instructions.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "multilinear.h"

/// Below so many features all corners are read side by side, with sums in registers.
constexpr int64_t kWide = 32;
/// So many elements of cells are brought into a buffer where they have to be converted or
/// collected.
constexpr int64_t kStaged = 2048;

/// Lanes of the vectors in which few features are taken.
template <typename A>
constexpr int kNarrow = (kVector < 32 ? kVector : 32) / sizeof(A);

/// One point of 1, 2 or 4 features whose corners are neighbours too, as vectors of the whole cell:
/// a lane has a corner's share, as a product of 1 + x or 1 - x along each axis.
template <typename Cell, int F, typename A>
struct Few {
    static constexpr int D = Cell::D, K = 1 << D, L = std::min(kNarrow<A>, K* F);
    using V = typename Lanes<A, L>::type;

    /// 1 or -1 by the side of `axis` on which the corner of each lane of vector v lies.
    static V side(int v, int axis) {
        V sign;
#pragma GCC unroll 8
        for (int i = 0; i < L; ++i) sign[i] = (v * L + i) / F >> Cell::bit(axis) & 1 ? 1 : -1;
        return sign;
    }
    /// Shares, or their derivatives by an axis.
    static V shares(int v, const A* x, int derived = -1) {
        V share = V{} + A(1) / K;
#pragma GCC unroll 3
        for (int d = 0; d < D; ++d) share *= d == derived ? side(v, d) : 1 + x[d] * side(v, d);
        return share;
    }
    static void take(const A* x, const A* feats, const A* grad_out, A* out, A* grad_feats,
                     A* grad_points) {
        V sum = {}, slope[D] = {}, grad = {};
#pragma GCC unroll 8
        for (int i = 0; grad_out && i < L; ++i) grad[i] = grad_out[i % F];
#pragma GCC unroll 8
        for (int v = 0; v < K * F / L; ++v) {
            if (out) sum += shares(v, x) * load_lanes<V>(feats + v * L);
            if (grad_feats) {
                const V part = shares(v, x) * grad;
                memcpy(grad_feats + v * L, &part, sizeof(part));
            }
#pragma GCC unroll 3
            for (int d = 0; grad_points && d < D; ++d)
                slope[d] += shares(v, x, d) * grad * load_lanes<V>(feats + v * L);
        }
        if (out) sum_lanes<A, L, F>(sum, out);
        for (int d = 0; grad_points && d < D; ++d) sum_lanes<A, L, 1>(slope[d], grad_points + d);
    }
};

template <typename Cell, typename A>
inline void load_point(const MultilinearParams& p, int64_t n, A* x) {
    for (int d = 0; d < Cell::D; ++d)
        x[d] =
            load_as<A>(p.points_dtype, p.points, n * p.points_stride[0] + d * p.points_stride[1]);
}

template <typename Cell, int F, typename A>
void few_points(const MultilinearParams& p, int64_t begin, int64_t end) {
    constexpr int D = Cell::D, K = 1 << D;
    for (int64_t n = begin; n < end; ++n) {
        A x[D], grad_points[D];
        load_point<Cell>(p, n, x);
        const A* feats = static_cast<const A*>(p.feats) + n * p.feats_stride[0];
        const A* grad_out = static_cast<const A*>(p.grad_out) + n * p.grad_out_stride[0];
        A* grad_feats = static_cast<A*>(p.grad_feats) + n * K * F;
        if (p.out)
            Few<Cell, F, A>::take(x, feats, nullptr, static_cast<A*>(p.out) + n * F, nullptr,
                                  nullptr);
        else
            Few<Cell, F, A>::take(x, feats, grad_out, nullptr, p.grad_feats ? grad_feats : nullptr,
                                  p.grad_points ? grad_points : nullptr);
        for (int axis = 0; p.grad_points && axis < D; ++axis)
            store_as<A>(p.points_dtype, p.grad_points, n * D + axis, grad_points[axis]);
    }
}

/// What corners have along each axis, of `corner`, which is overwritten: differences along one,
/// interpolated along the others. A slope is half of it, a cell being 2 wide.
template <typename Cell, typename A, typename X>
inline void differences(const A* x, X* corner, X (&along)[Cell::D][1 << Cell::D]) {
    constexpr int D = Cell::D;
#pragma GCC unroll 3
    for (int bit = D - 1; bit >= 0; --bit) {
        const int axis = Cell::bit(bit);  // which is its own inverse
        const A low = (1 - x[axis]) / 2, high = (1 + x[axis]) / 2;
#pragma GCC unroll 4
        for (int i = 0; i < 1 << bit; ++i) {
            const int upper = i + (1 << bit);
#pragma GCC unroll 2
            for (int above = D - 1; above > bit; --above) {
                X* const done = along[Cell::bit(above)];
                done[i] = low * done[i] + high * done[upper];
            }
            along[axis][i] = corner[upper] - corner[i];
            corner[i] = low * corner[i] + high * corner[upper];
        }
    }
}

/// One point: writes `out` (F), or `grad_feats` (2^D, F) and `grad_points`, each if not null.
/// Vectors read and write up to kNarrow - 1 elements past the end of each row, which the next one
/// overwrites.
template <typename Cell, typename A>
inline void narrow_point(const A* x, const A* share, int64_t F, const A* feats, int64_t step,
                         const A* grad_out, A* out, A* grad_feats, A* grad_points) {
    constexpr int D = Cell::D, K = 1 << D, L = kNarrow<A>;
    using V = typename Lanes<A, L>::type;
    for (int64_t f = 0; out && f < F; f += L) {
        V sum = share[0] * load_lanes<V>(feats + f);
#pragma GCC unroll 8
        for (int k = 1; k < K; ++k) sum += share[k] * load_lanes<V>(feats + k * step + f);
        memcpy(out + f, &sum, sizeof(sum));
    }
    for (int k = 0; grad_feats && k < K; ++k)
        for (int64_t f = 0; f < F; f += L) {
            const V grad = share[k] * load_lanes<V>(grad_out + f);
            memcpy(grad_feats + k * F + f, &grad, sizeof(grad));
        }
    if (!grad_points) return;
    V product[K] = {}, along[D][K];
    for (int64_t f = 0; f < F; f += L) {
        const auto last = keep_lanes<A, L>(F - f);
        const V grad = load_lanes<V>(grad_out + f);
#pragma GCC unroll 8
        for (int k = 0; k < K; ++k)
            product[k] += only(last, grad * load_lanes<V>(feats + k * step + f));
    }
    if (F <= L) {  // fewer sums over lanes
        differences<Cell>(x, product, along);
        for (int axis = 0; axis < D; ++axis)
            grad_points[axis] = sum_lanes<A, L>(along[axis][0]) / 2;
    } else {
        A dot[K], by[D][K];
#pragma GCC unroll 8
        for (int k = 0; k < K; ++k) dot[k] = sum_lanes<A, L>(product[k]);
        differences<Cell>(x, dot, by);
        for (int axis = 0; axis < D; ++axis) grad_points[axis] = by[axis][0] / 2;
    }
}

/// The same element by element, and nothing past a row's end.
template <typename Cell, typename A>
inline void single_point(const A* x, const A* share, int64_t F, const A* feats, int64_t step,
                         const A* grad_out, A* out, A* grad_feats, A* grad_points) {
    constexpr int D = Cell::D, K = 1 << D;
    A dot[K] = {}, along[D][K];
    for (int64_t f = 0; f < F; ++f) {
        A sum = 0;
        for (int k = 0; k < K; ++k) {
            if (out) sum += share[k] * feats[k * step + f];
            if (grad_feats) grad_feats[k * F + f] = share[k] * grad_out[f];
            if (grad_points) dot[k] += grad_out[f] * feats[k * step + f];
        }
        if (out) out[f] = sum;
    }
    if (!grad_points) return;
    differences<Cell>(x, dot, along);
    for (int axis = 0; axis < D; ++axis) grad_points[axis] = along[axis][0] / 2;
}

/// float and double with neighbouring features, few of them: straight from memory to memory. With
/// `room` there is memory to read and write past the last row.
template <typename Cell, typename A>
void narrow_points(const MultilinearParams& p, int64_t begin, int64_t end, bool room) {
    constexpr int D = Cell::D, K = 1 << D, L = kNarrow<A>;
    if (!p.feats || p.feats_stride[1] == p.F) {
        if (p.F == 1) return few_points<Cell, 1, A>(p, begin, end);
        if (p.F == 2) return few_points<Cell, 2, A>(p, begin, end);
        if constexpr (kNarrow<A> >= 4)
            if (p.F == 4) return few_points<Cell, 4, A>(p, begin, end);
    }
    using Shares = Few<Cell, 1, A>;
    // Rows that are not 0 apart: of the L - 1 behind one each has an element more to read.
    const bool apart = (!p.feats || p.feats_stride[0] > 0) && (p.out || p.grad_out_stride[0] > 0);
    const int64_t inside = room ? end : apart ? end - L : begin;
    for (int64_t n = begin; n < end; ++n) {
        A x[D], share[K], grad_points[D];
        load_point<Cell>(p, n, x);
        for (int v = 0; v < K / Shares::L; ++v) {
            const auto some = Shares::shares(v, x);
            memcpy(share + v * Shares::L, &some, sizeof(some));
        }
        const auto take = [&](auto point) {
            point(x, share, p.F, static_cast<const A*>(p.feats) + n * p.feats_stride[0],
                  p.feats_stride[1], static_cast<const A*>(p.grad_out) + n * p.grad_out_stride[0],
                  p.out ? static_cast<A*>(p.out) + n * p.F : nullptr,
                  p.grad_feats ? static_cast<A*>(p.grad_feats) + n * K * p.F : nullptr,
                  p.grad_points ? grad_points : nullptr);
        };
        if (n < inside)
            take([](auto... given) { narrow_point<Cell, A>(given...); });
        else
            take([](auto... given) { single_point<Cell, A>(given...); });
        for (int axis = 0; p.grad_points && axis < D; ++axis)
            store_as<A>(p.points_dtype, p.grad_points, n * D + axis, grad_points[axis]);
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

/// F features of the K corners of cells, wherever they lie, at most kStaged in all: collected, then
/// converted. A function of its own, or g++ makes worse code of what surrounds it.
template <int K, typename T>
__attribute__((noinline)) void bring(const T* from, const int64_t* step, int64_t cells, int64_t F,
                                     Acc<T>* to) {
    T few[kStaged];
    T* __restrict next = few;
    for (int64_t i = 0; i < cells; ++i)
        for (int k = 0; k < K; ++k, next += F)
            for (int64_t f = 0; f < F; ++f) next[f] = from[i * step[0] + k * step[1] + f * step[2]];
    load_run(few, cells * K * F, to);
}

/// Any element type, any strides: as many cells as fit, or a part of one, are brought into buffers
/// of the accumulating type, computed there, and brought back.
template <typename Cell, typename T>
void staged_points(const MultilinearParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    constexpr int D = Cell::D, K = 1 << D;
    constexpr int64_t kRow = kStaged / K, kPoints = 64, kRoom = kNarrow<A>;
    A cell[kStaged + kRoom], grad_cell[kStaged + kRoom], row[kRow + kRoom];
    A points[kPoints * D], grad_points[kPoints * D], part[kPoints * D];
    const T* const feats = static_cast<const T*>(p.feats);
    const T* const grad_out = static_cast<const T*>(p.grad_out);
    MultilinearParams q = {};
    q.feats = p.feats ? cell : nullptr, q.points = points, q.grad_out = row;
    q.out = p.out ? row : nullptr, q.grad_feats = p.grad_feats ? grad_cell : nullptr;
    q.grad_points = p.grad_points ? part : nullptr;
    q.points_stride[0] = D, q.points_stride[1] = 1, q.feats_stride[2] = q.grad_out_stride[1] = 1;
    q.dtype = q.points_dtype = sizeof(A) == 8 ? DType::kDouble : DType::kFloat;
    const int64_t width = std::min(p.F, kRow),
                  most = std::min(kPoints, kRow / std::max<int64_t>(width, 1));
    const int64_t* const step = p.feats_stride;
    // The corners of one feature are a run of their own stride.
    const int64_t apart = p.F == 1 ? step[1] : step[2];
    const bool cell_is_run = p.F == 1 || (width == p.F && step[2] == 1 && step[1] == p.F);
    const bool all_are_run = cell_is_run && step[0] == K * p.F * apart;
    for (int64_t n = begin; n < end; n += q.N) {
        q.N = std::min(most, end - n);
        for (int64_t i = 0; i < q.N * D; ++i) {
            const int64_t from = (n + i / D) * p.points_stride[0] + i % D * p.points_stride[1];
            points[i] = load_as<A>(p.points_dtype, p.points, from);
            grad_points[i] = 0;
        }
        for (int64_t first = 0; first < p.F; first += width) {
            const int64_t F = q.F = std::min(width, p.F - first);
            q.feats_stride[0] = K * F, q.feats_stride[1] = q.grad_out_stride[0] = F;
            const T* const from = feats + n * step[0] + first * step[2];
            const int64_t cells = !feats ? 0 : all_are_run ? 1 : q.N;  // or runs of them
            if (cell_is_run) {
                const int64_t length = K * F * (all_are_run ? q.N : 1);
                for (int64_t i = 0; i < cells; ++i)
                    gather(from + i * step[0], apart, length, cell + i * length);
            } else {
                bring<K>(from, step, cells, F, cell);
            }
            if (grad_out && F == p.F && p.grad_out_stride[0] == F && p.grad_out_stride[1] == 1)
                load_run(grad_out + n * F, q.N * F, row);
            else
                for (int64_t i = 0; grad_out && i < q.N; ++i)
                    gather(grad_out + (n + i) * p.grad_out_stride[0] + first * p.grad_out_stride[1],
                           p.grad_out_stride[1], F, row + i * F);
            std::fill_n(cell + q.N * K * F, kRoom, A(0));  // no numbers that slow the CPU down
            std::fill_n(row + q.N * F, kRoom, A(0));
            narrow_points<Cell, A>(q, 0, q.N, true);
            // Parts are of one cell: whole rows are all neighbours.
            if (p.out) store_run(row, q.N * F, static_cast<T*>(p.out) + n * p.F + first);
            for (int64_t i = 0; p.grad_points && i < q.N * D; ++i) grad_points[i] += part[i];
            if (!p.grad_feats) continue;
            T* to = static_cast<T*>(p.grad_feats) + n * K * p.F + first;
            if (F == p.F)
                store_run(grad_cell, q.N * K * F, to);
            else
                for (int k = 0; k < K; ++k) store_run(grad_cell + k * F, F, to + k * p.F);
        }
        for (int64_t i = 0; p.grad_points && i < q.N * D; ++i)
            store_as<A>(p.points_dtype, p.grad_points, n * D + i, grad_points[i]);
    }
}

/// Points [begin, end); forward where `out` is set, else backward.
template <typename Cell>
void multilinear_cpu(const MultilinearParams& p, int64_t begin, int64_t end) {
    const bool dense = (!p.feats || p.feats_stride[2] == 1) && (p.out || p.grad_out_stride[1] == 1);
    const auto direct = [&](auto element) {
        using A = decltype(element);
        p.F < kWide ? narrow_points<Cell, A>(p, begin, end, false)
                    : wide_points<Cell, A>(p, begin, end);
    };
    if (dense && p.dtype == DType::kFloat) return direct(float{});
    if (dense && p.dtype == DType::kDouble) return direct(double{});
    dispatch(p.dtype, [&](auto element) { staged_points<Cell, decltype(element)>(p, begin, end); });
}
