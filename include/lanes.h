// Vectors of neighbouring values for the CPU's kernels, in as many registers as the machine needs.
#pragma once
#include "common.h"

template <typename A, int L>
struct Lanes {
    typedef A type __attribute__((vector_size(L * sizeof(A))));
};

template <typename V, typename A>
inline V load_lanes(const A* from) {
    V lanes;
    memcpy(&lanes, from, sizeof(lanes));
    return lanes;
}

/// `count` elements `stride` apart, in the type that they are accumulated in.
template <typename T>
inline void gather(const T* from, int64_t stride, int64_t count, Acc<T>* __restrict to) {
    if (stride == 1)
        for (int64_t i = 0; i < count; ++i) to[i] = load(from[i]);
    else
        for (int64_t i = 0; i < count; ++i) to[i] = load(from[i * stride]);
}
