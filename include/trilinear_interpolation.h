// Corner order and launchers of trilinear_interpolation; the formula is in multilinear.h.
#pragma once
#include "multilinear.h"

/// Corner 4i + 2j + l lies at (i, j, l): the first axis is the slowest.
struct TrilinearCell : CornerOrder<3, false> {
    static constexpr const char* corner_order = "corner 4i + 2j + l at (i, j, l)";
};

OCTET_MULTILINEAR_LAUNCHERS(trilinear_interpolation)
