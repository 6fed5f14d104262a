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
#include "bytes.cuh"

/// The pixel at `from` evaluated from the table of float32.
template <bool kTetrahedral>
__device__ inline void evaluate(const ApplyLut3dParams& p, const uint8_t* from, uint8_t* to) {
    const float x[] = {float(from[0]), float(from[1]), float(from[2])};
    const auto out = blend<kTetrahedral>(static_cast<const float*>(p.table),
                                         place_of<Byte>(x, p.S, 0), EntrySteps::cells(p.S));
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
    const EntrySteps steps = Table::steps(S);
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
    const int32_t entries = p.entries;
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
    const int32_t entries = p->entries;
    const int64_t blocks = ceil_div(entries, kLutThreads);
    range_kernel<<<unsigned(blocks), kLutThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        *p, Work(*p, blocks), entries);
    return launch_error();
}

const char* apply_lut3d_bytes_cuda(const ApplyLut3dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    const int32_t entries = p->entries;
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
