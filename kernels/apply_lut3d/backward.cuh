// The kernels of apply_lut3d's gradients on the GPU.
//
// grad_image gathers, as the forward does. grad_lut scatters: many pixels add to few entries, and
// atomics bind. Neighbouring pixels of a photograph mostly share a cell, so a thread takes a run of
// them and keeps the sums of the cell's corners in registers until the cell changes. An entry then
// costs one vector reduction of 16 bytes (sm_90; three of 4 bytes before it). Additions to the same
// entry wait for each other: many pixels on few entries go to several copies of the sums, and those
// of a tiny table to shared memory first, where lanes have copies of their own. apply_lut3d_plan()
// chooses.
//
// In the deterministic form the sums are whole numbers of 64 bits, which any order adds up to the
// same bits. Their unit is a power of two that fits the largest |grad_out|, a pass of its own, so
// that N terms cannot overflow: 62 - log2 N bits below that largest value are kept, 38 for 16
// million pixels; for float64 a second number has as many again. What is not finite goes into
// flags.
#pragma once
#include "cells.cuh"

// Threads of a block that sums in shared memory: as registers allow.
template <typename A>
constexpr int kSharedThreads = sizeof(A) == 8 ? 384 : 768;

/// `sums` of the deterministic form.
struct Fixed {
    unsigned long long* largest;  // bits of the largest |grad_out| as a double
    unsigned long long *high, *low;
    int* flags;  // 1: an infinity was met, 2: a negative one; 3: NaN is the sum
    int bits;    // that a term may have

    HD Fixed(const ApplyLut3dParams& p) {
        const int64_t count = 3 * int64_t(p.entries);
        largest = static_cast<unsigned long long*>(p.sums);
        high = largest + 32;
        low = p.dtype == DType::kDouble ? high + count : high;
        flags = reinterpret_cast<int*>(low + count);
        bits = 62;
        for (int64_t n = p.N; n > 1; n = (n + 1) / 2) --bits;
    }
    /// How many units are 1.
    __device__ double scale() const {
        const double most = __longlong_as_double(static_cast<long long>(*largest));
        if (most == 0) return 1;
        const int shift = bits - (ilogb(most) + 1);
        return scalbn(1.0, shift < 1000 ? shift : 1000);
    }
    template <typename A>
    __device__ void add(int64_t i, A x, double scale) const {
        if (!isfinite(x)) {
            atomicOr(flags + i, x > 0 ? 1 : x < 0 ? 2 : 3);
            return;
        }
        const double scaled = double(x) * scale, whole = rint(scaled);
        atomicAdd(high + i, static_cast<unsigned long long>(static_cast<long long>(whole)));
        if constexpr (sizeof(A) == 8) {
            const double rest = rint(scalbn(scaled - whole, bits));
            atomicAdd(low + i, static_cast<unsigned long long>(static_cast<long long>(rest)));
        }
    }
};

template <typename T>
__global__ void largest_kernel(ApplyLut3dParams p) {
    const T* from = static_cast<const T*>(p.grad_out);
    const int64_t step = int64_t(gridDim.x) * kLutThreads;
    double most = 0;
    for (int64_t n = int64_t(blockIdx.x) * kLutThreads + threadIdx.x; n < p.N; n += step) {
        const T* pixel = from + p.grad_out_at(n);
        for (int c = 0; c < 3; ++c) {
            const double x = fabs(double(value_of(pixel[c * p.grad_out_at.channel], p.dtype)));
            if (isfinite(x) && x > most) most = x;
        }
    }
    for (int lane = 16; lane > 0; lane /= 2)
        most = fmax(most, __shfl_xor_sync(0xffffffff, most, lane));
    if (threadIdx.x % 32 == 0)  // positive doubles are ordered as their bits are
        atomicMax(Fixed(p).largest, static_cast<unsigned long long>(__double_as_longlong(most)));
}

template <typename A>
__device__ inline void add_entry(A* to, const A* x) {
#pragma unroll
    for (int c = 0; c < 3; ++c) atomicAdd(to + c, x[c]);
}
#if __CUDA_ARCH__ >= 900
template <>
__device__ inline void add_entry(float* to, const float* x) {
    atomicAdd(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], 0));
}
#endif

/// Not inlined: its code would be there dozens of times.
template <typename A>
__device__ __noinline__ void add_fixed(const Fixed& fixed, int64_t i, A r, A g, A b, double scale) {
    fixed.add(i, r, scale);
    fixed.add(i + 1, g, scale);
    fixed.add(i + 2, b, scale);
}

/// Where sums of numbers go: to the table's in memory.
template <typename A>
struct MemorySums {
    A* to;
    bool deterministic;
    double scale;

    __device__ void add(const ApplyLut3dParams& p, int64_t i, const A* x) const {
        if (deterministic)
            add_fixed(Fixed(p), 3 * i, x[0], x[1], x[2], scale);
        else
            add_entry(to + 4 * i, x);
    }
};

/// Or to a block's own in shared memory, where lanes have as many copies as there is room for: no
/// two lanes of a warp then wait for each other, nor for a bank.
template <typename A>
struct SharedSums {
    A* to;
    int copies;  // a power of two

    __device__ void add(const ApplyLut3dParams&, int32_t i, const A* x) const {
        A* at = to + 3 * i * copies + (threadIdx.x & (copies - 1));
#pragma unroll
        for (int c = 0; c < 3; ++c) atomicAdd(at + c * copies, x[c]);
    }
};

/// Adds a cell's sums.
template <typename Sums, typename A>
__device__ inline void flush(const ApplyLut3dParams& p, const Sums& sums, int32_t entry,
                             const A (*sum)[3]) {
    if (entry < 0) return;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        if (sum[k][0] == 0 && sum[k][1] == 0 && sum[k][2] == 0) continue;
        sums.add(p, entry + corner_offset(k, p.S), sum[k]);
    }
}

/// The weights of a cell's eight corners; of those that are no corner of the tetrahedron, 0.
template <bool kTetrahedral, typename A>
__device__ inline void corner_weights(const A* t, A* weight) {
    if constexpr (kTetrahedral) {
        const Tetrahedron<A> corners(t, 1);
        // Corner numbers of the two in the middle: the axis' bit, or all bits but the last axis'.
        const int bit[] = {4, 2, 1};
        int first = 0, second = 7;
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            if (corners.rank[axis] == 0) first = bit[axis];
            if (corners.rank[axis] == 2) second = 7 - bit[axis];
        }
        weight[0] = corners.weight[0], weight[7] = corners.weight[3];
#pragma unroll
        for (int k = 1; k < 7; ++k)
            weight[k] = k == first ? corners.weight[1] : k == second ? corners.weight[2] : A(0);
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) weight[k] = corner_weight(k, t);
    }
}

/// Derivatives along the three axes of the result times `grad`.
template <bool kTetrahedral, typename A>
__device__ inline void slopes(const A* table, const Place<A>& place, int32_t S, const A* grad,
                              A* slope) {
    A value[8];
    const auto dot = [&](int32_t offset) {
        const Rgb<A> corner = entry(table, place.entry + offset);
        return grad[0] * corner.at[0] + grad[1] * corner.at[1] + grad[2] * corner.at[2];
    };
    if constexpr (kTetrahedral) {
        const Tetrahedron<A> corners(place.t, S);
#pragma unroll
        for (int k = 0; k < 4; ++k) value[k] = dot(corners.offset[k]);
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            const int rank = corners.rank[axis];
            const A upper = rank == 0 ? value[1] : rank == 1 ? value[2] : value[3];
            slope[axis] = upper - (rank == 0 ? value[0] : rank == 1 ? value[1] : value[2]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] = dot(corner_offset(k, S));
        trilinear_slopes(value, place.t, slope);
    }
}

template <typename T, bool kTetrahedral>
__global__ void __launch_bounds__(kLutThreads)
    image_kernel(ApplyLut3dParams p, bool image_words, bool grad_words) {
    using A = Acc<T>;
    const Pixels pixels(p, (int64_t(blockIdx.x) * kLutThreads + threadIdx.x) * kGroup);
    const int64_t n = pixels.first;
    if (n >= pixels.end) return;
    T image[3 * kGroup], grads[3 * kGroup];
    load_group(p.image, p.image_at, n, pixels.end, image_words, image);
    load_group(p.grad_out, p.grad_out_at, n, pixels.end, grad_words, grads);
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
        A x[3], grad[3], slope[3];
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            x[c] = value_of(image[3 * k + c], p.dtype);
            grad[c] = value_of(grads[3 * k + c], p.dtype);
        }
        const Place<A> place = place_of<T>(x, p.S, pixels.entry);
        slopes<kTetrahedral>(static_cast<const A*>(p.table), place, p.S, grad, slope);
#pragma unroll
        for (int c = 0; c < 3; ++c)
            image[3 * k + c] = stored<T>(within(x[c]) ? slope[c] * A(p.S - 1) : A(0), p.dtype);
    }
    store_group(p.grad_image, n, pixels.end, image);
}

/// Adds the sums of pixels [first, last), which go through the table that begins at `entry`.
template <typename T, bool kTetrahedral, typename Sums>
__device__ inline void add_run(const ApplyLut3dParams& p, const Sums& sums, int64_t first,
                               int64_t last, int32_t table) {
    using A = Acc<T>;
    int32_t current = -1;
    A sum[8][3] = {};
    for (int64_t n = first; n <= last; ++n) {  // the last time round only to write what is left
        A grad[3];
        Place<A> place{{}, -1};
        if (n < last) {
            const T* image = static_cast<const T*>(p.image) + p.image_at(n);
            const T* grads = static_cast<const T*>(p.grad_out) + p.grad_out_at(n);
            A x[3];
#pragma unroll
            for (int c = 0; c < 3; ++c) {
                x[c] = value_of(image[c * p.image_at.channel], p.dtype);
                grad[c] = value_of(grads[c * p.grad_out_at.channel], p.dtype);
            }
            place = place_of<T>(x, p.S, table);
        }
        if (place.entry != current) {
            flush(p, sums, current, sum);
            current = place.entry;
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int c = 0; c < 3; ++c) sum[i][c] = 0;
        }
        if (n == last) break;
        A weight[8];
        corner_weights<kTetrahedral>(place.t, weight);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!kTetrahedral || weight[i] != 0)  // 0 times an infinity is no number
#pragma unroll
                for (int c = 0; c < 3; ++c) sum[i][c] += weight[i] * grad[c];
    }
}

template <typename T, bool kTetrahedral>
__global__ void __launch_bounds__(kLutThreads) sums_kernel(ApplyLut3dParams p) {
    using A = Acc<T>;
    const Pixels pixels(p, (int64_t(blockIdx.x) * kLutThreads + threadIdx.x) * p.run);
    const int64_t first = pixels.first, end = pixels.end;
    const int64_t last = first + p.run < end ? first + p.run : end;
    A* to = static_cast<A*>(p.sums) + blockIdx.x % unsigned(p.parts) * (4 * int64_t(p.entries));
    const MemorySums<A> sums{to, p.deterministic, p.deterministic ? Fixed(p).scale() : 0};
    add_run<T, kTetrahedral>(p, sums, first, last, pixels.entry);
}

/// The same in shared memory, for one table that fits there.
template <typename T, bool kTetrahedral>
__global__ void __launch_bounds__(kSharedThreads<Acc<T>>) shared_sums_kernel(ApplyLut3dParams p) {
    using A = Acc<T>;
    constexpr int kThreads = kSharedThreads<A>;
    extern __shared__ __align__(16) double memory[];
    const SharedSums<A> sums{reinterpret_cast<A*>(memory), p.copies};
    for (int i = threadIdx.x; i < 3 * p.entries * p.copies; i += kThreads) sums.to[i] = 0;
    __syncthreads();
    const int64_t step = int64_t(gridDim.x) * kThreads * p.run;
    for (int64_t n = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * p.run; n < p.N; n += step)
        add_run<T, kTetrahedral>(p, sums, n, n + p.run < p.N ? n + p.run : p.N, 0);
    __syncthreads();
    A* const to =
        static_cast<A*>(p.sums) + blockIdx.x % unsigned(p.parts) * (4 * int64_t(p.entries));
    for (int i = threadIdx.x; i < p.entries; i += kThreads) {
        A sum[3] = {};
        for (int k = 0; k < p.copies; ++k)
#pragma unroll
            for (int c = 0; c < 3; ++c)
                sum[c] += sums.to[(3 * i + c) * p.copies + ((k + threadIdx.x) & (p.copies - 1))];
        if (!(sum[0] == 0 && sum[1] == 0 && sum[2] == 0)) add_entry(to + 4 * int64_t(i), sum);
    }
}

template <typename T, bool kTetrahedral>
void shared_sums(const ApplyLut3dParams& p, cudaStream_t on) {
    int device = 0, processors = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const int bytes = 3 * p.entries * p.copies * int(sizeof(Acc<T>));
    const int beside = most / (bytes + 1024) < 2 ? 1 : 2;
    auto* const kernel = shared_sums_kernel<T, kTetrahedral>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<processors * beside, kSharedThreads<Acc<T>>, bytes, on>>>(p);
}

template <typename T, bool kTetrahedral>
void backward(const ApplyLut3dParams& p, cudaStream_t on) {
    if (p.grad_image) {
        const bool image_words = in_words(p, p.image, p.image_at);
        const bool grad_words = in_words(p, p.grad_out, p.grad_out_at);
        const dim3 blocks = blocks_of(p, kGroup);
        image_kernel<T, kTetrahedral><<<blocks, kLutThreads, 0, on>>>(p, image_words, grad_words);
    }
    if (p.sums && p.copies) {
        shared_sums<T, kTetrahedral>(p, on);
    } else if (p.sums) {
        const dim3 blocks = blocks_of(p, p.run);
        sums_kernel<T, kTetrahedral><<<blocks, kLutThreads, 0, on>>>(p);
    }
}

template <typename T>
const char* launch_backward(const ApplyLut3dParams& p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    if (p.sums) {
        const int64_t bytes = p.deterministic
                                  ? apply_lut3d_fixed_bytes(p)
                                  : p.parts * 4 * int64_t(p.entries) * int64_t(sizeof(Acc<T>));
        cudaMemsetAsync(p.sums, 0, bytes, on);
        if (p.deterministic) {
            const int64_t blocks = ceil_div(p.N, kLutThreads);
            largest_kernel<T><<<unsigned(blocks < 2048 ? blocks : 2048), kLutThreads, 0, on>>>(p);
        }
    }
    if (p.method == Lut3dMethod::kTetrahedral)
        backward<T, true>(p, on);
    else
        backward<T, false>(p, on);
    return launch_error();
}
