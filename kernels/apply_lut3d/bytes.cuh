// apply_lut3d's table of 16-bit whole numbers, and means of its entries; see bytes.cu.
#pragma once
#include <type_traits>

#include "planes.cuh"

constexpr int kBlock = 1024;      // threads; one block to an SM, as it takes all its memory
constexpr int kQueue = 64;        // groups with a pixel in doubt that a warp holds
constexpr float kLevels = 32895;  // 255 of them are less than 2^23
constexpr int kPixels = 1 << 29;  // to a launch, so that 28 bits number their groups
constexpr int kQueueBytes = kBlock / 32 * kQueue * 4;

/// What rounding the table to whole numbers means.
struct Scale {
    float step, base;  // levels of output are base + step * sum of 255ths of table numbers
    float low, inverse;
    float sure;  // how far from a whole level a value may be and round to it for certain
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
    scale.base = 255 * range.x - 8388608.0f * scale.step;
    // Half a step, a bit for roundings of what is summed, and of the float32 table's own sums.
    const float near = 255 * (0.52f * scale.step + (most + width) * 0x1p-21f);
    scale.usable = near < 0.05f;
    scale.sure = 0.5f - near - 1e-4f;
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
        const int S = p.S, at = i / (S * S) * EntrySteps::planes(S).red +
                                i / S % S * EntrySteps::planes(S).green + i % S;
        char* planes = reinterpret_cast<char*>(work.table);
        reinterpret_cast<unsigned*>(planes)[at] = x.x | x.y << 16;
        reinterpret_cast<unsigned short*>(planes + plane_bytes(S))[at] =
            static_cast<unsigned short>(x.z);
    } else if (form == Form::kPairs) {
        const uint3 y = whole(i + 1);
        work.table[i] = {x.x | y.x << 16, x.y | y.y << 16, x.z | y.z << 16, 0};
    } else {
        reinterpret_cast<uint2*>(work.table)[i] = {x.x | x.y << 16, x.z};
    }
}

/// The same from memory.
struct PairTable {
    const uint4* cells;
    HD static constexpr EntrySteps steps(int S) { return EntrySteps::cells(S); }
    __device__ uint3 pair(int i, int step) const {
        const uint4 x = __ldg(cells + i + step);
        return {x.x, x.y, x.z};
    }
    __device__ uint2 single(int) const { return {}; }
};
struct SingleTable {
    const uint2* cells;
    HD static constexpr EntrySteps steps(int S) { return EntrySteps::cells(S); }
    __device__ uint3 pair(int, int) const { return {}; }
    __device__ uint2 single(int i) const { return __ldg(cells + i); }
};

/// 2^23 plus the sum of two products, as a float. weights: two bytes from bit 16 on.
__device__ inline float sum_of(unsigned pair, unsigned weights) {
    return __uint_as_float(__dp2a_hi(pair, weights, 0x4b000000u));
}

constexpr unsigned kHalves = 0x00ff00ff;  // the lower bytes of two halves

/// Cells of four pixels, and the places in them, of 255. A value on an entry may count to the cell
/// below it, with place 255: the cell is never beyond the last.
struct Places {
    int entry[4];
    unsigned red_blue[4];  // halves of a word
    unsigned green[2];     // of the outer pixels, 0 and 3, and of the inner, 1 and 2

    __device__ unsigned green_high(int k) const {  // of pixel k, in the upper half
        const unsigned word = green[k == 1 || k == 2];
        return k < 2 ? word << 16 : word & 0xffff0000;
    }
    __device__ float green_of(int k) const {
        const unsigned word = green[k == 1 || k == 2];
        return place_of_half(k < 2 ? word : word >> 16);
    }
    __device__ float red_of(int k) const { return place_of_half(red_blue[k]); }

    /// A whole number in the lower half, over 255. As the bits of a half it is a multiple of 2^-24,
    /// and converting that is cheaper than converting an integer.
    __device__ static float place_of_half(unsigned word) {
        return load(Half{static_cast<uint16_t>(word)}) * (0x1p24f * (1 / 255.0f));
    }
};

/// For S = 33 two levels at a time, as halves of a word: their cells are level * 257 / 2048, which
/// is right for all of 0 to 255 and fits.
__device__ inline unsigned cells33(unsigned levels, unsigned* places) {
    const unsigned cells = levels * 257 >> 11 & 0x001f001f;
    *places = levels * 32 - cells * 255;
    return cells;
}
__device__ inline Places places33(unsigned a, unsigned b, unsigned c, EntrySteps steps) {
    Places at;
    const unsigned red_blue[] = {a & kHalves, __funnelshift_r(a, b, 24) & kHalves,
                                 __funnelshift_r(b, c, 16) & kHalves, c >> 8 & kHalves};
    const unsigned green[] = {__byte_perm(a, c, 0x7621) & kHalves, __byte_perm(b, 0, 0x4340)};
    unsigned greens[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) greens[i] = cells33(green[i], &at.green[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const unsigned cells = cells33(red_blue[k], &at.red_blue[k]);
        // The upper half becomes blue + red * steps.red + green * steps.green.
        const unsigned step = unsigned(steps.green) << (k < 2 ? 16 : 0);
        const unsigned sum =
            cells * (unsigned(steps.red) << 16 | 1) + greens[k == 1 || k == 2] * step;
        at.entry[k] = int(sum >> 16);
    }
    return at;
}

/// `multiple`: floor(2^23 (S - 1) / 255), less 1 where that is exact.
__device__ inline Places places_of(unsigned a, unsigned b, unsigned c, int S, unsigned multiple,
                                   EntrySteps steps) {
    Places at;
    const unsigned pixel[] = {a, __funnelshift_r(a, b, 24), __funnelshift_r(b, c, 16), c >> 8};
    unsigned green[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        unsigned cell[3], t[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const unsigned level = pixel[k] >> (8 * i) & 255;
            cell[i] = level * multiple >> 23;
            t[i] = level * (S - 1) - 255 * cell[i];
        }
        at.entry[k] = int(cell[0] * steps.red + cell[1] * steps.green + cell[2]);
        at.red_blue[k] = t[0] | t[2] << 16, green[k] = t[1];
    }
    at.green[0] = green[0] | green[3] << 16, at.green[1] = green[1] | green[2] << 16;
    return at;
}

/// 2^23 plus a channel's 255-fold mean, thrice, of pixel k.
template <typename Table>
__device__ inline void mean8(const Table& table, const Places& at, int k, EntrySteps steps,
                             float (&mean)[3]) {
    const unsigned weights = at.red_blue[k] * 255 + 0x00ff0000;  // 255 - t, then t, from bit 16 on
    const float g = at.green_of(k), r = at.red_of(k);
    float side[2][3];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint3 low = table.pair(at.entry[k], i * steps.red);
        const uint3 high = table.pair(at.entry[k], i * steps.red + steps.green);
        const float a[] = {sum_of(low.x, weights), sum_of(low.y, weights), sum_of(low.z, weights)};
        const float b[] = {sum_of(high.x, weights), sum_of(high.y, weights),
                           sum_of(high.z, weights)};
#pragma unroll
        for (int c = 0; c < 3; ++c) side[i][c] = fmaf(g, b[c] - a[c], a[c]);
    }
#pragma unroll
    for (int c = 0; c < 3; ++c) mean[c] = fmaf(r, side[1][c] - side[0][c], side[0][c]);
}

/// The axes are sorted by their places, as words that have the place above and the step below.
template <typename Table>
__device__ inline void mean4(const Table& table, const Places& at, int k, EntrySteps steps,
                             float (&mean)[3]) {
    const unsigned r = at.red_blue[k] << 16 | steps.red, g = at.green_high(k) | steps.green;
    const unsigned b = (at.red_blue[k] & 0xffff0000) | 1;
    const unsigned first = max(max(r, g), b), last = min(min(r, g), b);
    const unsigned middle = r + g + b - first - last;
    const int i = at.entry[k], all = i + steps.red + steps.green + 1;
    const uint2 k0 = table.single(i), k1 = table.single(i + int(first & 0xffff));
    const uint2 k2 = table.single(all - int(last & 0xffff)), k3 = table.single(all);
    // Bytes 255 - first, first - middle, middle - last and last.
    const unsigned places = __byte_perm(__byte_perm(first, middle, 0x3362), last, 0x7610);
    const unsigned weights = places * 255 + 255;
    const auto channel = [&](unsigned a, unsigned b, unsigned c, unsigned d, unsigned half) {
        return __uint_as_float(__dp2a_lo(__byte_perm(a, b, half), weights,
                                         __dp2a_hi(__byte_perm(c, d, half), weights, 0x4b000000u)));
    };
    mean[0] = channel(k0.x, k1.x, k2.x, k3.x, 0x5410);
    mean[1] = channel(k0.x, k1.x, k2.x, k3.x, 0x7632);
    mean[2] = channel(k0.y, k1.y, k2.y, k3.y, 0x5410);
}

/// Levels as whole numbers that may lie outside 0 to 255; returns how far the worst of the three
/// was from its own.
__device__ inline float round_levels(const float (&mean)[3], const Scale& scale, int* level) {
    constexpr float kMagic = 12582912;  // 1.5 * 2^23: what is added to it is rounded
    float off[3];
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        const float exact = fmaf(mean[c], scale.step, scale.base), sum = exact + kMagic;
        off[c] = fabsf(exact - (sum - kMagic));
        level[c] = int(__float_as_uint(sum) - 0x4b400000u);
    }
    return fmaxf(fmaxf(off[0], off[1]), off[2]);
}

/// Four levels, clamped, as bytes; the first in the lowest.
__device__ inline unsigned bytes_of(const int* level) {
    unsigned upper, all;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(level[3]), "r"(level[2]));
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;"
        : "=r"(all)
        : "r"(level[1]), "r"(level[0]), "r"(upper));
    return all;
}
