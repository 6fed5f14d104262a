// What the CUDA kernels of apply_lut3d share: entries of the table, pixels in groups of four.
#pragma once
#include "apply_lut3d.h"
#include "short.cuh"
#include "vector.cuh"

constexpr int kGroup = 4;  // pixels of a thread: three words of four elements each

__device__ inline float value_of(Byte x, DType) { return float(x.value); }

/// Calls `body` with a value of the type in which the kernels take an image's elements.
template <typename Body>
inline void by_storage(const ApplyLut3dParams& p, const Body& body) {
    if (p.bytes) return body(Byte{});
    if (p.dtype == DType::kDouble) return body(double{});
    if (p.dtype == DType::kFloat) return body(float{});
    body(Short{});
}

/// A colour of the table, or a mean of some; or what a part of its channels is.
template <typename A, int kChannels = 3>
struct Rgb {
    A at[kChannels];
};
__device__ inline Rgb<float> entry(const float* table, int32_t i) {
    const float4 x = __ldg(reinterpret_cast<const float4*>(table) + i);
    return {{x.x, x.y, x.z}};
}
__device__ inline Rgb<double> entry(const double* table, int32_t i) {
    const double2* at = reinterpret_cast<const double2*>(table) + 2 * int64_t(i);
    const double2 x = __ldg(at);
    return {{x.x, x.y, __ldg(at + 1).x}};
}
template <typename A, int kChannels>
__device__ inline Rgb<A, kChannels> mix(const Rgb<A, kChannels>& a, const Rgb<A, kChannels>& b,
                                        A t) {
    Rgb<A, kChannels> mean;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) mean.at[c] = (1 - t) * a.at[c] + t * b.at[c];
    return mean;
}
/// The mean of entry i and the next along blue.
template <typename Table, typename A>
__device__ inline auto mean_along(const Table& table, int32_t i, A t) {
    return mix(entry(table, i), entry(table, i + 1), t);
}

/// Copies entry i of the table to where the kernels read it.
template <typename A>
__device__ inline Rgb<A> copy_entry(const ApplyLut3dParams& p, int32_t i) {
    const int64_t at = lut_offset(p, i);
    A* to = static_cast<A*>(p.table) + 4 * int64_t(i);
    Rgb<A> x;
#pragma unroll
    for (int c = 0; c < 3; ++c)
        to[c] = x.at[c] = load_as<A>(p.lut_dtype, p.lut, at + c * p.lut_stride[3]);
    to[3] = 0;
    return x;
}

/// The pixels from the n-th on of those that go through table blockIdx.y.
struct Pixels {
    int64_t first, end;
    int32_t entry;  // the table's first

    __device__ Pixels(const ApplyLut3dParams& p, int64_t n)
        : first(blockIdx.y * p.pixels + n),
          end((blockIdx.y + 1) * p.pixels),
          entry(first_entry(p, blockIdx.y)) {}
};
/// Blocks whose threads have `each` pixels, of every table.
inline dim3 blocks_of(const ApplyLut3dParams& p, int each) {
    return dim3(unsigned(ceil_div(p.pixels, kLutThreads * each)), unsigned(p.tables));
}

/// The cell of a colour as it stands in the image, in the table that begins at `entry`.
template <typename T>
__device__ inline Place<Acc<T>> place_of(const Acc<T>* x, int32_t S, int32_t entry) {
    const EntrySteps steps = EntrySteps::cells(S);
    Place<Acc<T>> place;
    int32_t cell[3];
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        if constexpr (sizeof(T) == 1)
            cell[c] = cell_of_level(x[c], S, &place.t[c]);
        else
            cell[c] = cell_of(x[c], S, &place.t[c]);
    }
    place.entry = cell[0] * steps.red + cell[1] * steps.green + cell[2] + entry;
    return place;
}

/// A mean of the entries of a table, or of whatever else `entry` takes.
template <bool kTetrahedral, bool kMinima = false, typename Table, typename A>
__device__ inline auto blend(const Table& table, const Place<A>& place, EntrySteps steps) {
    using Colour = decltype(entry(table, 0));
    const int32_t i = place.entry;
    if constexpr (kTetrahedral) {
        const Tetrahedron<A, kMinima> corners(place.t, steps.red, steps.green, steps.blue);
        Colour sum = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const Colour corner = entry(table, i + corners.offset[k]);
#pragma unroll
            for (size_t c = 0; c < sizeof(Colour) / sizeof(A); ++c)
                sum.at[c] += corners.weight[k] * corner.at[c];
        }
        return sum;
    } else {
        Colour side[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int32_t j = i + k * steps.red;
            const Colour low = mean_along(table, j, place.t[2]);
            const Colour high = mean_along(table, j + steps.green, place.t[2]);
            side[k] = mix(low, high, place.t[1]);
        }
        return mix(side[0], side[1], place.t[0]);
    }
}

/// What a look at some pixels has told: whether neighbours' colours lie so far apart that a table
/// in shared memory is quicker than one in the L1 cache.
__device__ inline bool scattered(const ApplyLut3dParams& p) { return *static_cast<int*>(p.work); }

/// Whether groups of four pixels are three aligned words each.
inline bool in_words(const ApplyLut3dParams& p, const void* data, const PixelLayout& at) {
    const int64_t size = p.bytes                     ? 1
                         : p.dtype == DType::kDouble ? 8
                         : p.dtype == DType::kFloat  ? 4
                                                     : 2;
    const int64_t word = size == 8 ? 16 : kGroup * size;
    return at.dense() && reinterpret_cast<uintptr_t>(data) % word == 0;
}

/// Elements of the E / 3 pixels from n on; of those from `end` on, zeros. One or kGroup pixels.
template <typename T, int E>
__device__ inline void load_group(const void* data, const PixelLayout& at, int64_t n, int64_t end,
                                  bool words, T (&to)[E]) {
    constexpr int V = sizeof(T) == 8 ? 2 : kGroup;
    const T* from = static_cast<const T*>(data);
    if (E > 3 && words && n % kGroup == 0 && n + kGroup <= end) {
#pragma unroll
        for (int i = 0; i < E / V; ++i) {
            const auto word = load_vector<T, V>(from + 3 * n + i * V);
#pragma unroll
            for (int j = 0; j < V; ++j) to[i * V + j] = word.at[j];
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < E / 3; ++k) {
        const bool inside = n + k < end;
        const T* pixel = from + (inside ? at(n + k) : 0);
#pragma unroll
        for (int c = 0; c < 3; ++c) to[3 * k + c] = inside ? pixel[c * at.channel] : T{};
    }
}

/// The same into contiguous memory, aligned as torch's allocator does.
template <typename T, int E>
__device__ inline void store_group(void* data, int64_t n, int64_t end, const T (&x)[E]) {
    constexpr int V = sizeof(T) == 8 ? 2 : kGroup;
    T* to = static_cast<T*>(data) + 3 * n;
    if (E > 3 && n % kGroup == 0 && n + kGroup <= end) {
#pragma unroll
        for (int i = 0; i < E / V; ++i) {
            Vector<T, V> word;
#pragma unroll
            for (int j = 0; j < V; ++j) word.at[j] = x[i * V + j];
            store_vector(to + i * V, word);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < E; ++i)
        if (n + i / 3 < end) to[i] = x[i];
}
