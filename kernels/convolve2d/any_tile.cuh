// A tile of a convolution with a kernel of any size: multiply-adds in the accumulating type.
#pragma once
#include "tile.cuh"

template <typename A>
struct AnyTile {
    alignas(16) A tile[kTile * kPitch];
    alignas(16) A taps[kChunk * kChunk];
};

/// Computes and stores it, kChunk x kChunk taps at a time: what lies before row OH and column OW.
/// All threads of a block.
template <typename A>
__device__ inline void convolve_any(AnyTile<A>& shared, const Convolve2dParams& p,
                                    const TilePlace& at, int64_t OH, int64_t OW) {
    const int column = threadIdx.x % kThreadColumns * kQuad;
    const int row = threadIdx.x / kThreadColumns * kRows;
    A sum[kRows][kQuad] = {};
    for (int64_t i0 = 0; i0 < p.kh; i0 += kChunk) {
        for (int64_t j0 = 0; j0 < p.kw; j0 += kChunk) {
            const int ni = p.kh - i0 < kChunk ? int(p.kh - i0) : kChunk;
            const int nj = p.kw - j0 < kChunk ? int(p.kw - j0) : kChunk;
            __syncthreads();
            for (int i = threadIdx.x; i < ni * kChunk; i += kThreads)
                if (i % kChunk < nj)
                    shared.taps[i] =
                        tap_at<A>(p, group_of(p, at.n), i0 + i / kChunk, j0 + i % kChunk);
            fill(shared.tile, kPitch, Image::in(p, at.n), at.y + p.shift[0] - (p.kh - 1) + i0,
                 at.x + p.shift[1] - (p.kw - 1) + j0, kTileRows + ni - 1, kTileColumns + nj - 1);
            wait_for_tile();
            // A row of input meets up to kRows rows of taps, one for each row of output.
#pragma unroll 1
            for (int t = 0; t < kRows + ni - 1; ++t) {
                A* line = shared.tile + (row + t) * kPitch + column;
                Quad<A> left = quad(line);
#pragma unroll 1
                for (int j = 0; j < nj; j += kQuad) {
                    const Quad<A> right = quad(line + j + kQuad);
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        if (t < r || t - r >= ni) continue;
                        const Quad<A> tap = quad(shared.taps + (t - r) * kChunk + j);
#pragma unroll
                        for (int k = 0; k < kQuad; ++k) {
                            if (j + k >= nj) break;
#pragma unroll
                            for (int q = 0; q < kQuad; ++q)
                                sum[r][q] +=
                                    tap.at[k] * (q + k < kQuad ? left.at[(q + k) % kQuad]
                                                               : right.at[(q + k) % kQuad]);
                        }
                    }
                    left = right;
                }
            }
        }
    }
    by_storage<A>(p.dtype, [&](auto element) {
        store_outputs<decltype(element)>(p, at.n, at.y + row, at.x + column, OH, OW, sum);
    });
}

/// A tile of `images` images that tensor cores refuse, by multiply-adds in float32.
__device__ __noinline__ inline void refused_tile(char* memory, const Convolve2dParams& p,
                                                 int64_t n0, int images, int64_t y0, int rows,
                                                 int64_t x0, int columns) {
    auto& shared = *reinterpret_cast<AnyTile<float>*>(memory);
    const int64_t OH = y0 + rows < p.OH ? y0 + rows : p.OH;
    const int64_t OW = x0 + columns < p.OW ? x0 + columns : p.OW;
    TilePlace at(0, 1, 1);
    for (at.n = n0; at.n < n0 + images && at.n < p.N; ++at.n)
        for (at.y = y0; at.y < OH; at.y += kTileRows)
            for (at.x = x0; at.x < OW; at.x += kTileColumns) convolve_any(shared, p, at, OH, OW);
}
