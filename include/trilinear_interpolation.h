// Corner order and launchers of trilinear_interpolation; the formula is in multilinear.h.
#pragma once
#include "multilinear.h"

/// Corner 4i + 2j + l lies at (i, j, l): the first axis is the slowest.
struct TrilinearCell {
    static constexpr int D = 3;
    /// Which bit of a corner's index says where it lies along `axis`.
    HD static constexpr int bit(int axis) { return 2 - axis; }
};

/// Forward where p->out is set, else backward. Null, or the error's text.
OCTET_KERNEL const char* trilinear_interpolation_cuda(const MultilinearParams* p, void* stream);
/// Its part for float16 and bfloat16.
OCTET_KERNEL const char* trilinear_interpolation_16bit_cuda(const MultilinearParams* p,
                                                            void* stream);
/// Points [begin, end).
OCTET_KERNEL void trilinear_interpolation_cpu(const MultilinearParams* p, int64_t begin,
                                              int64_t end);
