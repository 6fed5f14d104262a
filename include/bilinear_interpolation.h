// Corner order and launchers of bilinear_interpolation; the formula is in multilinear.h.
#pragma once
#include "multilinear.h"

/// Corner i + 2j lies at (i, j): the first axis is the fastest, the textbooks' f1 to f4.
struct BilinearCell {
    static constexpr const char* corner_order = "corner i + 2j at (i, j)";
    static constexpr int D = 2;
    /// Which bit of a corner's index says where it lies along `axis`.
    HD static constexpr int bit(int axis) { return axis; }
};

OCTET_MULTILINEAR_LAUNCHERS(bilinear_interpolation)
