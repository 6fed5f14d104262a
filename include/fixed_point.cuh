// Sums into places that many threads of a CUDA kernel add to, with the same bits in every run.
//
// A floating-point sum depends on the order of its addends, which atomics leave open. Here addends
// become 64-bit integers, multiples of a power of two, whose sum has no order. With M >= |addend|
// and at most `terms` addends to a place, the unit is 2^-61 M terms, both rounded up to powers of
// two: nothing overflows, and even with 2^23 addends each keeps 38 bits. The steps, in one stream:
//   1. find_largest: M, over the values that will be weighted and added;
//   2. any kernels: FixedPoint(memory, places, terms).add(place, x);
//   3. finish_fixed_point, or FixedPoint::value<T>(place): sums rounded to the output's type.
// `memory` has fixed_point_words(places) words and is zeroed before step 1. Between uses on the
// same M (parts of an output in turn) only the words from memory + 1 on are zeroed again.
// A NaN or an infinity among the addends of a place, or an addend beyond the bound, makes it NaN.
#pragma once
#include "common.h"

/// 64-bit words of memory that a sum into so many places takes: M, the sums, a bit for each.
inline int64_t fixed_point_words(int64_t places) { return 1 + places + ceil_div(places, 64); }

#ifdef __CUDACC__
/// The accumulator, as each thread makes it for itself.
struct FixedPoint {
    unsigned long long *sums, *spoilt;
    double scale, inverse;  // powers of two

    /// `terms`: most addends of one place, weighted by their greatest weight; up to 2^50.
    __device__ FixedPoint(unsigned long long* memory, int64_t places, int64_t terms)
        : sums(memory + 1), spoilt(memory + 1 + places) {
        const int magnitude = int(memory[0] >> 52) - 1022;  // M < 2^magnitude
        const int count = terms > 1 ? 64 - __clzll(terms - 1) : 0;
        const int shift = min(61 - magnitude - count, 1022);
        scale = __longlong_as_double(int64_t(1023 + shift) << 52);
        inverse = __longlong_as_double(int64_t(1023 - shift) << 52);
    }

    __device__ void add(int64_t place, double x) const {
        x *= scale;
        if (fabs(x) <= 0x1p61)  // false for a NaN
            atomicAdd(sums + place, static_cast<unsigned long long>(__double2ll_rn(x)));
        else
            atomicOr(spoilt + place / 64, 1ull << (place % 64));
    }

    template <typename T>
    __device__ T value(int64_t place) const {
        const double sum = double(static_cast<long long>(sums[place])) * inverse;
        const bool lost = spoilt[place / 64] >> (place % 64) & 1;
        return store<T>(Acc<T>(lost ? __longlong_as_double(0x7ff8000000000000) : sum));
    }
};

/// An array of up to five dimensions, strides in elements.
struct Strided {
    const void* data;
    DType dtype;
    int dims;
    int64_t size[5], stride[5];

    __device__ double at(int64_t i) const { return load_as<double>(dtype, data, i); }
    /// Where element i lies. Not inlined: the divisions would be there for each of many at a time.
    __device__ __noinline__ int64_t offset(int64_t i) const {
        int64_t at = 0;
#pragma unroll 1
        for (int d = dims - 1; d >= 0; --d) {
            at += i % size[d] * stride[d];
            i /= size[d];
        }
        return at;
    }
};

constexpr int kFixedPointThreads = 256;

/// The greatest finite magnitude, as a double's bits, which are ordered as it is. A template, as
/// `find_largest` is: compiled where it is used and not wherever there are sums.
template <typename Bits>
__global__ void __launch_bounds__(kFixedPointThreads)
    largest_kernel(const __grid_constant__ Strided x, int64_t count, bool dense, Bits* largest) {
    const int64_t step = int64_t(gridDim.x) * kFixedPointThreads;
    double most = 0;
#pragma unroll 4
    for (int64_t i = int64_t(blockIdx.x) * kFixedPointThreads + threadIdx.x; i < count; i += step) {
        const double magnitude = fabs(x.at(dense ? i : x.offset(i)));
        if (magnitude <= 0x1.fffffffffffffp1023) most = fmax(most, magnitude);
    }
    for (int mask = 16; mask > 0; mask /= 2) most = fmax(most, __shfl_xor_sync(~0u, most, mask));
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(largest, __double_as_longlong(most));
}

/// Step 1. `largest` is the first word of the memory, and zeroed.
template <typename Bits>
inline void find_largest(const Strided& x, Bits* largest, cudaStream_t stream) {
    int64_t count = 1;
    bool dense = true;
    for (int d = x.dims - 1; d >= 0; --d) {
        dense = dense && (x.size[d] == 1 || x.stride[d] == count);
        count *= x.size[d];
    }
    const int64_t blocks = ceil_div(count, 4 * kFixedPointThreads);
    if (blocks > 0)
        largest_kernel<<<unsigned(blocks < 2048 ? blocks : 2048), kFixedPointThreads, 0, stream>>>(
            x, count, dense, largest);
}

template <typename T>
__global__ void __launch_bounds__(kFixedPointThreads)
    fixed_point_kernel(T* out, unsigned long long* memory, int64_t places, int64_t terms) {
    const int64_t i = int64_t(blockIdx.x) * kFixedPointThreads + threadIdx.x;
    if (i < places) out[i] = FixedPoint(memory, places, terms).template value<T>(i);
}

/// Step 3, to neighbouring elements.
template <typename T>
inline void finish_fixed_point(T* out, unsigned long long* memory, int64_t places, int64_t terms,
                               cudaStream_t stream) {
    const int64_t blocks = ceil_div(places, kFixedPointThreads);
    if (blocks > 0)
        fixed_point_kernel<T>
            <<<unsigned(blocks), kFixedPointThreads, 0, stream>>>(out, memory, places, terms);
}
#endif
