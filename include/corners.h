// The corners of a cell and their shares in a place in it: the one formula of what interpolates
// linearly along each axis, of its slopes and of its mixed derivatives. ops/corners.py says the
// same in PyTorch.
//
// Written out beside it where that is quicker, each with its reason: `Position` in multilinear.h
// and `Corners::slope` in hash_grid_encoding.h, of which nvcc makes fewer instructions;
// grid_sample's `weights` in kernels/grid_sample/blocks.h, the same mask in vectors of points; and,
// where slopes meet dot products, differences, with half the multiplications: `slopes` in
// kernels/grid_sample/cell.cuh and `trilinear_slopes` in apply_lut3d.h.
#pragma once
#include "common.h"

/// How the 2^D corners of a cell are numbered: along which axis neighbours in number lie.
template <int kD, bool kFirstFastest>
struct CornerOrder {
    static constexpr int D = kD;
    /// Which bit of a corner's number says on which side of `axis` it lies.
    HD static constexpr int bit(int axis) { return kFirstFastest ? axis : D - 1 - axis; }
};

/// The share of corner k: the product over the axes of what its side of each has in the place,
/// `side(axis, upper)`: t or 1 - t. Axes whose bits are in `derived` are differentiated: the upper
/// side grows by `slope`, the lower one shrinks by it. None derived is the weight, one a slope, two
/// a mixed derivative; twice by the same axis there is nothing.
template <typename Order, typename A, typename Side>
HD inline A corner_share(int k, int derived, A slope, const Side& side) {
    A share = 1;
    for (int d = 0; d < Order::D; ++d) {
        const bool upper = k >> Order::bit(d) & 1;
        share *= derived >> d & 1 ? (upper ? slope : -slope) : side(d, upper);
    }
    return share;
}
