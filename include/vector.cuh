// Loads and stores of several neighbouring elements at once, for CUDA kernels.
#pragma once
#include "common.h"

/// V neighbouring elements, moved between memory and registers as one word of up to 16 bytes.
template <typename T, int V>
struct alignas(sizeof(T) * V) Vector {
    T at[V];
};

template <int Bytes>
struct Word;
template <>
struct Word<16> {
    using type = uint4;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<4> {
    using type = unsigned;
};
template <>
struct Word<2> {
    using type = unsigned short;
};

/// In one access. The cache hints for data used once (`ld.cs`, `st.cs`) cost up to 8 % on an H200
/// where reads and writes mix, so there are none.
template <typename T, int V>
__device__ inline Vector<T, V> load_vector(const T* from) {
    using W = typename Word<sizeof(T) * V>::type;
    return bit_copy<Vector<T, V>>(*reinterpret_cast<const W*>(from));
}
/// From memory that nothing writes to while the kernel runs.
template <typename T, int V>
__device__ inline Vector<T, V> load_constant(const T* from) {
    using W = typename Word<sizeof(T) * V>::type;
    return bit_copy<Vector<T, V>>(__ldg(reinterpret_cast<const W*>(from)));
}
template <typename T, int V>
__device__ inline void store_vector(T* to, Vector<T, V> x) {
    using W = typename Word<sizeof(T) * V>::type;
    *reinterpret_cast<W*>(to) = bit_copy<W>(x);
}

/// The 16 bytes that begin `offset` bytes, 0 to 15 and a whole number of elements, after the first
/// of two words.
template <typename T>
__device__ inline uint4 window(uint4 low, uint4 high, unsigned offset) {
    unsigned x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (offset & 8) {
#pragma unroll
        for (int i = 0; i < 6; ++i) x[i] = x[i + 2];
    }
    if (sizeof(T) < 8 && offset & 4) {
#pragma unroll
        for (int i = 0; i < 5; ++i) x[i] = x[i + 1];
    }
    if (sizeof(T) < 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __funnelshift_r(x[i], x[i + 1], offset % 4 * 8);
    }
    return {x[0], x[1], x[2], x[3]};
}
/// As many elements as a word has, from wherever elements lie. Reads no word that has none of them.
template <typename T>
__device__ inline Vector<T, 16 / sizeof(T)> load_anywhere(const T* from) {
    const auto at = reinterpret_cast<uintptr_t>(from), end = at + 15;
    const uint4 low = *reinterpret_cast<const uint4*>(at - at % 16);
    const uint4 high = *reinterpret_cast<const uint4*>(end - end % 16);
    return bit_copy<Vector<T, 16 / sizeof(T)>>(window<T>(low, high, unsigned(at) % 16));
}

/// Null, or the text of the error that the launch before it left.
inline const char* launch_error() {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
