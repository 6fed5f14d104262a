// Contiguous uint8 images through a table of 16-bit whole numbers, in shared memory where it fits.
//
// 255 levels times S - 1 steps make places in a cell that are exact multiples of 1 / 255: weights
// of 8 bits. So the table is rounded to kLevels steps between its least and largest number, and a
// mean of two or four corners is one or two dp2a, exact: 255 kLevels < 2^23, and an accumulator
// that starts at the bits of 2^23 ends as a float. For S = 33 the table is 33^3 words of red and
// green and as many halves of blue, 211 KiB: it lies in an SM's shared memory, one block to an SM,
// and gathers need not go through the L1 cache. Larger tables are read from memory as cells: both
// corners along b in 16 bytes for the trilinear form, single corners in 8 for the tetrahedral.
//
// The result is still that of the float32 table, in every pixel: rounding the table moves a value
// by less than `near` (some 0.004 levels), so only a value that lies as near to where the rounding
// to whole levels changes is in doubt, some 2 pixels in a hundred. A warp notes these in a queue
// and evaluates them from the float32 table, 32 at a time. A table too wide or not finite goes that
// way altogether.
#include <type_traits>

#include "apply_lut3d.cuh"

constexpr int kBlock = 1024;      // threads; one block to an SM, as it takes all its memory
constexpr int kQueue = 64;        // pixels in doubt that a warp holds
constexpr float kLevels = 32895;  // 255 of them are less than 2^23
constexpr int kPixels = 1 << 29;  // to a launch, so that 32 bits number their bytes
constexpr int kFraction = 15;     // bits of a float in [256, 512) that are below 1
constexpr int kQueueBytes = kBlock / 32 * kQueue * 4;

/// What rounding the table to whole numbers means.
struct Scale {
    float step, base;  // levels of output are base + step * sum of 255ths of table numbers
    float low, inverse;
    int near;  // in doubt, of 2^-15 levels
    bool usable;
};

/// Parts of `work`.
struct Work {
    Scale* scale;
    float2* ranges;  // least and largest number of each block of range_kernel
    uint4* table;

    HD Work(const ApplyLut3dParams& p, int64_t blocks)
        : scale(static_cast<Scale*>(p.work)), ranges(reinterpret_cast<float2*>(scale) + 32) {
        table = reinterpret_cast<uint4*>(ranges + (blocks + 1) / 2 * 2);
    }
};

__device__ inline float2 warp_range(float2 range) {
    for (int lane = 16; lane > 0; lane /= 2) {
        range.x = fminf(range.x, __shfl_xor_sync(0xffffffff, range.x, lane));
        range.y = fmaxf(range.y, __shfl_xor_sync(0xffffffff, range.y, lane));
    }
    return range;
}

/// The range of a value of each thread, in all threads. `shared`: one to a warp.
__device__ inline float2 block_range(float2 range, float2* shared) {
    range = warp_range(range);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = range;
    __syncthreads();
    return warp_range(shared[threadIdx.x % (blockDim.x / 32)]);
}

/// The float32 table, and the range of each block's entries.
__global__ void range_kernel(ApplyLut3dParams p, Work work, int32_t entries) {
    __shared__ float2 shared[kLutThreads / 32];
    const int32_t i = blockIdx.x * kLutThreads + threadIdx.x;
    float2 range = {3e38f, -3e38f};
    if (i < entries) {
        const Rgb<float> x = copy_entry<float>(p, i);
        for (int c = 0; c < 3; ++c) {
            const bool fine = fabsf(x.at[c]) < 1e30f;  // an infinity or a NaN spoils the range
            range.x = fminf(range.x, fine ? x.at[c] : -3e38f);
            range.y = fmaxf(range.y, fine ? x.at[c] : 3e38f);
        }
    }
    range = block_range(range, shared);
    if (threadIdx.x == 0) work.ranges[blockIdx.x] = range;
}

/// Entries as planes of red and green and of blue, or as cells.
enum class Form : int { kPlanes, kPairs, kSingles };

__host__ __device__ inline int64_t plane_bytes(int64_t entries) { return (entries * 4 + 15) & ~15; }
__host__ __device__ inline int64_t planes_bytes(int64_t entries) {
    return plane_bytes(entries) + ((entries * 2 + 15) & ~15);
}

__global__ void round_kernel(ApplyLut3dParams p, Work work, int32_t entries, Form form) {
    __shared__ float2 shared[kLutThreads / 32];
    const int blocks = int(ceil_div(entries, kLutThreads));
    float2 range = {3e38f, -3e38f};
    for (int i = threadIdx.x; i < blocks; i += kLutThreads) {
        const float2 other = work.ranges[i];
        range = {fminf(range.x, other.x), fmaxf(range.y, other.y)};
    }
    range = block_range(range, shared);
    Scale scale;
    const float width = range.y - range.x, most = fmaxf(fabsf(range.x), fabsf(range.y));
    scale.low = range.x, scale.inverse = width > 0 ? kLevels / width : 0;
    scale.step = width / kLevels;
    scale.base = 255 * range.x + 0.5f - 8388608.0f * scale.step;
    // Half a step, a bit for roundings of what is summed, and of the float32 table's own sums.
    const float near = 255 * (0.52f * scale.step + (most + width) * 0x1p-21f);
    scale.usable = near < 0.05f;
    scale.near = scale.usable ? int(near * (1 << kFraction)) + 2 : 0;
    const int32_t i = blockIdx.x * kLutThreads + threadIdx.x;
    if (i == 0) *work.scale = scale;
    if (i >= entries || !scale.usable) return;
    const auto whole = [&](int32_t j) {
        const Rgb<float> x = entry(static_cast<const float*>(p.table), j < entries ? j : i);
        uint3 y;
        y.x = __float2uint_rn((x.at[0] - scale.low) * scale.inverse);
        y.y = __float2uint_rn((x.at[1] - scale.low) * scale.inverse);
        y.z = __float2uint_rn((x.at[2] - scale.low) * scale.inverse);
        return y;
    };
    const uint3 x = whole(i);
    if (form == Form::kPlanes) {
        char* planes = reinterpret_cast<char*>(work.table);
        reinterpret_cast<unsigned*>(planes)[i] = x.x | x.y << 16;
        reinterpret_cast<unsigned short*>(planes + plane_bytes(entries))[i] =
            static_cast<unsigned short>(x.z);
    } else if (form == Form::kPairs) {
        const uint3 y = whole(i + 1);
        work.table[i] = {x.x | y.x << 16, x.y | y.y << 16, x.z | y.z << 16, 0};
    } else {
        reinterpret_cast<uint2*>(work.table)[i] = {x.x | x.y << 16, x.z};
    }
}

/// Where corners come from. pair(): those of entries i and i + 1, channel by channel, as halves of
/// a word; single(): red and green, and blue, of entry i.
struct SharedTable {
    const unsigned* red_green;
    const unsigned short* blue;

    __device__ uint3 pair(int i) const {
        const uint2 a = single(i), b = single(i + 1);
        return {__byte_perm(a.x, b.x, 0x5410), __byte_perm(a.x, b.x, 0x7632),
                __byte_perm(a.y, b.y, 0x5410)};
    }
    __device__ uint2 single(int i) const { return {red_green[i], blue[i]}; }
};
struct PairTable {
    const uint4* cells;
    __device__ uint3 pair(int i) const {
        const uint4 x = __ldg(cells + i);
        return {x.x, x.y, x.z};
    }
    __device__ uint2 single(int) const { return {}; }
};
struct SingleTable {
    const uint2* cells;
    __device__ uint3 pair(int) const { return {}; }
    __device__ uint2 single(int i) const { return __ldg(cells + i); }
};

/// 2^23 plus the sum of two products, as a float. weights: the first in the lowest byte.
__device__ inline float sum_of(unsigned pair, unsigned weights) {
    return __uint_as_float(__dp2a_lo(pair, weights, 0x4b000000u));
}

/// A pixel's cell and the place in it, of 255. A value on an entry may count to the cell below it,
/// with place 255: the cell is never beyond the last. `multiple`: floor(2^23 (S - 1) / 255), less 1
/// where that is exact.
struct BytePlace {
    int entry;
    unsigned t[3];

    __device__ BytePlace(unsigned pixel, int S, unsigned multiple) {
        unsigned cell[3];
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            const unsigned level = pixel >> (8 * c) & 255;
            cell[c] = level * multiple >> 23;
            t[c] = level * (S - 1) - 255 * cell[c];
        }
        entry = int((cell[0] * S + cell[1]) * S + cell[2]);
    }
};

/// 2^23 plus a channel's 255-fold mean, thrice.
template <typename Table>
__device__ inline void mean8(const Table& table, const BytePlace& at, int S, float (&mean)[3]) {
    const unsigned weights = 255 + 255 * at.t[2];  // 255 - t in the first byte, t in the second
    const float g = float(at.t[1]) * (1 / 255.0f), r = float(at.t[0]) * (1 / 255.0f);
    float side[2][3];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const uint3 low = table.pair(at.entry + k * S * S);
        const uint3 high = table.pair(at.entry + k * S * S + S);
        const float a[] = {sum_of(low.x, weights), sum_of(low.y, weights), sum_of(low.z, weights)};
        const float b[] = {sum_of(high.x, weights), sum_of(high.y, weights),
                           sum_of(high.z, weights)};
#pragma unroll
        for (int c = 0; c < 3; ++c) side[k][c] = fmaf(g, b[c] - a[c], a[c]);
    }
#pragma unroll
    for (int c = 0; c < 3; ++c) mean[c] = fmaf(r, side[1][c] - side[0][c], side[0][c]);
}

template <typename Table>
__device__ inline void mean4(const Table& table, const BytePlace& at, int S, float (&mean)[3]) {
    const unsigned r = at.t[0], g = at.t[1], b = at.t[2];
    const int red = S * S, all = red + S + 1;
    const unsigned first = max(max(r, g), b), last = min(min(r, g), b);
    const unsigned middle = r + g + b - first - last;
    const int up = r == first ? red : g == first ? S : 1;
    const int down = b == last ? 1 : g == last ? S : red;
    const uint2 k0 = table.single(at.entry), k1 = table.single(at.entry + up);
    const uint2 k2 = table.single(at.entry + all - down), k3 = table.single(at.entry + all);
    const unsigned w01 = (255 - first) | (first - middle) << 8, w23 = (middle - last) | last << 8;
    const auto channel = [&](unsigned a, unsigned b, unsigned c, unsigned d, unsigned half) {
        return __uint_as_float(__dp2a_lo(__byte_perm(a, b, half), w01,
                                         __dp2a_lo(__byte_perm(c, d, half), w23, 0x4b000000u)));
    };
    mean[0] = channel(k0.x, k1.x, k2.x, k3.x, 0x5410);
    mean[1] = channel(k0.x, k1.x, k2.x, k3.x, 0x7632);
    mean[2] = channel(k0.y, k1.y, k2.y, k3.y, 0x5410);
}

/// Bytes of a result in the lowest three; *doubt is set where one of them may be another.
__device__ inline unsigned rounded(const float (&mean)[3], const Scale& scale, bool* doubt) {
    unsigned bits[3], nearest = ~0u;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        // In [256, 512) the bits of a float are whole levels above kFraction bits of a fraction.
        const float level = fmaf(mean[c], scale.step, scale.base + 256);
        bits[c] = __float_as_uint(fminf(fmaxf(level, 256.25f), 511.5f));
        nearest = min(nearest, (bits[c] + scale.near) & ((1 << kFraction) - 1));
    }
    *doubt = nearest <= 2 * unsigned(scale.near);
    const unsigned red_green =
        __byte_perm(bits[0] >> kFraction, bits[1] >> kFraction, 0x0040) & 0xffff;
    return red_green | (bits[2] >> kFraction & 255) << 16;
}

/// The pixel at `from` evaluated from the table of float32.
template <bool kTetrahedral>
__device__ inline void evaluate(const ApplyLut3dParams& p, const uint8_t* from, uint8_t* to) {
    const float x[] = {float(from[0]), float(from[1]), float(from[2])};
    const auto out =
        blend<kTetrahedral>(static_cast<const float*>(p.table), place_of<Byte>(x, p.S), p.S);
#pragma unroll
    for (int c = 0; c < 3; ++c) to[c] = store<Byte>(out.at[c]).value;
}

/// Pixels in doubt of a warp.
struct Queue {
    unsigned* pixels;
    int count;

    template <bool kTetrahedral>
    __device__ void evaluate_some(const ApplyLut3dParams& p, const uint8_t* in, uint8_t* out,
                                  int some) {
        __syncwarp();  // what was noted, and the pixels' first values, are there
        const int lane = threadIdx.x % 32;
        count -= some;
        if (lane < some) {
            const unsigned at = 3 * pixels[count + lane];
            evaluate<kTetrahedral>(p, in + at, out + at);
        }
        __syncwarp();
    }
    /// Notes `pixel` where it is in doubt. There is room for 32 more.
    __device__ void note(bool doubt, unsigned pixel) {
        const unsigned all = __ballot_sync(0xffffffff, doubt);
        const unsigned before = all & ((1u << threadIdx.x % 32) - 1);
        if (doubt) pixels[count + __popc(before)] = pixel;
        count += __popc(all);
    }
};

/// Groups of four pixels, three words each.
template <typename Table, bool kTetrahedral, int kS>
__device__ inline void walk(const ApplyLut3dParams& p, const Table& table, const Scale& scale,
                            const uint8_t* in, uint8_t* out, unsigned pixels, unsigned* queue) {
    const int S = kS ? kS : p.S;
    const unsigned multiple = ((unsigned(S - 1) << 23) - 1) / 255;
    const unsigned groups = pixels / kGroup, lane = threadIdx.x % 32;
    const unsigned step = gridDim.x * blockDim.x;
    Queue doubts{queue + threadIdx.x / 32 * kQueue, 0};
    const unsigned* words = reinterpret_cast<const unsigned*>(in);
    unsigned* results = reinterpret_cast<unsigned*>(out);
    const auto pixel_of = [&](unsigned pixel, bool* doubt) {
        float mean[3];
        const BytePlace at(pixel, S, multiple);
        if constexpr (kTetrahedral)
            mean4(table, at, S, mean);
        else
            mean8(table, at, S, mean);
        return rounded(mean, scale, doubt);
    };
    const auto drain = [&] {
        if (doubts.count >= 32) doubts.template evaluate_some<kTetrahedral>(p, in, out, 32);
    };
    const unsigned start = blockIdx.x * blockDim.x + threadIdx.x - lane;  // the warp's first
    for (unsigned base = start; base < groups; base += step) {
        const unsigned group = base + lane;
        const bool inside = group < groups;
        const unsigned* from = words + 3 * (inside ? group : 0);
        const unsigned a = from[0], b = from[1], c = from[2];
        const unsigned source[] = {a, __funnelshift_r(a, b, 24), __funnelshift_r(b, c, 16), c >> 8};
        unsigned result[4];
        bool doubt[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) result[k] = pixel_of(source[k], &doubt[k]);
        if (inside) {
            results[3 * group] = result[0] | result[1] << 24;
            results[3 * group + 1] = result[1] >> 8 | result[2] << 16;
            results[3 * group + 2] = result[2] >> 16 | result[3] << 8;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            doubts.note(doubt[k] && inside, 4 * group + k);
            drain();
        }
    }
    doubts.template evaluate_some<kTetrahedral>(p, in, out, doubts.count);
}

template <typename Table, bool kTetrahedral, int kS>
__global__ void __launch_bounds__(kBlock, 1)
    bytes_kernel(ApplyLut3dParams p, Work work, int64_t begin, unsigned pixels) {
    extern __shared__ uint4 memory[];
    unsigned* queue = reinterpret_cast<unsigned*>(memory);
    const uint8_t* in = static_cast<const uint8_t*>(p.image) + 3 * begin;
    uint8_t* out = static_cast<uint8_t*>(p.out) + 3 * begin;
    const Scale scale = *work.scale;
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned done = scale.usable ? pixels / kGroup * kGroup : 0;
    for (unsigned n = done + thread; n < pixels; n += gridDim.x * blockDim.x)
        evaluate<kTetrahedral>(p, in + 3 * n, out + 3 * n);
    if (!scale.usable) return;
    if constexpr (std::is_same_v<Table, SharedTable>) {
        const int entries = p.S * p.S * p.S, count = int(planes_bytes(entries) / 16);
        uint4* planes = memory + kQueueBytes / 16;
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const auto to = static_cast<unsigned>(__cvta_generic_to_shared(planes + i));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                         "l"(work.table + i));
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        const char* blue = reinterpret_cast<const char*>(planes) + plane_bytes(entries);
        const SharedTable table{reinterpret_cast<const unsigned*>(planes),
                                reinterpret_cast<const unsigned short*>(blue)};
        walk<Table, kTetrahedral, kS>(p, table, scale, in, out, pixels, queue);
    } else {
        const Table table{reinterpret_cast<decltype(Table::cells)>(work.table)};
        walk<Table, kTetrahedral, kS>(p, table, scale, in, out, pixels, queue);
    }
}

template <typename Table, bool kTetrahedral>
const char* run(const ApplyLut3dParams& p, Work work, Form form, int processors, cudaStream_t on) {
    const int32_t entries = p.S * p.S * p.S;
    const auto blocks = unsigned(ceil_div(entries, kLutThreads));
    round_kernel<<<blocks, kLutThreads, 0, on>>>(p, work, entries, form);
    const bool shared = form == Form::kPlanes;
    const auto kernel =
        p.S == 33 ? bytes_kernel<Table, kTetrahedral, 33> : bytes_kernel<Table, kTetrahedral, 0>;
    const int bytes = kQueueBytes + (shared ? int(planes_bytes(entries)) : 0);
    if (shared) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    const int grid = shared ? processors : processors * 2;
    for (int64_t begin = 0; begin < p.N; begin += kPixels) {
        const int64_t left = p.N - begin;
        kernel<<<grid, kBlock, bytes, on>>>(p, work, begin,
                                            unsigned(left < kPixels ? left : kPixels));
    }
    return launch_error();
}

template <bool kTetrahedral>
const char* choose(const ApplyLut3dParams& p, Work work, bool shared, int processors,
                   cudaStream_t on) {
    if (shared) return run<SharedTable, kTetrahedral>(p, work, Form::kPlanes, processors, on);
    using Cells = std::conditional_t<kTetrahedral, SingleTable, PairTable>;
    const Form form = kTetrahedral ? Form::kSingles : Form::kPairs;
    return run<Cells, kTetrahedral>(p, work, form, processors, on);
}

const char* apply_lut3d_ranges_cuda(const ApplyLut3dParams* p, void* stream) {
    const int32_t entries = p->S * p->S * p->S;
    const int64_t blocks = ceil_div(entries, kLutThreads);
    range_kernel<<<unsigned(blocks), kLutThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        *p, Work(*p, blocks), entries);
    return launch_error();
}

const char* apply_lut3d_bytes_cuda(const ApplyLut3dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    const int32_t entries = p->S * p->S * p->S;
    const int64_t blocks = ceil_div(entries, kLutThreads);
    const Work work(*p, blocks);
    int device = 0, processors = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const bool shared = kQueueBytes + planes_bytes(entries) <= most;
    return p->method == Lut3dMethod::kTetrahedral ? choose<true>(*p, work, shared, processors, on)
                                                  : choose<false>(*p, work, shared, processors, on);
}
