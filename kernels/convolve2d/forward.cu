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
// memory serves rows of up to 4 outputs, and one 16-byte read brings four values. For kernels of 3,
// 5, 7 or 9 taps square (3 or 5 for the gradient to the kernel) the compiler knows the size,
// unrolls all loops and keeps taps and sums in registers; tiles then start on words of four
// elements of the input. For any other kernel 16 x 16 taps at a time pass through shared
// memory. Kernels of more taps, but for float64, go to strips.rest.cu or bands.rest.cu instead:
// convolve2d_by_strips(), convolve2d_by_bands().
//
// No atomics. The gradient to the kernel is summed over a fixed partition of the tiles (`partial`)
// and then over the parts, so each run gives the same bits. What lies in a tile but belongs to no
// output is left out and not multiplied by 0: a NaN spreads only as far as the kernel reaches.
#include "any_tile.cuh"

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
    __syncthreads();
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

/// A warp to each pixel of a gradient to the image that the extension repeats.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const __grid_constant__ Convolve2dParams p, int64_t each) {
    const int64_t index = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    const int64_t n = index / each, g = group_of(p, n);
    if (n >= p.N) return;
    int64_t at[2];
    border_pixel(p, index % each, at);
    const Copies ys(p, 0, at[0]), xs(p, 1, at[1]);
    by_storage<A>(p.dtype, [&](auto element) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(p.in) + n * p.in_stride[0];
        A sum = 0;
        for (int64_t k = ys.begin; k < ys.end; ++k) {
            if (!ys.has(ys.at(k))) continue;
            const int64_t y = ys.at(k) + p.shift[0] - (p.kh - 1);
            const Overlap rows(y, p.kh, p.H);
            for (int64_t l = xs.begin; l < xs.end; ++l) {
                if (!xs.has(xs.at(l))) continue;
                const int64_t x = xs.at(l) + p.shift[1] - (p.kw - 1);
                const Overlap columns(x, p.kw, p.W);
                const int64_t width = columns.end - columns.begin;
                if (width <= 0) continue;
                // The threads of a warp take neighbouring taps, row after row.
                const int lane = threadIdx.x % 32, w = width < 64 ? int(width) : 64;
                int64_t i = rows.begin + lane / w, j = columns.begin + lane % w;
                while (i < rows.end) {
                    sum +=
                        tap_at<A>(p, g, i, j) *
                        value_of(in[(y + i) * p.in_stride[1] + (x + j) * p.in_stride[2]], p.dtype);
                    i += 32 / w, j += 32 % w;
                    if (j >= columns.end) j -= width, ++i;
                }
            }
        }
        sum = sum_over_warp(sum);
        T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + at[0] * p.out_stride[1];
        if (threadIdx.x % 32 == 0) out[at[1]] = stored<T>(sum, p.dtype);
    });
}

bool convolve2d_tensor_cores(int32_t device) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 8;
}

const char* convolve2d_cuda(const Convolve2dParams* p, void* stream) {
    return by_tiles<9>(*p, p->N, 1, [&](auto size, unsigned across, unsigned down, unsigned tiles) {
        const auto on = static_cast<cudaStream_t>(stream);
        using Size = decltype(size);
        if constexpr (std::is_empty_v<Size>)
            fixed_kernel<Size::kTaps><<<tiles, kThreads, 0, on>>>(*p, across, down);
        else
            any_kernel<Size><<<tiles, kThreads, 0, on>>>(*p, across, down);
    });
}

const char* convolve2d_fold_cuda(const Convolve2dParams* p, void* stream) {
    const int64_t each = border_pixels(*p), blocks = ceil_div(p->N * each, kThreads / 32);
    if (blocks > kMostBlocks) return "more border pixels than one CUDA grid can hold";
    const auto kernel = p->dtype == DType::kDouble ? fold_kernel<double> : fold_kernel<float>;
    kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p, each);
    return launch_error();
}
