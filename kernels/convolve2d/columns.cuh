// What kernels share whose warps walk down 32 neighbouring columns of the input, a column to a
// lane, without a tile in shared memory: rows may begin anywhere, and many of them are on their way
// at a time. What a lane's taps meet beside its own column it has from the lanes behind it.
#pragma once
#include "tile.cuh"

/// Columns of outputs that a warp has whose taps span kTaps columns.
template <int kTaps>
constexpr int kColumns = 33 - kTaps;

/// A lane's column of an image, row by row from some row on.
template <typename T>
struct Column {
    const T *first, *next;  // in row 0 (which need not be there), and in the next
    int64_t down;
    int line, H;
    bool there;
    Boundary boundary;

    __device__ Column(const void* image, int64_t begin, const int64_t* stride, int64_t x, int64_t W,
                      int64_t y, int64_t H, Boundary boundary)
        : down(stride[1]), line(int(y)), H(int(H)), boundary(boundary) {
        const int64_t column = extended(x, W, boundary);
        there = column >= 0;
        first = static_cast<const T*>(image) + begin + (there ? column : 0) * stride[2];
        next = first + y * down;
    }
    /// The element of the next row.
    __device__ T read() {
        T x{};
        if (unsigned(line) < unsigned(H)) {
            if (there) x = *next;
        } else {
            const int64_t kept = extended(line, H, boundary);
            if (kept >= 0 && there) x = first[kept * down];
        }
        next += down, ++line;
        return x;
    }
};

/// The values of a lane's own column and the next ones.
template <int kTaps, typename A>
__device__ inline void beside(A own, A (&x)[kTaps]) {
    x[0] = own;
#pragma unroll
    for (int j = 1; j < kTaps; ++j) x[j] = __shfl_down_sync(~0u, own, j);
}

/// The convolution with up to kRowTaps rows of kTaps taps: those stay in registers, as do the sums
/// of as many outputs of a column as a row of the input meets. A warp has `height` rows of outputs.
template <typename T, int kRowTaps, int kTaps>
__global__ void __launch_bounds__(kThreads, 4)
    columns_kernel(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down,
                   unsigned blocks, int height) {
    using A = Acc<T>;
    constexpr int kPitch = (kTaps + 3) / 4 * 4;
    __shared__ alignas(16) A taps[kRowTaps * kPitch];
    const int absent = kRowTaps - int(p.kh);  // first rows of taps
    const int64_t n = blockIdx.x / blocks;
    for (int k = threadIdx.x; k < kRowTaps * kPitch; k += kThreads)
        if (k / kPitch >= absent && k % kPitch < kTaps)
            taps[k] = tap_at<A>(p, group_of(p, n), k / kPitch - absent, k % kPitch);
    const unsigned own = blockIdx.x % blocks * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64_t x = int64_t(own % across) * kColumns<kTaps> + lane;
    const int64_t y = int64_t(own / across) * height;
    Column<T> in(p.in, n * p.in_stride[0], p.in_stride, x + p.shift[1] - (kTaps - 1), p.W,
                 y + p.shift[0] - (kRowTaps - 1), p.H, p.boundary);
    T ahead[kRowTaps];
#pragma unroll
    for (int u = 0; u < kRowTaps; ++u) ahead[u] = in.read();
    __syncthreads();
    if (own >= across * down) return;
    A tap[kRowTaps][kPitch];
#pragma unroll
    for (int i = 0; i < kRowTaps; ++i)
#pragma unroll
        for (int j = 0; j < kPitch; j += kQuad) {
            const auto four = quad(taps + i * kPitch + j);
#pragma unroll
            for (int k = 0; k < kQuad; ++k) tap[i][j + k] = four.at[k];
        }
    const bool has = lane < kColumns<kTaps> && x < p.OW;
    const int rows = p.OH - y < height ? int(p.OH - y) : height, all = rows + kRowTaps - 1;
    T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + y * p.out_stride[1] + x;
    A sum[kRowTaps] = {};
#pragma unroll 1
    for (int row = 0; row < all; row += kRowTaps) {
#pragma unroll
        for (int u = 0; u < kRowTaps; ++u) {
            A x[kTaps];
            beside(value_of(ahead[u], p.dtype), x);
            if (row + u + kRowTaps < all) ahead[u] = in.read();
            // Row row + u meets rows row + u - i of outputs.
#pragma unroll
            for (int i = 0; i < kRowTaps; ++i) {
                if (i < absent) continue;
#pragma unroll
                for (int j = 0; j < kTaps; ++j)
                    sum[(u + kRowTaps - i) % kRowTaps] += tap[i][j] * x[j];
            }
            A& last = sum[(u + 1) % kRowTaps];  // of row row + u - (kRowTaps - 1)
            const int done = row + u - (kRowTaps - 1);
            if (done >= 0 && done < rows) {
                if (has) *out = stored<T>(last, p.dtype);
                out += p.out_stride[1];
            }
            last = 0;
        }
    }
}

template <typename T, int kRowTaps, int kTaps>
inline const char* launch_columns(const Convolve2dParams& p, cudaStream_t stream) {
    // Fewer rows than these, of 162 and 181 drawn cases with heights of 4 to 64 each, where warps
    // would not fill the GPU: what a height takes beyond the best is 1 to 3 % in the mean.
    constexpr int kHeight = kRowTaps > 4 ? 64 : 64 / sizeof(T), kBusy = 8192 / kRowTaps;
    const int64_t across = ceil_div(p.OW, kColumns<kTaps>);
    int height = kHeight;
    while (height > 4 && double(p.N) * double(across * ceil_div(p.OH, height)) < kBusy) height /= 2;
    const int64_t down = ceil_div(p.OH, height), blocks = ceil_div(across * down, kWarps);
    if (double(p.N) * double(blocks) > kMostBlocks || across * down > kMostBlocks)
        return "more columns than one CUDA grid can hold";
    columns_kernel<T, kRowTaps, kTaps><<<unsigned(p.N * blocks), kThreads, 0, stream>>>(
        p, unsigned(across), unsigned(down), unsigned(blocks), height);
    return launch_error();
}
