// Convolutions of few pixels on the GPU, and their gradients to the kernel. There, starting blocks
// and waiting for memory take longer than the sums do: one launch, no shared memory to fill, and
// everything that a thread reads is under way at once. What is summed, and where it counts:
// convolve2d.h. Which calls are these: convolve2d_is_small(), convolve2d_is_small_gradient().
#include "tile.cuh"

/// Threads of a warp that share an output: its taps are shared out among them, one after the other.
inline int lanes_log2(const Convolve2dParams& p) {
    constexpr int64_t kBusy = 1 << 16;  // threads that fill a GPU
    const int64_t outputs = p.N * p.OH * p.OW, taps = p.kh * p.kw;
    int log2 = 0;
    while (log2 < 5 && outputs << log2 < kBusy && taps > 4 << log2) ++log2;
    return log2;
}

/// 1 << log2 threads to an output, nine taps of each at a time.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    output_kernel(const __grid_constant__ Convolve2dParams p, int log2) {
    constexpr int kUnder = 9;
    const int kh = int(p.kh), kw = int(p.kw), H = int(p.H), W = int(p.W);
    const unsigned OW = unsigned(p.OW), OH = unsigned(p.OH), outputs = unsigned(p.N) * OH * OW;
    const unsigned thread = blockIdx.x * kThreads + threadIdx.x, lanes = 1u << log2;
    const unsigned own = min(thread >> log2, outputs - 1), row = own / OW, n = row / OH;
    const int lane = int(thread & (lanes - 1)), rows = int(lanes) / kw, columns = int(lanes) % kw;
    const int y = int(row - n * OH), x = int(own - row * OW);
    const int y0 = y + int(p.shift[0]) - (kh - 1), x0 = x + int(p.shift[1]) - (kw - 1);
    const int64_t down = p.in_stride[1], along = p.in_stride[2];
    // Of taps: the first, and steps from each to the next, in the order of correlation.
    const int64_t lower = p.turned ? p.kernel_stride[1] : -p.kernel_stride[1];
    const int64_t right = p.turned ? p.kernel_stride[2] : -p.kernel_stride[2];
    const int64_t first = p.turned ? 0 : -(kh - 1) * lower - (kw - 1) * right;
    const bool inner = y0 >= 0 && x0 >= 0 && y0 + kh <= H && x0 + kw <= W;
    by_storage<A>(p.dtype, [&](auto element) {
        using T = decltype(element);
        const T* const in = static_cast<const T*>(p.in) + n * p.in_stride[0];
        const T* const kernel =
            static_cast<const T*>(p.kernel) + group_of(p, n) * p.kernel_stride[0] + first;
        A sum = 0;
        int i = lane / kw, j = lane % kw;
        if (inner || p.boundary == Boundary::kZero) {
            const T *at = in + (y0 + i) * down + (x0 + j) * along,
                    *tap = kernel + i * lower + j * right;
            while (i < kh) {
                T value[kUnder], weight[kUnder];
#pragma unroll
                for (int u = 0; u < kUnder; ++u) {
                    const bool there =
                        i < kh && unsigned(y0 + i) < unsigned(H) && unsigned(x0 + j) < unsigned(W);
                    value[u] = weight[u] = T{};  // a NaN spreads as far as the taps reach
                    if (there) value[u] = *at, weight[u] = *tap;
                    i += rows, j += columns;
                    at += rows * down + columns * along, tap += rows * lower + columns * right;
                    if (j >= kw) j -= kw, ++i, at += down - kw * along, tap += lower - kw * right;
                }
#pragma unroll
                for (int u = 0; u < kUnder; ++u)
                    sum += value_of(weight[u], p.dtype) * value_of(value[u], p.dtype);
            }
        } else {
#pragma unroll 2
            for (; i < kh; i += rows, j += columns) {
                if (j >= kw) j -= kw, ++i;
                if (i >= kh) break;
                const int64_t line = extended(y0 + i, H, p.boundary);
                const int64_t column = extended(x0 + j, W, p.boundary);
                sum += value_of(kernel[i * lower + j * right], p.dtype) *
                       value_of(in[line * down + column * along], p.dtype);
            }
        }
        for (int mask = int(lanes) / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        T* const out = static_cast<T*>(p.out) + n * p.out_stride[0] + y * p.out_stride[1];
        if (lane == 0 && thread >> log2 < outputs) out[x] = stored<T>(sum, p.dtype);
    });
}

constexpr int kMostThreads = 1024;  // to a tap

/// A block to a tap of the gradient to the kernel. Threads step through the outputs of a group's
/// images, row by row, without a division.
template <typename A>
__global__ void __launch_bounds__(kMostThreads)
    tap_kernel(const __grid_constant__ Convolve2dParams p) {
    constexpr int kUnder = 4;
    __shared__ double warp_sums[kMostThreads / 32];
    const int taps = int(p.kh * p.kw), tap = int(blockIdx.x) % taps;
    const int images = int(p.N / p.G), OW = int(p.OW), OH = int(p.OH);
    const int64_t first = int64_t(blockIdx.x / taps) * images;
    const int64_t down = p.shift[0] - tap / int(p.kw), right = p.shift[1] - tap % int(p.kw);
    A sum = 0;
    by_storage<A>(p.dtype, [&](auto element) {
        using T = decltype(element);
        const T* const in = static_cast<const T*>(p.in) + first * p.in_stride[0];
        const T* const grad = static_cast<const T*>(p.grad_out) + first * p.grad_out_stride[0];
        const auto digits = [&](int i, int& n, int& y, int& x) {
            n = i / OW / OH, y = i / OW % OH, x = i % OW;
        };
        int n, y, x, more, rows, columns;
        digits(int(threadIdx.x), n, y, x);
        digits(int(blockDim.x), more, rows, columns);
        while (n < images) {
            T weight[kUnder], value[kUnder];
#pragma unroll
            for (int u = 0; u < kUnder; ++u) {
                const int64_t line = extended(y + down, p.H, p.boundary);
                const int64_t column = extended(x + right, p.W, p.boundary);
                weight[u] = value[u] = T{};
                if (n < images && line >= 0 && column >= 0) {
                    weight[u] = grad[n * p.grad_out_stride[0] + y * p.grad_out_stride[1] +
                                     x * p.grad_out_stride[2]];
                    value[u] =
                        in[n * p.in_stride[0] + line * p.in_stride[1] + column * p.in_stride[2]];
                }
                n += more, y += rows, x += columns;
                if (x >= OW) x -= OW, ++y;
                if (y >= OH) y -= OH, ++n;
            }
#pragma unroll
            for (int u = 0; u < kUnder; ++u)
                sum += value_of(weight[u], p.dtype) * value_of(value[u], p.dtype);
        }
    });
    const double all = sum_over_warp(double(sum));
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const double total = sum_over_warp(threadIdx.x < blockDim.x / 32 ? warp_sums[threadIdx.x] : 0.);
    if (threadIdx.x == 0) store_tap(p, blockIdx.x, total);
}

const char* convolve2d_small_cuda(const Convolve2dParams* p, void* stream) {
    const int log2 = lanes_log2(*p);
    const auto kernel = p->dtype == DType::kDouble ? output_kernel<double> : output_kernel<float>;
    const auto blocks = unsigned(ceil_div(p->N * p->OH * p->OW << log2, kThreads));
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p, log2);
    return launch_error();
}

const char* convolve2d_small_gradient_cuda(const Convolve2dParams* p, void* stream) {
    const int64_t outputs = p->N / p->G * p->OH * p->OW;
    int threads = 128;  // four outputs each, while that is possible
    while (threads < kMostThreads && threads * 4 < outputs) threads *= 2;
    const auto kernel = p->dtype == DType::kDouble ? tap_kernel<double> : tap_kernel<float>;
    const auto blocks = unsigned(p->G * p->kh * p->kw);
    kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*p);
    return launch_error();
}
