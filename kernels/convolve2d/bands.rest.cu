// Convolutions with wide kernels on tensor cores; numbers as pairs of halves: halves.cuh.
//
// Along a row, with the taps in the order of correlation,
//   out[y, 8 c + n] = sum over i, k of in[y + i, 8 c + k] * band_i[k, n],
//   band_i[k, n] = tap[i, k - n]:
// for each row i of taps a product of matrices whose right side is a band. A warp has 16 rows of
// outputs and 8 C columns. The left side of neighbouring c is the same but for 8 columns, so each
// piece of it, 16 rows x 8 columns, is read once from shared memory for a row of taps, and used
// for all c. The band holds 16 K - 7 taps; wider kernels take several turns, 16 K - 8 taps each.
// What is zero in a band, 7 of 16 K columns and what the taps leave over, is lost.
//
// The products of kChain rows are summed on their own before they are added to the sums: long
// chains are what makes sums inexact. A NaN or an infinity would spread along a band: a tile with
// one is left to convolve_any, as is one whose scales leave the range of float32.
#include "any_tile.cuh"
#include "halves.cuh"

constexpr int kChain = 2;  // rows of taps whose products are summed on their own

/// How a convolution is cut into tiles.
struct BandsPlan {
    int groups;  // of 8 columns, of a tile
    int down;    // warps below each other, 16 rows each
    int shares;  // warps that share the rows of taps of the same outputs
    int images;  // of a block
    int rows;    // of taps, at a time
    int blocks;  // of 16 columns, of a band
    int lead;    // what the first tile holds in front of the first output
    unsigned tiles_across, tiles_down;

    explicit BandsPlan(const Convolve2dParams& p) {
        rows = p.kh < 32 ? int(p.kh) : 32;
        lead = int((p.shift[1] - (p.kw - 1)) & 3);
        share_warps(*this, p, kConvolve2dRates.bands_few, kConvolve2dRates.bands_fewer);
        blocks = 2 * turns(p.kw, 2) <= 3 * turns(p.kw, 3) ? 2 : 3;
        tiles_across = unsigned(ceil_div(p.OW + lead, 8 * groups));
        tiles_down = unsigned(ceil_div(p.OH, 16 * down));
    }
    /// How many bands of so many blocks hold the taps of a row.
    static int64_t turns(int64_t kw, int blocks) {
        return kw <= 16 * blocks - 7 ? 1 : ceil_div(kw - 1, 16 * blocks - 8);
    }
};

/// A tile: C groups of 8 columns, a band of K blocks of 16.
template <int C, int K>
struct Bands {
    static constexpr int kColumns = 8 * C, kGroups = C + 2 * K - 1;
    static constexpr int kPitch = kGroupPitch<kGroups>;
    static constexpr int kMost = 16 * K - 7;       // taps
    static constexpr int kTapRow = 16 * K + 8;     // halves: zeros before and behind
    static constexpr int kTapPitch = 4 * kTapRow;  // high, from the second on; low, likewise
};

/// Taps [j0, j0 + nj) of row i0 + i as halves with 7 zeros before and zeros behind, four times:
/// high, high from the second on, so that any pair lies in a word, and low ones likewise.
template <int C, int K>
__device__ inline bool split_taps(uint16_t* taps, const float* number, int ni, int nj,
                                  float scale) {
    using B = Bands<C, K>;
    bool any = false;
    for (int i = threadIdx.x; i < ni * (B::kTapRow / 2); i += kThreads) {
        const int row = i / (B::kTapRow / 2), z = i % (B::kTapRow / 2) * 2;
        float x[3];
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            const int j = z + k - 7;
            x[k] = j >= 0 && j < nj ? number[row * B::kMost + j] : 0.0f;
        }
        auto* to = reinterpret_cast<unsigned*>(taps + row * B::kTapPitch + z);
        unsigned high, low;
        any |= split(x[0], x[1], scale, high, low);
        to[0] = high, to[B::kTapRow] = low;
        split(x[1], x[2], scale, high, low);
        to[B::kTapRow / 2] = high, to[B::kTapRow / 2 * 3] = low;
    }
    return any;
}

/// A warp's 16 rows of sums to image n from (y, x) on, by way of shared memory, so that it writes
/// neighbouring columns. `sums`: the warp's own, free of what others still read.
template <int C>
__device__ inline void store_rows(const Convolve2dParams& p, int64_t n, int64_t y, int64_t x,
                                  float* sums, const float (&sum)[C][4]) {
    constexpr int kColumns = 8 * C, kPitch = kColumns + 8;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int row = lane / 4 + 8 * q, column = 8 * c + 2 * (lane % 4);
            *reinterpret_cast<float2*>(sums + row * kPitch + column) = {sum[c][2 * q],
                                                                        sum[c][2 * q + 1]};
        }
    __syncwarp();
    if (n >= p.N) return;
    by_storage<float>(p.dtype, [&](auto element) {
        using T = decltype(element);
        T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + y * p.out_stride[1] + x;
        for (int i = lane; i < 16 * kColumns; i += 32) {
            const int row = i / kColumns, column = i % kColumns;
            if (y + row < p.OH && x + column >= 0 && x + column < p.OW)
                out[row * p.out_stride[1] + column] =
                    stored<T>(sums[row * kPitch + column], p.dtype);
        }
    });
}

template <int C, int K>
__global__ void __launch_bounds__(kThreads, 3)
    bands_kernel(const __grid_constant__ Convolve2dParams p, const BandsPlan plan) {
    using B = Bands<C, K>;
    extern __shared__ __align__(16) char memory[];
    __shared__ uint2 largest[kThreads / 32];
    const int images = plan.images;
    const int height = 16 * plan.down + plan.rows - 1;
    char* const tile = memory;
    auto* const taps = reinterpret_cast<uint16_t*>(memory + images * height * B::kPitch + 16);
    auto* const numbers = reinterpret_cast<float*>(taps + plan.rows * B::kTapPitch);
    const unsigned across = blockIdx.x % plan.tiles_across;
    const unsigned rest = blockIdx.x / plan.tiles_across;
    const int64_t n0 = int64_t(rest / plan.tiles_down) * images;
    const int64_t y0 = int64_t(rest % plan.tiles_down) * 16 * plan.down;
    const int64_t x0 = int64_t(across) * B::kColumns - plan.lead;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = warp % plan.shares, place = warp / plan.shares;
    const int slot = place / plan.down, first = place % plan.down * 16;
    float sum[C][4] = {};
    bool refused = false;
    for (int64_t i0 = 0; i0 < p.kh && !refused; i0 += plan.rows) {
        const int ni = p.kh - i0 < plan.rows ? int(p.kh - i0) : plan.rows;
        for (int64_t j0 = 0; j0 < p.kw;) {
            const int nj = p.kw - j0 <= B::kMost ? int(p.kw - j0) : B::kMost - 1;
            __syncthreads();
            const int filled = 16 * plan.down + ni - 1;
            for (int s = 0; s < images && n0 + s < p.N; ++s)
                fill_groups<B::kGroups>(tile + s * height * B::kPitch, Image::in(p, n0 + s),
                                        y0 + p.shift[0] - (p.kh - 1) + i0,
                                        x0 + p.shift[1] - (p.kw - 1) + j0, filled);
            unsigned most = 0, most_tap = 0;
            for (int i = threadIdx.x; i < ni * nj; i += kThreads) {
                const float tap = tap_at<float>(p, group_of(p, n0), i0 + i / nj, j0 + i % nj);
                numbers[i / nj * B::kMost + i % nj] = tap;
                most_tap = max(most_tap, magnitude(tap));
            }
            for (int s = 0; s < images && n0 + s < p.N; ++s)
                most = max(most, largest_of<B::kGroups>(tile + s * height * B::kPitch, filled));
            block_largest(most, most_tap, largest);
            const HalfScale scale(most), tap_scale(most_tap);
            const int exponent = scale.exponent + tap_scale.exponent;
            refused = !can_scale(most, most_tap, exponent);
            if (refused) break;
            bool low = false;
            for (int s = 0; s < images && n0 + s < p.N; ++s)
                low |= split_groups<B::kGroups>(tile + s * height * B::kPitch, filled, scale.scale);
            const int lows = which(low, split_taps<C, K>(taps, numbers, ni, nj, tap_scale.scale));
            const float unit = __uint_as_float(unsigned(127 - exponent) << 23);
            // This lane's row of the left side, and where its pairs of taps begin.
            const char* from =
                tile + (slot * height + first + lane % 16) * B::kPitch + lane / 16 * 16;
            const int n = lane / 4, z = 2 * (lane % 4) + 7 - n;
            const auto* pairs =
                reinterpret_cast<const unsigned*>(taps) + z / 2 + (z % 2 ? B::kTapRow / 2 : 0);
            const int begin = ni * share / plan.shares, end = ni * (share + 1) / plan.shares;
            float lower[C][4] = {};
            const auto rows = [&](auto which) {
                constexpr int kLows = decltype(which)::value;
                float part[C][4] = {};
#pragma unroll 1
                for (int i = begin; i < end; ++i) {
                    unsigned tap[2 * K], tap_rest[2 * K];
#pragma unroll
                    for (int d = 0; d < 2 * K; ++d) {
                        const unsigned* pair = pairs + i * (B::kTapPitch / 2) + 4 * d;
                        tap[d] = pair[0];
                        if (kLows & 2) tap_rest[d] = pair[B::kTapRow];
                    }
                    const auto at = unsigned(__cvta_generic_to_shared(from + i * B::kPitch));
                    Piece piece[2];
                    piece[0].fetch(at);
#pragma unroll
                    for (int a = 0; a + 1 < B::kGroups; ++a) {
                        piece[(a + 1) % 2].fetch(at + (a + 1) * kGroupBytes);
                        const Piece &left = piece[a % 2], &right = piece[(a + 1) % 2];
                        const auto each = [&](const auto& body) {
#pragma unroll
                            for (int k = 0; k < K; ++k)
                                if (a - 2 * k >= 0 && a - 2 * k < C) body(a - 2 * k, 2 * k);
                        };
                        if (kLows & 1)
                            each([&](int c, int d) {
                                multiply(lower[c], left.low, right.low, tap[d], tap[d + 1]);
                            });
                        each([&](int c, int d) {
                            multiply(part[c], left.high, right.high, tap[d], tap[d + 1]);
                        });
                        if (kLows & 2)
                            each([&](int c, int d) {
                                multiply(lower[c], left.high, right.high, tap_rest[d],
                                         tap_rest[d + 1]);
                            });
                    }
                    if ((i - begin) % kChain != kChain - 1 && i + 1 < end) continue;
#pragma unroll
                    for (int c = 0; c < C; ++c)
#pragma unroll
                        for (int q = 0; q < 4; ++q) {
                            sum[c][q] += part[c][q] * unit;
                            part[c][q] = 0;
                        }
                }
            };
            if (lows & 1)
                rows(std::integral_constant<int, 3>{});
            else
                rows(std::integral_constant<int, 2>{});
#pragma unroll
            for (int c = 0; c < C; ++c)
#pragma unroll
                for (int q = 0; q < 4; ++q) sum[c][q] += lower[c][q] * (unit / kLow);
            j0 += nj;
        }
    }
    if (refused) {
        refused_tile(memory, p, n0, images, y0, 16 * plan.down, x0, B::kColumns);
        return;
    }
    constexpr int kOwn = 4 * (B::kColumns + 8);  // words of a warp
    if (!add_shares<kOwn>(plan, memory, sum)) return;
    store_rows<C>(p, n0 + slot, y0 + first, x0,
                  reinterpret_cast<float*>(memory) + warp * (4 * kOwn), sum);
}

template <int C, int K>
const char* run(const Convolve2dParams& p, const BandsPlan& plan, cudaStream_t stream) {
    using B = Bands<C, K>;
    const double tiles = tiles_of(plan, p);
    if (tiles > kMostBlocks) return "more tiles than one CUDA grid can hold";
    const int height = 16 * plan.down + plan.rows - 1;
    const int used =
        plan.images * height * B::kPitch + 16 + plan.rows * (B::kTapPitch * 2 + B::kMost * 4);
    const int sums = kWarps * 16 * (B::kColumns + 8) * 4;
    int bytes = used > sums ? used : sums;
    if (bytes < int(sizeof(AnyTile<float>))) bytes = int(sizeof(AnyTile<float>));
    const auto kernel = bands_kernel<C, K>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<unsigned(tiles), kThreads, bytes, stream>>>(p, plan);
    return launch_error();
}

const char* convolve2d_bands_cuda(const Convolve2dParams* p, void* stream) {
    const BandsPlan plan(*p);
    const auto on = static_cast<cudaStream_t>(stream);
    if (plan.groups == 4)
        return plan.blocks == 2 ? run<4, 2>(*p, plan, on) : run<4, 3>(*p, plan, on);
    return plan.blocks == 2 ? run<8, 2>(*p, plan, on) : run<8, 3>(*p, plan, on);
}
