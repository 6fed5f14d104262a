// What operators share that compute each element of `out` from the same element of their inputs.
// An operator gives a function object, `A operator()(A first, A second)`; where it has one input
// only, both are that input and the second goes unused.
#pragma once
#include "common.h"

constexpr int kMaxDims = 8;  // after neighbouring dimensions are merged

struct ElementwiseParams {
    const void* in[2];
    void* out;
    int64_t numel;
    int dims;                     // at least 1; 1 where all three are contiguous
    int64_t size[kMaxDims];       // outermost first
    int64_t stride[3][kMaxDims];  // in elements; of in[0], in[1], out
    DType dtype;                  // of all three
};
