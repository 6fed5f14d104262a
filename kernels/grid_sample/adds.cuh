// How grid_sample's CUDA kernels add to the gradient to the input: words of channels or of pixels,
// pairs of 16 bits, single elements, sums in fixed point.
#pragma once
#include "fixed_point.cuh"
#include "job.cuh"
#include "short.cuh"

/// to[0 ... V - 1] += x, in any order among threads.
template <int V>
__device__ inline void add_floats(float* to, const float* x) {
    static_assert(V % 4 == 0, "whole words of 16 bytes");
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int j = 0; j < V; j += 4)
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + j), "f"(x[j]),
                     "f"(x[j + 1]), "f"(x[j + 2]), "f"(x[j + 3])
                     : "memory");
#else
#pragma unroll
    for (int j = 0; j < V; ++j) atomicAdd(to + j, x[j]);
#endif
}

/// Adds two 16-bit elements to a word of memory, rounded at each addition.
__device__ inline void add_pair(DType dtype, unsigned* to, float first, float second) {
    if (dtype == DType::kHalf) {
        const unsigned word = store<Half>(first).bits | unsigned(store<Half>(second).bits) << 16;
        asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(to), "r"(word) : "memory");
        return;
    }
#if __CUDA_ARCH__ >= 900
    const BFloat16 low = store<BFloat16>(first), high = store<BFloat16>(second);
    const unsigned word = low.bits | unsigned(high.bits) << 16;
    asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(to), "r"(word) : "memory");
#else
    unsigned seen = *to, expected;
    do {
        expected = seen;
        const float low = load(BFloat16{uint16_t(expected)}) + first;
        const float high = load(BFloat16{uint16_t(expected >> 16)}) + second;
        seen = atomicCAS(to, expected,
                         store<BFloat16>(low).bits | unsigned(store<BFloat16>(high).bits) << 16);
    } while (seen != expected);
#endif
}

/// Adds to a 16-bit element: a word at a time, which is what the memory adds quickly.
__device__ __noinline__ inline void add_16bit(const GridSampleJob& job, void* to, float x) {
    if (to == job.lone) {
        auto* const bits = static_cast<unsigned short*>(to);
        unsigned short seen = *bits, expected;
        do {
            expected = seen;
            const float sum = value_of(Short{expected}, job.sum_dtype) + x;
            seen = atomicCAS(bits, expected, stored<Short>(sum, job.sum_dtype).bits);
        } while (seen != expected);
        return;
    }
    const auto address = reinterpret_cast<uintptr_t>(to);
    const bool second = address & 2;
    add_pair(job.sum_dtype, reinterpret_cast<unsigned*>(address & ~uintptr_t(3)), second ? 0.f : x,
             second ? x : 0.f);
}

/// Adds to an element of the gradient to elements T, in the type of its sums.
template <typename T>
__device__ inline void add_one(const GridSampleJob& job, void* to, Acc<T> x) {
    // Not atomicAdd, which asks at run time whether an address is one of shared memory.
    if constexpr (sizeof(T) == 8)
        asm volatile("red.global.add.f64 [%0], %1;" ::"l"(to), "d"(x) : "memory");
    else if (sizeof(T) == 4 || job.sum_dtype == DType::kFloat)
        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
    else
        add_16bit(job, to, x);
}

/// to[0 ... count - 1] += x, of elements that lie side by side, where job.line says so: pixels
/// along x, or a pixel's channels and its neighbour's. In words of 16 bytes, wherever these begin,
/// as the L2 cache takes a request for each, with zeros beside them: those of x from `count` on are
/// zero. Not beyond the last whole word of the sums.
template <int N>
__device__ inline void add_line(const GridSampleJob& job, float* to, const float (&x)[N],
                                int count = N) {
#if __CUDA_ARCH__ >= 900
    constexpr int kWords = (N + 6) / 4;
    const int place = int(reinterpret_cast<uintptr_t>(to) / sizeof(float) & 3);
    float* const words = to - place;
    if (words + (place + count + 3) / 4 * 4 <= job.whole_words) {
        float by_one[N + 1], all[4 * kWords];  // moved up by so many places
#pragma unroll
        for (int j = 0; j <= N; ++j)
            by_one[j] =
                place & 1 ? (j > 0 ? x[j > 0 ? j - 1 : 0] : 0) : (j < N ? x[j < N ? j : 0] : 0);
#pragma unroll
        for (int j = 0; j < 4 * kWords; ++j) {
            const float moved = j >= 2 && j - 2 <= N ? by_one[j - 2] : 0;
            all[j] = place & 2 ? moved : j <= N ? by_one[j] : 0;
        }
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            if (4 * w < place + count) add_floats<4>(words + 4 * w, all + 4 * w);
        return;
    }
#endif
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (k < count) add_one<float>(job, to + k, x[k]);
}

/// Adds V channels that lie side by side, in the type of the sums.
template <int V>
__device__ inline void add_word(const GridSampleJob& job, char* to, const float (&x)[V]) {
    if (job.sum_dtype == DType::kFloat) return add_floats<V>(reinterpret_cast<float*>(to), x);
#pragma unroll
    for (int j = 0; j < V; j += 2)
        add_pair(job.sum_dtype, reinterpret_cast<unsigned*>(to) + j / 2, x[j], x[j + 1]);
}

/// Element `at` of p.grad_input.
__device__ inline char* sum_at(const GridSampleJob& job, int64_t at) {
    return static_cast<char*>(job.p.grad_input) + at * element_size(job.sum_dtype);
}

/// Adds to element `at` of p.grad_input, or to its sum in fixed point.
__device__ __noinline__ inline void add_fixed(const GridSampleJob& job, int64_t at, double x) {
    FixedPoint(job.fixed, job.places, job.terms).add(at, x);
}
template <typename T>
__device__ inline void add_at(const GridSampleJob& job, int64_t at, Acc<T> x) {
    if (job.fixed) return add_fixed(job, at, x);
    add_one<T>(job, sum_at(job, at), x);
}
