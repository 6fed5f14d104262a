// A CUDA source as plain C++: what `loader.source_module` puts before it where there is no GPU.
// Every thread of the grid runs after the other, so atomics are plain arithmetic. What needs
// threads that run at the same time (shared memory, barriers, warps) is refused before it comes
// here.
#pragma once
#include <math.h>  // these two put the overloads for float into the global namespace
#include <stdlib.h>

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <typeinfo>
#include <utility>

// CUDA's vectors: float2 to ulonglong4, with make_X.
#define OCTET_VECTORS(T, name, wide)                                   \
    struct name##1 { T x; };                                           \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                 \
    struct name##3 { T x, y, z; };                                     \
    struct alignas(wide) name##4 { T x, y, z, w; };                    \
    inline name##1 make_##name##1(T x) { return {x}; }                 \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
OCTET_VECTORS(signed char, char, 4)
OCTET_VECTORS(unsigned char, uchar, 4)
OCTET_VECTORS(short, short, 8)
OCTET_VECTORS(unsigned short, ushort, 8)
OCTET_VECTORS(int, int, 16)
OCTET_VECTORS(unsigned, uint, 16)
OCTET_VECTORS(long long, longlong, 16)
OCTET_VECTORS(unsigned long long, ulonglong, 16)
OCTET_VECTORS(float, float, 16)
OCTET_VECTORS(double, double, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

// CUDA's functions that C++ lacks.
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __int2float_rn(int x) { return float(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return int(std::floor(x)); }
inline int __float2int_ru(float x) { return int(std::ceil(x)); }
inline int __float2int_rz(float x) { return int(x); }
template <typename To, typename From>
inline To octet_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline int __float_as_int(float x) { return octet_bits<int>(x); }
inline float __int_as_float(int x) { return octet_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return octet_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return octet_bits<float>(x); }
inline long long __double_as_longlong(double x) { return octet_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return octet_bits<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
template <typename T>
inline T __ldg(const T* at) {
    return *at;
}
inline void __threadfence() {}

// Atomics: what was there before comes back.
template <typename T, typename F>
inline T octet_atomic(T* at, const F& change) {
    const T old = *at;
    *at = T(change(old));
    return old;
}
#define OCTET_ATOMIC(name, result)                              \
    template <typename T>                                       \
    inline T name(T* at, std::common_type_t<T> x) {             \
        return octet_atomic(at, [&](T old) { return result; }); \
    }
OCTET_ATOMIC(atomicAdd, old + x)
OCTET_ATOMIC(atomicSub, old - x)
OCTET_ATOMIC(atomicExch, (void(old), x))
OCTET_ATOMIC(atomicMin, x < old ? x : old)
OCTET_ATOMIC(atomicMax, x > old ? x : old)
OCTET_ATOMIC(atomicAnd, old& x)
OCTET_ATOMIC(atomicOr, old | x)
OCTET_ATOMIC(atomicXor, old ^ x)
OCTET_ATOMIC(atomicInc, old >= x ? 0 : old + 1)
OCTET_ATOMIC(atomicDec, old == 0 || old > x ? x : old - 1)
template <typename T>
inline T atomicCAS(T* at, std::common_type_t<T> compare, std::common_type_t<T> x) {
    return octet_atomic(at, [&](T old) { return old == compare ? x : old; });
}

// What ends a launch with an error instead of the process.
struct octet_failure {
    const char* text;
};
#define OCTET_TEXT(x) #x
#define OCTET_LINE(x) OCTET_TEXT(x)
#undef assert
#define assert(x) \
    ((x) ? void() : throw octet_failure{"assert(" #x ") failed in line " OCTET_LINE(__LINE__)})
#define __trap() \
    throw octet_failure { "__trap() in line " OCTET_LINE(__LINE__) }

#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Found again in the preprocessed source: these are the kernels.
#define __global__ __attribute__((__used__))

/// Calls `body`; null, or what fault ended it (jit/source/guard.cpp).
extern "C" const char* octet_guarded(void (*body)(void*), void* state);

/// Runs a kernel over a grid; its parameters lie at these addresses.
template <auto kernel>
struct octet_kernel;
template <typename... A, void (*kernel)(A...)>
struct octet_kernel<kernel> {
    static const char* run(const unsigned* shape, void** at) {
        return run(shape, at, std::index_sequence_for<A...>{});
    }
    template <size_t... I>
    static const char* run(const unsigned* shape, void** at, std::index_sequence<I...>) {
        gridDim = {shape[0], shape[1], shape[2]};
        blockDim = {shape[3], shape[4], shape[5]};
        failed = nullptr;
        const char* fault = octet_guarded(loop<I...>, at);
        if (fault || !failed) return fault;
        static char text[512];
        std::snprintf(text, sizeof text, "%s, thread (%u, %u, %u) of block (%u, %u, %u)", failed,
                      threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
        return text;
    }
    template <size_t... I>
    static void loop(void* addresses) {
        void** at = static_cast<void**>(addresses);
        try {
            for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
                for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
                    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
                        for (threadIdx.z = 0; threadIdx.z < blockDim.z; ++threadIdx.z)
                            for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
                                for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
                                    kernel(*static_cast<A*>(at[I])...);
        } catch (const octet_failure& failure) {
            failed = failure.text;
        } catch (...) {
            failed = "an exception of C++";
        }
    }
    inline static const char* failed;
    static const char* type() { return typeid(void(A...)).name(); }
    static constexpr size_t sizes[] = {sizeof(A)..., 0};
};
