// Bicubic interpolation on the CPU: values and derivatives at points; see cubic_cpu.cpp.
#pragma once
#include "cubic_block.h"

namespace {

/// What is sampled at a point, derived a, b and c times by z, y and x; a + b + c <= kOrder.
template <typename V, int kOrder>
struct Jet {
    V at[kOrder + 1][kOrder + 1][kOrder + 1];

    const V& value() const { return at[0][0][0]; }
    const V& by(int d) const { return at[d == 0][d == 1][d == 2]; }
    const V& by(int d, int e) const {
        return at[(d == 0) + (e == 0)][(d == 1) + (e == 1)][(d == 2) + (e == 2)];
    }
};

template <typename A>
class CubicPoints {
    template <int L>
    using Vector = typename Lanes<A, L>::type;
    using Quad = Vector<4>;
    using Mask = typename Lanes<std::conditional_t<sizeof(A) == 4, int32_t, int64_t>, 4>::type;

    CubicBlock<A>& block;
    const GridSampleParams& p;
    const Fields& fields;
    const bool second, typed;  // a derivative of the backward; fields that are read have elements A
    Places input, upstream;
    A to_grid[3][kBlock];
    A outs[CubicBlock<A>::kMost][kBlock];       // of channels by planes
    A out_rows[kBlock][CubicBlock<A>::kGroup];  // and by rows
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
            block.dispatch_to_A([&](auto element) {
                gather_as<1>(static_cast<const decltype(element)*>(in), at, i);
            });
    }
    /// Where a point's pixels are: in the field, or gathered from it.
    struct Source {
        const A* data;
        const int64_t* offset[3];
        int64_t step;
    };
    template <int L>
    Source source(const void* in, const Places& at, int i) {
        static constexpr int64_t kOffset[3][4] = {
            {0, 16 * L, 32 * L, 48 * L}, {0, 4 * L, 8 * L, 12 * L}, {0, L, 2 * L, 3 * L}};
        if (at.plain[i])
            return {static_cast<const A*>(in),
                    {at.offset[0][0] + i, at.offset[1][0] + i, at.offset[2][0] + i},
                    kBlock};
        gather<L>(in, at, i);
        return {pixels, {kOffset[0], kOffset[1], kOffset[2]}, 1};
    }

    /// K channels side by side: a row is K vectors of four.
    template <int kOrder, int K>
    void contract(const Source& in, int i, Jet<A, kOrder> (&jet)[K]) const {
        Quad total[kOrder + 1][kOrder + 1][K] = {};
        for (int z = 0; z < block.depth; ++z) {
            const A* plane = in.data + in.offset[0][z * in.step] + in.offset[2][0];
            Quad sum[kOrder + 1][K] = {};
            for (int y = 0; y < 4; ++y) {
                const A* row = plane + in.offset[1][y * in.step];
                for (int q = 0; q < K; ++q) {
                    const Quad four = load_lanes<Quad>(row + 4 * q);
                    for (int b = 0; b <= kOrder; ++b) sum[b][q] += block.shares(b, 1, y)[i] * four;
                }
            }
            for (int a = 0; a <= kOrder; ++a)
                for (int b = 0; a + b <= kOrder; ++b)
                    for (int q = 0; q < K; ++q)
                        total[a][b][q] += block.shares(a, 0, z)[i] * sum[b][q];
        }
        for (int a = 0; a <= kOrder; ++a)
            for (int b = 0; a + b <= kOrder; ++b)
                for (int c = 0; a + b + c <= kOrder; ++c) {
                    const Quad weights = load_lanes<Quad>(block.lanes[c][i]);
                    A each[4 * K];
                    for (int q = 0; q < K; ++q) {
                        const int l = 4 * q;  // lanes of the row are channels of pixel l / K
                        const Quad product =
                            total[a][b][q] *
                            __builtin_shuffle(weights,
                                              Mask{l / K, (l + 1) / K, (l + 2) / K, (l + 3) / K});
                        memcpy(each + l, &product, sizeof(product));
                    }
                    for (int k = 0; k < K; ++k)
                        jet[k].at[a][b][c] =
                            (each[k] + each[K + k]) + (each[2 * K + k] + each[3 * K + k]);
                }
    }
    /// L channels as a vector.
    template <int kOrder, typename V>
    void contract(const Source& in, int i, Jet<V, kOrder>& jet) const {
        jet = {};
        for (int z = 0; z < block.depth; ++z) {
            const A* plane = in.data + in.offset[0][z * in.step];
            V sum[kOrder + 1][kOrder + 1] = {};
            for (int y = 0; y < 4; ++y) {
                const A* row = plane + in.offset[1][y * in.step];
                V mixed[kOrder + 1] = {};
                for (int x = 0; x < 4; ++x) {
                    const V pixel = load_lanes<V>(row + in.offset[2][x * in.step]);
                    for (int c = 0; c <= kOrder; ++c) mixed[c] += block.lanes[c][i][x] * pixel;
                }
                for (int b = 0; b <= kOrder; ++b)
                    for (int c = 0; b + c <= kOrder; ++c)
                        sum[b][c] += block.shares(b, 1, y)[i] * mixed[c];
            }
            for (int a = 0; a <= kOrder; ++a)
                for (int b = 0; a + b <= kOrder; ++b)
                    for (int c = 0; a + b + c <= kOrder; ++c)
                        jet.at[a][b][c] += block.shares(a, 0, z)[i] * sum[b][c];
        }
    }

    static A total(A x) { return x; }
    template <typename V>
    static A total(V x) {
        A sum = 0;
        for (size_t l = 0; l < sizeof(V) / sizeof(A); ++l) sum += x[l];
        return sum;
    }
    /// What the jet of a field adds to the results at point i. `kSlanted`: the field is weighted by
    /// the derivative of the weights along `direction`.
    template <bool kSlanted, int kOrder, typename V>
    void add(const Jet<V, kOrder>& jet, int i, const V& grad, V& out) {
        if (!kSlanted) out += jet.value();
        if constexpr (kOrder > 0)
            for (int d = block.outermost; d < 3; ++d) {
                V slope{};
                if constexpr (kSlanted) {
                    out += block.direction[d][i] * jet.by(d);
                    for (int e = block.outermost; e < 3; ++e)
                        slope += block.direction[e][i] * jet.by(d, e);
                } else {
                    slope = jet.by(d);
                }
                to_grid[2 - d][i] += total(grad * slope);
            }
    }
    template <bool kSlanted, int kOrder, int K>
    NOINLINE void visit_planes(const void* in, const Places& at) {
        for (int i = 0; i < block.count; ++i) {
            Jet<A, kOrder> jet[K];
            contract<kOrder, K>(source<K>(in, at, i), i, jet);
            for (int k = 0; k < K; ++k) add<kSlanted>(jet[k], i, block.grads[k][i], outs[k][i]);
        }
    }
    template <bool kSlanted, int kOrder, int L>
    void visit_vector(const A* in, const Places& at, int i, int k) {
        using V = Vector<L>;
        Jet<V, kOrder> jet;
        contract(source<L>(in + k, at, i), i, jet);
        V out = load_lanes<V>(out_rows[i] + k);
        add<kSlanted>(jet, i, load_lanes<V>(block.grad_rows[i] + k), out);
        memcpy(out_rows[i] + k, &out, sizeof(V));
    }
    template <bool kSlanted, int kOrder>
    NOINLINE void visit_rows(const A* in, const Places& at, int channels) {
        for (int i = 0; i < block.count; ++i)
            each_vector(channels, [&](auto lanes, int k) {
                visit_vector<kSlanted, kOrder, decltype(lanes)::value>(in, at, i, k);
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
        for (int64_t c = 0; c < p.C; c += CubicBlock<A>::kGroup) {
            const int channels = int(std::min<int64_t>(CubicBlock<A>::kGroup, p.C - c));
            block.read_grad_rows(c, channels);
            for (int i = 0; i < block.count; ++i) std::fill_n(out_rows[i], channels, A(0));
            each_field<kSecond>([&](const Field& f, const Places& at, auto slanted, auto order) {
                visit_rows<decltype(slanted)::value, decltype(order)::value>(
                    static_cast<const A*>(image_of(f, c)), at, channels);
            });
            if (p.out)
                for (int k = 0; k < channels; ++k)
                    block.write_out(c + k, out_rows[0] + k, CubicBlock<A>::kGroup);
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
          typed(fields.copy || p.dtype == DType::kFloat || p.dtype == DType::kDouble) {}

    /// What is wanted at the points of the block.
    NOINLINE void run() {
        // C channels that are all there is in a pixel, as in a photograph.
        const auto packed = [&](const Field& f) {
            return !f.data || (f.stride[1] == 1 && f.stride[4] == p.C);
        };
        const bool rows = second && !p.to_grad_grid ? fields.upstream.rows : fields.input.rows;
        const bool side_by_side =
            typed && !rows && (p.C == 2 || p.C == 3) && !second && packed(fields.input);
        const int64_t side = !typed ? 0 : side_by_side ? p.C : 1;
        if (!second || p.to_grad_grid) block.locate(fields.input, side, input);
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
