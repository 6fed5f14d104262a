// Two-dimensional convolution on the GPU, and its gradient to the image; the sums are written out
// in convolve2d.h.
//
// Bytes per pixel (float32): forward and gradient to the image read 4 and write 4, the gradient to
// the kernel reads 8. Flops: 2 kh kw. An H200 moves 4.28 TB/s and computes 60 Tflop/s, 14 flops to
// the byte or 56 multiply-adds to a float32 pixel: traffic decides up to 7 x 7 taps, arithmetic
// beyond. 2048 x 2048 moves 34 MB, 8 us; 8192 x 8192 takes 125 us.
//
// A block computes tiles of 32 x 64 outputs from an input tile in shared memory, in the
// accumulating type and extended beyond the image's borders, so that element types, strides and
// borders concern only the loop that fills it. A thread has 4 x 4 outputs: a value read from shared
// memory serves rows of up to 4 outputs, and one 16-byte read brings four values. For kernels of 5,
// 7 or 9 taps square (3 or 5 for the gradient to the kernel) the compiler knows the size,
// unrolls all loops and keeps taps and sums in registers; tiles then start on words of four
// elements of the input. For any other kernel 16 x 16 taps at a time pass through shared
// memory. 3 x 3 taps, and others that are few, take no tile but columns (columns.cuh,
// columns.rest.cu: convolve2d_by_columns()), those of many go to strips.rest.cu or bands.rest.cu
// (convolve2d_by_strips(), convolve2d_by_bands()), or, image and kernel of one 16-bit type, to
// eights.rest.cu (convolve2d_by_eights()); float64 goes by tiles always.
//
// No atomics. The gradient to the kernel is summed over a fixed partition of the tiles (`partial`)
// and then over the parts, so each run gives the same bits. What lies in a tile but belongs to no
// output is left out and not multiplied by 0: a NaN spreads only as far as the kernel reaches.
#include "any_tile.cuh"
#include "columns.cuh"
#include "fold.cuh"

/// Forward, and the gradient to the image, for K x K taps and 16- and 32-bit elements.
template <int K>
__global__ void __launch_bounds__(kThreads, K > 5 ? 4 : 7)
    fixed_kernel(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down) {
    using F = Fixed<K>;
    __shared__ alignas(16) float tile[F::kTile * F::kPitch];
    __shared__ float taps[K * K];
    const TilePlace at(blockIdx.x, across, down);
    float own = 0;  // on its way while the tile is fetched
    if (threadIdx.x < K * K)
        own = tap_at<float>(p, group_of(p, at.n), threadIdx.x / K, threadIdx.x % K);
    F::fetch(tile, p, at);
    if (threadIdx.x < K * K) taps[threadIdx.x] = own;
    wait_for_tile();
    const int column = threadIdx.x % kThreadColumns * kQuad;
    const int row = threadIdx.x / kThreadColumns * kRows;
    float tap[K * K], sum[kRows][kQuad] = {};
#pragma unroll
    for (int i = 0; i < K * K; ++i) tap[i] = taps[i];
#pragma unroll
    for (int t = 0; t < kRows + K - 1; ++t) {
        float in[12];
        F::window(tile, row + t, column, in);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (t < r || t - r >= K) continue;
#pragma unroll
            for (int j = 0; j < K; ++j)
#pragma unroll
                for (int q = 0; q < kQuad; ++q)
                    sum[r][q] += tap[(t - r) * K + j] * in[q + 4 - F::kHalf + j];
        }
    }
    by_storage<float>(p.dtype, [&](auto element) {
        store_outputs<decltype(element)>(p, at.n, at.y + row, at.x - F::lead(p) + column, p.OH,
                                         p.OW, sum);
    });
}

/// The same for any kernel.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    any_kernel(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down) {
    __shared__ AnyTile<A> shared;
    convolve_any(shared, p, TilePlace(blockIdx.x, across, down), p.OH, p.OW);
}

bool convolve2d_tensor_cores(int32_t device) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 8;
}

const char* convolve2d_cuda(const Convolve2dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    if (p->kh == 3 && p->kw == 3 && convolve2d_in_columns(*p))
        return p->dtype == DType::kFloat ? launch_columns<float, 4, 3>(*p, on)
                                         : launch_columns<Short, 4, 3>(*p, on);
    return by_tiles<9>(*p, p->N, 1, [&](auto size, unsigned across, unsigned down, unsigned tiles) {
        using Size = decltype(size);
        if constexpr (!std::is_empty_v<Size>)
            any_kernel<Size><<<tiles, kThreads, 0, on>>>(*p, across, down);
        else if constexpr (Size::kTaps == 3)
            any_kernel<float><<<tiles, kThreads, 0, on>>>(*p, across, down);
        else
            fixed_kernel<Size::kTaps><<<tiles, kThreads, 0, on>>>(*p, across, down);
    });
}

const char* convolve2d_fold_cuda(const Convolve2dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    return p->dtype == DType::kDouble ? fold<double>(*p, on) : fold<float>(*p, on);
}
