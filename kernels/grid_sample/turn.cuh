// Passes over whole fields beside grid_sample's kernels on the GPU: channels turned last, zeros,
// sums rounded. Each may be launched to do nothing, where the choice is made on the device.
#pragma once
#include <algorithm>

#include "job.cuh"

namespace {

/// Which launches work: those whose `chosen` is in `*made`; all of them without `made`.
struct Choice {
    int* made = nullptr;
    int chosen = 0;

    __device__ bool idle() const { return made && *made != chosen; }
};

/// A tensor of images as rows of voxels: what turning its channels needs to know.
struct Voxels {
    void* data;
    int64_t b_stride, c_stride;
    PointsView at;
};

constexpr int kTurners = 256;

/// Copies (B, C, voxels) between tensors, one with neighbouring voxels and one with neighbouring
/// channels, through tiles in shared memory. Channels from C up to `pad` become zeros.
template <typename From, typename To>
__global__ void __launch_bounds__(kTurners, 8)
    turn_kernel(const __grid_constant__ Voxels from, const __grid_constant__ Voxels to,
                int64_t voxels, int C, int pad, int channels_log2, unsigned across, unsigned deep,
                unsigned tiles, Choice choice) {
    if (choice.idle()) return;
    __shared__ From tile[8 * kTurners + 32];
    // Up to 8 elements a thread: `channels` rows of `wide` voxels.
    const int each_log2 = channels_log2 < 3 ? channels_log2 : 3, each = 1 << each_log2;
    const int wide_log2 = 8 + each_log2 - channels_log2, wide = 1 << wide_log2;
    const int pitch = wide + (32 >> channels_log2);  // a warp's channels of a few voxels: 32 banks
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        const unsigned block = index / across;
        const int64_t v0 = int64_t(index % across) << wide_log2, b = block / deep;
        const int c0 = int(block % deep) << channels_log2;
        const int most = voxels - v0 < wide ? int(voxels - v0) : wide;
        const From* source = static_cast<const From*>(from.data) + b * from.b_stride;
        To* target = static_cast<To*>(to.data) + b * to.b_stride;
        // Calls body(c, v, offset in elements) for a thread's elements.
        const auto walk = [&](const Voxels& x, const auto& body) {
            if (x.c_stride == 1 && pad > 1) {
                const int c = threadIdx.x & ((1 << channels_log2) - 1);
                int v = threadIdx.x >> channels_log2;
#pragma unroll 8
                for (int j = 0; j < each; ++j, v += kTurners >> channels_log2)
                    if (v < most) body(c, v, c0 + c + x.at.at(v0 + v));
            } else {
                const int v = threadIdx.x & (wide - 1);
                int c = threadIdx.x >> wide_log2;
                int64_t at = (c0 + c) * x.c_stride + x.at.at(v0 + v);
#pragma unroll 8
                for (int j = 0; j < each; ++j, c += kTurners >> wide_log2) {
                    if (v < most) body(c, v, at);
                    at += (kTurners >> wide_log2) * x.c_stride;
                }
            }
        };
        __syncthreads();
        walk(from, [&](int c, int v, int64_t at) {
            tile[c * pitch + v] = c0 + c < C ? source[at] : From{};
        });
        __syncthreads();
        walk(to, [&](int c, int v, int64_t at) {
            if (c0 + c < pad) target[at] = store<To>(load(tile[c * pitch + v]));
        });
    }
}

/// Elements of a voxel's row where the channels of all images lie in rows without gaps, else 0.
int row_of(const Voxels& x, int64_t voxels, int64_t B) {
    const int64_t row = x.at.stride[2];
    const bool dense = x.c_stride == 1 && voxels > 1 && x.at.count[1] == voxels && row > 0 &&
                       (B == 1 || x.b_stride == voxels * row);
    return dense && row < 1 << 20 ? int(row) : 0;
}

/// Stores the elements of `x` from `first` on, as far as there are so many.
template <typename T, int V>
__device__ void store_up_to(T* to, int64_t first, int64_t count, const Vector<T, V>& x) {
    if (first + V <= count) {
        store_vector(to + first, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (first + j < count) to[first + j] = x.at[j];
}

constexpr int kRepacked = 4, kRepacks = 4;  // elements at a time, and how often a thread does it

/// Copies rows of C channels to rows of another length; channels beyond C become zeros.
template <typename From, typename To>
__global__ void __launch_bounds__(kTurners)
    repack_kernel(const From* from, To* to, int64_t rows, int C, int from_row, int to_row,
                  Choice choice) {
    if (choice.idle()) return;
    constexpr int kBlock = kTurners * kRepacked * kRepacks;
    const int64_t count = rows * to_row, step = int64_t(gridDim.x) * kBlock;
    for (int64_t block = int64_t(blockIdx.x) * kBlock; block < count; block += step) {
        const int64_t row = block / to_row;
        const unsigned before = unsigned(block - row * to_row);
        const From* const source = from + row * from_row;
        Vector<To, kRepacked> words[kRepacks];
#pragma unroll
        for (int k = 0; k < kRepacks; ++k) {
            const unsigned i = (k * kTurners + threadIdx.x) * kRepacked;
            unsigned r = (before + i) / to_row, c = before + i - r * to_row;
#pragma unroll
            for (int j = 0; j < kRepacked; ++j) {
                const bool there = block + i + j < count && c < C;
                words[k].at[j] = store<To>(load(there ? source[r * from_row + c] : From{}));
                if (++c == to_row) c = 0, ++r;
            }
        }
#pragma unroll
        for (int k = 0; k < kRepacks; ++k)
            store_up_to(to, block + (k * kTurners + threadIdx.x) * kRepacked, count, words[k]);
    }
}

template <typename From, typename To>
const char* turn(const Voxels& from, const Voxels& to, const GridSampleParams& p, int pad,
                 Choice choice, int processors, cudaStream_t stream) {
    const int64_t voxels = int64_t(p.size[0]) * p.size[1] * p.size[2];
    const int from_row = row_of(from, voxels, p.B), to_row = row_of(to, voxels, p.B);
    if (from_row && to_row == pad &&
        reinterpret_cast<uintptr_t>(to.data) % (kRepacked * sizeof(To)) == 0) {
        const int64_t blocks =
            ceil_div(p.B * voxels * to_row, int64_t(kTurners) * kRepacked * kRepacks);
        repack_kernel<From, To>
            <<<unsigned(std::min<int64_t>(blocks, 64 * processors)), kTurners, 0, stream>>>(
                static_cast<const From*>(from.data), static_cast<To*>(to.data), p.B * voxels,
                int(p.C), from_row, to_row, choice);
        return launch_error();
    }
    int channels_log2 = 0;
    while (1 << channels_log2 < pad && channels_log2 < 5) ++channels_log2;
    // Fewer at a time where less is left over, but whole sectors.
    const auto covered = [pad](int log2) { return ceil_div(pad, 1 << log2) << log2; };
    const int least = sizeof(To) < 4 || sizeof(From) < 4 ? 4 : 3;
    for (int log2 = channels_log2 - 1; log2 >= least; --log2)
        if (covered(log2) < covered(channels_log2)) channels_log2 = log2;
    const int wide_log2 = 8 + std::min(channels_log2, 3) - channels_log2;
    const int64_t across = ceil_div(voxels, 1 << wide_log2);
    const int64_t deep = ceil_div(pad, 1 << channels_log2);
    if (double(across) * deep * p.B > 0x7fffffff) return "more voxels than one CUDA grid can hold";
    const unsigned tiles = unsigned(across * deep * p.B);
    const unsigned blocks = choice.made ? std::min(tiles, 64u * processors) : tiles;
    turn_kernel<From, To><<<blocks, kTurners, 0, stream>>>(from, to, voxels, int(p.C), pad,
                                                           channels_log2, unsigned(across),
                                                           unsigned(deep), tiles, choice);
    return launch_error();
}

/// Zeros, 16 bytes at a time: a memset that may be left out.
__global__ void __launch_bounds__(kTurners)
    zero_kernel(uint4* to, int64_t words, char* tail, int bytes, Choice choice) {
    if (choice.idle()) return;
    const int64_t step = int64_t(gridDim.x) * kTurners;
    const int64_t first = int64_t(blockIdx.x) * kTurners + threadIdx.x;
    for (int64_t i = first; i < words; i += step) to[i] = uint4{};
    if (first < bytes) tail[first] = 0;
}

const char* zero(void* to, int64_t bytes, Choice choice, int processors, cudaStream_t stream) {
    if (!choice.made || reinterpret_cast<uintptr_t>(to) % 16) {
        cudaMemsetAsync(to, 0, bytes, stream);
        return launch_error();
    }
    const int64_t words = bytes / 16, blocks = ceil_div(words, kTurners) + 1;
    zero_kernel<<<unsigned(std::min<int64_t>(blocks, 8 * processors)), kTurners, 0, stream>>>(
        static_cast<uint4*>(to), words, static_cast<char*>(to) + words * 16, int(bytes % 16),
        choice);
    return launch_error();
}

/// Rounds sums that lie in the order of what they are rounded to, 16 bytes at a time.
template <typename To>
__global__ void __launch_bounds__(kTurners)
    round_kernel(const float* from, To* to, int64_t count, Choice choice) {
    if (choice.idle()) return;
    constexpr int V = 16 / sizeof(To), kTogether = 2;
    const int64_t step = int64_t(gridDim.x) * kTurners * V;
    int64_t i = (int64_t(blockIdx.x) * kTurners + threadIdx.x) * V;
    for (; i < count; i += kTogether * step) {
        Vector<To, V> rounded[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int64_t first = i + k * step;
            if (first >= count) break;
#pragma unroll
            for (int j = 0; j < V; j += 4) {  // whole words: the scratch is padded
                const auto sums = load_constant<float, 4>(from + first + j);
#pragma unroll
                for (int e = 0; e < 4; ++e) rounded[k].at[j + e] = store<To>(sums.at[e]);
            }
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) store_up_to(to, i + k * step, count, rounded[k]);
    }
}

/// Voxels of a tensor with these strides.
Voxels voxels_of(void* data, const int64_t (&stride)[5], const int32_t (&size)[3]) {
    const int64_t sizes[] = {size[0], size[1], size[2]};
    return {data, stride[0], stride[1], view_of(3, sizes, stride + 2)};
}

}  // namespace
