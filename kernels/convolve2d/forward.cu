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
// (convolve2d_by_strips(), convolve2d_by_bands()); float64 goes by tiles always.
//
// No atomics. The gradient to the kernel is summed over a fixed partition of the tiles (`partial`)
// and then over the parts, so each run gives the same bits. What lies in a tile but belongs to no
// output is left out and not multiplied by 0: a NaN spreads only as far as the kernel reaches.
#include "any_tile.cuh"
#include "columns.cuh"

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

constexpr int kFoldTaps = 4096;  // that are held at a time

/// How pixels of a gradient to the image that the extension repeats are shared out: threads go
/// along the border, so that they read neighbours and the same taps.
struct FoldPlan {
    int64_t each;     // pixels of an image
    unsigned blocks;  // of an image
    int lanes;        // threads of a pixel, a power of two: they share rows of taps, warps copies

    explicit FoldPlan(const Convolve2dParams& p) : each(border_pixels(p)), lanes(1) {
        constexpr int64_t kBusy = 1 << 17, kLong = 16;  // threads that fill a GPU; rows of one
        const int64_t before = p.before[0] < p.after[0] ? p.after[0] : p.before[0];
        const int64_t rows = p.kh * (p.boundary == Boundary::kReflect ? 2 : 1 + before);
        const int most = p.boundary == Boundary::kReflect ? 32 : kThreads;  // few copies of each
        while (lanes < most && lanes < rows && (p.N * each * lanes < kBusy || rows > kLong * lanes))
            lanes *= 2;
        blocks = unsigned(ceil_div(each, kThreads / lanes));
    }
};

/// `lanes` threads to each pixel of a gradient to the image that the extension repeats.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const __grid_constant__ Convolve2dParams p, const __grid_constant__ FoldPlan plan) {
    __shared__ A taps[kFoldTaps];
    const int64_t n = blockIdx.x / plan.blocks, g = group_of(p, n);
    const int lane = threadIdx.x % plan.lanes;
    const int64_t own =
        int64_t(blockIdx.x % plan.blocks) * (kThreads / plan.lanes) + threadIdx.x / plan.lanes;
    int64_t at[2];
    border_pixel(p, own < plan.each ? own : plan.each - 1, at);
    const Copies ys(p, 0, at[0]), xs(p, 1, at[1]);
    const int copies = plan.lanes > 32 ? plan.lanes / 32 : 1, rows_at_once = plan.lanes / copies;
    const int across = p.kw < kFoldTaps ? int(p.kw) : kFoldTaps, down = kFoldTaps / across;
    A sum = 0;
    for (int64_t i0 = 0; i0 < p.kh; i0 += down) {
        for (int64_t j0 = 0; j0 < p.kw; j0 += across) {
            const int ni = p.kh - i0 < down ? int(p.kh - i0) : down;
            const int nj = p.kw - j0 < across ? int(p.kw - j0) : across;
            __syncthreads();
            for (int k = threadIdx.x; k < ni * nj; k += kThreads)
                taps[k] = tap_at<A>(p, g, i0 + k / nj, j0 + k % nj);
            __syncthreads();
            by_storage<A>(p.dtype, [&](auto element) {
                using T = decltype(element);
                const T* in = static_cast<const T*>(p.in) + n * p.in_stride[0];
                for (int64_t k = ys.begin + lane / 32; k < ys.end; k += copies) {
                    if (!ys.has(ys.at(k))) continue;
                    const int64_t y = ys.at(k) + p.shift[0] - (p.kh - 1) + i0;
                    const Overlap rows(y, ni, p.H);
                    for (int64_t l = xs.begin; l < xs.end; ++l) {
                        if (!xs.has(xs.at(l))) continue;
                        const int64_t x = xs.at(l) + p.shift[1] - (p.kw - 1) + j0;
                        const Overlap columns(x, nj, p.W);
                        const int width = int(columns.end - columns.begin);
                        for (int i = int(rows.begin) + lane % 32; i < rows.end; i += rows_at_once) {
                            const A* tap = taps + i * nj + columns.begin;
                            const T* from = in + (y + i) * p.in_stride[1] +
                                            (x + columns.begin) * p.in_stride[2];
#pragma unroll 4
                            for (int j = 0; j < width; ++j, from += p.in_stride[2])
                                sum += tap[j] * value_of(*from, p.dtype);
                        }
                    }
                }
            });
        }
    }
    for (int mask = rows_at_once / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (copies > 1) {
        __syncthreads();  // taps have been used
        if (lane % 32 == 0) taps[threadIdx.x / 32] = sum;
        __syncthreads();
        for (int w = 1; w < copies && lane == 0; ++w) sum += taps[threadIdx.x / 32 + w];
    }
    if (lane != 0 || own >= plan.each) return;
    by_storage<A>(p.dtype, [&](auto element) {
        using T = decltype(element);
        T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + at[0] * p.out_stride[1];
        out[at[1]] = stored<T>(sum, p.dtype);
    });
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
    const FoldPlan plan(*p);
    if (double(p->N) * plan.blocks > kMostBlocks)
        return "more border pixels than one CUDA grid can hold";
    const auto kernel = p->dtype == DType::kDouble ? fold_kernel<double> : fold_kernel<float>;
    kernel<<<unsigned(p->N * plan.blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p,
                                                                                             plan);
    return launch_error();
}
