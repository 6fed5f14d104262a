// Bicubic interpolation on the CPU: values and derivatives at points; see cubic_cpu.rest.cpp.
#pragma once
#include "cubic_block.h"

namespace {

/// What is sampled at a point: `at<a, b, c>()` derived a, b and c times by z, y and x, where
/// a + b + c <= kOrder. Here of channels that are a vector.
template <typename V, int kOrder>
struct VectorJet {
    V sum[kOrder + 1][kOrder + 1][kOrder + 1];

    template <int a, int b, int c>
    V at() const {
        return sum[a][b][c];
    }
};

/// Of K channels side by side: the sums along z and y, K vectors of four to a row; those along x
/// are made when asked for.
template <typename A, int kOrder, int K>
struct RowsJet {
    using Quad = typename Lanes<A, 4>::type;
    using Mask = typename Lanes<std::conditional_t<sizeof(A) == 4, int32_t, int64_t>, 4>::type;
    Quad sum[kOrder + 1][kOrder + 1][K];
    const A (*lanes)[kBlock][4];
    int i;

    template <int a, int b, int c>
    auto at() const {
        const Quad weights = load_lanes<Quad>(lanes[c][i]);
        if constexpr (K == 1) {
            const Quad four = sum[a][b][0] * weights;
            return (four[0] + four[1]) + (four[2] + four[3]);
        } else {
            A each[4 * K];
            for (int q = 0; q < K; ++q) {
                const int l = 4 * q;  // lanes of the row are channels of pixel l / K
                const Mask pixel{l / K, (l + 1) / K, (l + 2) / K, (l + 3) / K};
                const Quad four = sum[a][b][q] * __builtin_shuffle(weights, pixel);
                memcpy(each + l, &four, sizeof(four));
            }
            Quad channels{};
            for (int k = 0; k < K; ++k)
                channels[k] = (each[k] + each[K + k]) + (each[2 * K + k] + each[3 * K + k]);
            return channels;
        }
    }
};

template <typename A>
class CubicPoints {
    template <int L>
    using Vector = typename Lanes<A, L>::type;
    using Quad = Vector<4>;

    CubicBlock<A>& block;
    const GridSampleParams& p;
    const Fields& fields;
    const bool second, typed;  // a derivative of the backward; fields that are read have elements A
    Places input, upstream, gathered;  // the last: point L is of L channels in `pixels`
    A to_grid[3][kBlock];
    A outs[CubicBlock<A>::kMost][kBlock];  // of channels by planes
    A out_rows[kBlock][kRow];              // and by rows
    alignas(64) A pixels[64 * 8];

    /// The pixels of point i, in the order z, y, x, zeros for those outside.
    template <int L, typename E>
    void gather_as(const E* in, const Places& at, int i) {
        A* to = pixels;
        for (int z = 0; z < block.depth; ++z)
            for (int y = 0; y < 4; ++y) {
                const int64_t oz = at.offset[0][z][i], oy = at.offset[1][y][i];
                for (int x = 0; x < 4; ++x, to += L) {
                    const int64_t ox = at.offset[2][x][i];
                    const bool inside = (oz | oy | ox) >= 0;
                    const E* from = in + (inside ? oz + oy + ox : 0);
                    for (int l = 0; l < L; ++l) to[l] = inside ? A(load(from[l])) : A(0);
                }
            }
    }
    template <int L>
    NOINLINE void gather(const void* in, const Places& at, int i) {
        if (typed || L > 1) return gather_as<L>(static_cast<const A*>(in), at, i);
        if constexpr (L == 1)
            dispatch_to<A>(block.p.dtype, [&](auto element) {
                gather_as<1>(static_cast<const decltype(element)*>(in), at, i);
            });
    }
    /// Where a point's pixels are: in the field, or gathered from it.
    struct Source {
        const A* data;
        const Places& places;
        int i;

        int64_t along(int axis, int k) const { return places.offset[axis][k][i]; }
    };
    template <int L>
    Source source(const void* in, const Places& at, int i) {
        if (at.plain[i]) return {static_cast<const A*>(in), at, i};
        gather<L>(in, at, i);
        return {pixels, gathered, L};
    }

    /// K channels side by side: a row is K vectors of four.
    template <int kOrder, int K>
    void contract(const Source& in, int i, RowsJet<A, kOrder, K>& jet) const {
        Quad all[kOrder + 1][kOrder + 1][K] = {};
        const A* const first = in.data + in.along(2, 0);
        for (int z = 0; z < block.depth; ++z) {
            const A* const plane = first + in.along(0, z);
            Quad sum[kOrder + 1][K] = {};
#pragma GCC unroll 4
            for (int y = 0; y < 4; ++y) {
                const A* row = plane + in.along(1, y);
#pragma GCC unroll 4
                for (int q = 0; q < K; ++q) {
                    const Quad four = load_lanes<Quad>(row + 4 * q);
#pragma GCC unroll 4
                    for (int b = 0; b <= kOrder; ++b) sum[b][q] += block.shares(b, 1, y)[i] * four;
                }
            }
#pragma GCC unroll 4
            for (int a = 0; a <= kOrder; ++a)
#pragma GCC unroll 4
                for (int b = 0; a + b <= kOrder; ++b)
#pragma GCC unroll 4
                    for (int q = 0; q < K; ++q)
                        all[a][b][q] += block.shares(a, 0, z)[i] * sum[b][q];
        }
        memcpy(jet.sum, all, sizeof(all));
        jet.lanes = block.lanes, jet.i = i;
    }
    /// Channels as a vector.
    template <int kOrder, typename V>
    void contract(const Source& in, int i, VectorJet<V, kOrder>& jet) const {
        V all[kOrder + 1][kOrder + 1][kOrder + 1] = {};
        for (int z = 0; z < block.depth; ++z) {
            const A* const plane = in.data + in.along(0, z);
            V sum[kOrder + 1][kOrder + 1] = {};
#pragma GCC unroll 4
            for (int y = 0; y < 4; ++y) {
                const A* row = plane + in.along(1, y);
                V mixed[kOrder + 1] = {};
#pragma GCC unroll 4
                for (int x = 0; x < 4; ++x) {
                    const V pixel = load_lanes<V>(row + in.along(2, x));
#pragma GCC unroll 4
                    for (int c = 0; c <= kOrder; ++c) mixed[c] += block.lanes[c][i][x] * pixel;
                }
#pragma GCC unroll 4
                for (int b = 0; b <= kOrder; ++b)
#pragma GCC unroll 4
                    for (int c = 0; b + c <= kOrder; ++c)
                        sum[b][c] += block.shares(b, 1, y)[i] * mixed[c];
            }
#pragma GCC unroll 4
            for (int a = 0; a <= kOrder; ++a)
#pragma GCC unroll 4
                for (int b = 0; a + b <= kOrder; ++b)
#pragma GCC unroll 4
                    for (int c = 0; a + b + c <= kOrder; ++c)
                        all[a][b][c] += block.shares(a, 0, z)[i] * sum[b][c];
        }
        memcpy(jet.sum, all, sizeof(all));
    }

    static A total(A x, int) { return x; }
    template <typename V>
    static A total(const V& x, int from) {
        A sum = 0;
        constexpr int kLanes = sizeof(V) / sizeof(A);
        if (from == 0)
            for (int l = 0; l < kLanes; ++l) sum += x[l];
        else
            for (int l = from; l < kLanes; ++l) sum += x[l];
        return sum;
    }
    /// Calls `body` with each axis as a constant.
    template <typename Body>
    void each_axis(const Body& body) const {
        if (block.outermost == 0) body(std::integral_constant<int, 0>());
        body(std::integral_constant<int, 1>()), body(std::integral_constant<int, 2>());
    }
    /// What the jet of a field adds to the results at point i, but for the first `had` lanes.
    /// `kSlanted`: the field is weighted by the derivative of the weights along `direction`.
    template <bool kSlanted, int kOrder, typename Jet, typename V>
    void add(const Jet& jet, int i, const V& grad, V& out, int had) {
        if (!kSlanted && p.out) out += jet.template at<0, 0, 0>();
        if constexpr (kOrder > 0)
            each_axis([&](auto axis) {
                constexpr int d = decltype(axis)::value;
                V slope = jet.template at<d == 0, d == 1, d == 2>();
                if constexpr (kSlanted) {
                    out += block.direction[d][i] * slope;
                    slope = V{};
                    each_axis([&](auto other) {
                        constexpr int e = decltype(other)::value;
                        slope += block.direction[e][i] *
                                 jet.template at<(d == 0) + (e == 0), (d == 1) + (e == 1),
                                                 (d == 2) + (e == 2)>();
                    });
                }
                to_grid[2 - d][i] += total(grad * slope, had);
            });
    }
    template <bool kSlanted, int kOrder, int K>
    NOINLINE void visit_planes(const void* in, const Places& at) {
        for (int i = 0; i < block.count; ++i) {
            RowsJet<A, kOrder, K> jet;
            contract(source<K>(in, at, i), i, jet);
            if constexpr (K == 1) {
                add<kSlanted, kOrder>(jet, i, block.grads[0][i], outs[0][i], 0);
            } else {
                Quad grad{}, out{};
                for (int k = 0; k < K; ++k) grad[k] = block.grads[k][i];
                add<kSlanted, kOrder>(jet, i, grad, out, 0);
                for (int k = 0; k < K; ++k) outs[k][i] += out[k];
            }
        }
    }
    template <bool kSlanted, int kOrder, int L>
    void visit_vector(const A* in, const Places& at, int i, int k, int had) {
        using V = Vector<L>;
        VectorJet<V, kOrder> jet;
        contract(source<L>(in + k, at, i), i, jet);
        const V before = load_lanes<V>(out_rows[i] + k);
        V out = before;
        add<kSlanted, kOrder>(jet, i, load_lanes<V>(block.grad_rows[i] + k), out, had);
        for (int l = 0; l < had; ++l) out[l] = before[l];
        memcpy(out_rows[i] + k, &out, sizeof(V));
    }
    template <bool kSlanted, int kOrder>
    NOINLINE void visit_rows(const A* in, const Places& at, int channels) {
        for (int i = 0; i < block.count; ++i)
            each_vector(channels, [&](auto lanes, int k, int had) {
                visit_vector<kSlanted, kOrder, decltype(lanes)::value>(in, at, i, k, had);
            });
    }

    /// Calls `body` for each field that is read, with what it adds and up to which derivative.
    template <bool kSecond, typename Body>
    void each_field(const Body& body) {
        using std::integral_constant, std::bool_constant;
        constexpr integral_constant<int, 0> value;
        constexpr integral_constant<int, 1> slope;
        if constexpr (!kSecond) {
            p.grad_out ? body(fields.input, input, bool_constant<false>(), slope)
                       : body(fields.input, input, bool_constant<false>(), value);
        } else {
            if (p.to_grad_input)
                p.grad_grid ? body(fields.upstream, upstream, bool_constant<false>(), slope)
                            : body(fields.upstream, upstream, bool_constant<false>(), value);
            if (p.to_grad_grid)
                body(fields.input, input, bool_constant<true>(), integral_constant<int, 2>());
        }
    }
    template <int K, bool kSecond>
    NOINLINE void points_by_planes() {
        for (int64_t c = 0; c < p.C; c += K) {
            for (int k = 0; k < K; ++k) {
                if (p.grad_out) block.read_grad(c + k, block.grads[k]);
                std::fill_n(outs[k], block.count, A(0));
            }
            each_field<kSecond>([&](const Field& f, const Places& at, auto slanted, auto order) {
                constexpr bool kSlanted = decltype(slanted)::value;
                constexpr int kOrder = decltype(order)::value;
                visit_planes<kSlanted, kOrder, K>(image_of(f, c), at);
            });
            if (p.out)
                for (int k = 0; k < K; ++k) block.write_out(c + k, outs[k], 1);
        }
    }
    template <bool kSecond>
    NOINLINE void points_by_rows() {
        for (int64_t c = 0; c < p.C; c += kRow) {
            const int channels = int(std::min<int64_t>(kRow, p.C - c));
            block.read_grad_rows(c, channels);
            for (int i = 0; i < block.count; ++i) std::fill_n(out_rows[i], channels, A(0));
            each_field<kSecond>([&](const Field& f, const Places& at, auto slanted, auto order) {
                visit_rows<decltype(slanted)::value, decltype(order)::value>(
                    static_cast<const A*>(image_of(f, c)), at, channels);
            });
            if (p.out)
                for (int k = 0; k < channels; ++k) block.write_out(c + k, out_rows[0] + k, kRow);
        }
    }
    /// Channel c of the image in a field that is read.
    const void* image_of(const Field& f, int64_t c) const {
        const int64_t at = block.image * f.stride[0] + c * f.stride[1];
        return static_cast<const char*>(f.data) + at * (typed ? sizeof(A) : 2);
    }

  public:
    CubicPoints(CubicBlock<A>& block, const Fields& fields)
        : block(block),
          p(block.p),
          fields(fields),
          second(p.to_grad_input || p.to_grad_grid),
          typed(fields.copy || p.dtype == DType::kFloat || p.dtype == DType::kDouble) {
        for (const int L : {1, 2, 3, 4, 8})
            for (int tap = 0; tap < 4; ++tap) {
                gathered.offset[0][tap][L] = 16 * L * tap;
                gathered.offset[1][tap][L] = 4 * L * tap, gathered.offset[2][tap][L] = L * tap;
            }
    }

    /// What is wanted at the points of the block.
    NOINLINE void run() {
        const Field& in = fields.input;
        const bool rows = second && !p.to_grad_grid ? fields.upstream.rows : in.rows;
        // Few channels that are all there is in a pixel.
        const bool side_by_side = typed && !second && !rows && (p.C == 2 || p.C == 3) &&
                                  in.stride[1] == 1 && in.stride[4] == p.C;
        const int64_t side = !typed ? 0 : side_by_side ? p.C : 1;
        if (!second || p.to_grad_grid) block.locate(in, side, input);
        if (p.to_grad_input) block.locate(fields.upstream, side, upstream);
        if (p.grad_grid) std::fill_n(to_grid[0], 3 * kBlock, A(0));
        if (second)
            rows ? points_by_rows<true>() : points_by_planes<1, true>();
        else if (rows)
            points_by_rows<false>();
        else if (!side_by_side)
            points_by_planes<1, false>();
        else
            p.C == 2 ? points_by_planes<2, false>() : points_by_planes<3, false>();
        if (p.grad_grid) block.write_grid(to_grid);
    }
};

}  // namespace
