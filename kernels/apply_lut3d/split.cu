// Large images of floating point through a table of float32 in the shared memory of two blocks.
//
// Tables of 27 to 33 entries along an axis do not fit one SM's shared memory (shared.cu), but each
// half of their cells along the first axis does: of 33 entries 17 planes, 222 KB. Of two blocks,
// both of which read all pixels of their share, each takes those in its half of the cells. So that
// no lanes idle, a warp collects its pixels in shared memory and works when it has 32.
#include "cells.cuh"

namespace {

constexpr int kQueue = 64;  // pixels of a warp: up to 31 that wait, and 32 more

/// A pixel that waits: as it is in memory, and its number less that of the first in this share.
template <typename T>
struct alignas(16) Waiting {
    T x[3];
    uint32_t number;
};
template <>
struct alignas(8) Waiting<Short> {
    Short x[3];
    uint16_t number;
};

template <typename T>
constexpr int kThreads = std::is_same_v<T, float> ? 320 : 640;

/// Half of the table.
struct SharedEntries {
    const float2* red_green;
    const float* blue;
};
__device__ inline Rgb<float> entry(const SharedEntries& table, int32_t i) {
    const float2 x = table.red_green[i];
    return {{x.x, x.y, table.blue[i]}};
}

template <typename T, bool kTetrahedral>
__global__ void __launch_bounds__(kThreads<T>, 1)
    split_kernel(const __grid_constant__ ApplyLut3dParams p) {
    extern __shared__ __align__(16) char memory[];
    constexpr int kWarps = kThreads<T> / 32;
#ifdef SPLIT_AHEAD
    constexpr int kAhead = SPLIT_AHEAD;
#else
    constexpr int kAhead = 4;
#endif
    using Slot = Waiting<T>;
    using Whole = typename Word<sizeof(Slot)>::type;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t plane = p.S * p.S, cells = p.S - 1, half = (cells + 1) / 2;
    const int32_t first = blockIdx.x % 2 * half, last = blockIdx.x % 2 ? cells : half;
    Slot* const queue = reinterpret_cast<Slot*>(memory) + warp * kQueue;
    const int32_t held = (half + 1) * plane;
    float2* const red_green = reinterpret_cast<float2*>(memory + kWarps * kQueue * sizeof(Slot));
    float* const blue = reinterpret_cast<float*>(red_green + held);
    const int32_t have = (last - first + 1) * plane;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < have; i += kThreads<T>) {
        const Rgb<float> x = ::entry(static_cast<const float*>(p.table), first * plane + i);
        red_green[i] = {x.at[0], x.at[1]};
        blue[i] = x.at[2];
    }
    __syncthreads();
    const SharedEntries table{red_green, blue};
    // Units of 32 pixels; neighbouring warps have neighbouring units.
    const int64_t units = ceil_div(p.N, 32), stride = int64_t(gridDim.x / 2) * kWarps;
    const int64_t begin = int64_t(blockIdx.x / 2) * kWarps + warp;
    int64_t base = begin;  // what `number` counts from
    const T* const image = static_cast<const T*>(p.image);
    T ahead[kAhead][3];
    const auto fetch = [&](T (&to)[3], int64_t unit) {
        const int64_t n = unit * 32 + lane;
        if (n < p.N)
#pragma unroll
            for (int c = 0; c < 3; ++c) to[c] = image[3 * n + c];
    };
#pragma unroll
    for (int a = 0; a < kAhead; ++a) fetch(ahead[a], begin + a * stride);
    int waiting = 0;
    int turn = 0;  // unit = base + turn * stride
    const auto work = [&](int number_of) {
        __syncwarp();
        if (lane < number_of) {
            const Slot slot = bit_copy<Slot>(reinterpret_cast<const Whole*>(queue)[lane]);
            float x[3];
#pragma unroll
            for (int c = 0; c < 3; ++c) x[c] = value_of(slot.x[c], p.dtype);
            Place<float> place = place_of<float>(x, p.S, 0);
            place.entry -= first * plane;
            const Rgb<float> y = blend<kTetrahedral>(table, place, p.S);
            const int64_t unit = base + int64_t(slot.number / 32) * stride;
            T* to = static_cast<T*>(p.out) + 3 * (unit * 32 + slot.number % 32);
#pragma unroll
            for (int c = 0; c < 3; ++c) to[c] = stored<T>(y.at[c], p.dtype);
        }
        __syncwarp();
    };
    for (int64_t unit = begin; unit < units;) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            if (unit >= units) break;
            T now[3];
#pragma unroll
            for (int c = 0; c < 3; ++c) now[c] = ahead[a][c];
            fetch(ahead[a], unit + kAhead * stride);
            float t;
            const int32_t cell = cell_of(value_of(now[0], p.dtype), p.S, &t);
            const bool own = cell >= first && cell < last && unit * 32 + lane < p.N;
            const unsigned all = __ballot_sync(~0u, own);
            if (own) {
                Slot slot;
#pragma unroll
                for (int c = 0; c < 3; ++c) slot.x[c] = now[c];
                slot.number = turn * 32 + lane;
                reinterpret_cast<Whole*>(queue)[waiting + __popc(all & ((1u << lane) - 1))] =
                    bit_copy<Whole>(slot);
            }
            waiting += __popc(all);
            if (waiting >= 32) {
                work(32);
                waiting -= 32;
                Whole moved;
                if (lane < waiting) moved = reinterpret_cast<Whole*>(queue)[32 + lane];
                __syncwarp();
                if (lane < waiting) reinterpret_cast<Whole*>(queue)[lane] = moved;
                __syncwarp();
            }
            unit += stride, ++turn;
        }
        if (sizeof(T) == 2 && turn >= 1024) {  // 16 bits number 2048 of them
            work(waiting);
            waiting = 0, turn = 0, base = unit;
        }
    }
    work(waiting);
}

template <typename T, bool kTetrahedral>
const char* run(const ApplyLut3dParams& p, cudaStream_t on) {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int bytes = int(apply_lut3d_split_bytes(p.S));
    const auto kernel = split_kernel<T, kTetrahedral>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<processors / 2 * 2, kThreads<T>, bytes, on>>>(p);
    return launch_error();
}

}  // namespace

const char* apply_lut3d_split_cuda(const ApplyLut3dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    const bool four = p->method == Lut3dMethod::kTetrahedral;
    if (p->dtype == DType::kFloat)
        return four ? run<float, true>(*p, on) : run<float, false>(*p, on);
    return four ? run<Short, true>(*p, on) : run<Short, false>(*p, on);
}
