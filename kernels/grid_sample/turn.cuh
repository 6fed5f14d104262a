// Passes over whole fields beside grid_sample's kernels on the GPU: channels turned last, zeros,
// sums rounded. Each may be launched to do nothing, where the choice is made on the device.
#pragma once
#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "job.cuh"
#include "rates/grid_sample.h"

namespace {

/// Which launches work: where the bits of `asked` in `*made` are `chosen`; without `made` all.
struct Choice {
    static constexpr int kTurned = 1, kScattered = 2;  // the bits
    int* made = nullptr;
    int asked = 0, chosen = 0;
    bool slabs = false;          // the look tells of slabs of this way
    unsigned* claims = nullptr;  // see `share_out`; of one launch

    __device__ bool idle() const {
        follow();
        return made && (*made & asked) != chosen;
    }
};

/// The launches of a call, one after the other.
struct Chain {
    cudaStream_t stream;
    int processors;                // of the GPU
    bool can;                      // launch kernels that follow others, see `start`
    bool follows = false;          // the next one may
    unsigned* counters = nullptr;  // zeros, one for each launch of those to come,
    int left = 0;                  // as far as there are any

    unsigned* take() { return left > 0 ? (--left, counters++) : nullptr; }
};

/// A tensor of images as rows of voxels: what turning its channels needs to know.
struct Voxels {
    void* data;
    int64_t b_stride, c_stride;
    PointsView at;
};

constexpr int kTurners = 256;
constexpr unsigned kBusy = 8;  // blocks to a processor: of what may be idle there are no more

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
    share_out(tiles, choice.claims, [&](unsigned index) {
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
    });
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

/// A tensor with runs of neighbouring voxels, and one whose voxels' rows of whole words of four
/// channels follow one another: the channels of one are those of the other, turned in tiles.
template <typename Planar, typename Last>
struct Turned {
    Planar* planar;
    Last* last;
    int64_t b_stride, c_stride, voxels;  // of `planar`; elements, of a run
    PointsView places;                   // of its voxels, run after run
    int C, row;                          // channels of `planar`, elements of a row of `last`
    int groups, wide_log2;               // of a tile: words of four channels, voxels
    int turn_log2;                       // 8 words change places by so many for each of them
    int span;                            // voxels of a tile that are one's own
    unsigned runs;                       // of an image
    unsigned across, deep, tiles;        // tiles side by side, one behind another, in all
    const void* end;                     // of `planar`

    static constexpr int kWord = 16 / sizeof(Planar);         // voxels
    static constexpr int kElements = 16384 / sizeof(Planar);  // of a tile, at most

    /// Where a tile has channel c of voxel v, in a row of so many elements. Words of 16 bytes
    /// change places within a row, by channel: a warp's channels of a few voxels then lie in
    /// different banks.
    __device__ int at(int c, int v, int wide) const { return c * wide + (v ^ turned(c)); }
    __device__ int turned(int c) const { return ((c / 4) << turn_log2 & 7) * kWord; }
    /// Calls body(c, v, step) for a thread's words of four channels: c, of voxels v, v + step, ...
    /// Neighbouring threads have neighbouring words of `last`.
    template <typename Body>
    __device__ void each_word(const Body& body) const {
        const int v = threadIdx.x / groups, step = kTurners / groups;
        if (v < step) body(int(threadIdx.x - v * groups) * 4, v, step);
    }
    /// Calls body(planar, last, c0, voxels) for each of a block's tiles: where they begin. Tiles of
    /// the same voxels come one after the other, since they share sectors of `last`.
    template <typename Body>
    __device__ void each_tile(unsigned* claims, const Body& body) const {
        share_out(tiles, claims, [&](unsigned index) {
            const unsigned block = index / deep, run = block / across, b = run / runs;
            const int64_t v0 = int64_t(block - run * across) * span, left = voxels - v0;
            const int c0 = int(index - block * deep) * groups * 4;
            const int64_t from = b * b_stride + places.at((run - b * runs) * voxels) + v0;
            __syncthreads();
            body(planar + c0 * c_stride + from, last + (run * voxels + v0) * row + c0, c0,
                 left < span ? int(left) : span);
        });
    }
};

constexpr int kTogether = 4;  // words of a thread that are under way

/// Turns channels last; those beyond C become zeros. Whole words go to shared memory, from where
/// they lie: a channel's first voxel is then one of the first word's.
template <typename T>
__global__ void __launch_bounds__(kTurners, 8)
    turn_last(const __grid_constant__ Turned<const T, T> job, Choice choice) {
    if (choice.idle()) return;
    constexpr int kWord = job.kWord, kSpare = 8 * kWord;  // 8 words: those that change places
    constexpr int kMost = 128 / sizeof(T);                // channels
    __shared__ alignas(16) T tile[job.kElements + kMost * kSpare];
    const int wide = (1 << job.wide_log2) + kSpare;
    const auto end = reinterpret_cast<uintptr_t>(job.end);
    job.each_tile(choice.claims, [&](const T* planar, T* last, int c0, int most) {
        const auto begin = reinterpret_cast<uintptr_t>(planar);
        const int channels = min(4 * job.groups, job.row - c0), words = int(ceil_div(most, kWord));
        const auto before = [&](int c) {  // elements of the first word that are not the channel's
            const unsigned offset = unsigned(c) * unsigned(job.c_stride) * sizeof(T);
            return int((unsigned(begin) + offset) % 16 / sizeof(T));
        };
        const auto fetch = [&](int c, int w) {
            const uintptr_t first = (begin + c * job.c_stride * sizeof(T)) & ~uintptr_t(15);
            const uintptr_t from = first + 16 * w;
            const bool there = c0 + c < job.C && from < end;
            T* const to = tile + job.at(c, w * kWord, wide);
            if (there && end - from < 16) {  // of the tensor's last word what it has of it
                for (int k = 0; k < kWord; ++k)
                    to[k] = from + k * sizeof(T) < end ? reinterpret_cast<const T*>(from)[k] : T{};
                return;
            }
            __pipeline_memcpy_async(to,
                                    reinterpret_cast<const void*>(there ? from : begin & ~15ull),
                                    16, there ? 0 : 16);
        };
        for (int c = threadIdx.x / 32; c < channels; c += kTurners / 32)
            for (int w = threadIdx.x % 32; w < words; w += 32) fetch(c, w);
        // Where channels do not begin with a word they end in one more.
        if (int(threadIdx.x) < channels && before(threadIdx.x)) fetch(threadIdx.x, words);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        job.each_word([&](int c, int v, int step) {
            if (c >= channels) return;
            const int turned = job.turned(c);
            int first[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) first[e] = before(c + e);
            const T* const row = tile + c * wide;
            T* to = last + int64_t(v) * job.row + c;
#pragma unroll 2
            for (; v < most; v += step, to += step * job.row) {
                Vector<T, 4> word;
#pragma unroll
                for (int e = 0; e < 4; ++e) word.at[e] = row[e * wide + ((v + first[e]) ^ turned)];
                store_vector(to, word);
            }
        });
    });
}

/// Turns channels first, `W` voxels at a time, and rounds.
template <typename From, typename To, int W>
__global__ void __launch_bounds__(kTurners, 6)
    turn_first(const __grid_constant__ Turned<To, const From> job, Choice choice) {
    if (choice.idle()) return;
    __shared__ alignas(16) To tile[job.kElements];
    const int wide = 1 << job.wide_log2;
    job.each_tile(choice.claims, [&](To* planar, const From* last, int c0, int most) {
        job.each_word([&](int c, int v, int step) {
            if (c0 + c >= job.C) return;
            for (; v < most; v += kTogether * step) {
                Vector<From, 4> word[kTogether];
#pragma unroll
                for (int j = 0; j < kTogether; ++j)
                    if (v + j * step < most)
                        word[j] =
                            load_constant<From, 4>(last + int64_t(v + j * step) * job.row + c);
#pragma unroll
                for (int j = 0; j < kTogether; ++j)
                    if (v + j * step < most)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            tile[job.at(c + e, v + j * step, wide)] =
                                store<To>(load(word[j].at[e]));
            }
        });
        __syncthreads();
        const int channels = min(job.groups * 4, job.C - c0);
#pragma unroll 4
        for (int i = threadIdx.x * W; i < channels << job.wide_log2; i += kTurners * W) {
            const int c = i >> job.wide_log2, v = i & (wide - 1);
            if (v < most)
                store_vector(planar + c * job.c_stride + v,
                             load_vector<To, W>(tile + job.at(c, v, wide)));
        }
    });
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

/// A way to turn channels by whole words, of no tiles where tensors have no dense rows of these.
template <typename A, typename B>
Turned<A, B> turned_of(const Voxels& planar, const Voxels& last, const GridSampleParams& p,
                       int processors) {
    const int64_t all = int64_t(p.size[0]) * p.size[1] * p.size[2], voxels = planar.at.count[1];
    constexpr int64_t kLeast = 2048;  // elements of a tile that are worth its barriers
    const int row = row_of(last, all, p.B);
    Turned<A, B> job{static_cast<A*>(planar.data), static_cast<B*>(last.data)};
    const bool whole =
        row > 0 && row % 4 == 0 && reinterpret_cast<uintptr_t>(last.data) % (4 * sizeof(B)) == 0;
    if (planar.at.stride[2] != 1 || !whole || p.C == 1) return job;
    // Whole rows, or parts of whole sectors that are as even as can be.
    constexpr int64_t kSector = 32 / (4 * sizeof(B)), kMost = 4 * kSector;
    const int64_t row_words = row / 4, even = ceil_div(row_words, ceil_div(row_words, kMost));
    const int groups = int(even == row_words ? even : ceil_div(even, kSector) * kSector);
    const int64_t deep = ceil_div(row_words, groups);
    if (voxels != all && 4 * groups * std::min<int64_t>(voxels, 128) < kLeast) return job;
    int wide_log2 = 7;
    const auto across = [&] { return ceil_div(voxels, 1 << wide_log2); };
    const auto tiles = [&] { return across() * deep * (all / voxels) * p.B; };
    while (8 * groups << wide_log2 <= job.kElements && across() > 1 && tiles() > 8 * processors)
        ++wide_log2;
    job.b_stride = planar.b_stride, job.c_stride = planar.c_stride, job.voxels = voxels;
    job.places = planar.at, job.runs = unsigned(all / voxels);
    job.span = int(ceil_div(ceil_div(voxels, across()), job.kWord)) * job.kWord;
    job.C = int(p.C), job.row = row, job.groups = groups, job.wide_log2 = wide_log2;
    for (job.turn_log2 = 3; job.turn_log2 > 0 && groups > 8 >> job.turn_log2;) --job.turn_log2;
    job.across = unsigned(across()), job.deep = unsigned(deep);
    job.end = job.planar + (p.B - 1) * job.b_stride + (p.C - 1) * job.c_stride +
              planar.at.at_inline(all - 1) + 1;
    job.tiles = tiles() <= 0x7fffffff ? unsigned(tiles()) : 0;
    return job;
}

/// Turns channels by whole words if it can.
template <typename From, typename To>
bool turn_words(const Voxels& from, const Voxels& to, const GridSampleParams& p, Choice choice,
                int processors, cudaStream_t stream) {
    const auto blocks = [&](unsigned tiles) {
        return choice.made ? std::min(tiles, kBusy * processors) : tiles;
    };
    if constexpr (std::is_same_v<From, To>) {
        const auto job = turned_of<const From, To>(from, to, p, processors);
        if (job.tiles) turn_last<<<blocks(job.tiles), kTurners, 0, stream>>>(job, choice);
        if (job.tiles) return true;
    }
    if constexpr (sizeof(From) == 4) {
        const auto job = turned_of<To, const From>(to, from, p, processors);
        constexpr int kWord = job.kWord;
        const bool whole = reinterpret_cast<uintptr_t>(to.data) % 16 == 0 &&
                           job.voxels % kWord == 0 && job.c_stride % kWord == 0 &&
                           job.b_stride % kWord == 0 && job.places.stride[0] % kWord == 0 &&
                           job.places.stride[1] % kWord == 0;
        const auto kernel = whole ? turn_first<From, To, kWord> : turn_first<From, To, 1>;
        if (job.tiles) kernel<<<blocks(job.tiles), kTurners, 0, stream>>>(job, choice);
        return job.tiles > 0;
    }
    return false;
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
    if (turn_words<From, To>(from, to, p, choice, processors, stream)) return launch_error();
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
    const unsigned blocks = choice.made ? std::min(tiles, kBusy * processors) : tiles;
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

/// Zeros; by a memset where nothing is chosen and the next kernel gains nothing by following this.
/// `shared`: bytes of shared memory that a block of the next one has.
const char* zero(void* to, int64_t bytes, Choice choice, Chain& chain, int shared = 0) {
    const bool kernel = choice.made || (chain.can && bytes < kGridSampleGradientRates.short_zeros);
    if (!kernel || reinterpret_cast<uintptr_t>(to) % 16) {
        cudaMemsetAsync(to, 0, bytes, chain.stream);
        chain.follows = false;
        return launch_error();
    }
    const int64_t words = bytes / 16, blocks = ceil_div(words, kTurners) + 1;
    // A multiprocessor is not ready for blocks of the next kernel before its L1 cache leaves as
    // much shared memory as these need, for which it has to be idle: better before than in between.
    start(zero_kernel, unsigned(std::min<int64_t>(blocks, 8 * chain.processors)), kTurners, shared,
          chain.follows, chain.stream, static_cast<uint4*>(to), words,
          static_cast<char*>(to) + words * 16, int(bytes % 16), choice);
    chain.follows = chain.can;
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
                const auto sums = load_vector<float, 4>(from + first + j);
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
