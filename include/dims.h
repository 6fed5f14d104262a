// Neighbouring dimensions of tensors, merged where one stride serves both.
#pragma once
#include "common.h"

/// Sizes and strides of tensors of one shape, outermost first, neighbouring dimensions merged where
/// every tensor lets them and those of size 1 left out. `stride` and `merged_stride` have an array
/// for each tensor. Returns how many dimensions are left; -1 for over `most`.
inline int merge_dims(int64_t dims, const int64_t* size, const int64_t* const* stride, int tensors,
                      int most, int64_t* merged, int64_t* const* merged_stride) {
    int n = 0;
    for (int64_t d = 0; d < dims; ++d) {
        if (size[d] == 1) continue;
        bool merge = n > 0;
        for (int i = 0; merge && i < tensors; ++i)
            merge = merged_stride[i][n - 1] == size[d] * stride[i][d];
        if (!merge && n == most) return -1;
        if (!merge) merged[n++] = 1;
        merged[n - 1] *= size[d];
        for (int i = 0; i < tensors; ++i) merged_stride[i][n - 1] = stride[i][d];
    }
    return n;
}
