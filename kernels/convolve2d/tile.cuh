// What the CUDA kernels of convolve2d share: tiles of the input in shared memory.
#pragma once
#include <type_traits>

#include "convolve2d.h"
#include "follow.cuh"
#include "short.cuh"
#include "vector.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
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

#if __CUDA_ARCH__ >= 800
constexpr bool kAsyncCopies = true;
#else
constexpr bool kAsyncCopies = false;
#endif

/// A float on its way into a tile, or, where it is not `there`, zero. `to`: in shared memory.
__device__ inline void begin_copy(unsigned to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 4 : 0));
#endif
}
__device__ inline void begin_copy(void* to, const void* from, bool there) {
    begin_copy(static_cast<unsigned>(__cvta_generic_to_shared(to)), from, there);
}

/// The same where the copy is `wanted`, without a branch.
__device__ inline void begin_copy_if(bool wanted, unsigned to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n"
        " @p cp.async.ca.shared.global [%0], [%1], 4;\n}" ::"r"(to),
        "l"(from), "r"(int(wanted)));
#endif
}

constexpr int kMostColumns = 96;  // of a tile that `fill` fills

/// Copies `rows` x `columns` elements, up to kMostColumns of these, from (y, x) on into a tile
/// whose rows are `pitch` apart; they are there after `wait_for_tile`. A warp takes a row at a
/// time: what the border makes of columns is worked out once. Outside of the image there are zeros.
/// One function for all kernels, not inlined: the file compiles in little more than half the time.
template <typename A, int kShortRows = 3>
__device__ __noinline__ void fill(A* tile, int pitch, const Image& from, int64_t y, int64_t x,
                                  int rows, int columns) {
    constexpr int kEach = kMostColumns / 32;
    by_storage<A>(from.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr bool kAsync = kAsyncCopies && sizeof(T) == 4;
        constexpr int kUnder = kAsync ? 2 : kShortRows;  // rows of a warp under way
        const T* in = static_cast<const T*>(from.data) + from.begin;
        const int lane = threadIdx.x % 32, warps = int(blockDim.x / 32);
        int64_t offset[kEach];
        bool inside[kEach];
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int64_t at = extended(x + lane + 32 * k, from.W, from.boundary);
            inside[k] = at >= 0 && lane + 32 * k < columns;
            offset[k] = inside[k] ? at * from.along : 0;
        }
        for (int first = threadIdx.x / 32; first < rows; first += warps * kUnder) {
            [[maybe_unused]] T value[kUnder][kEach];
            [[maybe_unused]] bool has[kUnder];
#pragma unroll
            for (int u = 0; u < kUnder; ++u) {
                const int row = first + u * warps;
                const int64_t line = extended(y + row, from.H, from.boundary);
                has[u] = row < rows && line >= 0;
                const T* at = in + (has[u] ? line * from.down : 0);
#pragma unroll
                for (int k = 0; k < kEach; ++k) {
                    const bool there = has[u] && inside[k];
                    if constexpr (kAsync) {
                        if (row < rows && lane + 32 * k < columns)
                            begin_copy(tile + row * pitch + lane + 32 * k, at + offset[k], there);
                    } else if (there) {
                        value[u][k] = at[offset[k]];
                    }
                }
            }
#pragma unroll
            for (int u = 0; u < kUnder; ++u) {
                const int row = first + u * warps;
#pragma unroll
                for (int k = 0; k < kEach; ++k)
                    if (!kAsync && row < rows && lane + 32 * k < columns)
                        tile[row * pitch + lane + 32 * k] =
                            has[u] && inside[k] ? value_of(value[u][k], from.dtype) : A(0);
            }
        }
    });
}

/// The same with so many columns. Of float32 within the image a lane's addresses go on by the same
/// steps and nothing else is worked out, which is worth its place in each kernel.
template <int kColumns, int kShortRows = 3>
__device__ inline void fill_columns(float* tile, int pitch, const Image& from, int64_t y, int64_t x,
                                    int rows) {
    if (!kAsyncCopies || from.dtype != DType::kFloat || from.along != 1 || x < 0 || y < 0 ||
        x + kColumns > from.W || y + rows > from.H) {
        fill<float, kShortRows>(tile, pitch, from, y, x, rows, kColumns);
        return;
    }
    constexpr int kLast = kColumns % 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = int(blockDim.x / 32);
    const float* at =
        static_cast<const float*>(from.data) + from.begin + (y + warp) * from.down + x + lane;
    auto to = static_cast<unsigned>(__cvta_generic_to_shared(tile + warp * pitch + lane));
    const int64_t step = warps * from.down;
    const unsigned step_to = unsigned(warps * pitch) * unsigned(sizeof(float));
    const auto row = [&] {
#pragma unroll
        for (int k = 0; k < kColumns / 32; ++k) begin_copy(to + 128 * k, at + 32 * k, true);
        if (kLast) begin_copy_if(lane < kLast, to + kColumns / 32 * 128, at + kColumns / 32 * 32);
        at += step, to += step_to;
    };
    int left = (rows - warp + warps - 1) / warps;
    for (; left >= 4; left -= 4) row(), row(), row(), row();
    for (; left > 0; --left) row();
}

/// What `fill` does beside words of a tile, where columns are few and often outside of the image.
template <typename A>
__device__ __noinline__ void fill_beside(A* tile, int pitch, const Image& from, int64_t y,
                                         int64_t x, int rows, int columns) {
    constexpr int kAcross = 8, kEach = 3;  // columns; rows of a thread under way
    by_storage<A>(from.dtype, [&](auto element) {
        using T = decltype(element);
        for (int column = threadIdx.x % kAcross; column < columns; column += kAcross) {
            const int64_t at = extended(x + column, from.W, from.boundary);
            const T* in = static_cast<const T*>(from.data) + from.begin + at * from.along;
            for (int first = threadIdx.x / kAcross; first < rows;
                 first += kThreads / kAcross * kEach) {
                T value[kEach];
                bool has[kEach];
#pragma unroll
                for (int u = 0; u < kEach; ++u) {
                    const int row = first + u * (kThreads / kAcross);
                    const int64_t line = extended(y + row, from.H, from.boundary);
                    has[u] = row < rows && line >= 0 && at >= 0;
                    if (has[u]) value[u] = in[line * from.down];
                }
#pragma unroll
                for (int u = 0; u < kEach; ++u) {
                    const int row = first + u * (kThreads / kAcross);
                    if (row < rows)
                        tile[row * pitch + column] = has[u] ? value_of(value[u], from.dtype) : A(0);
                }
            }
        }
    });
}

/// What the threads of a block have copied is there, for all of them.
__device__ inline void wait_for_tile() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

/// Fills a whole tile whose rows are on words of 4 elements, as are x and the image's: words
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
    if (left == kPitch) fill(tile, kPitch, from, y, x, kTile, kPitch);
    if (left > 0 && left < kPitch) fill_beside(tile, kPitch, from, y, x, kTile, left);
    if (right < kPitch && left < kPitch)
        fill_beside(tile + right, kPitch, from, y, x + right, kTile, kPitch - right);
}

/// A thread's sums to outputs (y, x) ... (y + 3, x + 3) of image n; those outside of OH x OW are
/// left out.
template <typename T>
__device__ inline void store_outputs(const Convolve2dParams& p, int64_t n, int64_t y, int64_t x,
                                     int64_t OH, int64_t OW, const Acc<T> (&sum)[kRows][kQuad]) {
    T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + y * p.out_stride[1] + x;
#pragma unroll
    for (int r = 0; r < kRows; ++r, out += p.out_stride[1]) {
        if (y + r >= OH) return;
        if constexpr (sizeof(T) < 8) {
            if (x >= 0 && x + kQuad <= OW &&
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
            if (x + q >= 0 && x + q < OW) out[q] = stored<T>(sum[r][q], p.dtype);
    }
}

/// Where a tile lies. `x` counts from `p.shift[1] - K / 2` rounded down to whole words of the
/// input.
struct TilePlace {
    int64_t n, y, x;

    __device__ TilePlace(unsigned tile, unsigned across, unsigned down, int rows = kTileRows)
        : n(tile / across / down),
          y(int64_t(tile / across % down) * rows),
          x(int64_t(tile % across) * kTileColumns) {}
};

/// A known kernel size: the input tile spans [x - 4, x + 68) around its outputs' centres.
template <int K>
struct Fixed {
    static constexpr int kTaps = K, kHalf = K / 2, kTile = kTileRows + K - 1,
                         kPitch = kTileColumns + 8;
    static_assert(K % 2 == 1 && kHalf <= 4, "the halo is one word of 4 values on each side");

    /// What the first tile holds in front of the first output.
    HD static int lead(const Convolve2dParams& p) { return int((p.shift[1] - kHalf) & 3); }

    /// Fills the tile of the outputs from (y, x) on, x relative to the lead.
    __device__ static void fetch(float* tile, const Convolve2dParams& p, const TilePlace& at) {
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

constexpr int kPitch = kTileColumns + kChunk, kTile = kTileRows + kChunk - 1;

template <typename A>
__device__ inline A sum_over_warp(A x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

/// The sums of a block's warps, in their order, on top of `first`, to `partial` of its taps
/// [i0, i0 + ni) x [j0, j0 + nj) in the order of correlation. A warp has 16 I x 8 J of them as
/// tensor cores lay them out. `all`: shared memory for as many, which all have done with.
template <int I, int J>
__device__ inline void store_parts(const Convolve2dParams& p, int64_t g, unsigned split, int64_t i0,
                                   int64_t j0, int ni, int nj, float* all, const float* first,
                                   const float (&sum)[I][J][4]) {
    constexpr int kColumns = 8 * J;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int w = 0; w < kWarps; ++w) {
        __syncthreads();
        if (w != warp) continue;
#pragma unroll
        for (int i = 0; i < I; ++i)
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int tap =
                        (16 * i + lane / 4 + q / 2 * 8) * kColumns + 8 * j + 2 * (lane % 4) + q % 2;
                    all[tap] = sum[i][j][q] + (w ? all[tap] : first[tap]);
                }
    }
    __syncthreads();
    float* partial = static_cast<float*>(p.partial) + (g * p.splits + split) * p.kh * p.kw;
    for (int k = threadIdx.x; k < ni * nj; k += kThreads) {
        const int i = k / nj, j = k % nj;
        partial[p.kh * p.kw - 1 - (i0 + i) * p.kw - (j0 + j)] = all[i * kColumns + j];
    }
}

constexpr int64_t kMostBlocks = 0x7fffffff;

/// Calls `launch(size, across, down, tiles)` where tiles of so many images, and `blocks`, can be
/// numbered: `size` is Fixed<K> where a kernel is compiled for these taps, up to `kMost` of them
/// along an axis, else a float or double. Null, or the error's text.
template <int kMost, typename Launch>
inline const char* by_tiles(const Convolve2dParams& p, int64_t images, int64_t blocks,
                            const Launch& launch) {
    const auto with = [&](auto size, int64_t columns) {
        const int64_t across = ceil_div(columns, kTileColumns), down = ceil_div(p.OH, kTileRows);
        if (double(across) * down * images > kMostBlocks || blocks > kMostBlocks)
            return "more tiles than one CUDA grid can hold";
        launch(size, unsigned(across), unsigned(down), unsigned(images * across * down));
        return launch_error();
    };
    const auto fixed = [&](auto size) { return with(size, p.OW + size.lead(p)); };
    if (p.dtype == DType::kDouble) return with(double{}, p.OW);
    if (p.kh == p.kw && p.kw == 3) return fixed(Fixed<3>{});
    if (p.kh == p.kw && p.kw == 5) return fixed(Fixed<5>{});
    if constexpr (kMost > 5) {
        if (p.kh == p.kw && p.kw == 7) return fixed(Fixed<7>{});
        if (p.kh == p.kw && p.kw == 9) return fixed(Fixed<9>{});
    }
    return with(float{}, p.OW);
}
