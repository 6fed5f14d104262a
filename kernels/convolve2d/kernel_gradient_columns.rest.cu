// The gradient of convolve2d to its kernel where taps are few to a row: see columns.cuh. A lane has
// the sums of a chunk of taps in registers, over outputs of one column below each other. Of
// grad_out it keeps as many rows as a row of the input meets, one number each.
#include "columns.cuh"

/// Sums of kRowTaps x kTaps taps. A warp has `height` rows of outputs at a time.
template <typename T, int kRowTaps, int kTaps>
__global__ void __launch_bounds__(kThreads, kRowTaps* kTaps > 36 ? 3 : 4)
    columns_parts(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down,
                  int height) {
    using A = Acc<T>;
    __shared__ A warp_sums[kWarps][kRowTaps * kTaps];
    follow();
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const unsigned chunks = unsigned(ceil_div(p.kh, kRowTaps));
    const unsigned chunk = blockIdx.x / splits % chunks;
    const int64_t g = blockIdx.x / splits / chunks, first = g * (p.N / p.G);
    const unsigned tiles = across * down * unsigned(p.N / p.G);
    const int i0 = int(p.kh * chunk / chunks), ni = int(p.kh * (chunk + 1) / chunks) - i0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    A sum[kRowTaps][kTaps] = {};
    for (unsigned index = split * kWarps + warp; index < tiles; index += splits * kWarps) {
        const int64_t n = first + index / across / down;
        const int64_t x = int64_t(index % across) * kColumns<kTaps> + lane;
        const int64_t y = int64_t(index / across % down) * height;
        const int rows = p.OH - y < height ? int(p.OH - y) : height, all = rows + ni - 1;
        const bool has = lane < kColumns<kTaps> && x < p.OW;
        Column<T> in(p.in, n * p.in_stride[0], p.in_stride, x + p.shift[1] - (kTaps - 1), p.W,
                     y + p.shift[0] - (p.kh - 1) + i0, p.H, p.boundary);
        Column<T> grad(p.grad_out, n * p.grad_out_stride[0], p.grad_out_stride, has ? x : -1, p.OW,
                       y, y + rows, Boundary::kZero);
        T ahead[kRowTaps], grads_ahead[kRowTaps];
#pragma unroll
        for (int u = 0; u < kRowTaps; ++u) ahead[u] = in.read(), grads_ahead[u] = grad.read();
        // Row `row` of the input meets rows row - i of grad_out: weight[i], while some are not
        // there.
        A weight[kRowTaps] = {};
        int row = 0;
        const auto fetch = [&](int u, A(&x)[kTaps]) {
            beside(value_of(ahead[u], p.dtype), x);
#pragma unroll
            for (int j = 0; j < kTaps; ++j) x[j] = has ? x[j] : 0;  // it may be a NaN
        };
        const auto some = [&](int end) {
#pragma unroll 1
            for (; row < end; ++row) {
                A x[kTaps];
                fetch(0, x);
#pragma unroll
                for (int i = kRowTaps - 1; i > 0; --i) weight[i] = weight[i - 1];
                weight[0] = value_of(grads_ahead[0], p.dtype);
#pragma unroll
                for (int u = 0; u < kRowTaps - 1; ++u)
                    ahead[u] = ahead[u + 1], grads_ahead[u] = grads_ahead[u + 1];
                ahead[kRowTaps - 1] = in.read(), grads_ahead[kRowTaps - 1] = grad.read();
#pragma unroll
                for (int i = 0; i < kRowTaps; ++i) {
                    if (unsigned(row - i) >= unsigned(rows)) continue;
#pragma unroll
                    for (int j = 0; j < kTaps; ++j) sum[i][j] += weight[i] * x[j];
                }
            }
        };
        const auto reverse = [&] {
#pragma unroll
            for (int i = 0; i < kRowTaps / 2; ++i) {
                const A first = weight[i];
                weight[i] = weight[kRowTaps - 1 - i], weight[kRowTaps - 1 - i] = first;
            }
        };
        some(all < kRowTaps ? all : kRowTaps - 1);
        reverse();  // weight[u]: the row that the u-th of kRowTaps steps has brought
#pragma unroll 1
        for (; row + kRowTaps <= rows; row += kRowTaps) {
#pragma unroll
            for (int u = 0; u < kRowTaps; ++u) {
                A x[kTaps];
                fetch(u, x);
                weight[u] = value_of(grads_ahead[u], p.dtype);
                ahead[u] = in.read(), grads_ahead[u] = grad.read();
#pragma unroll
                for (int i = 0; i < kRowTaps; ++i)
#pragma unroll
                    for (int j = 0; j < kTaps; ++j)
                        sum[i][j] += weight[(u + kRowTaps - i) % kRowTaps] * x[j];
            }
        }
        reverse();
        some(all);
    }
#pragma unroll
    for (int i = 0; i < kRowTaps; ++i)
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
            const A all = sum_over_warp(sum[i][j]);
            if (lane == 0) warp_sums[warp][i * kTaps + j] = all;
        }
    __syncthreads();
    A* partial = static_cast<A*>(p.partial) + (g * p.splits + split) * p.kh * p.kw;
    for (int k = threadIdx.x; k < ni * kTaps; k += kThreads) {
        A all = 0;
        for (int w = 0; w < kWarps; ++w) all += warp_sums[w][k];
        partial[p.kh * kTaps - 1 - i0 * kTaps - k] = all;
    }
}

template <typename T, int kRowTaps, int kTaps>
static const char* launch_parts(const Convolve2dParams& p, const Convolve2dColumns& plan,
                                cudaStream_t stream) {
    const int64_t chunks = ceil_div(p.kh, kRowTaps);
    if (double(plan.across) * double(plan.down) * double(p.N / p.G) > kMostBlocks ||
        p.G * p.splits * chunks > kMostBlocks)
        return "more columns than one CUDA grid can hold";
    columns_parts<T, kRowTaps, kTaps><<<unsigned(p.G * p.splits * chunks), kThreads, 0, stream>>>(
        p, unsigned(plan.across), unsigned(plan.down), plan.height);
    return launch_error();
}
template <typename T, int kTaps>
static const char* with_taps(const Convolve2dParams& p, const Convolve2dColumns& plan,
                             cudaStream_t stream) {
    if constexpr (kTaps > 1)
        if (p.kw < kTaps) return with_taps<T, kTaps - 1>(p, plan, stream);
    if constexpr (sizeof(T) == 4 && kTaps <= 2)
        if (plan.rows > 4) return launch_parts<T, kColumnTaps, kTaps>(p, plan, stream);
    return launch_parts<T, 4, kTaps>(p, plan, stream);
}

const char* convolve2d_columns_parts_cuda(const Convolve2dParams* p, void* stream) {
    static_assert(kWarps == kColumnWarps);
    const Convolve2dColumns plan(*p);
    const auto on = static_cast<cudaStream_t>(stream);
    return p->dtype == DType::kFloat ? with_taps<float, kFewColumns>(*p, plan, on)
                                     : with_taps<Short, kFewColumns>(*p, plan, on);
}
