// Convolutions by multiply-adds in float32, with kernels of up to 16 columns of taps and any number
// of rows: where tensor cores would mostly multiply zeros.
//
// A thread has a strip of 4 x 8 outputs. Of a row of the input it holds what the strip meets, 7
// more than the taps of a row, in registers, read 16 bytes at a time, as are the taps, which all
// threads of a warp read from one place: with 15 taps to a row 22 reads for 480 multiply-adds. The
// number of columns is known to the compiler, that of rows is not. A block's warps have strips
// below each other, or, where there are few, share the rows of taps of the same strips.
//
// What lies in a tile but belongs to no output is not multiplied by 0: see forward.cu.
#include "tile.cuh"

constexpr int kStripRows = 4, kStripColumns = 8;
constexpr int kSums = kStripRows * kStripColumns;  // of a thread
constexpr int kRowsAtATime = 32;                   // of taps

/// How a convolution is cut into tiles.
struct StripsPlan {
    int threads_across;    // of a warp: 8 for tiles of 64 columns, 4 for 32
    int down;              // warps below each other, 16 or 32 rows each; others share these rows
    int ni;                // rows of taps at a time
    int pitch, tap_pitch;  // of the tile, of the taps: elements
    int rows, columns;     // of outputs
    unsigned across, tiles_down;
    int bytes;

    explicit StripsPlan(const Convolve2dParams& p) {
        const int64_t last = p.OW % 64;
        const bool few =
            double(p.N) * ceil_div(p.OW, 64) * ceil_div(p.OH, 64) < kConvolve2dRates.strips_few;
        threads_across = few || (p.OW < 256 && last > 0 && last <= 32) ? 4 : 8;
        columns = threads_across * kStripColumns;
        const int each = 32 / threads_across * kStripRows;
        down = few ? 1 : kWarps;
        const auto tiles = [&] {
            return double(p.N) * ceil_div(p.OW, columns) * ceil_div(p.OH, each * down);
        };
        while (down > 1 && (p.OH <= each * down / 2 || (tiles() < 400 && p.kh >= 32 / down)))
            down /= 2;
        rows = each * down;
        ni = p.kh < kRowsAtATime ? int(p.kh) : kRowsAtATime;
        tap_pitch = (int(p.kw) + 3) / 4 * 4;
        pitch = columns - kStripColumns + (int(p.kw) + kStripColumns + 2) / 4 * 4;
        across = unsigned(ceil_div(p.OW, columns)), tiles_down = unsigned(ceil_div(p.OH, rows));
        bytes = (ni * tap_pitch + (rows + ni - 1) * pitch) * 4;
        const int sums = kThreads * kSums * 4;
        if (bytes < sums) bytes = sums;
    }
};

using StripSums = float[kStripRows][kStripColumns];

/// The products of a row of input. `taps`: the row that meets the strip's first row; `has`: which
/// rows of the strip the input's row meets, if not all.
template <int kTaps, bool kAll>
__device__ inline void multiply_row(StripSums& sum, const float* line, const float* taps,
                                    unsigned has) {
    constexpr int kQuads = (kTaps + kStripColumns + 2) / 4, kPitch = (kTaps + 3) / 4 * 4;
    float in[4 * kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
        const auto part = quad(const_cast<float*>(line) + kQuad * i);
#pragma unroll
        for (int k = 0; k < kQuad; ++k) in[kQuad * i + k] = part.at[k];
    }
    const auto products = [&](int j, int r) {
        const auto tap = quad(const_cast<float*>(taps) + j - r * kPitch);
#pragma unroll
        for (int k = 0; k < kQuad; ++k)
#pragma unroll
            for (int q = 0; q < kStripColumns; ++q)
                if (j + k < kTaps) sum[r][q] += tap.at[k] * in[j + k + q];
    };
    if (kAll) {
#pragma unroll
        for (int j = 0; j < kTaps; j += kQuad)
#pragma unroll
            for (int r = 0; r < kStripRows; ++r) products(j, r);
    } else {
#pragma unroll
        for (int r = 0; r < kStripRows; ++r)
            if (has >> r & 1)
#pragma unroll
                for (int j = 0; j < kTaps; j += kQuad) products(j, r);
    }
}

/// Taps [i0, i0 + ni) x [0, kw) as float32, `pitch` from row to row; there as the tile's numbers
/// are.
__device__ __noinline__ void fetch_taps(float* taps, const Convolve2dParams& p, int64_t n,
                                        int64_t i0, int ni, int pitch) {
    const int64_t g = group_of(p, n), *stride = p.kernel_stride;
    const bool numbers = kAsyncCopies && p.kernel_dtype == DType::kFloat;
#pragma unroll 4
    for (int k = threadIdx.x; k < ni * pitch; k += kThreads) {
        if (k % pitch >= p.kw) continue;
        int64_t i = i0 + k / pitch, j = k % pitch;
        if (!numbers) {
            taps[k] = tap_at<float>(p, g, i, j);
            continue;
        }
        if (!p.turned) i = p.kh - 1 - i, j = p.kw - 1 - j;
        begin_copy(
            taps + k,
            static_cast<const float*>(p.kernel) + g * stride[0] + i * stride[1] + j * stride[2],
            true);
    }
}

/// A warp's sums from shared memory to outputs (y, x) on, so that it writes neighbouring columns.
__device__ __noinline__ void store_strips(const Convolve2dParams& p, int64_t n, int64_t y,
                                          int64_t x, int columns, const float* sums) {
    by_storage<float>(p.dtype, [&](auto element) {
        using T = decltype(element);
        const int lane = threadIdx.x % 32;
        T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + y * p.out_stride[1] + x;
        const auto address =
            reinterpret_cast<uintptr_t>(out) | uintptr_t(p.out_stride[1]) * sizeof(T);
        if (address % (kQuad * sizeof(T)) == 0 && x + columns <= p.OW) {
#pragma unroll
            for (int k = 0; k < kSums / kQuad; ++k) {
                const int i = (k * 32 + lane) * kQuad;
                if (y + i / columns >= p.OH) return;
                const auto from = quad(const_cast<float*>(sums) + i);
                Vector<T, kQuad> values;
#pragma unroll
                for (int q = 0; q < kQuad; ++q) values.at[q] = stored<T>(from.at[q], p.dtype);
                store_vector(out + i / columns * p.out_stride[1] + i % columns, values);
            }
            return;
        }
#pragma unroll 4
        for (int i = lane; i < 32 * kSums; i += 32)
            if (y + i / columns < p.OH && x + i % columns < p.OW)
                out[i / columns * p.out_stride[1] + i % columns] = stored<T>(sums[i], p.dtype);
    });
}

template <int kTaps>
__global__ void __launch_bounds__(kThreads, 4)
    strips_kernel(const __grid_constant__ Convolve2dParams p,
                  const __grid_constant__ StripsPlan plan) {
    constexpr int kTapPitch = (kTaps + 3) / 4 * 4;
    extern __shared__ __align__(16) float memory[];
    float* const taps = memory;
    float* const tile = taps + plan.ni * kTapPitch;
    const unsigned rest = blockIdx.x / plan.across;
    const int64_t n = rest / plan.tiles_down;
    const int64_t x0 = int64_t(blockIdx.x % plan.across) * plan.columns;
    const int64_t y0 = int64_t(rest % plan.tiles_down) * plan.rows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int share = warp / plan.down, shares = kWarps / plan.down;
    const int first = warp % plan.down * (32 / plan.threads_across * kStripRows);
    const int row = first + lane / plan.threads_across * kStripRows;
    const int column = lane % plan.threads_across * kStripColumns;
    StripSums sum = {};
    for (int64_t i0 = 0; i0 < p.kh; i0 += plan.ni) {
        const int ni = p.kh - i0 < plan.ni ? int(p.kh - i0) : plan.ni;
        if (i0) __syncthreads();
        fetch_taps(taps, p, n, i0, ni, kTapPitch);
        const int64_t y = y0 + p.shift[0] - (p.kh - 1) + i0, x = x0 + p.shift[1] - (kTaps - 1);
        const int rows = plan.rows + ni - 1;
        if (plan.threads_across == 8)
            fill_columns<64 + kTaps - 1, 5>(tile, plan.pitch, Image::in(p, n), y, x, rows);
        else
            fill_columns<32 + kTaps - 1, 5>(tile, plan.pitch, Image::in(p, n), y, x, rows);
        wait_for_tile();
        // Row t of the tile meets row t - r of the taps for row r of the strip.
        const int begin = ni * share / shares, count = ni * (share + 1) / shares - begin;
        const float* line = tile + (row + begin) * plan.pitch + column;
        const float* tap = taps + begin * kTapPitch;
#pragma unroll 1
        for (int t = 0; t < count + kStripRows - 1; ++t) {
            if (t >= kStripRows - 1 && t < count) {
                multiply_row<kTaps, true>(sum, line, tap, ~0u);
            } else {
                unsigned has = (2u << (t < kStripRows ? t : kStripRows - 1)) - 1;
                if (t >= count) has &= ~0u << (t - count + 1);
                multiply_row<kTaps, false>(sum, line, tap, has);
            }
            line += plan.pitch, tap += kTapPitch;
        }
    }
    // The sums of shares, in their order, next to each other as outputs are.
    for (int turn = 0; turn < shares; ++turn) {
        __syncthreads();
        if (share != turn) continue;
        float* at =
            memory + (first + lane / plan.threads_across * kStripRows) * plan.columns + column;
#pragma unroll
        for (int i = 0; i < kSums; i += kQuad) {
            Quad<float>& four = quad(at + i / kStripColumns * plan.columns + i % kStripColumns);
            Quad<float> old = {};
            if (turn) old = four;
#pragma unroll
            for (int q = 0; q < kQuad; ++q)
                old.at[q] += sum[i / kStripColumns][i % kStripColumns + q];
            four = old;
        }
    }
    __syncthreads();
    if (share == 0) store_strips(p, n, y0 + first, x0, plan.columns, memory + first * plan.columns);
}

template <int kTaps>
const char* run(const Convolve2dParams& p, cudaStream_t stream) {
    if constexpr (kTaps > 1)
        if (p.kw < kTaps) return run<kTaps - 1>(p, stream);
    const StripsPlan plan(p);
    if (double(plan.across) * plan.tiles_down * double(p.N) > kMostBlocks)
        return "more tiles than one CUDA grid can hold";
    const auto kernel = strips_kernel<kTaps>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
    kernel<<<unsigned(p.N * plan.across * plan.tiles_down), kThreads, plan.bytes, stream>>>(p,
                                                                                            plan);
    return launch_error();
}

const char* convolve2d_strips_cuda(const Convolve2dParams* p, void* stream) {
    return run<kStripTaps>(*p, static_cast<cudaStream_t>(stream));
}
