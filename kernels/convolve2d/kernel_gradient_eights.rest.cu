// The gradient of convolve2d to kernels of 16 bits on tensor cores, of numbers as they are
// (eights.cuh). For a row y of grad_out, with the taps in the order of correlation,
//   grad[i, 8 b + n] += sum over X of in[y + i, X] * band_y[X, 8 b + n],
//   band_y[X, j] = grad_out[y, X - j]:
// a product of matrices, whose right side depends on X - 8 b alone in pieces of 8 x 8, which are
// read once for all b. A block has 16 I x 8 J taps, a warp every fourth row of a tile. The products
// of a tile are summed on their own before they are added to the sums: long chains are what makes
// sums inexact.
#include "eights.cuh"

template <int I, int J>
struct EightsParts {
    static constexpr int kTapRows = 16 * I, kTapColumns = 8 * J;
    static constexpr int kSteps = kTileColumns / kEight;
    static constexpr int kGroups = kSteps + J, kPieces = (kGroups + 1) / 2 * 2;
    static constexpr int kPitch = kEightPitch<kPieces>;
    using Grads = PairRows<kTileColumns>;
    float refused[kTapRows * kTapColumns];  // sums over tiles that have a NaN or an infinity
    alignas(16) char tile[1];               // height + kTapRows - 1 rows, then those of grad_out

    static int bytes(int height) {
        return int(offsetof(EightsParts, tile)) + (height + kTapRows - 1) * kPitch +
               height * Grads::kPitch * 2;
    }
};

/// A tile of `rows` rows of outputs, columns [begin, end), by multiply-adds.
template <typename P>
__device__ __noinline__ void refused_tile(P& shared, typename P::Grads grads, DType dtype, int rows,
                                          int begin, int end, int ni, int nj) {
    for (int k = threadIdx.x; k < ni * nj; k += kThreads) {
        const int i = k / nj, j = k % nj;
        float sum = 0;
        for (int y = 0; y < rows; ++y) {
            const auto* line =
                reinterpret_cast<const Short*>(shared.tile + (y + i) * P::kPitch) + j;
            const uint16_t* grad = grads.rows + y * P::Grads::kPitch + kEight;
            float part = 0;
            for (int x = begin; x < end; ++x)
                part += value_of(Short{grad[x]}, dtype) * value_of(line[x], dtype);
            sum += part;
        }
        shared.refused[i * P::kTapColumns + j] += sum;
    }
}

template <int I, int J, bool kBrain>
__global__ void __launch_bounds__(kThreads, I* J > 4 ? 4 : 5)
    eights_parts(const __grid_constant__ Convolve2dParams p,
                 const __grid_constant__ Convolve2dEightsParts plan) {
    using P = EightsParts<I, J>;
    extern __shared__ __align__(16) char memory[];
    P& shared = *reinterpret_cast<P*>(memory);
    follow();
    const typename P::Grads grads{
        reinterpret_cast<uint16_t*>(shared.tile + (plan.height + P::kTapRows - 1) * P::kPitch)};
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const unsigned chunks = unsigned(plan.chunks), chunk = blockIdx.x / splits % chunks;
    const int64_t g = blockIdx.x / splits / chunks, first = g * (p.N / p.G);
    const unsigned across = unsigned(plan.across), down = unsigned(plan.down);
    const unsigned tiles = unsigned(p.N / p.G) * across * down;
    const int64_t i0 = int64_t(chunk / plan.chunks_across) * P::kTapRows;
    const int64_t j0 = int64_t(chunk % plan.chunks_across) * P::kTapColumns;
    const int ni = p.kh - i0 < P::kTapRows ? int(p.kh - i0) : P::kTapRows;
    const int nj = p.kw - j0 < P::kTapColumns ? int(p.kw - j0) : P::kTapColumns;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int k = threadIdx.x; k < P::kTapRows * P::kTapColumns; k += kThreads)
        shared.refused[k] = 0;
    grads.clear(plan.height);
    if (P::kPieces > P::kGroups)  // the band is zero there
        for (int k = threadIdx.x; k < plan.height + P::kTapRows - 1; k += kThreads)
            *reinterpret_cast<uint4*>(shared.tile + k * P::kPitch + P::kGroups * 16) = {};
    float sum[I][J][4] = {};
    for (unsigned index = split; index < tiles; index += splits) {
        const int64_t n = first + index / across / down;
        const int64_t y0 = int64_t(index / across % down) * plan.height;
        const int64_t x0 = int64_t(index % across) * kTileColumns - plan.lead;
        const int rows = p.OH - y0 < plan.height ? int(p.OH - y0) : plan.height;
        __syncthreads();
        bool finite = fetch_eights<P::kGroups, kBrain>(
            EightRows<P::kPitch>{shared.tile}, Image::in(p, n), y0 + p.shift[0] - (p.kh - 1) + i0,
            x0 + p.shift[1] - (p.kw - 1) + j0, rows + ni - 1);
        finite &= fetch_eights<P::kSteps, kBrain>(grads, Image::grad_out(p, n), y0, x0, rows);
        if (!__syncthreads_and(finite)) {
            const int columns = p.OW - x0 < kTileColumns ? int(p.OW - x0) : kTileColumns;
            refused_tile(shared, grads, p.dtype, rows, x0 < 0 ? int(-x0) : 0, columns, ni, nj);
            continue;
        }
        const unsigned* band = grads.band() + warp * (P::Grads::kPitch / 2);
        auto at = unsigned(__cvta_generic_to_shared(shared.tile + (lane % 16 + warp) * P::kPitch +
                                                    lane / 16 * 16));
        float part[I][J][4] = {};
#pragma unroll 1
        for (int y = warp; y < rows; y += kWarps) {
            // Step d of the band is at d + 1: those before and behind it are zeros.
            unsigned grad[P::kSteps + 3] = {};
#pragma unroll
            for (int d = 0; d <= P::kSteps; ++d) grad[d + 1] = band[4 * d];
#pragma unroll
            for (int a = 0; a < P::kPieces; a += 2)
#pragma unroll
                for (int i = 0; i < I; ++i) {
                    unsigned left[2], right[2];
                    fetch_pieces(left, right, at + 16 * i * P::kPitch + a * 16);
#pragma unroll
                    for (int j = 0; j < J; ++j)
                        if (a - j + 1 >= 0 && a - j <= P::kSteps)
                            multiply_eights<kBrain>(part[i][j], left, right, grad[a - j + 1],
                                                    grad[a - j + 2]);
                }
            band += kWarps * (P::Grads::kPitch / 2), at += kWarps * P::kPitch;
        }
#pragma unroll
        for (int i = 0; i < I; ++i)
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
                for (int q = 0; q < 4; ++q) sum[i][j][q] += part[i][j][q];
    }
    store_parts<I, J>(p, g, split, i0, j0, ni, nj, reinterpret_cast<float*>(shared.tile),
                      shared.refused, sum);
}

template <int I, int J>
static const char* run(const Convolve2dParams& p, const Convolve2dEightsParts& plan,
                       cudaStream_t stream) {
    const int64_t parts = p.G * p.splits;
    if (double(plan.across) * double(plan.down) * double(p.N / p.G) > kMostBlocks ||
        parts * plan.chunks > kMostBlocks)
        return "more tiles than one CUDA grid can hold";
    const auto kernel =
        p.dtype == DType::kHalf ? eights_parts<I, J, false> : eights_parts<I, J, true>;
    const int bytes = EightsParts<I, J>::bytes(plan.height);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<unsigned(parts * plan.chunks), kThreads, bytes, stream>>>(p, plan);
    return launch_error();
}

template <int I>
static const char* by_columns(const Convolve2dParams& p, const Convolve2dEightsParts& plan,
                              cudaStream_t stream) {
    return plan.columns == 8    ? run<I, 1>(p, plan, stream)
           : plan.columns == 16 ? run<I, 2>(p, plan, stream)
                                : run<I, 4>(p, plan, stream);
}

const char* convolve2d_eights_parts_cuda(const Convolve2dParams* p, void* stream) {
    const Convolve2dEightsParts plan(*p);
    const auto on = static_cast<cudaStream_t>(stream);
    return plan.rows == 16 ? by_columns<1>(*p, plan, on) : by_columns<2>(*p, plan, on);
}
