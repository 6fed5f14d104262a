// Corner order and launchers of trilinear_interpolation; the formula is in multilinear.h.
#pragma once
#include "multilinear.h"

/// Corner 4i + 2j + l lies at (i, j, l): the first axis is the slowest.
struct TrilinearCell {
    static constexpr const char* corner_order = "corner 4i + 2j + l at (i, j, l)";
    static constexpr int D = 3;
    /// Which bit of a corner's index says where it lies along `axis`.
    HD static constexpr int bit(int axis) { return 2 - axis; }
};

OCTET_MULTILINEAR_LAUNCHERS(trilinear_interpolation)
