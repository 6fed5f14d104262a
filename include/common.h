// What every kernel shares, CPU and CUDA alike: element types, their arithmetic, small numbers.
// Knows nothing of torch, and includes no CUDA header, so that a `.cu` compiles in about a second.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HD __host__ __device__
#else
#define HD
#endif
#define OCTET_KERNEL extern "C" __attribute__((visibility("hidden")))

/// Element types of every operator; `include/glue.h` maps torch's onto them.
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
#if defined(__CUDA_ARCH__)
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#elif defined(__FLT16_MANT_DIG__)
    return float(bit_copy<_Float16>(x.bits));
#else
    // Exponent and mantissa moved into float's place and rescaled; this also handles subnormals.
    const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
    float y = bit_copy<float>(magnitude) * 0x1p112f;
    if ((x.bits & 0x7c00) == 0x7c00) y = bit_copy<float>(magnitude | 0x7f800000);
    return bit_copy<float>(bit_copy<uint32_t>(y) | sign);
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
#if defined(__CUDA_ARCH__)
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#elif defined(__FLT16_MANT_DIG__)
    return {bit_copy<uint16_t>(_Float16(x))};
#else
    // Adding a power of two that aligns the last kept bit lets the FPU do the rounding.
    const uint32_t bits = bit_copy<uint32_t>(x), magnitude = bits & 0x7fffffff;
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
    if (magnitude < 0x38800000) {
        const float shifted = bit_copy<float>(magnitude) + 0.5f;
        return {uint16_t(sign | (bit_copy<uint32_t>(shifted) - 0x3f000000))};
    }
    return {uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13))};
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

HD inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
