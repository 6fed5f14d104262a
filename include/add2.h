// add2, element by element; launchers.
#pragma once
#include "elementwise.h"

struct Add2 {
    template <typename A>
    HD A operator()(A a, A b) const {
        return a + b;
    }
};

OCTET_KERNEL const char* add2_cuda(const ElementwiseParams* p, void* stream);
/// Elements [begin, end).
OCTET_KERNEL void add2_cpu(const ElementwiseParams* p, int64_t begin, int64_t end);
