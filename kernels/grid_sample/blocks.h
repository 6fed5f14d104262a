// Blocks of points for grid_sample on the CPU: their taps, and pixels fetched for them.
#pragma once
#include "taps.h"

namespace {

constexpr int kMostTaps = 16;

/// A block of points: their taps along each axis. z has one tap in two dimensions.
template <typename A>
struct Block {
    const GridSampleParams& p;
    int64_t image = 0, first = 0;
    int count = 0, taps, outermost;
    bool slopes, inside = false;
    Axis<A> axis[3];

    Block(const GridSampleParams& params, bool slopes)
        : p(params), outermost(3 - params.D), slopes(slopes) {
        taps = p.interpolation == Interpolation::kLinear    ? 2
               : p.interpolation == Interpolation::kNearest ? 1
                                                            : 4;
        if (outermost == 0) return;
        axis[0].inside = true;
        std::fill_n(axis[0].index[0], kBlock, 0);
        std::fill_n(axis[0].weight[0], kBlock, A(1));
    }
    int taps_of(int a) const { return a < outermost ? 1 : taps; }
    int all_taps() const { return taps_of(0) * taps * taps; }

    void begin(int64_t b, int64_t point) {
        image = b, first = point, count = int(std::min<int64_t>(kBlock, p.P - point));
    }
    /// Coordinate `a` of the points in `grid`, or what is laid out as it: 0 for z, 1 for y, 2 for
    /// x.
    void coordinates(const void* grid, const PointsView& view, const int64_t (&stride)[2], int a,
                     A* to) const {
        dispatch(p.grid_dtype, [&](auto element) {
            using G = decltype(element);
            read_points(static_cast<const G*>(grid) + image * stride[0] + (2 - a) * stride[1], view,
                        first, count, to);
        });
    }
    NOINLINE void find(int a) {
        A x[kBlock];
        coordinates(p.grid, p.grid_points, p.grid_stride, a, x);
        const auto run = [&](auto number) {
            find_taps<decltype(number)::value>(x, count, p.size[a], p.padding, p.align_corners,
                                               slopes, axis[a]);
        };
        if (taps == 1)
            run(std::integral_constant<int, 1>());
        else if (taps == 2)
            run(std::integral_constant<int, 2>());
        else
            run(std::integral_constant<int, 4>());
    }
    void find_all() {
        for (int a = outermost; a < 3; ++a) find(a);
    }
    /// Forgets taps outside of [begin, end) of the slowest axis; whether any are left.
    bool keep(int64_t begin, int64_t end) {
        const int n = count, low = int(begin), high = int(end);
        Axis<A>& slow = axis[outermost];
        int left = 0, gone = 0;
        for (int k = 0; k < taps; ++k)
            for (int i = 0; i < n; ++i) {
                const int at = slow.index[k][i];
                const bool out = (at < low) | (at >= high);
                slow.index[k][i] = out ? -1 : at;
                gone |= out, left |= !out;
            }
        slow.inside &= !gone;
        return left;
    }
    /// Each tap's place in a tensor; -1 outside.
    template <typename I>
    NOINLINE void offsets(const int64_t (&stride)[5], I (*to)[kBlock]) {
        const int n = count;
        inside = axis[0].inside & axis[1].inside & axis[2].inside;
        const I sz = I(stride[2]), sy = I(stride[3]), sx = I(stride[4]);
        for (int z = 0; z < taps_of(0); ++z)
            for (int y = 0; y < taps; ++y)
                for (int x = 0; x < taps; ++x, ++to) {
                    const int32_t *iz = axis[0].index[z], *iy = axis[1].index[y],
                                  *ix = axis[2].index[x];
                    I* __restrict at = *to;
                    if (inside)
                        for (int i = 0; i < n; ++i) at[i] = iz[i] * sz + iy[i] * sy + ix[i] * sx;
                    else
                        for (int i = 0; i < n; ++i)
                            at[i] = (iz[i] | iy[i] | ix[i]) < 0
                                        ? I(-1)
                                        : iz[i] * sz + iy[i] * sy + ix[i] * sx;
                }
    }
    /// Adds to each tap's weight, in which the axes of `derived` (bits) are differentiated.
    NOINLINE void weights(int derived, const A* factor, bool add, A (*to)[kBlock]) const {
        const int n = count;
        const auto along = [&](int a, int k) {
            return derived >> a & 1 ? axis[a].slope[k] : axis[a].weight[k];
        };
        for (int z = 0; z < taps_of(0); ++z)
            for (int y = 0; y < taps; ++y)
                for (int x = 0; x < taps; ++x, ++to) {
                    const A *wz = along(0, z), *wy = along(1, y), *wx = along(2, x);
                    A* __restrict w = *to;
                    if (!factor)
                        for (int i = 0; i < n; ++i) w[i] = wz[i] * wy[i] * wx[i];
                    else if (!add)
                        for (int i = 0; i < n; ++i) w[i] = factor[i] * wz[i] * wy[i] * wx[i];
                    else
                        for (int i = 0; i < n; ++i) w[i] += factor[i] * wz[i] * wy[i] * wx[i];
                }
    }
};

/// Calls `body` with pieces of a row: V vectors of L channels each, from channel c on.
template <typename Body>
void each_piece(int64_t begin, int64_t end, const Body& body) {
    using std::integral_constant;
    constexpr integral_constant<int, 1> one;
    int64_t c = begin;
    for (; c + 64 <= end; c += 64)
        body(integral_constant<int, 16>(), integral_constant<int, 4>(), c);
    for (; c + 16 <= end; c += 16) body(integral_constant<int, 16>(), one, c);
    for (; c + 4 <= end; c += 4) body(integral_constant<int, 4>(), one, c);
    for (; c < end; ++c) body(one, one, c);
}

/// to[i] = in[at[i]], 0 where there is no such pixel.
template <typename E, typename I>
NOINLINE void fetch(const E* __restrict in, const I* __restrict at, int n, bool inside,
                    Acc<E>* __restrict to) {
    if (inside)
        for (int i = 0; i < n; ++i) to[i] = load(in[at[i]]);
    else
        for (int i = 0; i < n; ++i) to[i] = at[i] < 0 ? Acc<E>(0) : load(in[at[i]]);
}

/// to[0][i] and to[1][i] = the neighbours in[at[i]] and in[at[i] + 1], each pair in one load.
template <typename A, typename I>
NOINLINE void fetch_pairs(const A* __restrict in, const I* __restrict at, int n,
                          A (*__restrict to)[kBlock]) {
    struct Pair {
        A left, right;
    };
    Pair pair[kBlock];
    for (int i = 0; i < n; ++i) memcpy(&pair[i], in + at[i], sizeof(Pair));
    for (int i = 0; i < n; ++i) to[0][i] = pair[i].left, to[1][i] = pair[i].right;
}

}  // namespace
