// Vectors of neighbouring values for the CPU's kernels, in as many registers as the machine needs.
#pragma once
#include <type_traits>

#include "common.h"

/// Bytes of the machine's widest registers. Arrays of wider vectors g++ keeps in memory.
#if defined(__AVX512F__)
constexpr int kVector = 64;
#elif defined(__AVX__)
constexpr int kVector = 32;
#else
constexpr int kVector = 16;
#endif

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

/// Writes `kLeft` sums of lanes that are so far apart; neighbours come last.
template <typename A, int L, int kLeft>
inline void sum_lanes(typename Lanes<A, L>::type lanes, A* sums) {
    if constexpr (L == kLeft) {
        memcpy(sums, &lanes, sizeof(lanes));
    } else {
        typename Lanes<A, L / 2>::type low, high;  // no array, which g++ would put into memory
        memcpy(&low, &lanes, sizeof(low));
        memcpy(&high, reinterpret_cast<const char*>(&lanes) + sizeof(low), sizeof(high));
        sum_lanes<A, L / 2, kLeft>(low + high, sums);
    }
}
/// The sum of all lanes.
template <typename A, int L>
inline A sum_lanes(typename Lanes<A, L>::type lanes) {
    A sum;
    sum_lanes<A, L, 1>(lanes, &sum);
    return sum;
}

/// All bits of the first `count` lanes, for `only`.
template <typename A, int L>
inline auto keep_lanes(int64_t count) {
    using Bits = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
    typename Lanes<Bits, L>::type lane;
    for (int i = 0; i < L; ++i) lane[i] = i;
    return lane < Bits(count < L ? count : L);
}
/// The lanes kept, and 0 in the others, NaN or not.
template <typename Kept, typename V>
inline V only(Kept kept, V lanes) {
    return V(Kept(lanes) & kept);
}

/// `count` neighbouring elements, in the type that they are accumulated in.
template <typename T>
inline void load_run(const T* from, int64_t count, Acc<T>* __restrict to) {
    for (int64_t i = 0; i < count; ++i) to[i] = load(from[i]);
}
/// The same back.
template <typename T>
inline void store_run(const Acc<T>* from, int64_t count, T* __restrict to) {
    for (int64_t i = 0; i < count; ++i) to[i] = store<T>(from[i]);
}

/// True where the CPU converts T itself.
template <typename T>
constexpr bool kConverts = false;

#ifdef __F16C__
template <>
constexpr bool kConverts<Half> = true;
// By the CPU's own conversions, five times as fast as by arithmetic; a NaN keeps more of its bits.
// Its intrinsics' header would take the compiler longer than all of a small kernel.
typedef short HalfLanes __attribute__((vector_size(16)));

template <>
inline void load_run(const Half* from, int64_t count, float* __restrict to) {
    const auto some = [&](int64_t i, int64_t n) {
        HalfLanes halves = {};
        memcpy(&halves, from + i, n * sizeof(Half));
        const Lanes<float, 8>::type floats = __builtin_ia32_vcvtph2ps256(halves);
        memcpy(to + i, &floats, n * sizeof(float));
    };
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) some(i, 8);
    if (i < count) some(i, count - i);
}
template <>
inline void store_run(const float* from, int64_t count, Half* __restrict to) {
    const auto some = [&](int64_t i, int64_t n) {
        Lanes<float, 8>::type floats = {};
        memcpy(&floats, from + i, n * sizeof(float));
        const HalfLanes halves = __builtin_ia32_vcvtps2ph256(floats, 0);  // to the nearest, even
        memcpy(to + i, &halves, n * sizeof(Half));
    };
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) some(i, 8);
    if (i < count) some(i, count - i);
}
#endif

/// A function of its own: inlined, g++ forgets that `to` is apart, and takes one after the other.
template <typename T>
__attribute__((noinline)) void gather_apart(const T* from, int64_t stride, int64_t count,
                                            Acc<T>* __restrict to) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; ++i) to[i] = load(from[i * stride]);
}
/// `count` elements `stride` apart, in the type that they are accumulated in.
template <typename T>
inline void gather(const T* from, int64_t stride, int64_t count, Acc<T>* __restrict to) {
    stride == 1 ? load_run(from, count, to) : gather_apart(from, stride, count, to);
}
