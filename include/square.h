// square and its gradient, element by element.
#pragma once
#include "elementwise.h"

struct Square {
    template <typename A>
    HD A operator()(A x) const {
        return x * x;
    }
};
struct SquareBackward {
    template <typename A>
    HD A operator()(A grad_out, A x) const {
        return 2 * grad_out * x;
    }
};

OCTET_LAUNCHERS(square)
OCTET_LAUNCHERS(square_backward)
