// Colours through a three-dimensional table on the GPU; the formulas are in apply_lut3d.h.
//
// Bytes per pixel: 3 s read and 3 s written, s being an element's size; for uint8 and 12 million
// pixels 72 MB, 17 us at 4.28 TB/s. But each pixel also gathers 8 corners (4 of a tetrahedron) of
// three channels, and that binds: a warp's gather takes as many turns of the L1 cache as it meets
// lines. The table is first copied to entries of four numbers (37 thousand for S = 33), so that a
// corner is one load of 16 bytes instead of three.
//
// A thread has four neighbouring pixels, three words of memory; of float32 it has one, as twelve
// bytes of each lane fill whole lines too. Large contiguous uint8 images go through bytes.cu
// instead, others through shared.cu where the table fits; few pixels read lut itself. Which way is
// quickest: apply_lut3d_way().
#include <algorithm>
#include <type_traits>

#include "cells.cuh"

/// Looks here and there at 32 neighbouring pixels: how many lines of the L1 cache they meet in the
/// table. A block.
__device__ void look(const ApplyLut3dParams& p, float few) {
    constexpr int kLooks = 8;  // of each warp
    __shared__ int lines;
    if (threadIdx.x == 0) lines = 0;
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = kLutThreads / 32;
    int own = 0;
#pragma unroll
    for (int k = 0; k < kLooks; ++k) {
        const int64_t at = (p.N - 32) * (k * warps + warp) / (kLooks * warps) + lane;
        float x[3];
#pragma unroll
        for (int c = 0; c < 3; ++c) x[c] = load_as<float>(p.dtype, p.image, 3 * at + c);
        const int line = place_of<float>(x, p.S, 0).entry / 8;
        own += __ffs(int(__match_any_sync(~0u, line))) - 1 == lane;
    }
    atomicAdd(&lines, own);
    __syncthreads();
    if (threadIdx.x == 0) *static_cast<int*>(p.work) = float(lines) > few * (kLooks * warps);
}

template <typename A>
__global__ void table_kernel(const __grid_constant__ ApplyLut3dParams p, int32_t entries,
                             float few) {
    const int32_t i = blockIdx.x * kLutThreads + threadIdx.x;
    if (p.way == Lut3dWay::kProbe && blockIdx.x == gridDim.x - 1) return look(p, few);
    if (i < entries) copy_entry<A>(p, i);
}

Lut3dWay apply_lut3d_way_cuda(const ApplyLut3dParams* p, int32_t device) {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return apply_lut3d_way(*p, bytes);
}

const char* apply_lut3d_table_cuda(const ApplyLut3dParams* p, void* stream) {
    if (p->way == Lut3dWay::kBytes) return apply_lut3d_ranges_cuda(p, stream);
    const int32_t entries = p->entries;
    auto blocks = unsigned(ceil_div(entries, kLutThreads));
    const float few = kLut3dRates.few_lines[p->method == Lut3dMethod::kTetrahedral];
    if (p->way == Lut3dWay::kProbe) ++blocks;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto kernel = p->dtype == DType::kDouble ? table_kernel<double> : table_kernel<float>;
    kernel<<<blocks, kLutThreads, 0, on>>>(*p, entries, few);
    return launch_error();
}

template <typename T>
constexpr int kPixels = std::is_same_v<T, float> ? 1 : kGroup;

constexpr int kGoing = 18;  // blocks of each processor that go on

/// kGoesOn: blocks are few and go on until all pixels are done. Where a look may send all away
/// little time is lost so, and neighbours' colours that are alike take 6 to 9 % less, trilinear in
/// float32; tetrahedral it takes registers that are then lacking.
template <typename T, bool kTetrahedral, bool kGoesOn>
__global__ void __launch_bounds__(kLutThreads) lut3d_kernel(ApplyLut3dParams p, bool words) {
    using A = Acc<T>;
    if (kGoesOn && p.way == Lut3dWay::kProbe && scattered(p)) return;
    const Pixels pixels(p, (int64_t(blockIdx.x) * kLutThreads + threadIdx.x) * kPixels<T>);
#pragma unroll 1
    for (int64_t n = pixels.first; n < pixels.end;
         n += int64_t(gridDim.x) * kLutThreads * kPixels<T>) {
        T group[3 * kPixels<T>];
        load_group(p.image, p.image_at, n, pixels.end, words, group);
#pragma unroll
        for (int k = 0; k < kPixels<T>; ++k) {
            A x[3];
#pragma unroll
            for (int c = 0; c < 3; ++c) x[c] = value_of(group[3 * k + c], p.dtype);
            const Place<A> place = place_of<T>(x, p.S, pixels.entry);
            const Rgb<A> out =
                blend<kTetrahedral>(static_cast<const A*>(p.table), place, EntrySteps::cells(p.S));
#pragma unroll
            for (int c = 0; c < 3; ++c) group[3 * k + c] = stored<T>(out.at[c], p.dtype);
        }
        store_group(p.out, n, pixels.end, group);
        if (!kGoesOn) return;
    }
}

/// One cell of lut, where that lies: a table of two entries along an axis.
template <typename A>
struct Cell {
    const ApplyLut3dParams& p;
    int64_t first;  // its lowest corner, in elements
};
template <typename A>
__device__ inline Rgb<A> entry(const Cell<A>& cell, int32_t k) {
    const int64_t* stride = cell.p.lut_stride;
    const int64_t at =
        cell.first + (k & 4 ? stride[0] : 0) + (k & 2 ? stride[1] : 0) + (k & 1 ? stride[2] : 0);
    Rgb<A> x;
#pragma unroll
    for (int c = 0; c < 3; ++c)
        x.at[c] = load_as<A>(cell.p.lut_dtype, cell.p.lut, at + c * stride[3]);
    return x;
}

/// Few pixels in one launch: from lut itself, types looked at where elements are met.
template <typename A>
__global__ void __launch_bounds__(kLutThreads)
    direct_kernel(const __grid_constant__ ApplyLut3dParams p) {
    const Pixels pixels(p, int64_t(blockIdx.x) * kLutThreads + threadIdx.x);
    const int64_t n = pixels.first;
    if (n >= pixels.end) return;
    const int64_t from = p.image_at(n);
    Place<A> place{{}, 0};
    Cell<A> cell{p, lut_offset(p, pixels.entry)};
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        const int64_t at = from + c * p.image_at.channel;
        int32_t number;
        if (sizeof(A) == 4 && p.bytes) {
            float t;
            number = cell_of_level(float(static_cast<const uint8_t*>(p.image)[at]), p.S, &t);
            place.t[c] = t;
        } else {
            number = cell_of(load_as<A>(p.dtype, p.image, at), p.S, &place.t[c]);
        }
        cell.first += number * p.lut_stride[c];
    }
    constexpr auto steps = EntrySteps::cells(2);
    const Rgb<A> out = p.method == Lut3dMethod::kTetrahedral ? blend<true>(cell, place, steps)
                                                             : blend<false>(cell, place, steps);
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        if (sizeof(A) == 4 && p.bytes)
            static_cast<Byte*>(p.out)[3 * n + c] = store<Byte>(float(out.at[c]));
        else
            store_as<A>(p.dtype, p.out, 3 * n + c, out.at[c]);
    }
}

const char* apply_lut3d_cuda(const ApplyLut3dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    if (p->way == Lut3dWay::kBytes) return apply_lut3d_bytes_cuda(p, stream);
    if (p->way == Lut3dWay::kShared) return apply_lut3d_shared_cuda(p, stream);
    if (p->way == Lut3dWay::kDirect) {
        const auto kernel =
            p->dtype == DType::kDouble ? direct_kernel<double> : direct_kernel<float>;
        kernel<<<blocks_of(*p, 1), kLutThreads, 0, on>>>(*p);
        return launch_error();
    }
    if (p->way == Lut3dWay::kProbe)
        if (const char* error = apply_lut3d_shared_cuda(p, stream)) return error;
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const bool words = in_words(*p, p->image, p->image_at);
    by_storage(*p, [&](auto element) {
        using T = decltype(element);
        constexpr bool kFloat = std::is_same_v<T, float>,
                       kGoes = kFloat || std::is_same_v<T, Short>;
        const bool four = p->method == Lut3dMethod::kTetrahedral;
        const bool once = !kGoes || (kFloat && four && p->way != Lut3dWay::kProbe);
        auto kernel = four ? lut3d_kernel<T, true, kGoes> : lut3d_kernel<T, false, kGoes>;
        if constexpr (kFloat)
            if (once) kernel = lut3d_kernel<T, true, false>;
        dim3 blocks = blocks_of(*p, kPixels<T>);
        if (!once) blocks.x = std::min(blocks.x, unsigned(kGoing * processors));
        kernel<<<blocks, kLutThreads, 0, on>>>(*p, words);
    });
    return launch_error();
}
