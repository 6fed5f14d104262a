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

/// Null, or the text of the error that the launch before it left.
inline const char* launch_error() {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
