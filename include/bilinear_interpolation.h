// Corner order and launchers of bilinear_interpolation; the formula is in multilinear.h.
#pragma once
#include "multilinear.h"

/// Corner i + 2j lies at (i, j): the first axis is the fastest, the textbooks' f1 to f4.
struct BilinearCell {
    static constexpr int D = 2;
    /// Which bit of a corner's index says where it lies along `axis`.
    HD static constexpr int bit(int axis) { return axis; }
};

/// Forward where p->out is set, else backward. Null, or the error's text.
OCTET_KERNEL const char* bilinear_interpolation_cuda(const MultilinearParams* p, void* stream);
/// Its part for float16 and bfloat16.
OCTET_KERNEL const char* bilinear_interpolation_16bit_cuda(const MultilinearParams* p,
                                                           void* stream);
/// Points [begin, end).
OCTET_KERNEL void bilinear_interpolation_cpu(const MultilinearParams* p, int64_t begin,
                                             int64_t end);
