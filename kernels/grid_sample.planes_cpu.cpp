// Images in two dimensions, where 4-D grid_sample spends its time: f32 and f64, without copies, one
// derivative. A channel at a time in vectors of points; or, where channels are neighbours in
// memory, a point at a time in vectors of channels.
//
// An axis' two taps are a pair of neighbouring pixels that always lies within the image: at its
// borders the pair is moved inwards and the weights change places, and what is outside gets none.
// So one offset a point serves all four taps, a pair is one load, and nothing depends on where the
// points are but a mask, which keeps infinite pixels that a point does not touch out of its sum.
#include <utility>

#include "grid_sample_cpu.h"

namespace {

template <typename A>
class Planes {
    static constexpr int L = 32 / sizeof(A);  // lanes
    using V = typename Lanes<A, L>::type;
    using Int = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
    using Mask = typename Lanes<Int, L>::type;
    using Quad = typename Lanes<A, 4>::type;

    /// The pairs along one axis: first pixel, weights, slopes; masks where not all are inside.
    struct Pairs {
        alignas(64) int32_t first[kBlock];
        alignas(64) int32_t moved[kBlock];
        alignas(64) A weight[2][kBlock];
        alignas(64) A slope[2][kBlock];
        alignas(64) Int mask[2][kBlock];
        bool inside;
    };

    const GridSampleParams& p;
    const PlanesPart& part;
    const int64_t sy, sx;
    const bool slopes, side_by_side;  // the latter: the channels of all pixels of a row
    int64_t begin = 0;                // of the block
    int n = 0;
    bool inside = false;
    Pairs y, x;
    static constexpr int kAhead = 8;
    alignas(64) int32_t offset[kBlock + kAhead] = {};
    static constexpr int kAll = 15;
    int8_t taken[kBlock], near[kBlock];  // which of a point's four pixels; the points with any
    alignas(64) A buffer[4][kBlock], along[2][kBlock];
    const A* grads[4];

    template <typename T>
    static V lanes(const T* from) {
        return load_lanes<V>(from);
    }
    void put(A* to, V value, int i) const {
        memcpy(to + i, &value, i + L <= n ? sizeof(V) : (n - i) * sizeof(A));
    }

    NOINLINE void coordinates(int axis, A* to) const {
        const A* from = static_cast<const A*>(p.grid) + part.image * p.grid_stride[0] +
                        (2 - axis) * p.grid_stride[1];
        if (n == kBlock && p.grid_points.stride[2] == 2 && p.grid_points.count[1] >= p.P) {
            for (int i = 0; i < kBlock; ++i) to[i] = from[2 * (begin + i)];
            return;
        }
        std::fill_n(to, kBlock, A(0));
        read_points(from, p.grid_points, begin, n, to);
    }
    /// Coordinates and positions along an axis; whether all are of moderate size, on an axis whose
    /// pixels A can number.
    bool find_places(int axis, A* x, A* at) const {
        coordinates(axis, x);
        const A size = A(p.size[axis]), most = std::min(A(1 << 30) / size, A(1 << 20));
        int strange = 0;
        for (int i = 0; i < kBlock; ++i) {
            strange |= !(fabs(x[i]) < most);
            at[i] = unnormalized(x[i], size, p.align_corners);
        }
        return !strange && (sizeof(A) == 8 || p.size[axis] <= 1 << 24);
    }

    /// The pairs of an axis.
    NOINLINE void find_pairs(int axis, Pairs& to) {
        A x[kBlock], at[kBlock], moved[kBlock], sign[kBlock];
        const bool moderate = find_places(axis, x, at);
        const int size = p.size[axis], last = size - 2;
        int outside = 0;
        if (!moderate) {
            for (int i = 0; i < kBlock; ++i) {
                const auto t =
                    p.grad_out
                        ? Taps<A, 2>::template of<true>(x[i], size, p.padding, p.align_corners)
                        : Taps<A, 2>::template of<false>(x[i], size, p.padding, p.align_corners);
                const int left = t.index[0], right = t.index[1];
                to.first[i] = left < 0 ? 0 : std::min(left, last);
                to.moved[i] = left >= 0 ? left - to.first[i] : right >= 0 ? -1 : 2;
                const bool one[2] = {to.moved[i] == -1, to.moved[i] == 1};
                for (int k = 0; k < 2; ++k) {
                    const bool used = to.moved[i] == 0 || one[k];
                    const int from = one[k] ? 1 - k : k;
                    to.weight[k][i] = used ? t.weight[from] : 0;
                    if (slopes) to.slope[k][i] = used ? t.slope[from] : 0;
                }
                outside |= to.moved[i];
            }
        } else {
            const A unit = pixels_per_unit(A(size), p.align_corners);
            const A* place = at;
            if (p.padding != Padding::kZeros) {
                pad(at, moved, sign, kBlock, A(size), p.padding, p.align_corners);
                place = moved;
            }
            // A weight is how much less than a pixel its own is away.
            for (int i = 0; i < kBlock; ++i) {
                const A floored = floor(place[i]), low = floored > 0 ? floored : A(0);
                const A kept = low < A(last) ? low : A(last);
                const A left = 1 - fabs(place[i] - kept), right = 1 - fabs(place[i] - (kept + 1));
                const int by = int(floored - kept);
                to.first[i] = int(kept), to.moved[i] = by;
                to.weight[0][i] = left > 0 ? left : A(0);
                to.weight[1][i] = right > 0 ? right : A(0);
                outside |= by;
            }
            if (slopes)
                for (int i = 0; i < kBlock; ++i) {
                    const A slope = p.padding == Padding::kZeros ? unit : unit * sign[i];
                    const A by = A(to.moved[i]), left = by + A(0.5), right = by - A(0.5);
                    to.slope[0][i] = fabs(left) < 1 ? -2 * left * slope : A(0);
                    to.slope[1][i] = fabs(right) < 1 ? -2 * right * slope : A(0);
                }
        }
        to.inside = !outside;
    }
    void set_masks(Pairs& of) const {
        for (int i = 0; i < kBlock; ++i) {
            const int by = of.moved[i];
            of.mask[0][i] = -Int((by == 0) | (by == -1));
            of.mask[1][i] = -Int((by == 0) | (by == 1));
        }
    }
    /// The nearest pixel of an axis; the mask says whether there is one.
    NOINLINE void find_nearest(int axis, Pairs& to) {
        A x[kBlock], at[kBlock], moved[kBlock], sign[kBlock];
        const bool moderate = find_places(axis, x, at);
        const int size = p.size[axis];
        Int outside = 0;
        if (!moderate) {
            for (int i = 0; i < kBlock; ++i) {
                using T = Taps<A, 1>;
                const auto t = p.grad_out
                                   ? T::template of<true>(x[i], size, p.padding, p.align_corners)
                                   : T::template of<false>(x[i], size, p.padding, p.align_corners);
                const int index = t.index[0];
                to.first[i] = std::max(index, 0), to.mask[0][i] = -Int(index >= 0);
                outside |= index < 0;
            }
        } else {
            const A* place = at;
            if (p.padding != Padding::kZeros) {
                pad(at, moved, sign, kBlock, A(size), p.padding, p.align_corners);
                place = moved;
            }
            for (int i = 0; i < kBlock; ++i) {
                const A index = rint(place[i]), low = index > 0 ? index : A(0);
                const A kept = low < A(size - 1) ? low : A(size - 1);
                const Int in = -Int(index == kept);
                to.first[i] = int(kept), to.mask[0][i] = in, outside |= ~in;
            }
        }
        to.inside = !outside;
    }

    const A* plane(int64_t c) const {
        return static_cast<const A*>(p.input) + part.image * p.input_stride[0] +
               c * p.input_stride[1];
    }
    A* out(int64_t c) const {
        return static_cast<A*>(p.out) + (part.image * p.C + c) * p.P + begin;
    }
    /// grad_out of a channel; in the tensor itself where it lies there in one piece.
    const A* grad(int64_t c, A* to) const {
        const A* from = static_cast<const A*>(p.grad_out) + part.image * p.grad_out_stride[0] +
                        c * p.grad_out_stride[1];
        const PointsView& view = p.grad_out_points;
        if (n == kBlock && view.stride[2] == 1 && view.count[1] >= p.P) return from + begin;
        std::fill_n(to, kBlock, A(0));
        read_points(from, view, begin, n, to);
        return to;
    }

    template <int... kLane>
    static V gather(const A* in, const int32_t* at, std::integer_sequence<int, kLane...>) {
        return V{in[at[kLane]]...};
    }
    /// Pixels at[i] and their right neighbours.
    template <bool kNeighbours>
    static void fetch(const A* in, const int32_t* at, int64_t step, V& left, V& right) {
        if constexpr (!kNeighbours) {
            left = gather(in, at, std::make_integer_sequence<int, L>());
            right = gather(in + step, at, std::make_integer_sequence<int, L>());
        } else if constexpr (sizeof(A) == 4) {
            typedef double Four __attribute__((vector_size(32)));
            const auto pair = [&](int l) { return load_lanes<double>(in + at[l]); };
            const V a = V(Four{pair(0), pair(1), pair(2), pair(3)});
            const V b = V(Four{pair(4), pair(5), pair(6), pair(7)});
            left = __builtin_shuffle(a, b, Mask{0, 2, 4, 6, 8, 10, 12, 14});
            right = __builtin_shuffle(a, b, Mask{1, 3, 5, 7, 9, 11, 13, 15});
        } else {
            using Two = typename Lanes<A, 2>::type;
            const auto pair = [&](int l) { return load_lanes<Two>(in + at[l]); };
            const V a = __builtin_shufflevector(pair(0), pair(1), 0, 1, 2, 3);
            const V b = __builtin_shufflevector(pair(2), pair(3), 0, 1, 2, 3);
            left = __builtin_shuffle(a, b, Mask{0, 2, 4, 6});
            right = __builtin_shuffle(a, b, Mask{1, 3, 5, 7});
        }
    }
    /// The four pixels of points i, .., i + L - 1, zero where masked.
    template <bool kNeighbours, bool kInside>
    void corners(const A* in, int i, V (&upper)[2], V (&lower)[2]) const {
        fetch<kNeighbours>(in, offset + i, sx, upper[0], upper[1]);
        fetch<kNeighbours>(in + sy, offset + i, sx, lower[0], lower[1]);
        if constexpr (!kInside)
            for (int k = 0; k < 2; ++k) {
                const Mask across = load_lanes<Mask>(x.mask[k] + i);
                upper[k] = V(Mask(upper[k]) & across & load_lanes<Mask>(y.mask[0] + i));
                lower[k] = V(Mask(lower[k]) & across & load_lanes<Mask>(y.mask[1] + i));
            }
    }

    template <bool kNeighbours, bool kInside>
    void sample() {
        for (int64_t c0 = 0; c0 < p.C; c0 += 4)
            for (int i = 0; i < n; i += L) {
                const V left = lanes(x.weight[0] + i), right = lanes(x.weight[1] + i);
                const V top = lanes(y.weight[0] + i), bottom = lanes(y.weight[1] + i);
                for (int64_t c = c0; c < std::min(p.C, c0 + 4); ++c) {
                    V upper[2], lower[2];
                    corners<kNeighbours, kInside>(plane(c), i, upper, lower);
                    put(out(c),
                        top * (left * upper[0] + right * upper[1]) +
                            bottom * (left * lower[0] + right * lower[1]),
                        i);
                }
            }
    }

    // Channels side by side: K of a point's at a time, in a vector. Of three, a photograph as it
    // comes, the last lane says nothing.
    template <int K>
    using Channels = typename Lanes<A, K == 3 ? 4 : K>::type;

    /// The pixels [row][column] of a point, zero where outside.
    template <int K>
    void pixels_at(const A* in, int i, Channels<K> (&to)[2][2]) const {
        for (int j = 0; j < 2; ++j) {
            const A* at = in + offset[i] + j * sy;
            __builtin_prefetch(in + offset[i + kAhead] + j * sy);
            to[j][0] = load_lanes<Channels<K>>(at);
            if constexpr (K == 3) {
                const Quad second = load_lanes<Quad>(at + 2);  // not past the pair's end
                to[j][1] = __builtin_shufflevector(second, second, 1, 2, 3, 3);
            } else {
                to[j][1] = load_lanes<Channels<K>>(at + sx);
            }
        }
        if (x.moved[i] | y.moved[i])
            for (int j = 0; j < 2; ++j)
                for (int k = 0; k < 2; ++k)
                    if (!(y.mask[j][i] & x.mask[k][i])) to[j][k] = Channels<K>{};
    }
    /// Weighted by row and column.
    template <typename C>
    C mixed(int i, const C (&of)[2][2], const A (&down)[2][kBlock],
            const A (&across)[2][kBlock]) const {
        return down[0][i] * (across[0][i] * of[0][0] + across[1][i] * of[0][1]) +
               down[1][i] * (across[0][i] * of[1][0] + across[1][i] * of[1][1]);
    }
    template <int K>
    static A total(Channels<K> of) {
        if constexpr (K == 8) {
            Quad half[2];
            memcpy(half, &of, sizeof(of));
            return total<4>(half[0] + half[1]);
        }
        if constexpr (K == 4) return (of[0] + of[2]) + (of[1] + of[3]);
        if constexpr (K == 3) return of[0] + of[1] + of[2];
        if constexpr (K == 1) return of[0];
    }
    /// Planes may lie a multiple of 4096 bytes apart, where the first cache holds few lines: many
    /// are written one after the other.
    template <int K>
    NOINLINE void sample_channels(int64_t c) {
        const A* in = plane(c);
        A* const to = out(c);
        const int64_t P = p.P;
        alignas(64) A columns[K][kBlock];
        for (int i = 0; i < n; ++i) {
            Channels<K> pixels[2][2];
            pixels_at<K>(in, i, pixels);
            const Channels<K> sum = mixed(i, pixels, y.weight, x.weight);
            for (int k = 0; k < K; ++k) (K > 4 ? columns[k] : to + k * P)[i] = sum[k];
        }
        if (K > 4)
            for (int k = 0; k < K; ++k) memcpy(to + k * P, columns[k], n * sizeof(A));
    }
    /// grad_out at the points, of K channels from c on.
    template <int K>
    class Upstream {
        const A* rows = nullptr;
        int64_t step = 0;
        A copies[K][kBlock];

      public:
        Upstream(const Planes& of, int64_t c) {
            const GridSampleParams& p = of.p;
            if (K != 3 && p.grad_out_stride[1] == 1 && p.grad_out_points.count[1] >= p.P) {
                step = p.grad_out_points.stride[2];
                rows = static_cast<const A*>(p.grad_out) + of.part.image * p.grad_out_stride[0] +
                       of.begin * step + c;
            } else {
                for (int k = 0; k < K; ++k) {
                    const A* plane = of.grad(c + k, copies[k]);
                    if (plane != copies[k]) memcpy(copies[k], plane, sizeof(copies[k]));
                }
            }
        }
        Channels<K> at(int i) const {
            if (rows) return load_lanes<Channels<K>>(rows + i * step);
            Channels<K> all = {};
            for (int k = 0; k < K; ++k) all[k] = copies[k][i];
            return all;
        }
    };
    template <int K>
    NOINLINE void differentiate_channels(int64_t c) {
        const A* in = plane(c);
        const Upstream<K> upstream(*this, c);
        Channels<K> pixels[2][2];
        for (int i = 0; i < n; ++i) {
            pixels_at<K>(in, i, pixels);
            const Channels<K> factor = upstream.at(i);
            const Channels<K> dx = factor * mixed(i, pixels, y.weight, x.slope);
            const Channels<K> dy = factor * mixed(i, pixels, y.slope, x.weight);
            along[0][i] += total<K>(dx), along[1][i] += total<K>(dy);
        }
    }
    /// Whether a point's channels can be taken as vectors.
    bool in_vectors() const { return p.input_stride[1] == 1 && (p.C == 3 ? sx == 3 : p.C >= 4); }
    /// Adds to pixels, or to the nearest one, of points of which one is taken.
    template <int K>
    NOINLINE void scatter_channels(int64_t c, int count, bool all) {
        const int64_t right = p.grad_input_stride[4], below = p.grad_input_stride[3];
        const Upstream<K> upstream(*this, c);
        A* to = target(c);
        const auto add = [](A* at, Channels<K> x) {
            x += load_lanes<Channels<K>>(at);
            memcpy(at, &x, sizeof(x));
        };
        for (int j = 0; j < count; ++j) {
            const int i = all ? j : near[j];
            A* at = to + offset[i];
            const Channels<K> g = upstream.at(i);
            if (p.interpolation == Interpolation::kNearest) {
                add(at, g);
                continue;
            }
            const Channels<K> upper = g * y.weight[0][i], lower = g * y.weight[1][i];
            if (taken[i] & 1) add(at, upper * x.weight[0][i]);
            if (taken[i] & 2) add(at + right, upper * x.weight[1][i]);
            if (taken[i] & 4) add(at + below, lower * x.weight[0][i]);
            if (taken[i] & 8) add(at + below + right, lower * x.weight[1][i]);
        }
    }
    /// Calls `body` with a number of channels and the first of them, until [c, end) are done.
    template <typename Body>
    void each_vector(int64_t c, int64_t end, const Body& body) {
        for (; c + L <= end; c += L) body(std::integral_constant<int, L>(), c);
        for (; c + 4 <= end; c += 4) body(std::integral_constant<int, 4>(), c);
        for (; c < end; ++c) body(std::integral_constant<int, 1>(), c);
    }
    A* target(int64_t c) const {
        return static_cast<A*>(p.grad_input) + part.image * p.grad_input_stride[0] +
               c * p.grad_input_stride[1];
    }
    /// Adds to all channels in vectors; false where these are no neighbours.
    bool scatter_vectors(int count, bool all) {
        if (p.C < 4 || p.grad_input_stride[1] != 1) return false;
        each_vector(part.channels[0], part.channels[1], [&](auto channels, int64_t c) {
            scatter_channels<decltype(channels)::value>(c, count, all);
        });
        return true;
    }
    void write_grid() {
        A* to = static_cast<A*>(p.grad_grid) + (part.image * p.P + begin) * 2;
        for (int i = 0; i < n; ++i) to[2 * i] = along[0][i], to[2 * i + 1] = along[1][i];
    }
    template <bool kNeighbours, bool kInside>
    void differentiate() {
        for (int64_t c0 = 0; c0 < p.C; c0 += 4) {
            const int count = int(std::min<int64_t>(4, p.C - c0));
            for (int k = 0; k < count; ++k) grads[k] = grad(c0 + k, buffer[k]);
            for (int i = 0; i < n; i += L) {
                const V left = lanes(x.weight[0] + i), right = lanes(x.weight[1] + i);
                const V top = lanes(y.weight[0] + i), bottom = lanes(y.weight[1] + i);
                V upper[2], lower[2], from[2] = {}, down[2] = {};
                // Sums over channels of grad_out * pixel, by corners.
                for (int k = 0; k < count; ++k) {
                    const V g = lanes(grads[k] + i);
                    corners<kNeighbours, kInside>(plane(c0 + k), i, upper, lower);
                    for (int j = 0; j < 2; ++j) from[j] += g * upper[j], down[j] += g * lower[j];
                }
                V dx = lanes(x.slope[0] + i) * (top * from[0] + bottom * down[0]) +
                       lanes(x.slope[1] + i) * (top * from[1] + bottom * down[1]);
                V dy = lanes(y.slope[0] + i) * (left * from[0] + right * from[1]) +
                       lanes(y.slope[1] + i) * (left * down[0] + right * down[1]);
                if (c0 > 0) dx += lanes(along[0] + i), dy += lanes(along[1] + i);
                memcpy(along[0] + i, &dx, sizeof(dx)), memcpy(along[1] + i, &dy, sizeof(dy));
            }
        }
        write_grid();
    }

    /// Lists the points of which a pixel is taken, without a branch: where a part has some rows of
    /// all, most points are elsewhere, in no order.
    int sort_out() {
        int count = 0;
        for (int i = 0; i < n; ++i) near[count] = int8_t(i), count += taken[i] != 0;
        return count;
    }

    /// Adds to the pixels of the part's channels and rows.
    NOINLINE void scatter() {
        const int64_t *stride = p.grad_input_stride, right = stride[4], below = stride[3];
        const int low = int(part.rows[0]), high = int(part.rows[1]);
        int apart = 0;
        for (int i = 0; i < n; ++i) {
            const int first = y.first[i], dx = x.moved[i], dy = y.moved[i];
            // The upper and the lower row: within the part, and of the two that the point has.
            const int upper = (first >= low) & (first < high) & (dy == 0 || dy == -1);
            const int lower = (first + 1 >= low) & (first + 1 < high) & (dy == 0 || dy == 1);
            const int west = dx == 0 || dx == -1, east = dx == 0 || dx == 1;
            taken[i] = int8_t((upper & west) | (upper & east) << 1 | (lower & west) << 2 |
                              (lower & east) << 3);
            offset[i] = int32_t(first * below + x.first[i] * right);
            apart |= taken[i] != kAll;
        }
        const int count = apart ? sort_out() : n;
        if (count == 0 || scatter_vectors(count, !apart)) return;
        alignas(64) A share[4][kBlock];
        for (int64_t c = part.channels[0]; c < part.channels[1]; ++c) {
            const A* g = grad(c, buffer[0]);
            A* to = target(c);
            for (int k = 0; k < 4; ++k)
                for (int i = 0; i < n; ++i)
                    share[k][i] = g[i] * y.weight[k / 2][i] * x.weight[k % 2][i];
            const auto add = [&](int i) {
                A* at = to + offset[i];
                at[0] += share[0][i], at[right] += share[1][i];
                at[below] += share[2][i], at[below + right] += share[3][i];
            };
            if (!apart) {
                for (int i = 0; i < n; ++i) add(i);
                continue;
            }
            for (int j = 0; j < count; ++j) {
                const int i = near[j];
                if (taken[i] == kAll) {
                    add(i);
                    continue;
                }
                A* at = to + offset[i];
                if (taken[i] & 1) at[0] += share[0][i];
                if (taken[i] & 2) at[right] += share[1][i];
                if (taken[i] & 4) at[below] += share[2][i];
                if (taken[i] & 8) at[below + right] += share[3][i];
            }
        }
    }

    template <typename Body>
    void with_shape(const Body& body) {
        using std::bool_constant;
        if (sx == 1)
            inside ? body(bool_constant<true>(), bool_constant<true>())
                   : body(bool_constant<true>(), bool_constant<false>());
        else
            inside ? body(bool_constant<false>(), bool_constant<true>())
                   : body(bool_constant<false>(), bool_constant<false>());
    }
    void set_offsets(int64_t below, int64_t right) {
        const int32_t down = int32_t(below), across = int32_t(right);
        for (int i = 0; i < kBlock; ++i) offset[i] = y.first[i] * down + x.first[i] * across;
    }

    void linear() {
        find_pairs(1, y);
        if (!part.points && !reaches()) return;
        find_pairs(2, x);
        inside = x.inside && y.inside;
        if (part.points && (p.out || p.grad_grid)) {
            if (!inside) set_masks(x), set_masks(y);
            set_offsets(sy, sx);
            if (in_vectors()) {
                if (p.grad_out) std::fill_n(along[0], 2 * kBlock, A(0));
                const auto run = [&](auto channels, int64_t c) {
                    constexpr int K = decltype(channels)::value;
                    p.grad_out ? differentiate_channels<K>(c) : sample_channels<K>(c);
                };
                p.C == 3 ? run(std::integral_constant<int, 3>(), 0) : each_vector(0, p.C, run);
                if (p.grad_out) write_grid();
            } else {
                with_shape([&](auto neighbours, auto all) {
                    constexpr bool N = decltype(neighbours)::value, I = decltype(all)::value;
                    p.grad_out ? differentiate<N, I>() : sample<N, I>();
                });
            }
        }
        if (part.scatter) scatter();
    }
    /// Whether any point of the block has a pixel in the part's rows.
    bool reaches() const {
        const int low = int(part.rows[0]), high = int(part.rows[1]);
        int some = 0;
        for (int i = 0; i < n; ++i) some |= (y.first[i] + 1 >= low) & (y.first[i] < high);
        return some;
    }

    void nearest() {
        find_nearest(1, y), find_nearest(2, x);
        inside = x.inside && y.inside;
        if (!inside)
            for (int i = 0; i < kBlock; ++i) x.mask[0][i] &= y.mask[0][i];
        if (!p.grad_out) {
            set_offsets(sy, sx);
            for (int64_t c = 0; c < p.C; ++c) {
                const A* in = plane(c);
                A* to = out(c);
                for (int i = 0; i < n; i += L) {
                    const V value = gather(in, offset + i, std::make_integer_sequence<int, L>());
                    put(to, V(Mask(value) & load_lanes<Mask>(x.mask[0] + i)), i);
                }
            }
        }
        if (!part.scatter) return;
        const int64_t* stride = p.grad_input_stride;
        const int low = int(part.rows[0]), high = int(part.rows[1]);
        int some = 0, all = 1;
        for (int i = 0; i < n; ++i) {
            taken[i] = (y.first[i] >= low) & (y.first[i] < high) & (x.mask[0][i] != 0);
            some |= taken[i], all &= taken[i];
        }
        if (!some) return;
        const int count = all ? n : sort_out();
        set_offsets(stride[3], stride[4]);
        if (scatter_vectors(count, all)) return;
        for (int64_t c = part.channels[0]; c < part.channels[1]; ++c) {
            const A* g = grad(c, buffer[0]);
            A* to = target(c);
            if (all)
                for (int i = 0; i < n; ++i) to[offset[i]] += g[i];
            else
                for (int j = 0; j < count; ++j) to[offset[near[j]]] += g[near[j]];
        }
    }

    Axis<A> rows, columns;

    // By lane of a row of four pixels of up to three channels each: weights and slopes along x.
    alignas(64) A across[kBlock * 12], steep[kBlock * 12];
    int8_t regular[kBlock];  // whether all rows and columns of a point are the image's own

    /// The sums over a row's four pixels, for each of their C channels.
    template <int C>
    static void sum_row(const Quad (&row)[C], const A* weight, A (&to)[C]) {
        A each[4 * C];
        for (int q = 0; q < C; ++q) {
            const Quad product = row[q] * load_lanes<Quad>(weight + 4 * q);
            for (int l = 0; l < 4; ++l) each[4 * q + l] = product[l];
        }
        for (int k = 0; k < C; ++k)
            to[k] = (each[k] + each[C + k]) + (each[2 * C + k] + each[3 * C + k]);
    }
    template <int C>
    void set_lanes() {
        for (int i = 0; i < n; ++i)
            for (int l = 0; l < 4 * C; ++l) across[4 * C * i + l] = columns.weight[l / C][i];
        if (!slopes) return;
        for (int i = 0; i < n; ++i)
            for (int l = 0; l < 4 * C; ++l) steep[4 * C * i + l] = columns.slope[l / C][i];
    }
    /// Bicubic values or derivatives of C channels from c on, side by side in memory.
    template <int C>
    NOINLINE void mix(int64_t c) {
        const A *in = plane(c), *g[C] = {};
        A* to[C] = {};
        for (int k = 0; k < C; ++k) {
            if (p.grad_out)
                g[k] = grad(c + k, buffer[k]);
            else
                to[k] = out(c + k);
        }
        const bool neighbours = C > 1 || sx == 1;
        for (int i = 0; i < n; ++i) {
            Quad row[4][C], mixed[C] = {}, tilted[C] = {};
            if (regular[i]) {
                const A* line = in + columns.index[0][i] * sx;
                for (int j = 0; j < 4; ++j) {
                    const A* at = line + rows.index[j][i] * sy;
                    if (neighbours)
                        memcpy(row[j], at, sizeof(row[j]));
                    else
                        row[j][0] = Quad{at[0], at[sx], at[2 * sx], at[3 * sx]};
                }
            } else {
                A pixels[4][4 * C];
                for (int j = 0; j < 4; ++j)
                    for (int l = 0; l < 4 * C; ++l) {
                        const int64_t y = rows.index[j][i], x = columns.index[l / C][i];
                        pixels[j][l] = (y | x) < 0 ? A(0) : in[y * sy + x * sx + l % C];
                    }
                memcpy(row, pixels, sizeof(row));
            }
            for (int j = 0; j < 4; ++j)
                for (int q = 0; q < C; ++q) mixed[q] += rows.weight[j][i] * row[j][q];
            A sum[C];
            if (!slopes) {
                sum_row(mixed, across + 4 * C * i, sum);
                for (int k = 0; k < C; ++k) to[k][i] = sum[k];
                continue;
            }
            for (int j = 0; j < 4; ++j)
                for (int q = 0; q < C; ++q) tilted[q] += rows.slope[j][i] * row[j][q];
            sum_row(mixed, steep + 4 * C * i, sum);
            for (int k = 0; k < C; ++k) along[0][i] += g[k][i] * sum[k];
            sum_row(tilted, across + 4 * C * i, sum);
            for (int k = 0; k < C; ++k) along[1][i] += g[k][i] * sum[k];
        }
    }

    void cubic() {
        A at[kBlock];
        coordinates(1, at);  // y
        find_taps<4>(at, n, p.size[1], p.padding, p.align_corners, slopes, rows);
        coordinates(2, at);
        find_taps<4>(at, n, p.size[2], p.padding, p.align_corners, slopes, columns);
        for (int i = 0; i < n; ++i) {
            const int first = columns.index[0][i];
            const int up =
                rows.index[0][i] | rows.index[1][i] | rows.index[2][i] | rows.index[3][i];
            regular[i] = (first >= 0) & (columns.index[3][i] - first == 3) & (up >= 0);
        }
        if (slopes) std::fill_n(along[0], 2 * kBlock, A(0));
        const auto run = [&](auto channels) {
            constexpr int C = decltype(channels)::value;
            set_lanes<C>();
            for (int64_t c = 0; c < p.C; c += C) mix<C>(c);
        };
        if (side_by_side && p.C == 3)
            run(std::integral_constant<int, 3>());
        else if (side_by_side && p.C == 2)
            run(std::integral_constant<int, 2>());
        else
            run(std::integral_constant<int, 1>());
        if (slopes) write_grid();
    }

  public:
    Planes(const GridSampleParams& params, const PlanesPart& part)
        : p(params),
          part(part),
          sy(p.input_stride[3]),
          sx(p.input_stride[4]),
          slopes(params.grad_grid != nullptr),
          side_by_side(p.input_stride[1] == 1 && sx == p.C) {}

    void run() {
        const bool flat = p.interpolation == Interpolation::kNearest;
        if (flat && part.points && p.grad_grid) {
            memset(static_cast<A*>(p.grad_grid) + (part.image * p.P + part.begin) * 2, 0,
                   (part.end - part.begin) * 2 * sizeof(A));
            if (!part.scatter) return;
        }
        for (begin = part.begin; begin < part.end; begin += kBlock) {
            n = int(std::min<int64_t>(kBlock, part.end - begin));
            if (p.interpolation == Interpolation::kLinear)
                linear();
            else
                flat ? nearest() : cubic();
        }
    }
};

}  // namespace

void grid_sample_planes_cpu(const GridSampleParams* p, const PlanesPart* part) {
    p->dtype == DType::kFloat ? Planes<float>(*p, *part).run() : Planes<double>(*p, *part).run();
}
