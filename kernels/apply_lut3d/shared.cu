// Large images of floating point through a table of float32 in shared memory.
//
// What binds is the gather: of 32 lanes that read words at random from 32 banks the fullest bank
// has 3.5. Red and green lie together, as 8 bytes, which serve 16 lanes at a time, blue apart: 9.7
// cycles for a corner of a warp's pixels, where the L1 cache takes 32. A table of up to 26 entries
// along an axis fits an SM's 227 KiB. Every block copies it, and then takes its share of the
// pixels. For the four corners of a tetrahedron the L1 cache is as quick where neighbours' colours
// are alike, and the copy is lost.
#include "cells.cuh"

namespace {

constexpr int kThreads = 768, kPixels = 2;  // pixels of a lane under way, 32 apart
constexpr int kUnit = 32 * kPixels;         // pixels of a warp

/// The table in shared memory.
struct SharedEntries {
    const float2* red_green;
    const float* blue;

    __device__ SharedEntries(float* memory, int count)
        : red_green(reinterpret_cast<float2*>(memory)), blue(memory + 2 * count) {}

    __device__ void copy(const ApplyLut3dParams& p) {
#pragma unroll 4
        for (int i = threadIdx.x; i < p.entries; i += kThreads) {
            const Rgb<float> x = ::entry(static_cast<const float*>(p.table), i);
            const_cast<float2*>(red_green)[i] = {x.at[0], x.at[1]};
            const_cast<float*>(blue)[i] = x.at[2];
        }
        __syncthreads();
    }
};
__device__ inline Rgb<float> entry(const SharedEntries& table, int32_t i) {
    const float2 x = table.red_green[i];
    return {{x.x, x.y, table.blue[i]}};
}

/// A unit's pixels as they are in memory; those beyond the end are zeros.
template <typename T>
struct Pixels {
    T at[kPixels][3];

    __device__ void fetch(const ApplyLut3dParams& p, int64_t unit, int64_t end) {
        if (unit >= end) return;
        const int lane = threadIdx.x % 32;
        const T* from = static_cast<const T*>(p.image) + unit * (3 * kUnit) + 3 * lane;
        const bool whole = (unit + 1) * kUnit <= p.N;
#pragma unroll
        for (int k = 0; k < kPixels; ++k)
#pragma unroll
            for (int c = 0; c < 3; ++c)
                at[k][c] = whole || unit * kUnit + 32 * k + lane < p.N ? from[96 * k + c] : T{};
    }
};

template <typename T>
__device__ inline void put(const ApplyLut3dParams& p, int64_t n, const Rgb<float>& x) {
    if (n >= p.N) return;
    T* to = static_cast<T*>(p.out) + 3 * n;
#pragma unroll
    for (int c = 0; c < 3; ++c) to[c] = stored<T>(x.at[c], p.dtype);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    shared_kernel(const __grid_constant__ ApplyLut3dParams p) {
    extern __shared__ __align__(16) float memory[];
    SharedEntries table(memory, p.entries);
    const int64_t units = ceil_div(p.N, kUnit), stride = gridDim.x * int64_t(kThreads / 32);
    int64_t unit = blockIdx.x * int64_t(kThreads / 32) + threadIdx.x / 32;
    Pixels<T> next;
    next.fetch(p, unit, units);
    table.copy(p);
    for (; unit < units; unit += stride) {
        const Pixels<T> pixels = next;
        next.fetch(p, unit + stride, units);
#pragma unroll
        for (int k = 0; k < kPixels; ++k) {
            float x[3];
#pragma unroll
            for (int c = 0; c < 3; ++c) x[c] = value_of(pixels.at[k][c], p.dtype);
            const Place<float> place = place_of<float>(x, p.S, 0);
            put<T>(p, unit * kUnit + 32 * k + threadIdx.x % 32, blend<false>(table, place, p.S));
        }
    }
}

template <typename T>
const char* run(const ApplyLut3dParams& p, cudaStream_t on) {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int bytes = 12 * p.entries;
    cudaFuncSetAttribute(shared_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    shared_kernel<T><<<processors, kThreads, bytes, on>>>(p);
    return launch_error();
}

}  // namespace

const char* apply_lut3d_shared_cuda(const ApplyLut3dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    return p->dtype == DType::kFloat ? run<float>(*p, on) : run<Short>(*p, on);
}
