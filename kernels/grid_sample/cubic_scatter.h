// Bicubic interpolation on the CPU: the gradient to the input; see cubic_cpu.rest.cpp.
#pragma once
#include "cubic_block.h"

namespace {

template <typename A>
class CubicScatter {
    template <int L>
    using Vector = typename Lanes<A, L>::type;
    using Quad = Vector<4>;

    CubicBlock<A>& block;
    const Field& target;
    Places at;

    /// What grad_out is weighted by at a point's pixels of row (z, y): `weight` times x's weights
    /// and `slope` times its slopes along the direction.
    template <bool kSlanted>
    struct RowShare {
        A weight, slope;
        RowShare(const CubicScatter& of, int i, int z, int y) : slope(0) {
            const A wz = of.block.shares(0, 0, z)[i], wy = of.block.shares(0, 1, y)[i];
            weight = wz * wy;
            if (!kSlanted) return;
            slope = weight * of.block.direction[2][i];
            weight = of.block.direction[1][i] * wz * of.block.shares(1, 1, y)[i];
            if (of.block.depth > 1)
                weight += of.block.direction[0][i] * of.block.shares(1, 0, z)[i] * wy;
        }
        Quad of(const CubicScatter& of, int i, A factor) const {
            Quad share = factor * weight * load_lanes<Quad>(of.block.lanes[0][i]);
            if (kSlanted) share += factor * slope * load_lanes<Quad>(of.block.lanes[1][i]);
            return share;
        }
    };
    template <bool kSlanted>
    NOINLINE void scatter_plane(A* to, const A* grad) const {
        for (int i = 0; i < block.count; ++i)
            for (int z = 0; z < block.depth; ++z) {
                const int64_t oz = at.offset[0][z][i];
                if (oz < 0) continue;
                for (int y = 0; y < 4; ++y) {
                    const int64_t oy = at.offset[1][y][i];
                    if (oy < 0) continue;
                    const Quad share = RowShare<kSlanted>(*this, i, z, y).of(*this, i, grad[i]);
                    A* row = to + oz + oy;
                    if (at.plain[i]) {
                        row += at.offset[2][0][i];
                        const Quad sum = load_lanes<Quad>(row) + share;
                        memcpy(row, &sum, sizeof(sum));
                    } else {
                        for (int x = 0; x < 4; ++x)
                            if (at.offset[2][x][i] >= 0) row[at.offset[2][x][i]] += share[x];
                    }
                }
            }
    }
    template <int L>
    static void add_rows(A* to, const int64_t* at, const A* share, int count, const A* grad,
                         int had) {
        auto g = load_lanes<Vector<L>>(grad);
        for (int l = 0; l < had; ++l) g[l] = 0;
        for (int m = 0; m < count; ++m) {
            const auto sum = load_lanes<Vector<L>>(to + at[m]) + share[m] * g;
            memcpy(to + at[m], &sum, sizeof(sum));
        }
    }
    template <bool kSlanted>
    NOINLINE void scatter_rows(A* to, int channels) const {
        int64_t place[64];
        A share[64];
        for (int i = 0; i < block.count; ++i) {
            int count = 0;
            for (int z = 0; z < block.depth; ++z)
                for (int y = 0; y < 4; ++y) {
                    const int64_t oz = at.offset[0][z][i], oy = at.offset[1][y][i];
                    if ((oz | oy) < 0) continue;
                    const Quad four = RowShare<kSlanted>(*this, i, z, y).of(*this, i, 1);
                    for (int x = 0; x < 4; ++x) {
                        const int64_t ox = at.offset[2][x][i];
                        place[count] = oz + oy + ox, share[count] = four[x];
                        count += ox >= 0;
                    }
                }
            each_vector(channels, [&](auto lanes, int k, int had) {
                add_rows<decltype(lanes)::value>(to + k, place, share, count,
                                                 block.grad_rows[i] + k, had);
            });
        }
    }
    template <bool kSlanted>
    void scatter(const Part& part) {
        if (!target.rows)
            for (int64_t c = part.channels[0]; c < part.channels[1]; ++c) {
                block.read_grad(c, block.grads[0]);
                scatter_plane<kSlanted>(image_of(c), block.grads[0]);
            }
        else
            for (int64_t c = part.channels[0]; c < part.channels[1]; c += kRow) {
                const int64_t left = part.channels[1] - c;
                const int channels = int(std::min<int64_t>(kRow, left));
                block.read_grad_rows(c, channels);
                scatter_rows<kSlanted>(image_of(c), channels);
            }
    }
    A* image_of(int64_t c) const {
        return static_cast<A*>(target.data) + block.image * target.stride[0] + c * target.stride[1];
    }

  public:
    CubicScatter(CubicBlock<A>& block, const Field& target) : block(block), target(target) {}

    /// Adds what the points of the block share out to the pixels of the part.
    void run(const Part& part) {
        block.locate(target, 1, at);
        block.p.to_grad_grid ? scatter<true>(part) : scatter<false>(part);
    }
};

}  // namespace
