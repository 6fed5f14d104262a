// The gradient of convolve2d to its kernel by multiply-adds in float32, with tiles of the input and
// of grad_out in shared memory.
//
// A lane has the sums of up to 4 x 16 taps in registers, over outputs of four neighbouring columns:
// it walks down them and holds of the input the rows that meet the present row of grad_out, so that
// an output row costs one new row of either, read 16 bytes at a time: with 9 taps to a row 4 reads
// for 144 multiply-adds. The number of columns is known to the compiler, that of rows is not: a
// block's warps have rows of taps below each other, and where these are few, rows of the tile.
//
// What lies in a tile but belongs to no output is multiplied by 0 here: where that may be a NaN, a
// tile's sums are made one by one.
#include "tile.cuh"

template <int kTaps>
struct Strips {
    static constexpr int kRowTaps = Convolve2dStripsParts::kRowTaps;
    static constexpr int kWindow = (kTaps + kQuad + 2) / kQuad * kQuad;  // what four outputs meet
    static constexpr int kPitch = Convolve2dStripsParts::pitch(kTaps);
    static constexpr int kSums = kRowTaps * kTaps;
    static constexpr int kMostThreads = 32 * Convolve2dStripsParts::most_warps(kTaps);
    static_assert(kPitch == kTileColumns - kQuad + kWindow);
    using Window = float[kWindow];

    /// What four outputs meet of a row.
    __device__ static void read(Window& to, const float* from) {
#pragma unroll
        for (int i = 0; i < kWindow; i += kQuad) {
            const auto four = quad(const_cast<float*>(from) + i);
#pragma unroll
            for (int k = 0; k < kQuad; ++k) to[i + k] = four.at[k];
        }
    }
};

/// Which tile of which image: as `TilePlace`, without a division from one to the next.
struct TileWalk {
    int n, y, x, step_n, step_y, step_x, across, down;

    __device__ TileWalk(unsigned index, unsigned step, int across, int down)
        : across(max(across, 1)), down(max(down, 1)) {
        const auto digits = [&](unsigned i, int& n, int& y, int& x) {
            const unsigned columns = unsigned(this->across), rows = unsigned(this->down);
            n = int(i / columns / rows), y = int(i / columns % rows), x = int(i % columns);
        };
        digits(index, n, y, x);
        digits(step, step_n, step_y, step_x);
    }
    __device__ void next() {
        n += step_n, y += step_y, x += step_x;
        if (x >= across) x -= across, ++y;
        if (y >= down) y -= down, ++n;
    }
};

/// The tile of `rows` rows of outputs and `columns` columns, one sum after the other.
__device__ __noinline__ void sums_one_by_one(float* sums, const float* tile, int pitch,
                                             const float* grads, int rows, int columns, int ni,
                                             int nj) {
    for (int k = threadIdx.x; k < ni * nj; k += blockDim.x) {
        float sum = 0;
        for (int y = 0; y < rows; ++y) {
            const float* line = tile + (y + k / nj) * pitch + k % nj;
            float part = 0;
            for (int x = 0; x < columns; ++x) part += grads[y * kTileColumns + x] * line[x];
            sum += part;
        }
        sums[k] += sum;
    }
}

/// Sums over a warp's lanes of each of `value`, the first `count` of which are wanted: lanes share
/// them out, and each writes its own to `to`.
template <int kMask, int kCount>
__device__ inline void share_sums(float* to, const float (&value)[kCount], int begin, int count) {
    if constexpr (kMask == 0) {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
            if (k < count) to[begin + k] = value[k];
    } else {
        constexpr int kHalf = (kCount + 1) / 2;
        const bool upper = threadIdx.x & kMask;
        float half[kHalf];
#pragma unroll
        for (int k = 0; k < kHalf; ++k) {
            const float other = k + kHalf < kCount ? value[k + kHalf] : 0.0f;
            half[k] =
                (upper ? other : value[k]) + __shfl_xor_sync(~0u, upper ? value[k] : other, kMask);
        }
        const int lower = count < kHalf ? count : kHalf;
        share_sums<kMask / 2>(to, half, upper ? begin + kHalf : begin,
                              upper ? count - lower : lower);
    }
}

template <int kTaps>
__global__ void __launch_bounds__(Strips<kTaps>::kMostThreads, 2)
    strips_parts(const __grid_constant__ Convolve2dParams p,
                 const __grid_constant__ Convolve2dStripsParts plan) {
    using S = Strips<kTaps>;
    constexpr int kRowTaps = S::kRowTaps, kPitch = S::kPitch;
    extern __shared__ __align__(16) float memory[];
    follow();
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const unsigned chunk = blockIdx.x / splits % unsigned(plan.chunks);
    const int64_t g = blockIdx.x / splits / unsigned(plan.chunks), first = g * (p.N / p.G);
    const int images = p.OH > 0 && p.OW > 0 ? int(p.N / p.G) : 0;
    // The last columns of taps may be those of two chunks.
    const int chunks_down = int(plan.chunks / plan.chunks_across);
    const int chunk_row = int(chunk / unsigned(plan.chunks_across));
    const int i0 = int(p.kh * chunk_row / chunks_down);
    const int ni = int(p.kh * (chunk_row + 1) / chunks_down) - i0;
    const int begin = int(chunk % unsigned(plan.chunks_across)) * kTaps;
    const int j0 = begin < int(p.kw) - kTaps ? begin : int(p.kw) - kTaps;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = warp % plan.parts, own = ni * part / plan.parts;
    const bool four = ni * (part + 1) / plan.parts - own == kRowTaps;
    const int each = plan.height / (2 * plan.slices);  // rows of a lane
    const int column = lane % 16 * kQuad, from = (warp / plan.parts * 2 + lane / 16) * each;
    float* const tile = memory;
    float* const grads = tile + (plan.height + plan.rows - 1) * kPitch;
    float* const others = memory + plan.others;  // sums that have been made one by one
    for (int k = threadIdx.x; k < ni * kTaps; k += blockDim.x) others[k] = 0;
    const int lower = int(p.shift[0] - (p.kh - 1)) + i0, right = int(p.shift[1] - (p.kw - 1)) + j0;
    float sum[kRowTaps][kTaps] = {};
    for (TileWalk at(split, splits, int(plan.across), int(plan.down)); at.n < images; at.next()) {
        constexpr int kWidth = kTileColumns + kTaps - 1;
        const int y = at.y * plan.height, x = at.x * kTileColumns;
        const int rows = min(int(p.OH) - y, plan.height),
                  columns = min(int(p.OW) - x, kTileColumns);
        const int64_t n = first + at.n;
        fill_columns<kWidth>(tile, kPitch, Image::in(p, n), y + lower, x + right, rows + ni - 1);
        fill_columns<kTileColumns>(grads, kTileColumns, Image::grad_out(p, n), y, x, rows);
        wait_for_tile();
        const int filled = rows + ni - 1;
        bool usual = true;
        if (columns % kQuad != 0) {
            float zero = 0;
            for (int y = warp; y < filled; y += int(blockDim.x / 32))
                for (int x = lane; x < kWidth; x += 32) zero += tile[y * kPitch + x] * 0;
            if (__syncthreads_or(zero != 0)) {
                sums_one_by_one(others, tile, kPitch, grads, rows, columns, ni, kTaps);
                usual = false;
            }
        }
        const int last = rows - from < each ? rows - from : each;
        const int end = column < columns && usual ? last : 0;
        const float* line = tile + (from + own) * kPitch + column;
        const float* grad = grads + from * kTileColumns + column;
        typename S::Window in[kRowTaps];
#pragma unroll
        for (int u = 0; u < kRowTaps - 1; ++u) S::read(in[u], line + u * kPitch);
        line += (kRowTaps - 1) * kPitch;
        auto next = quad(const_cast<float*>(grad));
#pragma unroll 1
        for (int y = 0; y < end; y += kRowTaps) {
#pragma unroll
            for (int u = 0; u < kRowTaps; ++u) {
                if (y + u >= end) break;
                S::read(in[(u + kRowTaps - 1) % kRowTaps], line);
                const auto weight = next;
                line += kPitch, grad += kTileColumns;
                next = quad(const_cast<float*>(grad));
                const auto products = [&](int i) {
#pragma unroll
                    for (int q = 0; q < kQuad; ++q)
#pragma unroll
                        for (int j = 0; j < kTaps; ++j)
                            sum[i][j] += weight.at[q] * in[(u + i) % kRowTaps][q + j];
                };
#pragma unroll
                for (int i = 0; i < kRowTaps - 1; ++i) products(i);
                if (four) products(kRowTaps - 1);
            }
        }
        __syncthreads();
    }
    float flat[S::kSums];
#pragma unroll
    for (int k = 0; k < S::kSums; ++k) flat[k] = sum[k / kTaps][k % kTaps];
    share_sums<16>(memory + warp * S::kSums, flat, 0, S::kSums);
    __syncthreads();
    float* partial = static_cast<float*>(p.partial) + (g * p.splits + split) * p.kh * p.kw;
    for (int k = threadIdx.x; k < ni * kTaps; k += blockDim.x) {
        const int i = k / kTaps, j = j0 + k % kTaps, of = ((i + 1) * plan.parts - 1) / ni;
        const float* at = memory + of * S::kSums + (i - ni * of / plan.parts) * kTaps + k % kTaps;
        float all = others[k];
        for (int s = 0; s < plan.slices; ++s) all += at[s * plan.parts * S::kSums];
        if (j >= begin) partial[p.kh * p.kw - 1 - (i0 + i) * p.kw - j] = all;
    }
}

template <int kTaps>
static const char* launch_strips(const Convolve2dParams& p, const Convolve2dStripsParts& plan,
                                 cudaStream_t stream) {
    if constexpr (kTaps > 3)
        if (plan.columns < kTaps) return launch_strips<kTaps - 1>(p, plan, stream);
    const int64_t blocks = p.G * p.splits * plan.chunks;
    if (double(plan.across) * double(plan.down) * double(p.N / p.G) > kMostBlocks ||
        blocks > kMostBlocks)
        return "more tiles than one CUDA grid can hold";
    const auto kernel = strips_parts<kTaps>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
    kernel<<<unsigned(blocks), 32 * plan.warps(), plan.bytes, stream>>>(p, plan);
    return launch_error();
}

const char* convolve2d_strips_parts_cuda(const Convolve2dParams* p, void* stream) {
    const Convolve2dStripsParts plan(*p);
    return launch_strips<kStripTaps>(*p, plan, static_cast<cudaStream_t>(stream));
}
