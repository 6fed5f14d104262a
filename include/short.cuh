// Elements of either 16-bit type, told apart where they are converted and not by the compiler:
// kernels that are compiled for two types of storage and not three compile in three quarters of the
// time.
#pragma once
#include <type_traits>

#include "common.h"

struct Short {
    uint16_t bits;
};
/// What such kernels are compiled for: Short for either 16-bit type.
template <typename T>
using Stored = std::conditional_t<sizeof(T) == 2, Short, T>;

template <typename T>
__device__ inline Acc<T> value_of(T x, DType) {
    return load(x);
}
__device__ inline float value_of(Short x, DType dtype) {
    return dtype == DType::kHalf ? load(Half{x.bits}) : load(BFloat16{x.bits});
}
template <typename T>
__device__ inline T stored(Acc<T> x, DType) {
    return store<T>(x);
}
template <>
__device__ inline Short stored<Short>(float x, DType dtype) {
    return {dtype == DType::kHalf ? store<Half>(x).bits : store<BFloat16>(x).bits};
}
