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
            tile[c * (wide + 1) + v] = c0 + c < C ? source[at] : From{};
        });
        __syncthreads();
        walk(to, [&](int c, int v, int64_t at) {
            if (c0 + c < pad) target[at] = store<To>(load(tile[c * (wide + 1) + v]));
        });
    }
}

template <typename From, typename To>
const char* turn(const Voxels& from, const Voxels& to, const GridSampleParams& p, int pad,
                 Choice choice, int processors, cudaStream_t stream) {
    const int64_t voxels = int64_t(p.size[0]) * p.size[1] * p.size[2];
    int channels_log2 = 0;
    while (1 << channels_log2 < pad && channels_log2 < 5) ++channels_log2;
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

/// Rounds sums that lie in the order of what they are rounded to, four at a time.
template <typename To>
__global__ void __launch_bounds__(kTurners)
    round_kernel(const float* from, To* to, int64_t count, Choice choice) {
    if (choice.idle()) return;
    const int64_t step = int64_t(gridDim.x) * kTurners * 4;
    int64_t i = (int64_t(blockIdx.x) * kTurners + threadIdx.x) * 4;
#pragma unroll 4
    for (; i < count; i += step) {
        const auto sums = load_vector<float, 4>(from + i);  // whole words: the scratch is padded
        Vector<To, 4> rounded;
#pragma unroll
        for (int j = 0; j < 4; ++j) rounded.at[j] = store<To>(sums.at[j]);
        if (i + 4 <= count)
            store_vector(to + i, rounded);
        else
            for (int j = 0; i + j < count; ++j) to[i + j] = rounded.at[j];
    }
}

/// Voxels of a tensor with these strides.
Voxels voxels_of(void* data, const int64_t (&stride)[5], const int32_t (&size)[3]) {
    const int64_t sizes[] = {size[0], size[1], size[2]};
    return {data, stride[0], stride[1], view_of(3, sizes, stride + 2)};
}

}  // namespace
