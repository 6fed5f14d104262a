// What every kernel shares, CPU and CUDA alike: element types, their arithmetic, small numbers.
// Knows nothing of torch, and includes no CUDA header, so that a `.cu` compiles in about a second.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HD __host__ __device__
#define HD_ONCE HD __noinline__
#else
#define HD
#define HD_ONCE __attribute__((noinline))
#endif
// HD_ONCE: what is long and seldom run is compiled once for each kernel and not for each use.
#define OCTET_KERNEL extern "C" __attribute__((visibility("hidden")))

/// Element types of every operator; `include/torch/glue.h` maps torch's onto them.
enum class DType : int32_t { kFloat, kDouble, kHalf, kBFloat16 };

/// 16-bit storage types: kernels load and store them, and compute in float.
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

/// The type in which T is accumulated: float for 16- and 32-bit elements, double for double.
template <typename T>
struct Accumulate {
    using type = float;
};
template <>
struct Accumulate<double> {
    using type = double;
};
template <typename T>
using Acc = typename Accumulate<T>::type;

template <typename To, typename From>
HD inline To bit_copy(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

HD inline float load(float x) { return x; }
HD inline double load(double x) { return x; }
HD inline float load(BFloat16 x) { return bit_copy<float>(uint32_t(x.bits) << 16); }
HD inline float load(Half x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#else
    // Exponent and mantissa moved to where a float has them; the product mends the exponent's bias
    // and subnormals too. Without branches, for the vectoriser (g++'s _Float16 is 5 times slower).
    const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
    const uint32_t scaled = bit_copy<uint32_t>(bit_copy<float>(magnitude) * 0x1p112f);
    const uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000 : 0;  // infinity and NaN
    return bit_copy<float>(scaled | special | uint32_t(x.bits & 0x8000) << 16);
#endif
}

/// Rounds to nearest even, NaN stays NaN.
template <typename T>
HD inline T store(Acc<T> x) {
    return T(x);
}
template <>
HD inline BFloat16 store<BFloat16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    BFloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#else
    const uint32_t bits = bit_copy<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
#endif
}
template <>
HD inline Half store<Half>(float x) {
#ifdef __CUDA_ARCH__
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#else
    // Adding a power of two whose last bit is the last that a half keeps makes the FPU round; the
    // two factors first send what is too large to infinity. Without branches, and by comparisons
    // of signed numbers, for the vectoriser: SSE and AVX have no others.
    const uint32_t bits = bit_copy<uint32_t>(x);
    const int32_t magnitude = bits & 0x7fffffff, exponent = bits & 0x7f800000;
    const float limited = (bit_copy<float>(magnitude) * 0x1p112f) * 0x1p-110f;
    const uint32_t shift = uint32_t(exponent > 0x38800000 ? exponent : 0x38800000) + 0x07800000;
    const uint32_t sum = bit_copy<uint32_t>(bit_copy<float>(shift) + limited);
    const uint32_t rounded = (sum >> 13 & 0x7c00) + (sum & 0xfff);
    const uint32_t nan = -uint32_t(magnitude > 0x7f800000);  // all bits, or none
    return {uint16_t((rounded & ~nan) | (nan & 0x7e00) | (bits >> 16 & 0x8000))};
#endif
}

/// Calls `body` with a value of the C++ type that `dtype` stands for.
template <typename Body>
inline void dispatch(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::kFloat: return body(float{});
        case DType::kDouble: return body(double{});
        case DType::kHalf: return body(Half{});
        case DType::kBFloat16: return body(BFloat16{});
    }
}

/// Element i of a buffer whose type is known at run time only, as A.
template <typename A>
HD inline A load_as(DType dtype, const void* data, int64_t i) {
    switch (dtype) {
        case DType::kFloat: return A(static_cast<const float*>(data)[i]);
        case DType::kDouble: return A(static_cast<const double*>(data)[i]);
        case DType::kHalf: return A(load(static_cast<const Half*>(data)[i]));
        default: return A(load(static_cast<const BFloat16*>(data)[i]));
    }
}
template <typename A>
HD inline void store_as(DType dtype, void* data, int64_t i, A x) {
    switch (dtype) {
        case DType::kFloat: static_cast<float*>(data)[i] = float(x); return;
        case DType::kDouble: static_cast<double*>(data)[i] = double(x); return;
        case DType::kHalf: static_cast<Half*>(data)[i] = store<Half>(float(x)); return;
        default: static_cast<BFloat16*>(data)[i] = store<BFloat16>(float(x)); return;
    }
}

HD inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
