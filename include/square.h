// square and its gradient, element by element; launchers.
#pragma once
#include "elementwise.h"

struct Square {
    template <typename A>
    HD A operator()(A x, A) const {
        return x * x;
    }
};
struct SquareBackward {
    template <typename A>
    HD A operator()(A grad_out, A x) const {
        return 2 * grad_out * x;
    }
};

OCTET_KERNEL const char* square_cuda(const ElementwiseParams* p, void* stream);
OCTET_KERNEL const char* square_backward_cuda(const ElementwiseParams* p, void* stream);
/// Elements [begin, end).
OCTET_KERNEL void square_cpu(const ElementwiseParams* p, int64_t begin, int64_t end);
OCTET_KERNEL void square_backward_cpu(const ElementwiseParams* p, int64_t begin, int64_t end);
