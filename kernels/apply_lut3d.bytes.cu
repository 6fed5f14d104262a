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

/// How many entries a step along red and green is.
struct Steps {
    int red, green;

    /// In planes both are even, and chosen so that the corners of nearby cells, which lanes ask for
    /// at once, are seldom in the same bank of shared memory.
    HD static constexpr Steps planes(int S) {
        const int green = (S + 2) & ~1;
        return {S * green + 4, green};
    }
    HD static constexpr Steps cells(int S) { return {S * S, S}; }
};

HD inline int plane_bytes(int S) { return (S * Steps::planes(S).red * 4 + 15) & ~15; }
HD inline int planes_bytes(int S) {
    return plane_bytes(S) + ((S * Steps::planes(S).red * 2 + 15) & ~15);
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
        const int S = p.S, at = i / (S * S) * Steps::planes(S).red +
                                i / S % S * Steps::planes(S).green + i % S;
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

/// The word of shared memory at `from` where `wanted` is odd; elsewhere whatever there was, which
/// the caller drops: lanes that do not load leave the banks to others.
__device__ inline unsigned load_if_odd(const unsigned* from, unsigned wanted) {
    unsigned word;
    asm volatile(
        "{\n.reg .pred odd;\n.reg .b32 bit;\nand.b32 bit, %2, 1;\nsetp.ne.u32 odd, bit, 0;\n"
        "@odd ld.shared.u32 %0, [%1];\n}"
        : "=r"(word)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))), "r"(wanted));
    return word;
}

/// Where corners come from. pair(): those of entries i + step and the next, channel by channel, as
/// halves of a word, `step` being even; single(): red and green, and blue, of entry i.
struct SharedTable {
    const unsigned* red_green;
    const unsigned short* blue;

    HD static constexpr Steps steps(int S) { return Steps::planes(S); }
    __device__ uint3 pair(int i, int step) const {
        const unsigned a = red_green[i + step], b = red_green[i + step + 1];
        const unsigned* blues = reinterpret_cast<const unsigned*>(blue) + (i >> 1) + step / 2;
        const unsigned c = blues[0], d = load_if_odd(blues + 1, unsigned(i));
        return {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                __funnelshift_r(c, d, unsigned(i) << 4)};
    }
    __device__ uint2 single(int i) const { return {red_green[i], blue[i]}; }
};
struct PairTable {
    const uint4* cells;
    HD static constexpr Steps steps(int S) { return Steps::cells(S); }
    __device__ uint3 pair(int i, int step) const {
        const uint4 x = __ldg(cells + i + step);
        return {x.x, x.y, x.z};
    }
    __device__ uint2 single(int) const { return {}; }
};
struct SingleTable {
    const uint2* cells;
    HD static constexpr Steps steps(int S) { return Steps::cells(S); }
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
__device__ inline Places places33(unsigned a, unsigned b, unsigned c, Steps steps) {
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
                                   Steps steps) {
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
__device__ inline void mean8(const Table& table, const Places& at, int k, Steps steps,
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
__device__ inline void mean4(const Table& table, const Places& at, int k, Steps steps,
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

/// The pixel at `from` evaluated from the table of float32.
template <bool kTetrahedral>
__device__ inline void evaluate(const ApplyLut3dParams& p, const uint8_t* from, uint8_t* to) {
    const float x[] = {float(from[0]), float(from[1]), float(from[2])};
    const auto out =
        blend<kTetrahedral>(static_cast<const float*>(p.table), place_of<Byte>(x, p.S), p.S);
#pragma unroll
    for (int c = 0; c < 3; ++c) to[c] = store<Byte>(out.at[c]).value;
}

/// Groups of a warp that have pixels in doubt: which, in bits 28 to 31, and the group's number.
struct Queue {
    unsigned* groups;
    int count;

    /// Evaluates a pixel of each of the last `some`. A group that has another one is put back.
    template <bool kTetrahedral>
    __device__ void evaluate_some(const ApplyLut3dParams& p, const uint8_t* in, uint8_t* out,
                                  int some) {
        __syncwarp();  // what was noted, and the pixels' first values, are there
        const int lane = threadIdx.x % 32;
        count -= some;
        unsigned group = 0;
        if (lane < some) {
            group = groups[count + lane];
            const unsigned pixel = 31 - __clz(group);
            group ^= 1u << pixel;
            const unsigned at = 12 * (group & kNumber) + 3 * (pixel - 28);
            evaluate<kTetrahedral>(p, in + at, out + at);
        }
        __syncwarp();
        note(group > kNumber, group);
    }
    /// Notes `group` where it is in doubt. There is room for 32 more.
    __device__ void note(bool doubt, unsigned group) {
        const unsigned all = __ballot_sync(0xffffffff, doubt);
        const unsigned before = all & ((1u << threadIdx.x % 32) - 1);
        if (doubt) groups[count + __popc(before)] = group;
        count += __popc(all);
    }
    static constexpr unsigned kNumber = (1u << 28) - 1;
};

/// Groups of four pixels, three words each.
template <typename Table, bool kTetrahedral, int kS>
__device__ inline void walk(const ApplyLut3dParams& p, const Table& table, const Scale& scale,
                            const uint8_t* in, uint8_t* out, unsigned pixels, unsigned* queue) {
    const int S = kS ? kS : p.S;
    const Steps steps = Table::steps(S);
    const unsigned multiple = ((unsigned(S - 1) << 23) - 1) / 255;
    const unsigned groups = pixels / kGroup, lane = threadIdx.x % 32;
    const unsigned step = gridDim.x * blockDim.x;
    Queue doubts{queue + threadIdx.x / 32 * kQueue, 0};
    const unsigned* words = reinterpret_cast<const unsigned*>(in);
    unsigned* results = reinterpret_cast<unsigned*>(out);
    const unsigned start = blockIdx.x * blockDim.x + threadIdx.x - lane;  // the warp's first
    for (unsigned base = start; base < groups; base += step) {
        const unsigned group = base + lane;
        const bool inside = group < groups;
        const unsigned* from = words + 3 * (inside ? group : 0);
        const unsigned a = from[0], b = from[1], c = from[2];
        Places at;
        if constexpr (kS == 33)
            at = places33(a, b, c, steps);
        else
            at = places_of(a, b, c, S, multiple, steps);
        int level[12];
        unsigned doubtful = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float mean[3];
            if constexpr (kTetrahedral)
                mean4(table, at, k, steps, mean);
            else
                mean8(table, at, k, steps, mean);
            if (round_levels(mean, scale, level + 3 * k) > scale.sure) doubtful |= 1u << (28 + k);
        }
        if (inside) {
#pragma unroll
            for (int i = 0; i < 3; ++i) results[3 * group + i] = bytes_of(level + 4 * i);
        }
        doubts.note(doubtful && inside, doubtful | group);
        while (doubts.count >= 32) doubts.template evaluate_some<kTetrahedral>(p, in, out, 32);
    }
    while (doubts.count > 0)
        doubts.template evaluate_some<kTetrahedral>(p, in, out, min(doubts.count, 32));
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
        const int count = planes_bytes(p.S) / 16;
        uint4* planes = memory + kQueueBytes / 16;
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const auto to = static_cast<unsigned>(__cvta_generic_to_shared(planes + i));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                         "l"(work.table + i));
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        const char* blue = reinterpret_cast<const char*>(planes) + plane_bytes(kS ? kS : p.S);
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
    auto kernel = bytes_kernel<Table, kTetrahedral, 0>;
    if constexpr (std::is_same_v<Table, SharedTable>)
        if (p.S == 33) kernel = bytes_kernel<Table, kTetrahedral, 33>;
    const int bytes = kQueueBytes + (shared ? planes_bytes(p.S) : 0);
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
    const bool shared = kQueueBytes + planes_bytes(p->S) <= most;
    return p->method == Lut3dMethod::kTetrahedral ? choose<true>(*p, work, shared, processors, on)
                                                  : choose<false>(*p, work, shared, processors, on);
}
