// Corner order and launchers of bilinear_interpolation; the formula is in multilinear.h.
#pragma once
#include "multilinear.h"

/// Corner i + 2j lies at (i, j): the first axis is the fastest, the textbooks' f1 to f4.
struct BilinearCell : CornerOrder<2, true> {
    static constexpr const char* corner_order = "corner i + 2j at (i, j)";
};

OCTET_MULTILINEAR_LAUNCHERS(bilinear_interpolation)
