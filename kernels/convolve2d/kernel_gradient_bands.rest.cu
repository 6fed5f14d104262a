// The gradient of convolve2d to wide kernels on tensor cores; numbers as pairs of halves:
// halves.cuh, tiles and order of sums: forward.cu.
//
// For a row y of grad_out, with the taps in the order of correlation,
//   grad[i, 8 b + n] += sum over X of in[y + i, X] * band_y[X, 8 b + n],
//   band_y[X, j] = grad_out[y, X - j]:
// a product of matrices, whose right side depends on X - 8 b alone in pieces of 8 x 8, which are
// read once for all b. A block has 16 I x 8 J taps, a warp every fourth row of a tile.
#include "halves.cuh"

template <int I, int J>
struct Parts {
    static constexpr int kTapRows = 16 * I, kTapColumns = 8 * J;
    static constexpr int kRowsOfTile = kTileRows + kTapRows - 1;
    static constexpr int kSteps = kTileColumns / 8, kGroups = kSteps + J;
    static constexpr int kPitch = kGroupPitch<kGroups>;
    static constexpr int kNumbers = kGroupPitch<kSteps> / 4;  // from row to row
    static constexpr int kGradRow = kTileColumns + 16;        // halves: zeros before and behind
    static constexpr int kGradPitch = 4 * kGradRow;  // high, from the second on; low, likewise
    static_assert(kGroups % 2 == 0, "whole blocks of 16 columns");

    alignas(16) char tile[kRowsOfTile * kPitch + 16];
    alignas(16) uint16_t grad[kTileRows * kGradPitch];
    alignas(16) float numbers[kTileRows * kNumbers];  // of grad_out
    float refused[kTapRows * kTapColumns];  // sums over tiles that have a NaN or an infinity
    uint2 largest[kThreads / 32];
};

/// A row of grad_out as halves with 7 zeros before and zeros behind, four times: high, high from
/// the second on, so that any pair lies in a word, and low ones likewise.
template <typename P>
__device__ inline bool split_grads(P& shared, float scale) {
    bool any = false;
    for (int i = threadIdx.x; i < kTileRows * (P::kGradRow / 2); i += kThreads) {
        const int row = i / (P::kGradRow / 2), z = i % (P::kGradRow / 2) * 2;
        float x[3];
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            const int j = z + k - 7;
            x[k] = j >= 0 && j < kTileColumns ? shared.numbers[row * P::kNumbers + j] : 0.0f;
        }
        auto* to = reinterpret_cast<unsigned*>(shared.grad + row * P::kGradPitch + z);
        unsigned high, low;
        any |= split(x[0], x[1], scale, high, low);
        to[0] = high, to[P::kGradRow] = low;
        split(x[1], x[2], scale, high, low);
        to[P::kGradRow / 2] = high, to[P::kGradRow / 2 * 3] = low;
    }
    return any;
}

/// The tile of `rows` rows of outputs, columns [begin, end), by multiply-adds, from what is not
/// halves yet.
template <typename P>
__device__ __noinline__ void refused_tile(P& shared, int rows, int begin, int end, int ni, int nj) {
    for (int k = threadIdx.x; k < ni * nj; k += kThreads) {
        const int i = k / nj, j = k % nj;
        float sum = 0;
        for (int y = 0; y < rows; ++y) {
            const auto* line = reinterpret_cast<const float*>(shared.tile + (y + i) * P::kPitch);
            float part = 0;
            for (int x = begin; x < end; ++x)
                part += shared.numbers[y * P::kNumbers + x] * line[x + j];
            sum += part;
        }
        shared.refused[i * P::kTapColumns + j] += sum;
    }
}

template <int I, int J>
__global__ void __launch_bounds__(kThreads, I > 1 ? 2 : 4)
    bands_parts(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down,
                unsigned tiles, int height) {
    using P = Parts<I, J>;
    extern __shared__ __align__(16) char memory[];
    P& shared = *reinterpret_cast<P*>(memory);
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const unsigned chunks_across = unsigned(ceil_div(p.kw, P::kTapColumns));
    const unsigned chunks = unsigned(ceil_div(p.kh, P::kTapRows)) * chunks_across;
    const unsigned chunk = blockIdx.x / splits % chunks;
    const int64_t g = blockIdx.x / splits / chunks, first = g * (p.N / p.G);
    const int64_t i0 = int64_t(chunk / chunks_across) * P::kTapRows;
    const int64_t j0 = int64_t(chunk % chunks_across) * P::kTapColumns;
    const int ni = p.kh - i0 < P::kTapRows ? int(p.kh - i0) : P::kTapRows;
    const int nj = p.kw - j0 < P::kTapColumns ? int(p.kw - j0) : P::kTapColumns;
    const int lead = int((p.shift[1] - (p.kw - 1)) & 3);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int k = threadIdx.x; k < P::kTapRows * P::kTapColumns; k += kThreads)
        shared.refused[k] = 0;
    float sum[I][J][4] = {};
    for (unsigned index = split; index < tiles; index += splits) {
        TilePlace at(index, across, down, height);
        at.n += first, at.x -= lead;
        const int rows = p.OH - at.y < height ? int(p.OH - at.y) : height;
        const int columns = p.OW - at.x < kTileColumns ? int(p.OW - at.x) : kTileColumns;
        __syncthreads();
        const int filled = rows + P::kTapRows - 1;
        char* const grads = reinterpret_cast<char*>(shared.numbers);
        fill_groups<P::kGroups>(shared.tile, Image::in(p, at.n),
                                at.y + p.shift[0] - (p.kh - 1) + i0,
                                at.x + p.shift[1] - (p.kw - 1) + j0, filled);
        fill_groups<P::kSteps>(grads, Image::grad_out(p, at.n), at.y, at.x, rows);
        unsigned most = largest_of<P::kGroups>(shared.tile, filled);
        unsigned most_grad = largest_of<P::kSteps>(grads, rows);
        block_largest(most, most_grad, shared.largest);
        const HalfScale scale(most), grad_scale(most_grad);
        const int exponent = scale.exponent + grad_scale.exponent;
        if (!can_scale(most, most_grad, exponent)) {
            refused_tile(shared, rows, at.x < 0 ? int(-at.x) : 0, columns, ni, nj);
            continue;
        }
        const bool low = split_groups<P::kGroups>(shared.tile, filled, scale.scale);
        const int lows = which(low, split_grads(shared, grad_scale.scale));
        const float unit = __uint_as_float(unsigned(127 - exponent) << 23);
        const int n = lane / 4, z = 2 * (lane % 4) + 7 - n;
        const auto* pairs =
            reinterpret_cast<const unsigned*>(shared.grad) + z / 2 + (z % 2 ? P::kGradRow / 2 : 0);
        const char* from = shared.tile + lane % 16 * P::kPitch + lane / 16 * 16;
        float lower[I][J][4] = {};
        const auto walk = [&](auto which) {
            constexpr int kLows = decltype(which)::value;
#pragma unroll 1
            for (int y = warp; y < rows; y += kThreads / 32) {
                // Step d of the band is at d + 1: those before and behind it are zeros.
                unsigned grad[P::kSteps + 3] = {}, grad_rest[P::kSteps + 3] = {};
#pragma unroll
                for (int d = 0; d <= P::kSteps; ++d) {
                    grad[d + 1] = pairs[y * (P::kGradPitch / 2) + 4 * d];
                    if (kLows & 2)
                        grad_rest[d + 1] = pairs[y * (P::kGradPitch / 2) + P::kGradRow + 4 * d];
                }
                float part[I][J][4] = {};
#pragma unroll
                for (int a = 0; a < P::kGroups; a += 2) {
#pragma unroll
                    for (int i = 0; i < I; ++i) {
                        const auto piece_at = unsigned(__cvta_generic_to_shared(
                            from + (y + 16 * i) * P::kPitch + a * kGroupBytes));
                        Piece left, right;
                        left.fetch(piece_at);
                        right.fetch(piece_at + kGroupBytes);

                        const auto each = [&](const auto& body) {
#pragma unroll
                            for (int j = 0; j < J; ++j)
                                if (a - j + 1 >= 0 && a - j <= P::kSteps) body(j, a - j + 1);
                        };
                        if (kLows & 1)
                            each([&](int j, int d) {
                                multiply(lower[i][j], left.low, right.low, grad[d], grad[d + 1]);
                            });
                        each([&](int j, int d) {
                            multiply(part[i][j], left.high, right.high, grad[d], grad[d + 1]);
                        });
                        if (kLows & 2)
                            each([&](int j, int d) {
                                multiply(lower[i][j], left.high, right.high, grad_rest[d],
                                         grad_rest[d + 1]);
                            });
                    }
                }
#pragma unroll
                for (int i = 0; i < I; ++i)
#pragma unroll
                    for (int j = 0; j < J; ++j)
#pragma unroll
                        for (int q = 0; q < 4; ++q) sum[i][j][q] += part[i][j][q] * unit;
            }
        };
        if (lows & 1)
            walk(std::integral_constant<int, 3>{});
        else
            walk(std::integral_constant<int, 2>{});
#pragma unroll
        for (int i = 0; i < I; ++i)
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
                for (int q = 0; q < 4; ++q) sum[i][j][q] += lower[i][j][q] * (unit / kLow);
    }
    store_parts<I, J>(p, g, split, i0, j0, ni, nj, reinterpret_cast<float*>(shared.tile),
                      shared.refused, sum);
}

template <int I, int J>
const char* run(const Convolve2dParams& p, cudaStream_t stream) {
    using P = Parts<I, J>;
    const Convolve2dBandsParts plan(p);
    const int64_t images = p.N / p.G, parts = p.G * p.splits;
    if (double(plan.across) * double(plan.down) * double(images) > kMostBlocks ||
        parts * plan.chunks > kMostBlocks)
        return "more tiles than one CUDA grid can hold";
    const auto kernel = bands_parts<I, J>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(P)));
    kernel<<<unsigned(parts * plan.chunks), kThreads, sizeof(P), stream>>>(
        p, unsigned(plan.across), unsigned(plan.down), unsigned(images * plan.across * plan.down),
        plan.height);
    return launch_error();
}

const char* convolve2d_bands_parts_cuda(const Convolve2dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    return Convolve2dBandsParts(*p).chunk == 16 ? run<1, 2>(*p, on) : run<2, 4>(*p, on);
}
