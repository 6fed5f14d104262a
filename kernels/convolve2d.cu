// Two-dimensional convolution on the GPU; the sums are written out in convolve2d.h.
//
// Bytes per pixel (float32): forward and gradient to the image read 4 and write 4, the gradient to
// the kernel reads 8. Flops: 2 kh kw. An H200 moves 4.28 TB/s and computes 60 Tflop/s, 14 flops to
// the byte or 56 multiply-adds to a float32 pixel: traffic decides up to 7 x 7 taps, arithmetic
// beyond. 2048 x 2048 moves 34 MB, 8 us; 8192 x 8192 takes 125 us.
//
// A block computes tiles of 32 x 64 outputs from an input tile in shared memory, in the
// accumulating type and extended beyond the image's borders, so that element types, strides and
// borders concern only the loop that fills it. A thread has 4 x 4 outputs: a value read from shared
// memory serves rows of up to 4 outputs, and one 16-byte read brings four values. For kernels of 3,
// 5, 7 or 9 taps square (3 or 5 for the gradient to the kernel) the compiler knows the size,
// unrolls all loops and keeps taps and sums in registers; tiles then start on words of four
// elements of the input. For any other kernel 16 x 16 taps at a time pass through shared memory.
//
// No atomics. The gradient to the kernel is summed over a fixed partition of the tiles (`partial`)
// and then over the parts, so each run gives the same bits. What lies in a tile but belongs to no
// output is left out and not multiplied by 0: a NaN spreads only as far as the kernel reaches.
#include "convolve2d.h"
#include "vector.cuh"

constexpr int kThreads = 128;
constexpr int kRows = 4, kQuad = 4;  // outputs of a thread: rows and columns
constexpr int kThreadColumns = kTileColumns / kQuad;
static_assert(kThreads == kThreadColumns * kTileRows / kRows, "a tile to a block");

/// Four neighbouring values in shared memory.
template <typename A>
struct alignas(16) Quad {
    A at[kQuad];
};
template <typename A>
__device__ inline Quad<A>& quad(A* at) {
    return *reinterpret_cast<Quad<A>*>(at);
}

/// An element of either 16-bit type, told apart where it is converted: kernels that are compiled
/// for two types of storage and not three compile in three quarters of the time.
struct Short {
    uint16_t bits;
};
template <typename T>
__device__ inline Acc<T> value_of(T x, DType) {
    return load(x);
}
__device__ inline float value_of(Short x, DType dtype) {
    return dtype == DType::kHalf ? load(Half{x.bits}) : load(BFloat16{x.bits});
}
template <typename T>
__device__ inline T stored(Acc<T> x, DType) {
    return x;
}
template <>
__device__ inline Short stored<Short>(float x, DType dtype) {
    return {dtype == DType::kHalf ? store<Half>(x).bits : store<BFloat16>(x).bits};
}

/// Calls `body` with a value of the type in which elements that are accumulated in A are stored.
template <typename A, typename Body>
__device__ inline void by_storage(DType dtype, const Body& body) {
    if constexpr (sizeof(A) == 8) {
        body(double{});
    } else {
        if (dtype == DType::kFloat)
            body(float{});
        else
            body(Short{});
    }
}

/// What a tile is filled from: image n of `in` or of `grad_out`.
struct Image {
    const void* data;
    int64_t begin, down, along, H, W;  // in elements
    Boundary boundary;
    DType dtype;

    __device__ static Image in(const Convolve2dParams& p, int64_t n) {
        const int64_t* stride = p.in_stride;
        return {p.in, n * stride[0], stride[1], stride[2], p.H, p.W, p.boundary, p.dtype};
    }
    __device__ static Image grad_out(const Convolve2dParams& p, int64_t n) {
        const int64_t* stride = p.grad_out_stride;
        return {p.grad_out, n * stride[0], stride[1],       stride[2],
                p.OH,       p.OW,          Boundary::kZero, p.dtype};
    }
};

/// Copies `rows` x `columns` elements from (y, x) on into a tile whose rows are `pitch` apart. One
/// function for all kernels, not inlined: the file compiles in little more than half the time.
template <typename A>
__device__ __noinline__ void fill(A* tile, int pitch, const Image& from, int64_t y, int64_t x,
                                  int rows, int columns) {
    by_storage<A>(from.dtype, [&](auto element) {
        const auto* in = static_cast<const decltype(element)*>(from.data) + from.begin;
        for (int row = threadIdx.x / 16; row < rows; row += kThreads / 16) {
            const int64_t line = extended(y + row, from.H, from.boundary);
#pragma unroll 5
            for (int column = threadIdx.x % 16; column < columns; column += 16) {
                const int64_t at = extended(x + column, from.W, from.boundary);
                tile[row * pitch + column] =
                    line < 0 || at < 0
                        ? A(0)
                        : value_of(in[line * from.down + at * from.along], from.dtype);
            }
        }
    });
}

/// The same for a whole tile whose rows are on words of 4 elements, as are x and the image's: words
/// within the image's columns at once, all loads of a thread under way before the first is needed.
template <typename T, int kPitch, int kTile>
__device__ inline void fill_words(float* tile, const Image& from, int64_t y, int64_t x, int left,
                                  int right) {
    constexpr int kQuads = kPitch / kQuad, kAll = kTile * kQuads;
    constexpr int kEach = (kAll + kThreads - 1) / kThreads;
    const T* in = static_cast<const T*>(from.data) + from.begin + x;
    Vector<T, kQuad> moved[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int i = j * kThreads + threadIdx.x, column = i % kQuads * kQuad;
        const int64_t line = extended(y + i / kQuads, from.H, from.boundary);
        moved[j] = {};
        if (i < kAll && line >= 0 && column >= left && column < right)
            moved[j] = load_vector<T, kQuad>(in + line * from.down + column);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int i = j * kThreads + threadIdx.x, column = i % kQuads * kQuad;
        Quad<float> values;
#pragma unroll
        for (int k = 0; k < kQuad; ++k) values.at[k] = value_of(moved[j].at[k], from.dtype);
        if (i < kAll && column >= left && column < right) quad(tile + i * kQuad) = values;
    }
}

/// What `fill` does, by `fill_words` where that is possible. x is a multiple of 4.
template <int kPitch, int kTile>
__device__ inline void fill_quickly(float* tile, const Image& from, int64_t y, int64_t x) {
    const int64_t inside = (from.W - x) & ~int64_t(kQuad - 1);
    int left = x >= 0 ? 0 : x > -kPitch ? int(-x) : kPitch;
    int right = inside > kPitch ? kPitch : inside > left ? int(inside) : left;
    by_storage<float>(from.dtype, [&](auto element) {
        using T = decltype(element);
        const auto words =
            reinterpret_cast<uintptr_t>(static_cast<const T*>(from.data) + from.begin);
        if (from.along == 1 &&
            (words | uintptr_t(from.down) * sizeof(T)) % (kQuad * sizeof(T)) == 0)
            fill_words<T, kPitch, kTile>(tile, from, y, x, left, right);
        else
            left = kPitch;
    });
    if (left > 0) fill(tile, kPitch, from, y, x, kTile, left);
    if (right < kPitch && left < kPitch)
        fill(tile + right, kPitch, from, y, x + right, kTile, kPitch - right);
}

/// A thread's sums to outputs (y, x) ... (y + 3, x + 3) of image n; those outside are left out.
template <typename T>
__device__ inline void store_outputs(const Convolve2dParams& p, int64_t n, int64_t y, int64_t x,
                                     const Acc<T> (&sum)[kRows][kQuad]) {
    T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + y * p.out_stride[1] + x;
#pragma unroll
    for (int r = 0; r < kRows; ++r, out += p.out_stride[1]) {
        if (y + r >= p.OH) return;
        if constexpr (sizeof(T) < 8) {
            if (x >= 0 && x + kQuad <= p.OW &&
                reinterpret_cast<uintptr_t>(out) % (kQuad * sizeof(T)) == 0) {
                Vector<T, kQuad> values;
#pragma unroll
                for (int q = 0; q < kQuad; ++q) values.at[q] = stored<T>(sum[r][q], p.dtype);
                store_vector(out, values);
                continue;
            }
        }
#pragma unroll
        for (int q = 0; q < kQuad; ++q)
            if (x + q >= 0 && x + q < p.OW) out[q] = stored<T>(sum[r][q], p.dtype);
    }
}

/// Where a tile lies. `x` counts from `p.shift[1] - K / 2` rounded down to whole words of the
/// input.
struct Place {
    int64_t n, y, x;

    __device__ Place(unsigned tile, unsigned across, unsigned down)
        : n(tile / across / down),
          y(int64_t(tile / across % down) * kTileRows),
          x(int64_t(tile % across) * kTileColumns) {}
};

/// A known kernel size: the input tile spans [x - 4, x + 68) around its outputs' centres.
template <int K>
struct Fixed {
    static constexpr int kHalf = K / 2, kTile = kTileRows + K - 1, kPitch = kTileColumns + 8;
    static_assert(K % 2 == 1 && kHalf <= 4, "the halo is one word of 4 values on each side");

    /// What the first tile holds in front of the first output.
    HD static int lead(const Convolve2dParams& p) { return int((p.shift[1] - kHalf) & 3); }

    /// Fills the tile of the outputs from (y, x) on, x relative to the lead.
    __device__ static void fetch(float* tile, const Convolve2dParams& p, const Place& at) {
        fill_quickly<kPitch, kTile>(tile, Image::in(p, at.n), at.y + p.shift[0] - (K - 1),
                                    at.x - lead(p) + p.shift[1] - kHalf - 4);
    }
    /// The 12 values of row `row` around a thread's columns; column q's first tap meets value
    /// q + 4 - kHalf.
    __device__ static void window(const float* tile, int row, int column, float (&values)[12]) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const auto part = quad(const_cast<float*>(tile) + row * kPitch + column + kQuad * i);
#pragma unroll
            for (int k = 0; k < kQuad; ++k) values[kQuad * i + k] = part.at[k];
        }
    }
};

/// Forward, and the gradient to the image, for K x K taps and 16- and 32-bit elements.
template <int K>
__global__ void __launch_bounds__(kThreads, K > 5 ? 4 : 7)
    fixed_kernel(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down) {
    using F = Fixed<K>;
    __shared__ alignas(16) float tile[F::kTile * F::kPitch];
    __shared__ float taps[K * K];
    const Place at(blockIdx.x, across, down);
    float own = 0;  // on its way while the tile is fetched
    if (threadIdx.x < K * K)
        own = tap_at<float>(p, group_of(p, at.n), threadIdx.x / K, threadIdx.x % K);
    F::fetch(tile, p, at);
    if (threadIdx.x < K * K) taps[threadIdx.x] = own;
    __syncthreads();
    const int column = threadIdx.x % kThreadColumns * kQuad;
    const int row = threadIdx.x / kThreadColumns * kRows;
    float tap[K * K], sum[kRows][kQuad] = {};
#pragma unroll
    for (int i = 0; i < K * K; ++i) tap[i] = taps[i];
#pragma unroll
    for (int t = 0; t < kRows + K - 1; ++t) {
        float in[12];
        F::window(tile, row + t, column, in);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (t < r || t - r >= K) continue;
#pragma unroll
            for (int j = 0; j < K; ++j)
#pragma unroll
                for (int q = 0; q < kQuad; ++q)
                    sum[r][q] += tap[(t - r) * K + j] * in[q + 4 - F::kHalf + j];
        }
    }
    by_storage<float>(p.dtype, [&](auto element) {
        store_outputs<decltype(element)>(p, at.n, at.y + row, at.x - F::lead(p) + column, sum);
    });
}

constexpr int kPitch = kTileColumns + kChunk, kTile = kTileRows + kChunk - 1;

/// The same for any kernel, kChunk x kChunk taps at a time.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    any_kernel(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down) {
    __shared__ alignas(16) A tile[kTile * kPitch];
    __shared__ alignas(16) A taps[kChunk * kChunk];
    const Place at(blockIdx.x, across, down);
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
                    taps[i] = tap_at<A>(p, group_of(p, at.n), i0 + i / kChunk, j0 + i % kChunk);
            fill(tile, kPitch, Image::in(p, at.n), at.y + p.shift[0] - (p.kh - 1) + i0,
                 at.x + p.shift[1] - (p.kw - 1) + j0, kTileRows + ni - 1, kTileColumns + nj - 1);
            __syncthreads();
            // A row of input meets up to kRows rows of taps, one for each row of output.
#pragma unroll 1
            for (int t = 0; t < kRows + ni - 1; ++t) {
                A* line = tile + (row + t) * kPitch + column;
                Quad<A> left = quad(line);
#pragma unroll 1
                for (int j = 0; j < nj; j += kQuad) {
                    const Quad<A> right = quad(line + j + kQuad);
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        if (t < r || t - r >= ni) continue;
                        const Quad<A> tap = quad(taps + (t - r) * kChunk + j);
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
        store_outputs<decltype(element)>(p, at.n, at.y + row, at.x + column, sum);
    });
}

template <typename A>
__device__ inline A sum_over_warp(A x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

/// A warp to each pixel of a gradient to the image that the extension repeats.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const __grid_constant__ Convolve2dParams p, int64_t each) {
    const int64_t index = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    const int64_t n = index / each, g = group_of(p, n);
    if (n >= p.N) return;
    int64_t at[2];
    border_pixel(p, index % each, at);
    const Copies ys(p, 0, at[0]), xs(p, 1, at[1]);
    by_storage<A>(p.dtype, [&](auto element) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(p.in) + n * p.in_stride[0];
        A sum = 0;
        for (int64_t k = ys.begin; k < ys.end; ++k) {
            if (!ys.has(ys.at(k))) continue;
            const int64_t y = ys.at(k) + p.shift[0] - (p.kh - 1);
            const Overlap rows(y, p.kh, p.H);
            for (int64_t l = xs.begin; l < xs.end; ++l) {
                if (!xs.has(xs.at(l))) continue;
                const int64_t x = xs.at(l) + p.shift[1] - (p.kw - 1);
                const Overlap columns(x, p.kw, p.W);
                const int64_t width = columns.end - columns.begin;
                if (width <= 0) continue;
                // The threads of a warp take neighbouring taps, row after row.
                const int lane = threadIdx.x % 32, w = width < 64 ? int(width) : 64;
                int64_t i = rows.begin + lane / w, j = columns.begin + lane % w;
                while (i < rows.end) {
                    sum +=
                        tap_at<A>(p, g, i, j) *
                        value_of(in[(y + i) * p.in_stride[1] + (x + j) * p.in_stride[2]], p.dtype);
                    i += 32 / w, j += 32 % w;
                    if (j >= columns.end) j -= width, ++i;
                }
            }
        }
        sum = sum_over_warp(sum);
        T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + at[0] * p.out_stride[1];
        if (threadIdx.x % 32 == 0) out[at[1]] = stored<T>(sum, p.dtype);
    });
}

/// A part of the gradient to K x K taps: each thread has all K * K sums over its outputs.
template <int K>
__global__ void __launch_bounds__(kThreads, 4)
    fixed_parts(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down,
                unsigned tiles) {
    using F = Fixed<K>;
    constexpr int kWarps = kThreads / 32;
    __shared__ alignas(16) float tile[F::kTile * F::kPitch];
    __shared__ float warp_sums[kWarps][K * K];
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const int64_t g = blockIdx.x / splits, first = g * (p.N / p.G);
    const int column = threadIdx.x % kThreadColumns * kQuad;
    const int row = threadIdx.x / kThreadColumns * kRows;
    float sum[K * K] = {};
    for (unsigned index = split; index < tiles; index += splits) {
        Place at(index, across, down);
        at.n += first;
        const int64_t y = at.y + row, x = at.x - F::lead(p) + column;
        const int64_t from =
            at.n * p.grad_out_stride[0] + y * p.grad_out_stride[1] + x * p.grad_out_stride[2];
        const bool whole = x >= 0 && x + kQuad <= p.OW && y + kRows <= p.OH;
        float grad[kRows][kQuad];
        by_storage<float>(p.dtype, [&](auto element) {
            using T = decltype(element);
            if (whole) {
                const T* line = static_cast<const T*>(p.grad_out) + from;
                const auto address =
                    reinterpret_cast<uintptr_t>(line) | uintptr_t(p.grad_out_stride[1]) * sizeof(T);
                const bool words = p.grad_out_stride[2] == 1 && address % (kQuad * sizeof(T)) == 0;
#pragma unroll
                for (int r = 0; r < kRows; ++r, line += p.grad_out_stride[1]) {
                    Vector<T, kQuad> part;
                    if (words) {
                        part = load_vector<T, kQuad>(line);
                    } else {
#pragma unroll
                        for (int q = 0; q < kQuad; ++q) part.at[q] = line[q * p.grad_out_stride[2]];
                    }
#pragma unroll
                    for (int q = 0; q < kQuad; ++q) grad[r][q] = value_of(part.at[q], p.dtype);
                }
            }
        });
        __syncthreads();  // the tile before has been used
        F::fetch(tile, p, at);
        __syncthreads();
        if (whole) {
#pragma unroll
            for (int t = 0; t < kRows + K - 1; ++t) {
                float in[12];
                F::window(tile, row + t, column, in);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (t < r || t - r >= K) continue;
#pragma unroll
                    for (int j = 0; j < K; ++j)
#pragma unroll
                        for (int q = 0; q < kQuad; ++q)
                            sum[(t - r) * K + j] += grad[r][q] * in[q + 4 - F::kHalf + j];
                }
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < kRows * kQuad; ++i) {
                const int r = i / kQuad, q = i % kQuad;
                if (y + r >= p.OH || x + q < 0 || x + q >= p.OW) continue;
                const float value =
                    load_as<float>(p.dtype, p.grad_out,
                                   from + r * p.grad_out_stride[1] + q * p.grad_out_stride[2]);
                const float* in = tile + (row + r) * F::kPitch + column + q + 4 - F::kHalf;
#pragma unroll
                for (int k = 0; k < K * K; ++k) sum[k] += value * in[k / K * F::kPitch + k % K];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < K * K; ++k) {
        const float all = sum_over_warp(sum[k]);
        if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][k] = all;
    }
    __syncthreads();
    if (threadIdx.x >= K * K) return;
    float all = 0;
    for (int w = 0; w < kWarps; ++w) all += warp_sums[w][threadIdx.x];
    // From the order of correlation to that of the kernel, which is the reverse.
    float* partial = static_cast<float*>(p.partial) + int64_t(blockIdx.x) * (K * K);
    partial[K * K - 1 - threadIdx.x] = all;
}

/// The same for any kernel, kChunk x kChunk taps to a block. A thread has four neighbouring taps,
/// and of the tile's rows every so many pieces of kPiece columns.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    any_parts(const __grid_constant__ Convolve2dParams p, unsigned across, unsigned down,
              unsigned tiles) {
    constexpr int kPiece = 16, kPieces = kTileColumns / kPiece;
    __shared__ alignas(16) A tile[kTile * kPitch];
    __shared__ alignas(16) A grad[kTileRows * kTileColumns];
    const unsigned splits = unsigned(p.splits), split = blockIdx.x % splits;
    const unsigned chunks_across = unsigned(ceil_div(p.kw, kChunk));
    const unsigned chunks = unsigned(ceil_div(p.kh, kChunk)) * chunks_across;
    const unsigned chunk = blockIdx.x / splits % chunks;
    const int64_t g = blockIdx.x / splits / chunks, first = g * (p.N / p.G);
    const int64_t i0 = int64_t(chunk / chunks_across) * kChunk;
    const int64_t j0 = int64_t(chunk % chunks_across) * kChunk;
    const int ni = p.kh - i0 < kChunk ? int(p.kh - i0) : kChunk;
    const int nj = p.kw - j0 < kChunk ? int(p.kw - j0) : kChunk;
    const int quads = (nj + kQuad - 1) / kQuad, items = ni * quads, slices = kThreads / items;
    const int item = threadIdx.x % items, slice = threadIdx.x / items;
    const int i = item / quads, j = item % quads * kQuad;
    A total[kQuad] = {};
    for (unsigned index = split; index < tiles; index += splits) {
        Place at(index, across, down);
        at.n += first;
        const int rows = p.OH - at.y < kTileRows ? int(p.OH - at.y) : kTileRows;
        const int columns = p.OW - at.x < kTileColumns ? int(p.OW - at.x) : kTileColumns;
        __syncthreads();
        fill(tile, kPitch, Image::in(p, at.n), at.y + p.shift[0] - (p.kh - 1) + i0,
             at.x + p.shift[1] - (p.kw - 1) + j0, rows + ni - 1, columns + nj - 1);
        fill(grad, kTileColumns, Image::grad_out(p, at.n), at.y, at.x, rows, columns);
        __syncthreads();
        A sum[kQuad] = {};
        for (int piece = slice; slice < slices && piece < rows * kPieces; piece += slices) {
            const int row = piece / kPieces, begin = piece % kPieces * kPiece;
            const int end = columns < begin + kPiece ? columns : begin + kPiece;
            A* line = tile + (row + i) * kPitch + j;
            A* weights = grad + row * kTileColumns;
            Quad<A> left = quad(line + begin);
            int x = begin;
            for (; x + kQuad <= end; x += kQuad) {
                const Quad<A> right = quad(line + x + kQuad), weight = quad(weights + x);
#pragma unroll
                for (int k = 0; k < kQuad; ++k)
#pragma unroll
                    for (int q = 0; q < kQuad; ++q)
                        sum[k] += weight.at[q] * (q + k < kQuad ? left.at[(q + k) % kQuad]
                                                                : right.at[(q + k) % kQuad]);
                left = right;
            }
            for (; x < end; ++x)
#pragma unroll
                for (int k = 0; k < kQuad; ++k) sum[k] += weights[x] * line[x + k];
        }
#pragma unroll
        for (int k = 0; k < kQuad; ++k) total[k] += sum[k];
    }
    __syncthreads();
    quad(tile + threadIdx.x * kQuad) = {{total[0], total[1], total[2], total[3]}};
    __syncthreads();
    if (threadIdx.x >= items) return;
    A* partial = static_cast<A*>(p.partial) + (g * p.splits + split) * p.kh * p.kw;
    for (int k = 0; k < kQuad && j + k < nj; ++k) {
        A sum = 0;
        for (int s = 0; s < slices; ++s) sum += tile[(s * items + item) * kQuad + k];
        partial[p.kh * p.kw - 1 - (i0 + i) * p.kw - (j0 + j + k)] = sum;
    }
}

/// A warp to each tap.
template <typename A>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Convolve2dParams p) {
    const int64_t taps = p.kh * p.kw;
    const int64_t tap = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    if (tap >= p.G * taps) return;
    const A* part = static_cast<const A*>(p.partial) + tap / taps * p.splits * taps + tap % taps;
    double sum = 0;
    for (int64_t s = threadIdx.x % 32; s < p.splits; s += 32) sum += part[s * taps];
    sum = sum_over_warp(sum);
    if (threadIdx.x % 32 == 0) store_tap(p, tap, sum);
}

/// Runs `body(size, columns)`: `size` is Fixed<K> where a kernel is compiled for these taps, up to
/// `most` of them along an axis, else a float or double; `columns`, those of all tiles of an image.
template <int kMost, typename Body>
inline void by_size(const Convolve2dParams& p, const Body& body) {
    if (p.dtype == DType::kDouble) return body(double{}, p.OW);
    const auto fixed = [&](auto size) { body(size, p.OW + size.lead(p)); };
    if (p.kh == p.kw && p.kw == 3) return fixed(Fixed<3>{});
    if (p.kh == p.kw && p.kw == 5) return fixed(Fixed<5>{});
    if constexpr (kMost > 5) {
        if (p.kh == p.kw && p.kw == 7) return fixed(Fixed<7>{});
        if (p.kh == p.kw && p.kw == 9) return fixed(Fixed<9>{});
    }
    body(float{}, p.OW);
}

constexpr int64_t kMostBlocks = 0x7fffffff;
constexpr const char* kTooMany = "more tiles than one CUDA grid can hold";

template <int K>
void launch_convolve(Fixed<K>, const Convolve2dParams& p, unsigned blocks, unsigned across,
                     unsigned down, cudaStream_t stream) {
    fixed_kernel<K><<<blocks, kThreads, 0, stream>>>(p, across, down);
}
template <typename A>
void launch_convolve(A, const Convolve2dParams& p, unsigned blocks, unsigned across, unsigned down,
                     cudaStream_t stream) {
    any_kernel<A><<<blocks, kThreads, 0, stream>>>(p, across, down);
}
template <int K>
void launch_parts(Fixed<K>, const Convolve2dParams& p, unsigned blocks, unsigned across,
                  unsigned down, unsigned tiles, cudaStream_t stream) {
    fixed_parts<K><<<blocks, kThreads, 0, stream>>>(p, across, down, tiles);
}
template <typename A>
void launch_parts(A, const Convolve2dParams& p, unsigned blocks, unsigned across, unsigned down,
                  unsigned tiles, cudaStream_t stream) {
    any_parts<A><<<blocks, kThreads, 0, stream>>>(p, across, down, tiles);
}

const char* convolve2d_cuda(const Convolve2dParams* p, void* stream) {
    const char* error = nullptr;
    by_size<9>(*p, [&](auto size, int64_t columns) {
        const int64_t across = ceil_div(columns, kTileColumns), down = ceil_div(p->OH, kTileRows);
        if (double(across) * down * p->N > kMostBlocks) return void(error = kTooMany);
        launch_convolve(size, *p, unsigned(p->N * across * down), unsigned(across), unsigned(down),
                        static_cast<cudaStream_t>(stream));
    });
    return error ? error : launch_error();
}

const char* convolve2d_fold_cuda(const Convolve2dParams* p, void* stream) {
    const int64_t each = border_pixels(*p), blocks = ceil_div(p->N * each, kThreads / 32);
    if (blocks > kMostBlocks) return "more border pixels than one CUDA grid can hold";
    const auto kernel = p->dtype == DType::kDouble ? fold_kernel<double> : fold_kernel<float>;
    kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p, each);
    return launch_error();
}

const char* convolve2d_parts_cuda(const Convolve2dParams* p, void* stream) {
    const char* error = nullptr;
    by_size<5>(*p, [&](auto size, int64_t columns) {
        const int64_t across = ceil_div(columns, kTileColumns), down = ceil_div(p->OH, kTileRows);
        const int64_t chunks = sizeof(size) > 1  // Fixed is empty and takes all taps at once
                                   ? ceil_div(p->kh, kChunk) * ceil_div(p->kw, kChunk)
                                   : 1;
        if (double(across) * down * (p->N / p->G) > kMostBlocks ||
            double(chunks) * p->G * p->splits > kMostBlocks)
            return void(error = kTooMany);
        launch_parts(size, *p, unsigned(chunks * p->G * p->splits), unsigned(across),
                     unsigned(down), unsigned(p->N / p->G * across * down),
                     static_cast<cudaStream_t>(stream));
    });
    return error ? error : launch_error();
}

const char* convolve2d_sum_cuda(const Convolve2dParams* p, void* stream) {
    const int64_t blocks = ceil_div(p->G * p->kh * p->kw, kThreads / 32);
    if (blocks > kMostBlocks) return "more taps than one CUDA grid can hold";
    const auto kernel = p->dtype == DType::kDouble ? sum_kernel<double> : sum_kernel<float>;
    kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p);
    return launch_error();
}
