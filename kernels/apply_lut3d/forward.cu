// Colours through a three-dimensional table on the GPU; the formulas are in apply_lut3d.h.
//
// Bytes per pixel: 3 s read and 3 s written, s being an element's size; for uint8 and 12 million
// pixels 72 MB, 17 us at 4.28 TB/s. But each pixel also gathers 8 corners (4 of a tetrahedron) of
// three channels, and that binds: a warp's gather takes as many turns of the L1 cache as it meets
// lines. The table is first copied to entries of four numbers (37 thousand for S = 33), so that a
// corner is one load of 16 bytes instead of three.
//
// A thread has four neighbouring pixels, three words of memory; of float32 it has one, as twelve
// bytes of each lane fill whole lines too. Large contiguous uint8 images go through
// kernels/apply_lut3d/bytes.cu instead.
#include <type_traits>

#include "cells.cuh"

template <typename A>
__global__ void table_kernel(ApplyLut3dParams p, int32_t entries) {
    const int32_t i = blockIdx.x * kLutThreads + threadIdx.x;
    if (i < entries) copy_entry<A>(p, i);
}

const char* apply_lut3d_table_cuda(const ApplyLut3dParams* p, void* stream) {
    if (p->work) return apply_lut3d_ranges_cuda(p, stream);
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

const char* apply_lut3d_cuda(const ApplyLut3dParams* p, void* stream) {
    if (p->work) return apply_lut3d_bytes_cuda(p, stream);
    const auto on = static_cast<cudaStream_t>(stream);
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
