// The coordinates of a point and the gradient to them, of a type known at run time only: one branch
// for all, so that the loads are under way before anything waits for them.
#pragma once
#include <type_traits>

#include "multilinear.h"
#include "short.cuh"

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

/// A point that is being read: nothing waits for its coordinates before `in` converts them.
template <typename A, int D>
struct LoadedPoint {
    using Bits = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;
    DType dtype;
    Bits bits[D];  // of each coordinate as it is in memory, or of A where that is shorter

    LoadedPoint() = default;
    __device__ LoadedPoint(const MultilinearParams& p, int64_t n) { read(p, n); }
    __device__ void read(const MultilinearParams& p, int64_t n) {
        dtype = p.points_dtype;
        const int64_t first = n * p.points_stride[0], step = p.points_stride[1];
        if (dtype == DType::kFloat) {
#pragma unroll
            for (int d = 0; d < D; ++d)
                bits[d] = static_cast<const uint32_t*>(p.points)[first + d * step];
        } else if (is_short()) {
#pragma unroll
            for (int d = 0; d < D; ++d)
                bits[d] = static_cast<const uint16_t*>(p.points)[first + d * step];
        } else {
#pragma unroll
            for (int d = 0; d < D; ++d)
                bits[d] = bit_copy<Bits>(A(static_cast<const double*>(p.points)[first + d * step]));
        }
    }
    __device__ bool is_short() const { return dtype == DType::kHalf || dtype == DType::kBFloat16; }
    /// Its position in a cell.
    template <typename Cell>
    __device__ Position<Cell, A> in() const {
        A place[D];
        if (is_short()) {
#pragma unroll
            for (int d = 0; d < D; ++d) place[d] = A(value_of(Short{uint16_t(bits[d])}, dtype));
        } else {
#pragma unroll
            for (int d = 0; d < D; ++d)
                place[d] = sizeof(A) == 8 && dtype == DType::kDouble
                               ? bit_copy<A>(bits[d])
                               : A(bit_copy<float>(uint32_t(bits[d])));
        }
        return Position<Cell, A>(place);
    }
};

template <typename A, int D>
__device__ inline void store_gradient(const MultilinearParams& p, int64_t n, const A (&sums)[D]) {
    of_type(p.points_dtype, [&](auto type) {
        using P = decltype(type);
        P* to = static_cast<P*>(p.grad_points) + n * D;
#pragma unroll
        for (int d = 0; d < D; ++d) to[d] = store<P>(Acc<P>(sums[d]));
    });
}
