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

/// How a block's warps, of 16 rows of outputs and 8 * `groups` columns each, are shared out where
/// tensor cores multiply by bands: below each other (`down`), to further images (`images`), or,
/// where there would be fewer tiles than `few`, to the rows of taps of the same outputs (`shares`);
/// of fewer than `fewer` tiles these get narrower, and are shared once more.
template <typename Plan>
inline double tiles_of(const Plan& plan, const Convolve2dParams& p) {
    return double(ceil_div(p.N, plan.images)) *
           double(ceil_div(p.OW + plan.lead, 8 * plan.groups)) *
           double(ceil_div(p.OH, 16 * plan.down));
}
template <typename Plan>
inline void share_warps(Plan& plan, const Convolve2dParams& p, double few, double fewer) {
    plan.groups = p.OW + plan.lead <= 32 ? 4 : 8;
    plan.down = p.G > 1 || p.N == 1 || p.OH > 32 ? 4 : p.OH > 16 ? 2 : 1;
    plan.images = kWarps / plan.down, plan.shares = 1;
    const auto share = [&] {
        plan.images > 1 ? plan.images /= 2 : plan.down /= 2;
        plan.shares *= 2;
    };
    if (tiles_of(plan, p) < few) share();
    if (tiles_of(plan, p) < fewer) plan.groups = 4;
    if (tiles_of(plan, p) < fewer) share();
}

/// Adds the sums of warps that share taps, in their order; true in the first of these alone, which
/// has them then. `memory`: shared, kOwn words of 16 bytes to each warp.
template <int kOwn, int C, typename Plan>
__device__ inline bool add_shares(const Plan& plan, char* memory, float (&sum)[C][4]) {
    const int warp = threadIdx.x / 32, share = warp % plan.shares;
    auto* const sums = reinterpret_cast<float4*>(memory) + warp * kOwn + threadIdx.x % 32;
    __syncthreads();
    if (share > 0)
#pragma unroll
        for (int c = 0; c < C; ++c) sums[c * 32] = {sum[c][0], sum[c][1], sum[c][2], sum[c][3]};
    if (plan.shares > 1) __syncthreads();
    if (share > 0) return false;
#pragma unroll 1
    for (int s = 1; s < plan.shares; ++s)
#pragma unroll
        for (int c = 0; c < C; ++c) {
            const float4 more = sums[(s * (kOwn / 32) + c) * 32];
            sum[c][0] += more.x, sum[c][1] += more.y, sum[c][2] += more.z, sum[c][3] += more.w;
        }
    return true;
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
