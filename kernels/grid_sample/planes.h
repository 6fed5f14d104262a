// Images of grid_sample in two dimensions, on the CPU: what is known of a block of points, and
// reads of pixels and gradients; see planes_cpu.cpp.
#pragma once
#include <utility>

#include "taps.h"

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
        bool inside, plain = true;  // all; all of the last block before padding, too
    };

    const GridSampleParams& p;
    const Part& part;
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

    template <typename T>
    static V lanes(const T* from) {
        return load_lanes<V>(from);
    }
    static void put(A* to, V value, int i, int end) {
        if (i + L <= end)
            memcpy(to + i, &value, sizeof(V));
        else
            put_last(to + i, value, end - i);
    }
    NOINLINE static void put_last(A* to, V value, int count) {
        memcpy(to, &value, count * sizeof(A));
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
    /// Coordinates below this are of moderate size.
    static A most_moderate(A size) { return std::min(A(1 << 30) / size, A(1 << 20)); }
    /// Coordinates and positions along an axis; whether all are of moderate size, on an axis whose
    /// pixels A can number.
    bool find_places(int axis, A* x, A* at) const {
        coordinates(axis, x);
        const A size = A(p.whole[axis]), most = most_moderate(size);
        int strange = 0;
        for (int i = 0; i < kBlock; ++i) {
            strange |= !(fabs(x[i]) < most);
            at[i] = unnormalized(x[i], size, p.align_corners);
        }
        return !strange && (sizeof(A) == 8 || p.whole[axis] <= 1 << 24);
    }

    /// The pairs of an axis; of coordinates that are not all moderate; of places not all inside.
    NOINLINE void find_pairs(int axis, Pairs& to);
    NOINLINE void find_strange_pairs(const A* x, const Window& in, Pairs& to) const;
    NOINLINE void move_pairs(const A* at, const Window& in, Pairs& to) const;
    void set_masks(Pairs& of) const {
        for (int i = 0; i < kBlock; ++i) {
            const int by = of.moved[i];
            of.mask[0][i] = -Int((by == 0) | (by == -1));
            of.mask[1][i] = -Int((by == 0) | (by == 1));
        }
    }
    /// The nearest pixel of an axis; the mask says whether there is one.
    NOINLINE void find_nearest(int axis, Pairs& to);

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
    /// The k-th of four neighbours from in + at[i] on.
    static void fetch_fours(const A* in, const int32_t* at, V (&to)[4]) {
        const auto four = [&](int l) { return load_lanes<Quad>(in + at[l]); };
        if constexpr (L == 8 && kVector >= 32) {
            const auto two = [&](int l) {
                return __builtin_shufflevector(four(l), four(l + 4), 0, 1, 2, 3, 4, 5, 6, 7);
            };
            const V a = two(0), b = two(1), c = two(2), d = two(3);
            const Mask low{0, 8, 1, 9, 4, 12, 5, 13}, high{2, 10, 3, 11, 6, 14, 7, 15};
            const Mask first{0, 1, 8, 9, 4, 5, 12, 13}, second{2, 3, 10, 11, 6, 7, 14, 15};
            const V ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
            const V ef = __builtin_shuffle(a, b, high), gh = __builtin_shuffle(c, d, high);
            to[0] = __builtin_shuffle(ab, cd, first), to[1] = __builtin_shuffle(ab, cd, second);
            to[2] = __builtin_shuffle(ef, gh, first), to[3] = __builtin_shuffle(ef, gh, second);
        } else {
            for (int l = 0; l < L; l += 4) {
                const Quad a = four(l), b = four(l + 1), c = four(l + 2), d = four(l + 3);
                const Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                           cd = __builtin_shufflevector(c, d, 0, 4, 1, 5),
                           ef = __builtin_shufflevector(a, b, 2, 6, 3, 7),
                           gh = __builtin_shufflevector(c, d, 2, 6, 3, 7);
                const Quad turned[] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5),
                                       __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                                       __builtin_shufflevector(ef, gh, 0, 1, 4, 5),
                                       __builtin_shufflevector(ef, gh, 2, 3, 6, 7)};
                for (int k = 0; k < 4; ++k)
                    memcpy(reinterpret_cast<A*>(to + k) + l, turned + k, sizeof(Quad));
            }
        }
    }
    /// The same of four that are `step` apart.
    NOINLINE static void fetch_apart(const A* in, int64_t step, const int32_t* at, V* to) {
        for (int k = 0; k < 4; ++k)
            to[k] = gather(in + k * step, at, std::make_integer_sequence<int, L>());
    }
    /// The same of two or three channels side by side in memory.
    template <int K>
    static void fetch_channels(const A* in, const int32_t* at, V (&left)[K], V (&right)[K]) {
        if constexpr (K == 2) {
            fetch<true>(in, at, 0, left[0], left[1]),
                fetch<true>(in + 2, at, 0, right[0], right[1]);
        } else {
            // Of four elements three are a pixel's: the first of what begins with the left one, the
            // last of what ends with the right one.
            V first[4], last[4];
            fetch_fours(in, at, first), fetch_fours(in + 2, at, last);
            for (int k = 0; k < K; ++k) left[k] = first[k], right[k] = last[k + 1];
        }
    }
    /// Zeros to what is masked of the pixels in column k at points i, .., i + L - 1.
    void mask(int i, int k, V& upper, V& lower) const {
        const Mask across = load_lanes<Mask>(x.mask[k] + i);
        upper = V(Mask(upper) & across & load_lanes<Mask>(y.mask[0] + i));
        lower = V(Mask(lower) & across & load_lanes<Mask>(y.mask[1] + i));
    }
    /// The four pixels of points i, .., i + L - 1, zero where masked.
    template <bool kNeighbours, bool kInside>
    void corners(const A* in, int i, V (&upper)[2], V (&lower)[2]) const {
        fetch<kNeighbours>(in, offset + i, sx, upper[0], upper[1]);
        fetch<kNeighbours>(in + sy, offset + i, sx, lower[0], lower[1]);
        if constexpr (!kInside)
            for (int k = 0; k < 2; ++k) mask(i, k, upper[k], lower[k]);
    }
    /// The same of K channels side by side, by column and channel.
    template <int K, bool kInside>
    void corners_of_channels(const A* in, int i, V (&upper)[2][K], V (&lower)[2][K]) const {
        fetch_channels<K>(in, offset + i, upper[0], upper[1]);
        fetch_channels<K>(in + sy, offset + i, lower[0], lower[1]);
        if constexpr (!kInside)
            for (int k = 0; k < 2; ++k)
                for (int c = 0; c < K; ++c) mask(i, k, upper[k][c], lower[k][c]);
    }

    /// `K`: channels that lie side by side, and are taken at once.
    template <int K, bool kNeighbours, bool kInside>
    NOINLINE void sample();

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
    NOINLINE void sample_channels(int64_t c);
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
    NOINLINE void differentiate_channels(int64_t c);
    /// Whether a point's channels can be taken as vectors.
    bool in_vectors() const {
        return p.input_stride[1] == 1 && (p.C >= 4 || (sizeof(A) == 8 && p.C == 3 && sx == 3));
    }
    /// Adds to pixels, or to the nearest one, of points of which one is taken.
    template <int K>
    NOINLINE void scatter_channels(int64_t c, int count, bool all);
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
    template <int K, bool kNeighbours, bool kInside>
    NOINLINE void differentiate();

    /// Lists the points of which a pixel is taken, without a branch: where a part has some rows of
    /// all, most points are elsewhere, in no order.
    int sort_out() {
        int count = 0;
        for (int i = 0; i < n; ++i) near[count] = int8_t(i), count += taken[i] != 0;
        return count;
    }

    /// Adds to the pixels of the part's channels and rows.
    NOINLINE void scatter();

    /// Calls `body` with how many channels lie side by side, whether a row's pixels do, and whether
    /// all that points read is inside.
    template <typename Body>
    void with_shape(const Body& body) {
        using std::bool_constant, std::integral_constant;
        const auto of = [&](auto channels, auto neighbours) {
            inside ? body(channels, neighbours, bool_constant<true>())
                   : body(channels, neighbours, bool_constant<false>());
        };
        if (sx == 1) return of(integral_constant<int, 1>(), bool_constant<true>());
        if constexpr (sizeof(A) == 4)
            if (side_by_side && p.C <= 3)
                return p.C == 2 ? of(integral_constant<int, 2>(), bool_constant<false>())
                                : of(integral_constant<int, 3>(), bool_constant<false>());
        of(integral_constant<int, 1>(), bool_constant<false>());
    }
    void set_offsets(int64_t below, int64_t right) {
        set_offsets(y.first, below, x.first, right, offset);
    }
    static void set_offsets(const int32_t* y, int64_t below, const int32_t* x, int64_t right,
                            int32_t* to) {
        const int32_t down = int32_t(below), across = int32_t(right);
        for (int i = 0; i < kBlock; ++i) to[i] = y[i] * down + x[i] * across;
    }

    void linear();
    /// Whether any point of the block has a pixel in the part's rows.
    bool reaches() const {
        const int low = int(part.rows[0]), high = int(part.rows[1]);
        int some = 0;
        for (int i = 0; i < n; ++i) some |= (y.first[i] + 1 >= low) & (y.first[i] < high);
        return some;
    }

    void nearest();

    /// Four pixels along one axis, all within the image. Rows outside are others, which masks leave
    /// out; columns begin at at[0] and are neighbours, among which weights move.
    struct Fours {
        alignas(64) int32_t at[4][kBlock];
        alignas(64) A weight[4][kBlock];
        alignas(64) A slope[4][kBlock];
        alignas(64) Int mask[4][kBlock];
        bool inside;
    };
    Fours down, across;
    alignas(64) int32_t offsets[4][kBlock];  // by row
    /// False where the axis has less, or a point is so far away that A may not number its pixels.
    NOINLINE bool find_fours(int axis, Fours& to);
    void place_fours(const Window& in, const A* floored, A (&index)[4][kBlock]) const;
    NOINLINE void set_rows(const Window& in, const A* floored);
    NOINLINE void move_columns(const Window& in, const A* floored);
    /// Row j of points i, .., i + L - 1: pixels of K channels, zero where masked.
    template <int K>
    void fetch_row(const A* in, int i, int j, V (&to)[4 * K]) const;
    /// Values of `count` channels from c on, K of which lie side by side.
    template <int K>
    NOINLINE void sum_fours(int64_t c, int count);
    template <int K>
    NOINLINE void differentiate_fours(int64_t c, int count);
    void run_fours();

    Axis<A> rows, columns;   // of points that have no such fours, and for vectors of channels
    int8_t regular[kBlock];  // whether all rows and columns of a point are the image's own

    /// Values or derivatives of a channel, a point at a time.
    NOINLINE void mix(int64_t c);
    /// Of L channels from c on, which lie side by side and of which the first `had` are not new, in
    /// vectors of channels.
    template <int L, bool kSlopes>
    NOINLINE void mix_rows(int64_t c, int had);
    void run_rows();

    void cubic();

  public:
    Planes(const GridSampleParams& params, const Part& part)
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
