// Large images of floating point through a table in shared memory.
//
// What binds is the gather: of 32 lanes that read words at random from 32 banks the fullest bank
// has 3.5, where the L1 cache takes 32 turns for a corner of a warp's pixels. Tables of 16 bits lie
// as in planes.cuh (up to 33 entries along an axis in an SM's 227 KiB). Of float32 red and green
// lie together, as 8 bytes, which serve 16 lanes at a time, blue apart: 9.7 cycles for a corner (up
// to 26 entries). Larger ones are shared out (up to 38): a block has one channel's numbers, reads
// whole pixels and writes that channel, which takes the L1 cache 24 gathers of 3.5 turns for 32
// pixels and 27 turns for what is read and written: it is busy nine tenths of the time. Every block
// copies its part of the table from lut, and then takes its share of the pixels.
#include "async_copy.cuh"
#include "planes.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kPixels = 2;  // of a lane under way: neighbours of 16 bits, or 32 apart of float32
constexpr int kUnit = 32 * kPixels;  // pixels of a warp

// Tables: kParts of them make all kChannels, of bytes() each. read() takes a part of an entry from
// lut, put() writes it where steps() has it; entry() and mean_along() are what blend() needs.

struct HalfPlanes {
    static constexpr int kParts = 1, kChannels = 3;
    SharedTable planes;

    static int bytes(int S) { return planes_bytes(S); }
    HD static EntrySteps steps(int S) { return EntrySteps::planes(S); }
    __device__ HalfPlanes(const ApplyLut3dParams& p, char* memory)
        : planes{reinterpret_cast<const unsigned*>(memory),
                 reinterpret_cast<const unsigned short*>(memory + plane_bytes(p.S))} {}

    __device__ static uint2 read(const ApplyLut3dParams& p, int64_t from, int) {
        const auto channel = [&](int c) -> unsigned {
            return __ldg(static_cast<const unsigned short*>(p.lut) + from + c * p.lut_stride[3]);
        };
        return {channel(0) | channel(1) << 16, channel(2)};
    }
    __device__ void put(int i, uint2 x) const {
        const_cast<unsigned*>(planes.red_green)[i] = x.x;
        const_cast<unsigned short*>(planes.blue)[i] = static_cast<unsigned short>(x.y);
    }
};
/// Of elements T.
template <typename T>
struct Halves : HalfPlanes {
    using Copied = HalfPlanes;
    using HalfPlanes::HalfPlanes;
    __device__ static float low(unsigned word) { return load(T{uint16_t(word)}); }
    __device__ static float high(unsigned word) { return low(word >> 16); }
};
template <typename T>
__device__ inline Rgb<float> entry(const Halves<T>& table, int32_t i) {
    const uint2 x = table.planes.single(i);
    return {{table.low(x.x), table.high(x.x), table.low(x.y)}};
}
template <typename T>
__device__ inline Rgb<float> mean_along(const Halves<T>& table, int32_t i, float t) {
    const unsigned a = table.planes.red_green[i], b = table.planes.red_green[i + 1];
    const unsigned blue = table.planes.blues(i, 0);
    return mix(Rgb<float>{{table.low(a), table.high(a), table.low(blue)}},
               Rgb<float>{{table.low(b), table.high(b), table.high(blue)}}, t);
}

/// A channel of an element of lut.
__device__ inline float read_channel(const ApplyLut3dParams& p, int64_t from, int c) {
    return load_as<float>(p.lut_dtype, p.lut, from + c * p.lut_stride[3]);
}

struct Entries {
    using Copied = Entries;
    static constexpr int kParts = 1, kChannels = 3;
    float2* red_green;
    float* blue;

    static int bytes(int S) { return 12 * S * S * S; }
    HD static EntrySteps steps(int S) { return EntrySteps::cells(S); }
    __device__ Entries(const ApplyLut3dParams& p, char* memory)
        : red_green(reinterpret_cast<float2*>(memory)),
          blue(reinterpret_cast<float*>(red_green + p.entries)) {}

    __device__ static Rgb<float> read(const ApplyLut3dParams& p, int64_t from, int) {
        return {{read_channel(p, from, 0), read_channel(p, from, 1), read_channel(p, from, 2)}};
    }
    __device__ void put(int i, const Rgb<float>& x) const {
        red_green[i] = {x.at[0], x.at[1]};
        blue[i] = x.at[2];
    }
};
__device__ inline Rgb<float> entry(const Entries& table, int32_t i) {
    const float2 x = table.red_green[i];
    return {{x.x, x.y, table.blue[i]}};
}

/// Its entries are numbered by the bytes before them.
struct Channel {
    using Copied = Channel;
    static constexpr int kParts = 3, kChannels = 1, kNumber = sizeof(float);
    unsigned plane;

    static int bytes(int S) { return plane_bytes(S); }
    HD static EntrySteps steps(int S) {
        const EntrySteps in = EntrySteps::planes(S);
        return {kNumber * in.red, kNumber * in.green, kNumber};
    }
    __device__ Channel(const ApplyLut3dParams&, char* memory) : plane(shared_address(memory)) {}

    __device__ static float read(const ApplyLut3dParams& p, int64_t from, int part) {
        return read_channel(p, from, part);
    }
    __device__ void put(int i, float x) const {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(plane + i), "f"(x) : "memory");
    }
};
__device__ inline Rgb<float, 1> entry(const Channel& table, int32_t i) {
    Rgb<float, 1> x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x.at[0]) : "r"(table.plane + i));
    return x;
}
__device__ inline Rgb<float, 1> mean_along(const Channel& table, int32_t i, float t) {
    return mix(entry(table, i), entry(table, i + Channel::kNumber), t);
}

/// Fills a block's table from lut. Its threads step through the entries by kThreads, digit by digit
/// of S, so that nothing is divided; kUnder loads of each are under way at once.
template <typename Table>
__device__ __noinline__ void copy(Table table, const ApplyLut3dParams& p, int part) {
    constexpr int kUnder = 8;
    const int S = p.S, thread = threadIdx.x;
    const EntrySteps steps = Table::steps(S);
    int red = thread / (S * S), green = thread / S % S, blue = thread % S;
    const int reds = kThreads / (S * S), greens = kThreads / S % S, blues = kThreads % S;
    while (red < S) {
        decltype(Table::read(p, 0, 0)) number[kUnder];
        int at[kUnder];
#pragma unroll
        for (int u = 0; u < kUnder; ++u) {
            at[u] = red < S ? red * steps.red + green * steps.green + blue * steps.blue : -1;
            if (at[u] >= 0)
                number[u] = Table::read(
                    p, red * p.lut_stride[0] + green * p.lut_stride[1] + blue * p.lut_stride[2],
                    part);
            blue += blues, green += greens, red += reds;
            if (blue >= S) blue -= S, ++green;
            if (green >= S) green -= S, ++red;
        }
#pragma unroll
        for (int u = 0; u < kUnder; ++u)
            if (at[u] >= 0) table.put(at[u], number[u]);
    }
    __syncthreads();
}

template <typename T, int kCount>
struct Several {
    T at[kCount];
};
using Words = Several<unsigned, 3>;

/// How a warp turns 96 words that lie one after the other, lane after lane three times, so that
/// each lane has three neighbours of them, and back: shuffles are cheaper than loads and stores of
/// every third word, each of which meets three lines. A lane's k-th comes from lane (3 lane + k) %
/// 32, which gives away the one of its three whose number is its own minus k, modulo 3.
struct Turn {
    int lane;
    bool second, third;  // which of a lane's words goes first, unless it is the first

    __device__ Turn() : lane(threadIdx.x % 32), second(lane % 3 == 1), third(lane % 3 == 2) {}
    __device__ Words operator()(const Words& word) const {
        const Words given = rotated(word);
        Words own;
#pragma unroll
        for (int k = 0; k < 3; ++k) own.at[k] = __shfl_sync(~0u, given.at[k], 3 * lane + k);
        return own;
    }
    __device__ Words back(const Words& own) const {
        Words given;
#pragma unroll
        for (int k = 0; k < 3; ++k)  // 11 times 3 is 1, modulo 32
            given.at[k] = __shfl_sync(~0u, own.at[k], 11 * (lane - k));
        return rotated(given);
    }
    __device__ Words rotated(const Words& word) const {
        const auto [a, b, c] = word.at;
        const auto one_of = [&](unsigned x, unsigned y, unsigned z) {
            return third ? z : second ? y : x;
        };
        return {{one_of(a, b, c), one_of(c, a, b), one_of(b, c, a)}};
    }
};

/// A unit's pixels as words of memory.
template <typename T>
struct Unit {
    static constexpr int kPer = 4 / sizeof(T), kGroups = kPixels / kPer;  // elements; 96 words each
    static constexpr int kWords = 96 * kGroups;
    Words group[kGroups];

    __device__ void fetch(const unsigned* from) {
#pragma unroll
        for (int i = 0; i < 3 * kGroups; ++i) group[i / 3].at[i % 3] = from[32 * i];
    }
};

/// place_of() in fewer instructions, which bind here, and without conversions, which a GPU does at
/// a quarter of its pace: the last bits of a number added to 2^23 are what is whole of it. kept:
/// steps and origin stay in registers, where there are some left, and are not worked out for each
/// pixel.
struct Cells {
    static constexpr float kWhole = 0x1p23f;
    EntrySteps steps;
    float last, most;
    uint32_t origin;

    __device__ Cells(int S, EntrySteps of, bool kept)
        : steps(of),
          last(float(S - 1)),
          most(kWhole + float(S - 2)),
          origin(-bit_copy<uint32_t>(kWhole) * uint32_t(of.red + of.green + of.blue)) {
        if (kept) asm volatile("" : "+r"(steps.red), "+r"(steps.green), "+r"(origin));
    }
    __device__ Place<float> place_of(const float* x) const {
        const int32_t step[] = {steps.red, steps.green, steps.blue};
        Place<float> place;
        uint32_t entry = origin;
#pragma unroll
        for (int c = 0; c < 3; ++c) {
            const float scaled = __saturatef(x[c]) * last;  // 0 if x is NaN
            const float whole = fminf(__fadd_rd(scaled, kWhole), most);
            place.t[c] = scaled - (whole - kWhole);
            entry += bit_copy<uint32_t>(whole) * uint32_t(step[c]);
        }
        place.entry = int32_t(entry);
        return place;
    }
};

template <typename T, typename Table, bool kTetrahedral>
__global__ void __launch_bounds__(kThreads, 1)
    shared_kernel(const __grid_constant__ ApplyLut3dParams p) {
    if (p.way == Lut3dWay::kProbe && !scattered(p)) return;
    extern __shared__ __align__(16) char memory[];
    constexpr int kPer = Unit<T>::kPer, kGroups = Unit<T>::kGroups, kChannels = Table::kChannels;
    Table table(p, memory);
    const int part = int(blockIdx.x) % Table::kParts, lane = threadIdx.x % 32;
    const int units = int(p.N / kUnit), stride = int(gridDim.x) / Table::kParts * (kThreads / 32);
    int unit = int(blockIdx.x) / Table::kParts * (kThreads / 32) + int(threadIdx.x) / 32;
    const auto* const image = static_cast<const unsigned*>(p.image) + lane;
    T* const out = static_cast<T*>(p.out);
    Unit<T> next;
    if (unit < units) next.fetch(image + int64_t(unit) * Unit<T>::kWords);
    copy<typename Table::Copied>(table, p, part);
    const Turn turn;
    const Cells cells(p.S, Table::steps(p.S), kChannels == 1 || sizeof(T) == 2);
    const auto colour = [&](const T* element) {
        float x[3];
#pragma unroll
        for (int c = 0; c < 3; ++c) x[c] = value_of(element[c], p.dtype);
        return blend<kTetrahedral, true>(table, cells.place_of(x), cells.steps);
    };
#pragma unroll 1
    for (; unit < units; unit += stride) {
        const Unit<T> own = next;
        if (unit + stride < units) next.fetch(image + int64_t(unit + stride) * Unit<T>::kWords);
        T* const to = out + int64_t(unit) * 3 * kUnit;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const auto in = bit_copy<Several<T, 3 * kPer>>(turn(own.group[g]));
            Several<T, kChannels * kPer> mixed;
#pragma unroll
            for (int k = 0; k < kPer; ++k) {
                const auto mean = colour(in.at + 3 * k);
#pragma unroll
                for (int c = 0; c < kChannels; ++c)
                    mixed.at[kChannels * k + c] = stored<T>(mean.at[c], p.dtype);
            }
            if constexpr (kChannels == 3) {
                const Words words = turn.back(bit_copy<Words>(mixed));
#pragma unroll
                for (int c = 0; c < 3; ++c)
                    reinterpret_cast<unsigned*>(to)[96 * g + 32 * c + lane] = words.at[c];
            } else {
#pragma unroll
                for (int k = 0; k < kPer; ++k)
                    to[96 * kPer * g + 3 * (kPer * lane + k) + part] = mixed.at[k];
            }
        }
    }
    const int64_t n = int64_t(units) * kUnit + threadIdx.x;  // of those that fill no unit
    if (blockIdx.x >= Table::kParts || n >= p.N) return;
    const auto mean = colour(static_cast<const T*>(p.image) + 3 * n);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) out[3 * n + part + c] = stored<T>(mean.at[c], p.dtype);
}

template <typename T, typename Table>
const char* run(const ApplyLut3dParams& p, int processors, cudaStream_t on) {
    const auto kernel = p.method == Lut3dMethod::kTetrahedral ? shared_kernel<T, Table, true>
                                                              : shared_kernel<T, Table, false>;
    const int bytes = Table::bytes(p.S), blocks = processors < Table::kParts
                                                      ? Table::kParts
                                                      : processors / Table::kParts * Table::kParts;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<blocks, kThreads, bytes, on>>>(p);
    return launch_error();
}

}  // namespace

const char* apply_lut3d_shared_cuda(const ApplyLut3dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    int device = 0, processors = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const Lut3dShared held = apply_lut3d_shared(*p, bytes);
    const auto with = [&](auto element) {
        using T = decltype(element);
        if (held == Lut3dShared::kEntries) return run<T, Entries>(*p, processors, on);
        if (held == Lut3dShared::kChannel) return run<T, Channel>(*p, processors, on);
        return "no table in shared memory";
    };
    if (held == Lut3dShared::kHalves)
        return p->dtype == DType::kHalf ? run<Half, Halves<Half>>(*p, processors, on)
                                        : run<BFloat16, Halves<BFloat16>>(*p, processors, on);
    return p->dtype == DType::kFloat ? with(float{}) : with(Short{});
}
