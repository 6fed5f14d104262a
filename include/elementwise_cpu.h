// The CPU loop of elementwise operators; see elementwise.h.
#pragma once
#include "elementwise.h"

/// Elements [begin, end) in row-major order, a run of the innermost dimension at a time.
template <typename T, typename Function>
void elementwise_range(const ElementwiseParams& p, int64_t begin, int64_t end) {
    const int inner = p.dims - 1;
    const int64_t s0 = p.stride[0][inner], s1 = p.stride[1][inner], s2 = p.stride[2][inner];
    while (begin < end) {
        int64_t row = begin / p.size[inner], column = begin % p.size[inner];
        int64_t at[3] = {column * s0, column * s1, column * s2};
        for (int d = inner - 1; d >= 0; --d) {
            for (int i = 0; i < 3; ++i) at[i] += row % p.size[d] * p.stride[i][d];
            row /= p.size[d];
        }
        const T* a = static_cast<const T*>(p.in[0]) + at[0];
        const T* b = static_cast<const T*>(p.in[1]) + at[1];
        T* __restrict out = static_cast<T*>(p.out) + at[2];
        const int64_t left = p.size[inner] - column,
                      length = end - begin < left ? end - begin : left;
        if (s0 == 1 && s1 == 1 && s2 == 1)
            for (int64_t i = 0; i < length; ++i)
                out[i] = store<T>(Function()(load(a[i]), load(b[i])));
        else
            for (int64_t i = 0; i < length; ++i)
                out[i * s2] = store<T>(Function()(load(a[i * s0]), load(b[i * s1])));
        begin += length;
    }
}

template <typename Function>
void elementwise_cpu(const ElementwiseParams& p, int64_t begin, int64_t end) {
    dispatch(p.dtype,
             [&](auto element) { elementwise_range<decltype(element), Function>(p, begin, end); });
}
