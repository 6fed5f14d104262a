// add2, element by element.
#pragma once
#include "elementwise.h"

struct Add2 {
    template <typename A>
    HD A operator()(A a, A b) const {
        return a + b;
    }
};

OCTET_LAUNCHERS(add2)
