// The coordinates of a point and the gradient to them, of a type known at run time only: one branch
// for all, so that the loads are under way before anything waits for them.
#pragma once
#include "multilinear.h"

/// Calls `body` with a value of the C++ type that `dtype` stands for.
template <typename Body>
__device__ inline void of_type(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::kFloat: return body(float{});
        case DType::kDouble: return body(double{});
        case DType::kHalf: return body(Half{});
        default: return body(BFloat16{});
    }
}

template <typename A, int D>
__device__ inline void load_point(const MultilinearParams& p, int64_t n, A (&place)[D]) {
    of_type(p.points_dtype, [&](auto type) {
        const auto* x = static_cast<const decltype(type)*>(p.points) + n * p.points_stride[0];
#pragma unroll
        for (int d = 0; d < D; ++d) place[d] = A(load(x[d * p.points_stride[1]]));
    });
}

template <typename A, int D>
__device__ inline void store_gradient(const MultilinearParams& p, int64_t n, const A (&sums)[D]) {
    of_type(p.points_dtype, [&](auto type) {
        using P = decltype(type);
        P* to = static_cast<P*>(p.grad_points) + n * D;
#pragma unroll
        for (int d = 0; d < D; ++d) to[d] = store<P>(Acc<P>(sums[d]));
    });
}
