// Tiles of float32 numbers as pairs of halves, for tensor cores.
//
// A number x of a tile, scaled by a power of two so that the tile's largest is below 2^15, is
// high + low / kLow: two halves of 11 bits each, of which a half is exact for all that is at least
// 2^-29 of the largest. A product of two such numbers is three of halves, each exact in float32;
// low times low, below 2^-22 of it, is left out. So it is off by less than what rounding does to a
// sum of some products in float32.
#pragma once
#include "tile.cuh"

constexpr float kLow = 2048;  // by what the lower halves are scaled
constexpr int kGroup = 8;     // numbers whose halves lie together: 16 bytes high, 16 bytes low
constexpr int kGroupBytes = 32;
constexpr int kTop = 15;  // of the largest number: below 2^kTop
constexpr unsigned kInfinity = 0x7f800000;

/// How a tile's numbers are scaled.
struct HalfScale {
    float scale;
    int exponent;  // scale = 2^exponent

    /// `largest`: the bits of the largest magnitude.
    __device__ explicit HalfScale(unsigned largest) {
        exponent = largest ? kTop - 1 - (int(largest >> 23) - 127) : 0;
        exponent = exponent > 126 ? 126 : exponent;
        scale = __uint_as_float(unsigned(exponent + 127) << 23);
    }
};

__device__ inline unsigned two_halves(float low, float high) {
    unsigned both = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
__device__ inline float half_of(unsigned both, bool upper) {
    return load(Half{static_cast<uint16_t>(upper ? both >> 16 : both)});
}

/// Two numbers as halves; returns whether a lower one is not 0.
__device__ inline bool split(float a, float b, float scale, unsigned& high, unsigned& low) {
    a *= scale, b *= scale;
    high = two_halves(a, b);
    low = two_halves((a - half_of(high, false)) * kLow, (b - half_of(high, true)) * kLow);
    return (low & 0x7fff7fff) != 0;
}

/// The largest bits of two values of each thread, in all threads. `shared`: two to a warp; what was
/// read of them before has been read by all.
__device__ inline void block_largest(unsigned& x, unsigned& y, uint2* shared) {
    for (int lane = 16; lane > 0; lane /= 2) {
        x = max(x, __shfl_xor_sync(~0u, x, lane));
        y = max(y, __shfl_xor_sync(~0u, y, lane));
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = {x, y};
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) x = max(x, shared[w].x), y = max(y, shared[w].y);
}
__device__ inline unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }

/// Rows of numbers in groups, before and after they are split.
template <int kGroups>
constexpr int kGroupPitch = kGroups * kGroupBytes + 16;  // an odd number of 16 bytes

/// Four neighbouring elements on their way into a tile, as they are in memory.
template <typename T>
__device__ inline void begin_copy(float* to, const T* from, Vector<T, kQuad>& word) {
#if __CUDA_ARCH__ >= 800
    if constexpr (sizeof(T) == 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(
                         static_cast<unsigned>(__cvta_generic_to_shared(to))),
                     "l"(from));
        return;
    }
#endif
    word = load_vector<T, kQuad>(from);
}
template <typename T>
__device__ inline void end_copy(float* to, const Vector<T, kQuad>& word, DType dtype) {
#if __CUDA_ARCH__ >= 800
    if constexpr (sizeof(T) == 4) return;
#endif
    quad(to) = {value_of(word.at[0], dtype), value_of(word.at[1], dtype),
                value_of(word.at[2], dtype), value_of(word.at[3], dtype)};
}

/// Four elements of a line one by one, from column x on.
template <typename T>
__device__ inline void copy_singly(float* to, const Image& from, const T* line, int64_t x) {
    for (int k = 0; k < kQuad; ++k) {
        const int64_t at = extended(x + k, from.W, from.boundary);
        to[k] = at < 0 ? 0.0f : value_of(line[at * from.along], from.dtype);
    }
}

/// Fills `rows` rows of a tile with numbers from (y, x) of an image on, as float32; x is a multiple
/// of 4 where words of 4 elements can be. What is filled is there after `largest_of`.
template <int kGroups>
__device__ __noinline__ void fill_groups(char* tile, const Image& from, int64_t y, int64_t x,
                                         int rows) {
    by_storage<float>(from.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int kEach = 2;  // groups of a thread under way
        const T* data = static_cast<const T*>(from.data) + from.begin;
        const auto address =
            reinterpret_cast<uintptr_t>(data + x) | uintptr_t(from.down) * sizeof(T);
        const bool words = from.along == 1 && address % (kQuad * sizeof(T)) == 0;
        for (int first = threadIdx.x; first < rows * kGroups; first += kEach * kThreads) {
            Vector<T, kQuad> word[kEach][2];
            bool whole[kEach][2];
#pragma unroll
            for (int e = 0; e < kEach; ++e) {
                const int i = first + e * kThreads, row = i / kGroups, group = i % kGroups;
                auto* to = reinterpret_cast<float*>(tile + row * kGroupPitch<kGroups> +
                                                    group * kGroupBytes);
                whole[e][0] = whole[e][1] = false;
                if (i >= rows * kGroups) break;
                const int64_t line = extended(y + row, from.H, from.boundary);
                const T* at = data + line * from.down;
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const int64_t column = x + group * kGroup + q * kQuad;
                    whole[e][q] = words && line >= 0 && column >= 0 && column + kQuad <= from.W;
                    if (whole[e][q])
                        begin_copy(to + q * kQuad, at + column, word[e][q]);
                    else if (line < 0)
                        quad(to + q * kQuad) = {};
                    else
                        copy_singly(to + q * kQuad, from, at, column);
                }
            }
#pragma unroll
            for (int e = 0; e < kEach; ++e) {
                const int i = first + e * kThreads, row = i / kGroups, group = i % kGroups;
                auto* to = reinterpret_cast<float*>(tile + row * kGroupPitch<kGroups> +
                                                    group * kGroupBytes);
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    if (whole[e][q]) end_copy(to + q * kQuad, word[e][q], from.dtype);
            }
        }
    });
}

/// Calls `body` with each group that this thread has filled in.
template <int kGroups, typename Body>
__device__ inline void own_groups(char* tile, int rows, const Body& body) {
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * kGroups; i += kThreads)
        body(reinterpret_cast<float*>(tile + i / kGroups * kGroupPitch<kGroups> +
                                      i % kGroups * kGroupBytes));
}

/// The largest magnitude's bits of what this thread has filled in.
template <int kGroups>
__device__ inline unsigned largest_of(char* tile, int rows) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    unsigned largest = 0;
    own_groups<kGroups>(tile, rows, [&](float* at) {
        const Quad<float> a = quad(at), b = quad(at + kQuad);
#pragma unroll
        for (int k = 0; k < kQuad; ++k)
            largest = max(largest, max(magnitude(a.at[k]), magnitude(b.at[k])));
    });
    return largest;
}

/// Makes halves of it; returns whether a lower one is not 0.
template <int kGroups>
__device__ inline bool split_groups(char* tile, int rows, float scale) {
    bool any = false;
    own_groups<kGroups>(tile, rows, [&](float* at) {
        const Quad<float> a = quad(at), b = quad(at + kQuad);
        uint4 high, low;
        any |= split(a.at[0], a.at[1], scale, high.x, low.x);
        any |= split(a.at[2], a.at[3], scale, high.y, low.y);
        any |= split(b.at[0], b.at[1], scale, high.z, low.z);
        any |= split(b.at[2], b.at[3], scale, high.w, low.w);
        reinterpret_cast<uint4*>(at)[0] = high;
        reinterpret_cast<uint4*>(at)[1] = low;
    });
    return any;
}

/// Which numbers of two tiles have lower halves: 1 where `x` holds in a thread, 2 where `y` does.
__device__ inline int which(bool x, bool y) {
    return (__syncthreads_or(x) ? 1 : 0) | (__syncthreads_or(y) ? 2 : 0);
}

/// Whether numbers of such largest magnitudes can be scaled and multiplied.
__device__ inline bool can_scale(unsigned largest, unsigned other, int exponent) {
#if __CUDA_ARCH__ >= 800
    return largest < kInfinity && other < kInfinity && exponent <= 100 && exponent >= -100;
#else
    return false;
#endif
}

/// A 16 x 8 piece of a matrix of halves: of high ones, and of low ones.
struct Piece {
    unsigned high[2], low[2];

    /// `at`: this lane's row, rows 0 to 15 for lanes 0 to 15, and again with the lower halves.
    __device__ void fetch(unsigned at) {
#if __CUDA_ARCH__ >= 800
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(high[0]), "=r"(high[1]), "=r"(low[0]), "=r"(low[1])
                     : "r"(at));
#endif
    }
};

/// sum += (16 x 16 halves, as two pieces) x (16 x 8 halves).
__device__ inline void multiply(float (&sum)[4], const unsigned (&left)[2],
                                const unsigned (&right)[2], unsigned upper, unsigned lower) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(right[0]), "r"(right[1]), "r"(upper), "r"(lower));
#endif
}
