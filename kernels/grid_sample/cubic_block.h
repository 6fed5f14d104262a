// Blocks of points for bicubic interpolation on the CPU; see cubic_cpu.rest.cpp.
#pragma once
#include "blocks.h"

namespace {

/// Where the taps of a block lie in a field.
struct Places {
    int64_t offset[3][4][kBlock];  // along z, y, x; -1 outside
    int8_t plain[kBlock];          // whether a point's pixels can be read where they are
};

/// A block of points: their weights and the derivatives of these; what arrives at the points.
template <typename A>
struct CubicBlock : Points<A> {
    template <int L>
    using Vector = typename Lanes<A, L>::type;
    using Quad = Vector<4>;
    static constexpr int kMost = 3;  // channels side by side
    using Points<A>::p, Points<A>::count, Points<A>::axis, Points<A>::image, Points<A>::outermost;

    const int depth, orders;  // taps along z; how often weights are derived, and themselves
    A curve[3][4][kBlock];
    A direction[3][kBlock];             // what arrives for grad_grid
    alignas(64) A lanes[3][kBlock][4];  // x's weights, slopes and curves by point
    A grads[kMost][kBlock];             // grad_out of channels by planes
    A grad_rows[kBlock][kRow];          // and by rows

    explicit CubicBlock(const GridSampleParams& params)
        : Points<A>(params, params.grad_out != nullptr),
          depth(params.D == 3 ? 4 : 1),
          orders(params.to_grad_grid ? 3
                 : params.grad_out   ? 2
                                     : 1) {
        std::fill_n(curve[0][0], kBlock, A(0));
    }

    /// The weights of tap k along an axis, derived `order` times.
    const A* shares(int order, int a, int k) const {
        return order == 0 ? axis[a].weight[k] : order == 1 ? axis[a].slope[k] : curve[a][k];
    }
    NOINLINE void find(int a) {
        A x[kBlock];
        this->coordinates(p.grid, p.grid_points, p.grid_stride, a, x);
        Points<A>::template find<4>(a, x);
        if (orders < 3) return;
        const A scale = pixels_per_unit(A(p.whole[a]), p.align_corners);
        for (int i = 0; i < count; ++i) {
            const A at = unnormalized(x[i], A(p.whole[a]), p.align_corners);
            A w[4];
            Taps<A, 4>::cubic_curve(w, at - floor(at), scale * scale);
            for (int k = 0; k < 4; ++k) curve[a][k][i] = w[k];
        }
        this->coordinates(p.to_grad_grid, p.to_grad_grid_points, p.to_grad_grid_stride, a,
                          direction[a]);
    }
    /// All but the slowest axis, which is there.
    void find_others() {
        for (int a = outermost + 1; a < 3; ++a) find(a);
        for (int o = 0; o < orders; ++o)
            for (int i = 0; i < count; ++i)
                for (int k = 0; k < 4; ++k) lanes[o][i][k] = shares(o, 2, k)[i];
    }
    /// `side`: how far apart the pixels of a row are where they can be read as vectors; 0: nowhere.
    NOINLINE void locate(const Field& f, int64_t side, Places& to) const {
        const int n = count;
        for (int a = 0; a < 3; ++a)
            for (int k = 0; k < (a ? 4 : depth); ++k)
                for (int i = 0; i < n; ++i) {
                    const int at = axis[a].index[k][i];
                    to.offset[a][k][i] = at < 0 ? -1 : at * f.stride[2 + a];
                }
        const bool rows = f.rows && side, lines = f.stride[4] == side;
        for (int i = 0; i < n; ++i) {
            int all = 0;
            for (int a = 0; a < 3; ++a)
                for (int k = 0; k < (a ? 4 : depth); ++k) all |= axis[a].index[k][i];
            const bool neighbours = axis[2].index[3][i] - axis[2].index[0][i] == 3;
            to.plain[i] = (all >= 0) & (rows | (lines & neighbours));
        }
    }
    NOINLINE void read_grad_rows(int64_t c, int channels) {
        if (!p.grad_out) return;
        for (int k = 0; k < channels; ++k) {
            this->read_grad(c + k, grads[0]);
            for (int i = 0; i < count; ++i) grad_rows[i][k] = grads[0][i];
        }
    }
};

/// Calls `body` with how many channels are a vector, the first of these, and how many of them it
/// has had before: the last vector reaches back where fewer are left than it takes.
template <typename Body>
void each_vector(int channels, const Body& body) {
    using std::integral_constant;
    int k = 0;
    for (; k + 8 <= channels; k += 8) body(integral_constant<int, 8>(), k, 0);
    if (channels - k > 4 && channels > 8)
        return body(integral_constant<int, 8>(), channels - 8, k + 8 - channels);
    for (; k + 4 <= channels; k += 4) body(integral_constant<int, 4>(), k, 0);
    if (k < channels && channels > 4)
        return body(integral_constant<int, 4>(), channels - 4, k + 4 - channels);
    for (; k < channels; ++k) body(integral_constant<int, 1>(), k, 0);
}

}  // namespace
