// Blocks of points for grid_sample on the CPU: their taps, and pixels fetched for them.
#pragma once
#include "taps.h"

namespace {

constexpr int kRow = 64;  // channels of a row taken at a time

/// A block of points: their taps along each axis, what is read for them and what is written. z has
/// one tap in two dimensions.
template <typename A>
struct Points {
    const GridSampleParams& p;
    int64_t image = 0, first = 0;
    int count = 0;
    const int outermost;
    const bool slopes;
    Axis<A> axis[3];

    Points(const GridSampleParams& params, bool slopes)
        : p(params), outermost(3 - params.D), slopes(slopes) {
        if (outermost == 0) return;
        axis[0].inside = true;
        std::fill_n(axis[0].index[0], kBlock, 0);
        std::fill_n(axis[0].weight[0], kBlock, A(1));
        std::fill_n(axis[0].slope[0], kBlock, A(0));
    }
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
    template <int kTaps>
    void find(int a, const A* x) {
        find_taps<kTaps>(x, count, p.window(a), p.padding, p.align_corners, slopes, axis[a]);
    }
    /// Forgets taps outside of [begin, end) of the slowest axis; whether any are left.
    bool keep(int taps, int64_t begin, int64_t end) {
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
    /// grad_out of a channel.
    NOINLINE void read_grad(int64_t c, A* to) const {
        dispatch_to<A>(p.out_dtype, [&](auto element) {
            using T = decltype(element);
            read_points(static_cast<const T*>(p.grad_out) + image * p.grad_out_stride[0] +
                            c * p.grad_out_stride[1],
                        p.grad_out_points, first, count, to);
        });
    }
    /// A channel of the output, from neighbouring elements or a column of rows of kRow.
    NOINLINE void write_out(int64_t c, const A* from, int step) const {
        dispatch_to<A>(p.out_dtype, [&](auto element) {
            using T = decltype(element);
            T* to = static_cast<T*>(p.out) + (image * p.C + c) * p.P + first;
            if (step == 1)
                for (int i = 0; i < count; ++i) to[i] = store<T>(from[i]);
            else
                for (int i = 0; i < count; ++i) to[i] = store<T>(from[i * kRow]);
        });
    }
    /// The gradients by x, y and z.
    NOINLINE void write_grid(const A (*from)[kBlock]) const {
        dispatch(p.grid_dtype, [&](auto element) {
            using G = decltype(element);
            G* const to = static_cast<G*>(p.grad_grid) + (image * p.P + first) * p.D;
            const auto rows = [&](auto dims) {
                constexpr int D = decltype(dims)::value;
                for (int i = 0; i < count; ++i)
                    for (int d = 0; d < D; ++d) to[i * D + d] = store<G>(Acc<G>(from[d][i]));
            };
            p.D == 3 ? rows(std::integral_constant<int, 3>())
                     : rows(std::integral_constant<int, 2>());
        });
    }
};

constexpr int kMostTaps = 16;

/// A block of points, all of whose taps are at hand.
template <typename A>
struct Block : Points<A> {
    using Points<A>::p, Points<A>::count, Points<A>::axis, Points<A>::outermost;
    int taps;
    bool inside = false;

    Block(const GridSampleParams& params, bool slopes)
        : Points<A>(params, slopes),
          taps(params.interpolation == Interpolation::kLinear    ? 2
               : params.interpolation == Interpolation::kNearest ? 1
                                                                 : 4) {}
    int taps_of(int a) const { return a < outermost ? 1 : taps; }
    int all_taps() const { return taps_of(0) * taps * taps; }

    NOINLINE void find(int a) {
        A x[kBlock];
        this->coordinates(p.grid, p.grid_points, p.grid_stride, a, x);
        if (taps == 1)
            Points<A>::template find<1>(a, x);
        else if (taps == 2)
            Points<A>::template find<2>(a, x);
        else
            Points<A>::template find<4>(a, x);
    }
    void find_all() {
        for (int a = outermost; a < 3; ++a) find(a);
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

/// Calls `body` with pieces of a row: V vectors of L channels each, from channel c on, of which the
/// first `had` have been in another piece: where kReaches, the last one reaches back, so that it is
/// a vector and not several single channels.
template <bool kReaches, typename Body>
void each_piece(int64_t begin, int64_t end, const Body& body) {
    using std::integral_constant;
    constexpr integral_constant<int, 1> one;
    constexpr integral_constant<int, 4> four;
    constexpr integral_constant<int, 8> eight;
    constexpr integral_constant<int, 16> sixteen;
    int64_t c = begin;
    const auto last = [&](auto lanes) {
        const int64_t from = end - decltype(lanes)::value;
        body(lanes, one, from, int(c - from));
    };
    const auto reaches = [&](int64_t more, int64_t lanes) {
        return kReaches && end - c > more && end - begin >= lanes;
    };
    for (; c + 64 <= end; c += 64) body(sixteen, four, c, 0);
    for (; c + 16 <= end; c += 16) body(sixteen, one, c, 0);
    if (reaches(8, 16)) return last(sixteen);
    for (; c + 8 <= end; c += 8) body(eight, one, c, 0);
    if (reaches(4, 8)) return last(eight);
    for (; c + 4 <= end; c += 4) body(four, one, c, 0);
    if (reaches(0, 4)) return last(four);
    for (; c < end; ++c) body(one, one, c, 0);
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
