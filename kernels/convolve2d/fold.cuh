// Pixels of a gradient to the image that the extension beyond its borders repeats: each is a sum
// over its copies, every one of which is a sum over the taps.
#pragma once
#include "tile.cuh"

constexpr int kFoldTaps = 4096;  // that are held at a time

/// How pixels of a gradient to the image that the extension repeats are shared out: threads go
/// along the border, so that they read neighbours and the same taps.
struct FoldPlan {
    int64_t each;     // pixels of an image
    unsigned blocks;  // of an image
    int lanes;        // threads of a pixel, a power of two: they share its copies' rows of taps

    explicit FoldPlan(const Convolve2dParams& p) : each(border_pixels(p)) {
        const int64_t before = p.before[0] < p.after[0] ? p.after[0] : p.before[0];
        lanes = lanes_of(p, p.kh * (p.boundary == Boundary::kReflect ? 2 : 1 + before));
        blocks = unsigned(ceil_div(each, kThreads / lanes));
    }
    /// Threads that share so many rows.
    static int lanes_of(const Convolve2dParams& p, int64_t rows) {
        constexpr int64_t kBusy = 1 << 17, kLong = 16;  // threads that fill a GPU; rows of one
        const int64_t pixels = p.N * border_pixels(p);
        int lanes = 1;
        while (lanes < 32 && lanes < rows && (pixels * lanes < kBusy || rows > kLong * lanes))
            lanes *= 2;
        return lanes;
    }
};

template <typename A>
__device__ inline void store_pixel(const Convolve2dParams& p, int64_t n, const int64_t (&at)[2],
                                   A sum) {
    by_storage<A>(p.dtype, [&](auto element) {
        using T = decltype(element);
        T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + at[0] * p.out_stride[1];
        out[at[1]] = stored<T>(sum, p.dtype);
    });
}

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
                for (int64_t k = ys.begin; k < ys.end; ++k) {
                    if (!ys.has(ys.at(k))) continue;
                    const int64_t y = ys.at(k) + p.shift[0] - (p.kh - 1) + i0;
                    const Overlap rows(y, ni, p.H);
                    for (int64_t l = xs.begin; l < xs.end; ++l) {
                        if (!xs.has(xs.at(l))) continue;
                        const int64_t x = xs.at(l) + p.shift[1] - (p.kw - 1) + j0;
                        const Overlap columns(x, nj, p.W);
                        const int width = int(columns.end - columns.begin);
                        for (int i = int(rows.begin) + lane; i < rows.end; i += plan.lanes) {
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
    for (int mask = plan.lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane != 0 || own >= plan.each) return;
    store_pixel(p, n, at, sum);
}

/// What repeated pixels are where the nearest goes on: the first and the last of an axis, each with
/// the others or with such of the other axis. Pixels of a kind have the same number of copies.
struct NearestPlan {
    int64_t begin[2][3], count[2][3];  // of an axis: elements within, the first, the last
    unsigned blocks[9];                // of a kind, up to and with it; 3 * row + column
    int lanes;                         // threads of a pixel

    explicit NearestPlan(const Convolve2dParams& p, int lanes) : lanes(lanes) {
        for (int axis = 0; axis < 2; ++axis) {
            const Edge edge(p, axis);
            const int64_t n = axis ? p.OW : p.OH, last = n - edge.last;
            const int64_t from[] = {edge.first, 0, last};
            const int64_t size[] = {last - edge.first, edge.first, edge.last};
            for (int k = 0; k < 3; ++k) begin[axis][k] = from[k], count[axis][k] = size[k];
        }
        unsigned sum = 0;
        for (int kind = 0; kind < 9; ++kind) {
            const int64_t pixels = kind ? count[0][kind / 3] * count[1][kind % 3] : 0;
            blocks[kind] = sum += unsigned(ceil_div(pixels, kThreads / lanes));
        }
    }
};

/// Sums of `rows` x `columns` numbers over windows of up to `down` rows of them: to[y] is the sum
/// of from[y - down + 1] to from[y]. All threads of a block.
template <typename A>
__device__ inline void window_sums(A* to, const A* from, int rows, int columns, int down,
                                   bool transposed) {
    const int all = (rows + down - 1) * columns;
    for (int k = threadIdx.x; k < all; k += kThreads) {
        const int y = k / columns, x = k % columns;
        const int first = y < down ? 0 : y - down + 1, last = y < rows ? y : rows - 1;
        A sum = 0;
        for (int i = first; i <= last; ++i)
            sum += from[transposed ? x * rows + i : i * columns + x];
        to[transposed ? x * (rows + down - 1) + y : k] = sum;
    }
    __syncthreads();
}

/// The copies of a pixel lie side by side, so that their taps are added up first: a block's pixels
/// share these sums.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    nearest_kernel(const __grid_constant__ Convolve2dParams p,
                   const __grid_constant__ NearestPlan plan) {
    __shared__ A memory[kFoldTaps];
    const unsigned all = plan.blocks[8], block = blockIdx.x % all;
    const int64_t n = blockIdx.x / all;
    int kind = 1;
    while (block >= plan.blocks[kind]) ++kind;
    const int lane = threadIdx.x % plan.lanes;
    const int64_t width = plan.count[1][kind % 3], pixels = plan.count[0][kind / 3] * width;
    const int64_t own =
        int64_t(block - plan.blocks[kind - 1]) * (kThreads / plan.lanes) + threadIdx.x / plan.lanes;
    const int64_t pixel = own < pixels ? own : pixels - 1;
    const int64_t at[] = {plan.begin[0][kind / 3] + pixel / width,
                          plan.begin[1][kind % 3] + pixel % width};
    const Copies ys(p, 0, at[0]), xs(p, 1, at[1]);
    const int kh = int(p.kh), kw = int(p.kw);
    const int down = int(ys.end - ys.begin), across = int(xs.end - xs.begin);
    const int rows = kh + down - 1, columns = kw + across - 1;
    A *const taps = memory + kFoldTaps - kh * kw, *const part = memory;
    A* const sums = part + rows * kw;  // they may take the taps' place, once `part` is made
    for (int k = threadIdx.x; k < kh * kw; k += kThreads)
        taps[k] = tap_at<A>(p, group_of(p, n), k / kw, k % kw);
    __syncthreads();
    window_sums(part, taps, kh, kw, down, false);
    window_sums(sums, part, kw, rows, across, true);
    const int64_t y0 = ys.at(ys.begin) + p.shift[0] - (kh - 1);
    const int64_t x0 = xs.at(xs.begin) + p.shift[1] - (kw - 1);
    const Overlap inside_y(y0, rows, p.H), inside_x(x0, columns, p.W);
    const int width_inside = int(inside_x.end - inside_x.begin);
    A sum = 0;
    by_storage<A>(p.dtype, [&](auto element) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(p.in) + n * p.in_stride[0];
        for (int y = int(inside_y.begin) + lane; y < inside_y.end; y += plan.lanes) {
            const A* tap = sums + y * columns + inside_x.begin;
            const T* from = in + (y0 + y) * p.in_stride[1] + (x0 + inside_x.begin) * p.in_stride[2];
#pragma unroll 4
            for (int x = 0; x < width_inside; ++x, from += p.in_stride[2])
                sum += tap[x] * value_of(*from, p.dtype);
        }
    });
    for (int mask = plan.lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane != 0 || own >= pixels) return;
    store_pixel(p, n, at, sum);
}

/// Whether its taps and sums of them fit what nearest_kernel holds.
inline bool adds_taps_first(const Convolve2dParams& p) {
    // Of a pixel; one that is the first and the last of its axis has copies on both sides.
    const auto most = [&](int axis, int64_t n) {
        const int64_t before = p.before[axis], after = p.after[axis];
        return n > 1 ? (before < after ? after : before) : before + after;
    };
    const int64_t rows = p.kh + most(0, p.OH), columns = p.kw + most(1, p.OW);
    return p.boundary == Boundary::kNearest && rows <= kFoldTaps && columns <= kFoldTaps &&
           rows * (columns + p.kw) <= kFoldTaps;
}

template <typename A>
inline const char* fold(const Convolve2dParams& p, cudaStream_t stream) {
    if (adds_taps_first(p)) {
        const NearestPlan plan(p, FoldPlan::lanes_of(p, p.kh + p.before[0] + p.after[0]));
        if (double(p.N) * plan.blocks[8] <=
            kMostBlocks) {  // of very many images FoldPlan has fewer
            nearest_kernel<A><<<unsigned(p.N * plan.blocks[8]), kThreads, 0, stream>>>(p, plan);
            return launch_error();
        }
    }
    const FoldPlan plan(p);
    if (double(p.N) * plan.blocks > kMostBlocks)
        return "more border pixels than one CUDA grid can hold";
    fold_kernel<A><<<unsigned(p.N * plan.blocks), kThreads, 0, stream>>>(p, plan);
    return launch_error();
}
