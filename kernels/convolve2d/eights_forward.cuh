// Convolutions of 16-bit images with kernels of the same type on tensor cores: the product of
// matrices of bands.rest.cu, of numbers as they are (eights.cuh).
//
// A warp has 16 rows of outputs and 8 C columns; a band has S pieces of 8 rows and holds 8 S - 7
// taps, and wider kernels take several turns of 8 S - 8 taps. Warps of a block lie below each
// other; where tiles would be few, they share the rows of taps of the same outputs, or have further
// images.
//
// A NaN or an infinity would spread along a band: a tile with one is left to convolve_any.
#pragma once
#include "any_tile.cuh"
#include "eights.cuh"

constexpr int kTapRowsAtATime = 32;

/// How a convolution is cut into tiles.
struct EightsPlan {
    int groups;  // of 8 columns, of a tile
    int down;    // warps below each other, 16 rows each
    int shares;  // warps of the same outputs
    int rows;    // of taps, at a time
    int pieces;  // of 8 rows, of a band
    int lead;    // what the first tile holds in front of the first output
    int images;  // of a block
    int height;  // of an image's tile
    int saved;   // where sums of turns are, in bytes
    unsigned across, tiles_down;

    explicit EightsPlan(const Convolve2dParams& p) {
        rows = p.kh < kTapRowsAtATime ? int(p.kh) : kTapRowsAtATime;
        // Outputs begin on 16 bytes where they can, else what is read.
        const auto on_eights = [](const void* at, int64_t down) {
            return reinterpret_cast<uintptr_t>(at) % 16 == 0 && down % kEight == 0;
        };
        const bool reads = !on_eights(p.out, p.out_stride[1]) && on_eights(p.in, p.in_stride[1]);
        lead = reads ? int((p.shift[1] - (p.kw - 1)) & (kEight - 1)) : 0;
        pieces = p.kw <= 9 ? 2 : p.kw <= 17 ? 3 : p.kw <= 25 ? 4 : 5;
        share_warps(*this, p, kConvolve2dRates.eights_few, kConvolve2dRates.eights_fewer);
        across = unsigned(ceil_div(p.OW + lead, kEight * groups));
        tiles_down = unsigned(ceil_div(p.OH, 16 * down));
        height = 16 * down + rows - 1;
    }
};

/// Taps [i0, i0 + ni) x [j0, j0 + nj) of image n, in the order of correlation; returns whether this
/// thread's are finite.
template <bool kBrain, int kNumbers>
__device__ inline bool fetch_taps(const PairRows<kNumbers>& rows, const Convolve2dParams& p,
                                  int64_t n, int64_t i0, int ni, int64_t j0, int nj) {
    const auto* kernel = static_cast<const Short*>(p.kernel) + group_of(p, n) * p.kernel_stride[0];
    Finite<kBrain> finite;
    for (int number = threadIdx.x % 32; number < nj; number += 32) {
        const int64_t j = p.turned ? j0 + number : p.kw - 1 - (j0 + number);
        const int64_t step = p.turned ? p.kernel_stride[1] : -p.kernel_stride[1];
        const Short* at =
            kernel + j * p.kernel_stride[2] + (p.turned ? i0 : p.kh - 1 - i0) * p.kernel_stride[1];
#pragma unroll 4
        for (int row = threadIdx.x / 32; row < ni; row += kWarps) {
            const uint16_t bits = at[row * step].bits;
            finite.add(bits);
            rows.put(row, number, bits);
        }
    }
    return finite.all();
}

/// A warp's 16 rows of sums to image n from (y, x) on, by way of shared memory, so that it writes
/// neighbouring columns: 16 bytes at once where they lie on these, else pairs on words.
template <int C, bool kBrain>
__device__ inline void store_eights(const Convolve2dParams& p, int64_t n, int64_t y, int64_t x,
                                    char* memory, const float (&sum)[C][4]) {
    constexpr int kPitch = kEightPitch<C>, kPairs = 4 * C, kAtOnce = 32 / kPairs;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
        for (int q = 0; q < 2; ++q)
            *reinterpret_cast<unsigned*>(memory + (lane / 4 + 8 * q) * kPitch + 16 * c +
                                         lane % 4 * 4) =
                two_eights<kBrain>(sum[c][2 * q], sum[c][2 * q + 1]);
    __syncwarp();
    if (n >= p.N || y >= p.OH) return;
    const int64_t down = p.out_stride[1];
    Short* const out = static_cast<Short*>(p.out) + n * p.out_stride[0] + y * down + x;
    const int rows = p.OH - y < 16 ? int(p.OH - y) : 16;
    const bool whole = x >= 0 && x + kEight * C <= p.OW;
    if (whole && (reinterpret_cast<uintptr_t>(out) | uintptr_t(down) * 2) % 16 == 0) {
#pragma unroll
        for (int k = 0; k < C / 2; ++k) {
            const int row = (k * 32 + lane) / C, group = lane % C;
            if (row < rows)
                *reinterpret_cast<uint4*>(out + row * down + group * kEight) =
                    *reinterpret_cast<const uint4*>(memory + row * kPitch + group * 16);
        }
        return;
    }
    const int pair = lane % kPairs, first = lane / kPairs, last = kEight * C - 1;
    const char* from = memory + first * kPitch + 4 * pair;
    Short* to = out + first * down + 2 * pair;
    const int begin = x < 0 ? int(-x) : 0;
    const int end = p.OW - x <= last ? int(p.OW - x) : last + 1;
#pragma unroll 4
    for (int row = first; row < rows; row += kAtOnce) {
        // Off words, a pair is the second of two numbers and the first of the next two.
        const auto* words = reinterpret_cast<const unsigned*>(from);
        const int off = int(reinterpret_cast<uintptr_t>(to) / 2 % 2), column = 2 * pair + off;
        const unsigned both = __funnelshift_r(words[0], words[1], 16 * off);
        const auto put = [&](int at, unsigned bits) {
            if (at >= begin && at < end) to[at - 2 * pair].bits = uint16_t(bits);
        };
        if (column >= begin && column + 1 < end) {
            *reinterpret_cast<unsigned*>(to + off) = both;
        } else {
            put(column, both);
            if (column < last) put(column + 1, both >> 16);
        }
        if (off && pair == 0) put(0, words[0]);
        from += kAtOnce * kPitch, to += kAtOnce * down;
    }
}

/// The sums of warps that share taps, in their order, to the output.
template <int C, bool kBrain>
__device__ inline void finish(const Convolve2dParams& p, const EightsPlan& plan, int64_t n,
                              int64_t y, int64_t x, char* memory, float (&sum)[C][4]) {
    const int warp = threadIdx.x / 32;
    if (!add_shares<32 * C>(plan, memory, sum)) return;
    store_eights<C, kBrain>(p, n, y, x, memory + warp * (512 * C), sum);
}

template <int C, int S, bool kBrain>
__global__ void __launch_bounds__(kThreads, C > 4 ? 5 : 6)
    eights_kernel(const __grid_constant__ Convolve2dParams p,
                  const __grid_constant__ EightsPlan plan) {
    constexpr int kGroups = C + S - 1, kPitch = kEightPitch<kGroups>;
    using Taps = PairRows<kEight*(S - 1)>;  // the last of 8 S - 7 stands among the zeros behind
    extern __shared__ __align__(16) char memory[];
    const int images = plan.images, height = plan.height;
    const Taps taps{reinterpret_cast<uint16_t*>(memory + images * height * kPitch)};
    const unsigned rest = blockIdx.x / plan.across;
    const int64_t n0 = int64_t(rest / plan.tiles_down) * images;
    const int64_t y0 = int64_t(rest % plan.tiles_down) * 16 * plan.down;
    const int64_t x0 = int64_t(blockIdx.x % plan.across) * (kEight * C) - plan.lead;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = warp % plan.shares, place = warp / plan.shares;
    const int slot = place / plan.down, first = place % plan.down * 16;
    // What a turn has summed waits in shared memory for the next: there it takes no registers.
    auto* const saved = reinterpret_cast<float4*>(memory + plan.saved) + threadIdx.x;
    for (int64_t i0 = 0, j0 = 0;;) {
        const int ni = p.kh - i0 < plan.rows ? int(p.kh - i0) : plan.rows;
        const int nj = p.kw - j0 <= kEight * S - 7 ? int(p.kw - j0) : kEight * (S - 1);
        const bool begun = i0 || j0;
        if (begun) __syncthreads();
        taps.clear(ni);
        bool finite = true;
#pragma unroll 1
        for (int s = 0; s < images && n0 + s < p.N; ++s)
            finite &= fetch_eights<kGroups, kBrain>(
                EightRows<kPitch>{memory + s * height * kPitch}, Image::in(p, n0 + s),
                y0 + p.shift[0] - (p.kh - 1) + i0, x0 + p.shift[1] - (p.kw - 1) + j0,
                16 * plan.down + ni - 1);
        __syncthreads();
        finite &= fetch_taps<kBrain>(taps, p, n0, i0, ni, j0, nj);
        if (!__syncthreads_and(finite)) {
            refused_tile(memory, p, n0, images, y0, 16 * plan.down, x0, kEight * C);
            return;
        }
        float sum[C][4] = {};
        if (begun)
#pragma unroll
            for (int c = 0; c < C; ++c) {
                const float4 four = saved[c * kThreads];
                sum[c][0] = four.x, sum[c][1] = four.y, sum[c][2] = four.z, sum[c][3] = four.w;
            }
        const int begin = ni * share / plan.shares, end = ni * (share + 1) / plan.shares;
        auto at = unsigned(__cvta_generic_to_shared(
            memory + (slot * height + first + lane % 16 + begin) * kPitch + lane / 16 * 16));
        const unsigned* band = taps.band() + begin * (Taps::kPitch / 2);
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
            unsigned tap[S], piece[kGroups + 1][2];
#pragma unroll
            for (int d = 0; d < S; ++d) tap[d] = band[4 * d];
#pragma unroll
            for (int a = 0; a < kGroups; a += 2) fetch_pieces(piece[a], piece[a + 1], at + a * 16);
#pragma unroll
            for (int d = 0; d < S; d += 2)
#pragma unroll
                for (int c = 0; c < C; ++c) {
                    if (d + 1 < S)
                        multiply_eights<kBrain>(sum[c], piece[c + d], piece[c + d + 1], tap[d],
                                                tap[d + 1]);
                    else
                        multiply_eights<kBrain>(sum[c], piece[c + d], tap[d]);
                }
            at += kPitch, band += Taps::kPitch / 2;
        }
        j0 += nj;
        if (j0 == p.kw) j0 = 0, i0 += ni;
        if (i0 == p.kh) return finish<C, kBrain>(p, plan, n0 + slot, y0 + first, x0, memory, sum);
#pragma unroll
        for (int c = 0; c < C; ++c)
            saved[c * kThreads] = {sum[c][0], sum[c][1], sum[c][2], sum[c][3]};
    }
}

/// By kernels of C groups and, from S on, of as many pieces as the taps want.
template <int C, int S = 2>
inline const char* run_eights(const Convolve2dParams& p, EightsPlan plan, cudaStream_t stream) {
    if constexpr (S < 5)
        if (plan.pieces > S) return run_eights<C, S + 1>(p, plan, stream);
    const double blocks = tiles_of(plan, p);
    if (blocks > kMostBlocks) return "more tiles than one CUDA grid can hold";
    constexpr int kSums = kWarps * 512 * C;
    plan.saved = plan.images * plan.height * kEightPitch<C + S - 1> +
                 plan.rows * int(sizeof(uint16_t)) * PairRows<kEight*(S - 1)>::kPitch + 16;
    const bool turns = plan.rows < p.kh || p.kw > kEight * S - 7;
    int bytes = plan.saved + (turns ? kSums : 0);
    for (int least : {kSums, int(sizeof(AnyTile<float>))}) bytes = bytes < least ? least : bytes;
    const auto kernel =
        p.dtype == DType::kHalf ? eights_kernel<C, S, false> : eights_kernel<C, S, true>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<unsigned(blocks), kThreads, bytes, stream>>>(p, plan);
    return launch_error();
}

/// eights_narrow.rest.cu
const char* convolve2d_eights_narrow(const Convolve2dParams& p, const EightsPlan& plan,
                                     cudaStream_t stream);
