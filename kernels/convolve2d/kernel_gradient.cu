// The gradient of convolve2d to its kernel, on the GPU; tiles, traffic and order of sums:
// forward.cu.
#include "tile.cuh"

/// A part of the gradient to K x K taps: each thread has all K * K sums over its outputs.
template <int K>
__global__ void __launch_bounds__(kThreads, 4)
    fixed_parts(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down,
                unsigned tiles) {
    using F = Fixed<K>;
    __shared__ alignas(16) float tile[F::kTile * F::kPitch];
    __shared__ float warp_sums[kWarps][K * K];
    follow();
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const int64_t g = blockIdx.x / splits, first = g * (p.N / p.G);
    const int column = threadIdx.x % kThreadColumns * kQuad;
    const int row = threadIdx.x / kThreadColumns * kRows;
    float sum[K * K] = {};
    for (unsigned index = split; index < tiles; index += splits) {
        TilePlace at(index, across, down);
        at.n += first;
        const int64_t y = at.y + row, x = at.x - F::lead(p) + column;
        const int64_t from =
            at.n * p.grad_out_stride[0] + y * p.grad_out_stride[1] + x * p.grad_out_stride[2];
        const bool whole = x >= 0 && x + kQuad <= p.OW && y + kRows <= p.OH;
        float grad[kRows][kQuad];
        by_storage<float>(p.dtype, [&](auto element) {
            using T = decltype(element);
            if (whole) {
                const T* line = static_cast<const T*>(p.grad_out) + from;
                const auto address =
                    reinterpret_cast<uintptr_t>(line) | uintptr_t(p.grad_out_stride[1]) * sizeof(T);
                const bool words = p.grad_out_stride[2] == 1 && address % (kQuad * sizeof(T)) == 0;
#pragma unroll
                for (int r = 0; r < kRows; ++r, line += p.grad_out_stride[1]) {
                    Vector<T, kQuad> part;
                    if (words) {
                        part = load_vector<T, kQuad>(line);
                    } else {
#pragma unroll
                        for (int q = 0; q < kQuad; ++q) part.at[q] = line[q * p.grad_out_stride[2]];
                    }
#pragma unroll
                    for (int q = 0; q < kQuad; ++q) grad[r][q] = value_of(part.at[q], p.dtype);
                }
            }
        });
        __syncthreads();  // the tile before has been used
        F::fetch(tile, p, at);
        wait_for_tile();
        if (whole) {
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
                            sum[(t - r) * K + j] += grad[r][q] * in[q + 4 - F::kHalf + j];
                }
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < kRows * kQuad; ++i) {
                const int r = i / kQuad, q = i % kQuad;
                if (y + r >= p.OH || x + q < 0 || x + q >= p.OW) continue;
                const float value =
                    load_as<float>(p.dtype, p.grad_out,
                                   from + r * p.grad_out_stride[1] + q * p.grad_out_stride[2]);
                const float* in = tile + (row + r) * F::kPitch + column + q + 4 - F::kHalf;
#pragma unroll
                for (int k = 0; k < K * K; ++k) sum[k] += value * in[k / K * F::kPitch + k % K];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < K * K; ++k) {
        const float all = sum_over_warp(sum[k]);
        if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][k] = all;
    }
    __syncthreads();
    if (threadIdx.x >= K * K) return;
    float all = 0;
    for (int w = 0; w < kWarps; ++w) all += warp_sums[w][threadIdx.x];
    // From the order of correlation to that of the kernel, which is the reverse.
    float* partial = static_cast<float*>(p.partial) + int64_t(blockIdx.x) * (K * K);
    partial[K * K - 1 - threadIdx.x] = all;
}

/// The same for any kernel, kChunk x kChunk taps to a block. A thread has four neighbouring taps,
/// and of the tile's rows every so many pieces of kPiece columns.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    any_parts(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down,
              unsigned tiles) {
    constexpr int kPiece = 16, kPieces = kTileColumns / kPiece;
    __shared__ alignas(16) A tile[kTile * kPitch];
    __shared__ alignas(16) A grad[kTileRows * kTileColumns];
    follow();
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const unsigned chunks_across = unsigned(ceil_div(p.kw, kChunk));
    const unsigned chunks = unsigned(ceil_div(p.kh, kChunk)) * chunks_across;
    const unsigned chunk = blockIdx.x / splits % chunks;
    const int64_t g = blockIdx.x / splits / chunks, first = g * (p.N / p.G);
    const int64_t i0 = int64_t(chunk / chunks_across) * kChunk;
    const int64_t j0 = int64_t(chunk % chunks_across) * kChunk;
    const int ni = p.kh - i0 < kChunk ? int(p.kh - i0) : kChunk;
    const int nj = p.kw - j0 < kChunk ? int(p.kw - j0) : kChunk;
    const int quads = (nj + kQuad - 1) / kQuad, items = ni * quads, slices = kThreads / items;
    const int item = threadIdx.x % items, slice = threadIdx.x / items;
    const int i = item / quads, j = item % quads * kQuad;
    A total[kQuad] = {};
    for (unsigned index = split; index < tiles; index += splits) {
        TilePlace at(index, across, down);
        at.n += first;
        const int rows = p.OH - at.y < kTileRows ? int(p.OH - at.y) : kTileRows;
        const int columns = p.OW - at.x < kTileColumns ? int(p.OW - at.x) : kTileColumns;
        __syncthreads();
        fill(tile, kPitch, Image::in(p, at.n), at.y + p.shift[0] - (p.kh - 1) + i0,
             at.x + p.shift[1] - (p.kw - 1) + j0, rows + ni - 1, columns + nj - 1);
        fill(grad, kTileColumns, Image::grad_out(p, at.n), at.y, at.x, rows, columns);
        wait_for_tile();
        A sum[kQuad] = {};
        for (int piece = slice; slice < slices && piece < rows * kPieces; piece += slices) {
            const int row = piece / kPieces, begin = piece % kPieces * kPiece;
            const int end = columns < begin + kPiece ? columns : begin + kPiece;
            A* line = tile + (row + i) * kPitch + j;
            A* weights = grad + row * kTileColumns;
            Quad<A> left = quad(line + begin);
            int x = begin;
            for (; x + kQuad <= end; x += kQuad) {
                const Quad<A> right = quad(line + x + kQuad), weight = quad(weights + x);
#pragma unroll
                for (int k = 0; k < kQuad; ++k)
#pragma unroll
                    for (int q = 0; q < kQuad; ++q)
                        sum[k] += weight.at[q] * (q + k < kQuad ? left.at[(q + k) % kQuad]
                                                                : right.at[(q + k) % kQuad]);
                left = right;
            }
            for (; x < end; ++x)
#pragma unroll
                for (int k = 0; k < kQuad; ++k) sum[k] += weights[x] * line[x + k];
        }
#pragma unroll
        for (int k = 0; k < kQuad; ++k) total[k] += sum[k];
    }
    __syncthreads();
    quad(tile + threadIdx.x * kQuad) = {{total[0], total[1], total[2], total[3]}};
    __syncthreads();
    if (threadIdx.x >= items) return;
    A* partial = static_cast<A*>(p.partial) + (g * p.splits + split) * p.kh * p.kw;
    for (int k = 0; k < kQuad && j + k < nj; ++k) {
        A sum = 0;
        for (int s = 0; s < slices; ++s) sum += tile[(s * items + item) * kQuad + k];
        partial[p.kh * p.kw - 1 - (i0 + i) * p.kw - (j0 + j + k)] = sum;
    }
}

/// A warp to each tap, behind the kernel whose parts these are.
template <typename A>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Convolve2dParams p) {
    follow();
    const int64_t taps = p.kh * p.kw;
    const int64_t tap = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    if (tap >= p.G * taps) return;
    const A* part = static_cast<const A*>(p.partial) + tap / taps * p.splits * taps + tap % taps;
    double sum = 0;
    for (int64_t s = threadIdx.x % 32; s < p.splits; s += 32) sum += part[s * taps];
    sum = sum_over_warp(sum);
    if (threadIdx.x % 32 == 0) store_tap(p, tap, sum);
}

const char* convolve2d_parts_cuda(const Convolve2dParams* p, void* stream) {
    const int64_t parts = p->G * p->splits, images = p->N / p->G;
    const int64_t chunks = ceil_div(p->kh, kChunk) * ceil_div(p->kw, kChunk);
    return by_tiles<5>(
        *p, images, parts * chunks, [&](auto size, unsigned across, unsigned down, unsigned tiles) {
            const auto on = static_cast<cudaStream_t>(stream);
            using Size = decltype(size);
            if constexpr (std::is_empty_v<Size>)
                fixed_parts<Size::kTaps>
                    <<<unsigned(parts), kThreads, 0, on>>>(*p, across, down, tiles);
            else
                any_parts<Size>
                    <<<unsigned(parts * chunks), kThreads, 0, on>>>(*p, across, down, tiles);
        });
}

const char* convolve2d_sum_cuda(const Convolve2dParams* p, void* stream) {
    const int64_t blocks = ceil_div(p->G * p->kh * p->kw, kThreads / 32);
    if (blocks > kMostBlocks) return "more taps than one CUDA grid can hold";
    const auto kernel = p->dtype == DType::kDouble ? sum_kernel<double> : sum_kernel<float>;
    start(kernel, unsigned(blocks), kThreads, 0, can_follow(kernel),
          static_cast<cudaStream_t>(stream), *p);
    return launch_error();
}
