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
#include <type_traits>

#include "cells.cuh"

template <typename A>
__global__ void table_kernel(ApplyLut3dParams p, int32_t entries) {
    const int32_t i = blockIdx.x * kLutThreads + threadIdx.x;
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
    const auto blocks = unsigned(ceil_div(entries, kLutThreads));
    const auto on = static_cast<cudaStream_t>(stream);
    if (p->dtype == DType::kDouble)
        table_kernel<double><<<blocks, kLutThreads, 0, on>>>(*p, entries);
    else
        table_kernel<float><<<blocks, kLutThreads, 0, on>>>(*p, entries);
    return launch_error();
}

template <typename T>
constexpr int kPixels = std::is_same_v<T, float> ? 1 : kGroup;

template <typename T, bool kTetrahedral>
__global__ void __launch_bounds__(kLutThreads) lut3d_kernel(ApplyLut3dParams p, bool words) {
    using A = Acc<T>;
    const Pixels pixels(p, (int64_t(blockIdx.x) * kLutThreads + threadIdx.x) * kPixels<T>);
    const int64_t n = pixels.first;
    if (n >= pixels.end) return;
    T group[3 * kPixels<T>];
    load_group(p.image, p.image_at, n, pixels.end, words, group);
#pragma unroll
    for (int k = 0; k < kPixels<T>; ++k) {
        A x[3];
#pragma unroll
        for (int c = 0; c < 3; ++c) x[c] = value_of(group[3 * k + c], p.dtype);
        const Place<A> place = place_of<T>(x, p.S, pixels.entry);
        const Rgb<A> out = blend<kTetrahedral>(static_cast<const A*>(p.table), place, p.S);
#pragma unroll
        for (int c = 0; c < 3; ++c) group[3 * k + c] = stored<T>(out.at[c], p.dtype);
    }
    store_group(p.out, n, pixels.end, group);
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
    const Rgb<A> out = p.method == Lut3dMethod::kTetrahedral ? blend<true>(cell, place, 2)
                                                             : blend<false>(cell, place, 2);
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
    const bool words = in_words(*p, p->image, p->image_at);
    by_storage(*p, [&](auto element) {
        using T = decltype(element);
        const dim3 blocks = blocks_of(*p, kPixels<T>);
        if (p->method == Lut3dMethod::kTetrahedral)
            lut3d_kernel<T, true><<<blocks, kLutThreads, 0, on>>>(*p, words);
        else
            lut3d_kernel<T, false><<<blocks, kLutThreads, 0, on>>>(*p, words);
    });
    return launch_error();
}
