// A convolution with a kernel of any size by multiply-adds in float32: what the CUDA cores reach.
//
// A thread has a strip of 4 x 8 outputs. Along a row of input it keeps 12 neighbouring values in
// registers, of which each step brings 4 by one 16-byte read; these and 4 taps of each of 4 rows of
// taps, which all threads of a warp read from one place, make 128 multiply-adds. Only the tile's
// size and the loops' ends depend on the kernel's.
#pragma once
#include "tile.cuh"

constexpr int kStripRows = 4, kStripColumns = 8;
constexpr int kMostTaps = 32;  // along an axis, that are held at a time
#ifndef STRIP_BLOCKS
#define STRIP_BLOCKS 4
#endif

/// Where element x of a row of a tile lies: 4 elements are left free after each 32, so that the 8
/// threads whose strips are neighbours read from all banks.
#ifdef STRIP_PLAIN
HD constexpr int strip_place(int x) { return x; }
#else
HD constexpr int strip_place(int x) { return x + x / 32 * 4; }
#endif

/// How a convolution is cut into tiles.
struct StripsPlan {
    int threads_across;     // of a warp: 8 for tiles of 64 columns, 4 for 32
    int warps;              // below each other, 16 or 32 rows each
    int ni, nj;             // taps at a time
    int pitch, tap_pitch;   // of the tile, of the taps: elements
    int rows, columns;      // of outputs
    unsigned across, down;  // tiles
    int bytes;

    explicit StripsPlan(const Convolve2dParams& p) {
        const int64_t last = p.OW % 64;
        threads_across = p.OW < 256 && last > 0 && last <= 32 ? 4 : 8;
        columns = threads_across * kStripColumns;
        const int each = 32 / threads_across * kStripRows;
        warps = 4;
        const auto tiles = [&] {
            return double(p.N) * ceil_div(p.OW, columns) * ceil_div(p.OH, each * warps);
        };
        while (warps > 1 && (p.OH <= each * warps / 2 || tiles() < 512)) warps /= 2;
        rows = each * warps;
        ni = p.kh < kMostTaps ? int(p.kh) : kMostTaps;
        nj = p.kw < kMostTaps ? int(p.kw) : kMostTaps;
        tap_pitch = (nj + 3) / 4 * 4;
        pitch = strip_place(columns + tap_pitch + 4) / 4 * 4 + 4;
        across = unsigned(ceil_div(p.OW, columns)), down = unsigned(ceil_div(p.OH, rows));
        bytes = (ni * tap_pitch + (rows + ni - 1) * pitch) * 4;
        const int out = 128 * warps * kStripColumns * 4;
        if (bytes < out) bytes = out;
    }
};

/// Copies `rows` x `columns` elements from (y, x) on into a tile. A warp takes a row at a time: what
/// the border makes of columns is worked out once. Outside of the image there are zeros.
__device__ __noinline__ void fill_strips(float* tile, int pitch, const Image& from, int64_t y,
                                         int64_t x, int rows, int columns) {
    constexpr int kEach = (8 * kStripColumns + kMostTaps - 1 + 31) / 32, kUnder = 4;
    by_storage<float>(from.dtype, [&](auto element) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(from.data) + from.begin;
        const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
        int64_t offset[kEach];
        bool inside[kEach];
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int64_t at = extended(x + lane + 32 * k, from.W, from.boundary);
            inside[k] = at >= 0 && lane + 32 * k < columns;
            offset[k] = inside[k] ? at * from.along : 0;
        }
        for (int first = threadIdx.x / 32; first < rows; first += warps * kUnder) {
            T value[kUnder][kEach];
            bool has[kUnder];
#pragma unroll
            for (int u = 0; u < kUnder; ++u) {
                const int row = first + u * warps;
                const int64_t line = extended(y + row, from.H, from.boundary);
                has[u] = row < rows && line >= 0;
#pragma unroll
                for (int k = 0; k < kEach; ++k)
                    if (has[u] && inside[k]) value[u][k] = in[line * from.down + offset[k]];
            }
#pragma unroll
            for (int u = 0; u < kUnder; ++u) {
                const int row = first + u * warps;
#pragma unroll
                for (int k = 0; k < kEach; ++k)
                    if (row < rows && lane + 32 * k < columns)
                        tile[row * pitch + lane + strip_place(32) * k] =
                            has[u] && inside[k] ? value_of(value[u][k], from.dtype) : 0.0f;
            }
        }
    });
}

using StripSums = float[kStripRows][kStripColumns];

/// The products of kTaps columns of taps; `taps`: of the row that meets the strip's first row.
/// `has`: which rows of the strip the input's row meets, if not all.
template <int kTaps, bool kAll>
__device__ inline void multiply_add(StripSums& sum, const Quad<float>& a, const Quad<float>& b,
                                    const Quad<float>& c, const float* taps, int tap_pitch,
                                    unsigned has) {
    const float in[12] = {a.at[0], a.at[1], a.at[2], a.at[3], b.at[0], b.at[1],
                          b.at[2], b.at[3], c.at[0], c.at[1], c.at[2], c.at[3]};
#pragma unroll
    for (int r = 0; r < kStripRows; ++r) {
        if (!kAll && !(has >> r & 1)) continue;
        const Quad<float> tap = quad(const_cast<float*>(taps) - r * tap_pitch);
#pragma unroll
        for (int k = 0; k < kTaps; ++k)
#pragma unroll
            for (int q = 0; q < kStripColumns; ++q) sum[r][q] += tap.at[k] * in[q + k];
    }
}

/// A row of input. `column`: of the strip, in tile.
template <bool kAll>
__device__ inline void multiply_row(StripSums& sum, const float* line, int column,
                                    const float* taps, int tap_pitch, int nj, unsigned has) {
    const auto at = [&](int j) { return quad(const_cast<float*>(line) + strip_place(column + j)); };
    Quad<float> a = at(0), b = at(4), c;
    int j = 0;
#if defined(STRIP_MOVES)
#pragma unroll 1
    for (; j + 4 <= nj; j += 4) {
        c = at(j + 8);
        multiply_add<4, kAll>(sum, a, b, c, taps + j, tap_pitch, has);
        a = b, b = c;
    }
#elif defined(STRIP_FIXED)
    (void)nj;
#pragma unroll
    for (int k = 0; k < STRIP_FIXED / 4; ++k, j += 4) {
        c = at(j + 8);
        multiply_add<4, kAll>(sum, a, b, c, taps + j, tap_pitch, has);
        a = b, b = c;
    }
    nj = STRIP_FIXED;
#else
    // Three steps, after which the registers have their names again.
#pragma unroll 1
    for (; j + 12 <= nj; j += 12) {
        c = at(j + 8);
        multiply_add<4, kAll>(sum, a, b, c, taps + j, tap_pitch, has);
        a = at(j + 12);
        multiply_add<4, kAll>(sum, b, c, a, taps + j + 4, tap_pitch, has);
        b = at(j + 16);
        multiply_add<4, kAll>(sum, c, a, b, taps + j + 8, tap_pitch, has);
    }
#pragma unroll 1
    for (; j + 4 <= nj; j += 4) {
        c = at(j + 8);
        multiply_add<4, kAll>(sum, a, b, c, taps + j, tap_pitch, has);
        a = b, b = c;
    }
#endif
    if (j == nj) return;
    c = at(j + 8);
    if (nj - j == 1)
        multiply_add<1, kAll>(sum, a, b, c, taps + j, tap_pitch, has);
    else if (nj - j == 2)
        multiply_add<2, kAll>(sum, a, b, c, taps + j, tap_pitch, has);
    else
        multiply_add<3, kAll>(sum, a, b, c, taps + j, tap_pitch, has);
}

/// Sums to outputs from (y, x) on, of a tile whose rows are words of the output or not: then by way
/// of shared memory, so that a warp writes neighbouring columns. `staged`: the warp's own.
template <typename T>
__device__ inline void store_strip(const Convolve2dParams& p, T* out, int64_t y, int64_t x,
                                   int threads_across, float* staged, const StripSums& sum) {
    const int lane = threadIdx.x % 32, column = lane % threads_across * kStripColumns;
    const int row = lane / threads_across * kStripRows;
    const int columns = threads_across * kStripColumns;
    const auto address = reinterpret_cast<uintptr_t>(out) | uintptr_t(p.out_stride[0]) * sizeof(T) |
                         uintptr_t(p.out_stride[1]) * sizeof(T);
    if (address % (kQuad * sizeof(T)) == 0 && x + columns <= p.OW) {
#pragma unroll
        for (int r = 0; r < kStripRows; ++r) {
            if (y + row + r >= p.OH) return;
            T* to = out + (y + row + r) * p.out_stride[1] + x + column;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Vector<T, kQuad> values;
#pragma unroll
                for (int q = 0; q < kQuad; ++q)
                    values.at[q] = stored<T>(sum[r][half * kQuad + q], p.dtype);
                store_vector(to + half * kQuad, values);
            }
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < kStripRows; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            quad(staged + (row + r) * columns + column + half * kQuad) = {
                sum[r][half * kQuad], sum[r][half * kQuad + 1], sum[r][half * kQuad + 2],
                sum[r][half * kQuad + 3]};
    __syncwarp();
    const int rows = 32 / threads_across * kStripRows;
    for (int i = lane; i < rows * columns; i += 32) {
        const int64_t Y = y + i / columns, X = x + i % columns;
        if (Y < p.OH && X < p.OW)
            out[Y * p.out_stride[1] + X] = stored<T>(staged[i], p.dtype);
    }
}

__global__ void __launch_bounds__(kThreads, STRIP_BLOCKS)
    strips_kernel(const __grid_constant__ Convolve2dParams p,
                  const __grid_constant__ StripsPlan plan) {
    extern __shared__ __align__(16) char memory[];
    float* const taps = reinterpret_cast<float*>(memory);
    float* const tile = taps + plan.ni * plan.tap_pitch;
    const unsigned rest = blockIdx.x / plan.across;
    const int64_t n = rest / plan.down;
    const int64_t x0 = int64_t(blockIdx.x % plan.across) * plan.columns;
    const int64_t y0 = int64_t(rest % plan.down) * plan.rows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rows_of_warp = 32 / plan.threads_across * kStripRows;
    const int column = lane % plan.threads_across * kStripColumns;
    const int row = warp * rows_of_warp + lane / plan.threads_across * kStripRows;
    StripSums sum = {};
    for (int64_t i0 = 0; i0 < p.kh; i0 += plan.ni) {
        for (int64_t j0 = 0; j0 < p.kw; j0 += plan.nj) {
            const int ni = p.kh - i0 < plan.ni ? int(p.kh - i0) : plan.ni;
            const int nj = p.kw - j0 < plan.nj ? int(p.kw - j0) : plan.nj;
            __syncthreads();
            for (int i = threadIdx.x; i < ni * plan.tap_pitch; i += blockDim.x) {
                const int j = i % plan.tap_pitch;
                if (j < nj)
                    taps[i] = tap_at<float>(p, group_of(p, n), i0 + i / plan.tap_pitch, j0 + j);
            }
            fill_strips(tile, plan.pitch, Image::in(p, n), y0 + p.shift[0] - (p.kh - 1) + i0,
                        x0 + p.shift[1] - (p.kw - 1) + j0, plan.rows + ni - 1,
                        plan.columns + nj - 1);
            __syncthreads();
            // Row t of the tile meets row t - r of the taps for row r of the strip.
            const float* line = tile + row * plan.pitch;
            const float* tap = taps;
#pragma unroll 1
            for (int t = 0; t < ni + kStripRows - 1; ++t) {
                if (t >= kStripRows - 1 && t < ni) {
                    multiply_row<true>(sum, line, column, tap, plan.tap_pitch, nj, ~0u);
                } else {
                    unsigned has = (2u << (t < kStripRows ? t : kStripRows - 1)) - 1;
                    if (t >= ni) has &= ~0u << (t - ni + 1);
                    multiply_row<false>(sum, line, column, tap, plan.tap_pitch, nj, has);
                }
                line += plan.pitch, tap += plan.tap_pitch;
            }
        }
    }
    __syncthreads();
    by_storage<float>(p.dtype, [&](auto element) {
        using T = decltype(element);
        store_strip(p, static_cast<T*>(p.out) + n * p.out_stride[0], y0 + warp * rows_of_warp, x0,
                    plan.threads_across,
                    reinterpret_cast<float*>(memory) + warp * 128 * kStripColumns, sum);
    });
}

/// Null, or the error's text.
inline const char* convolve_strips(const Convolve2dParams& p, cudaStream_t stream) {
    const StripsPlan plan(p);
    if (double(plan.across) * plan.down * double(p.N) > kMostBlocks)
        return "more tiles than one CUDA grid can hold";
    cudaFuncSetAttribute(strips_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
    strips_kernel<<<unsigned(p.N * plan.across * plan.down), plan.warps * 32, plan.bytes, stream>>>(
        p, plan);
    return launch_error();
}
