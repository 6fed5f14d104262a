// Colours through a three-dimensional table, forward and both gradients: what CPU and CUDA share.
// A colour x in [0, 1]^3 lies in the cell of the table with the lowest corner floor(x (S - 1)), at
// the place t in [0, 1]^3 of it, and the result is a mean of the cell's corners:
//   trilinear: all eight, with the products of t or 1 - t of each axis as weights;
//   tetrahedral: four, on the way from the lowest corner to the highest along the axes in falling
//   order of t; with t1 >= t2 >= t3 their weights are 1 - t1, t1 - t2, t2 - t3 and t3 [Kasson,
//   Plouffe and Nin 1993, A tetrahedral interpolation technique for color space conversion].
#pragma once
#include "choices.h"
#include "corners.h"
#include "rates/apply_lut3d.h"

enum class Lut3dMethod : int32_t { kTrilinear, kTetrahedral };

/// By which kernels a GPU does the forward.
enum class Lut3dWay : int32_t {
    kTable,   // forward.cu: the table through the L1 cache
    kDirect,  // there too: lut itself
    kBytes,   // bytes.cu
    kShared,  // shared.cu: the table in shared memory
    kProbe,   // forward.cu or shared.cu, as a look at some pixels tells
};

/// A uint8 of an image, 255 standing for 1.
struct Byte {
    uint8_t value;
};
template <>
HD inline Byte store<Byte>(float x) {
    const float level = x * 255.0f + 0.5f;  // NaN fails the comparison and becomes 0
    return {uint8_t(level > 0 ? (level < 255 ? level : 255) : 0)};
}

constexpr int kLutDims = 4;        // leading dimensions of an image, after joining what can be
constexpr int kLutThreads = 256;   // of a CUDA block, but where a kernel says otherwise
constexpr int kLutLargest = 1024;  // entries along an axis: 32 bits number the S^3
constexpr int kLutTables = 65535;  // at once: rows of a CUDA grid

/// Where a tensor (..., 3) has the pixels 0 to N - 1, in elements.
struct PixelLayout {
    int64_t size[kLutDims], stride[kLutDims], channel;
    int32_t dims;

    HD int64_t operator()(int64_t n) const {
        if (dims == 1) return n * stride[0];
        int64_t at = 0;
        for (int d = dims - 1; d > 0; --d) {
            at += n % size[d] * stride[d];
            n /= size[d];
        }
        return at + n * stride[0];
    }
    HD bool dense() const { return dims == 1 && stride[0] == 3 && channel == 1; }
};

struct ApplyLut3dParams {
    const void *image, *grad_out;  // (N, 3)
    const void* lut;               // (S, S, S, 3), indexed [r, g, b], or `tables` of them
    void *out, *grad_image;        // (N, 3), contiguous
    void* grad_lut;                // as lut, contiguous
    void* table;  // (entries, 4): lut, contiguous, in the accumulating type; or null
    void* sums;   // (parts, entries, 4) of the same, whose sum is grad_lut; CPU: or grad_lut itself
    void* work;   // of the CUDA kernels: apply_lut3d_work() bytes
    PixelLayout image_at, grad_out_at;
    int64_t lut_stride[4];
    int64_t N, parts;
    int64_t tables, pixels;  // each table has the next `pixels` of the N
    int32_t S, entries;      // of all tables
    Lut3dMethod method;
    DType dtype, lut_dtype;  // of the image, unless `bytes`, and of lut
    Lut3dWay way;            // of the CUDA kernels, forward
    int32_t run;             // backward: pixels that a thread sums up before it writes,
    int32_t copies;          // and copies of sums in shared memory: a power of two, or 0
    bool bytes;              // image and out are uint8
    bool deterministic;      // grad_lut is to have the same bits in every run
};

/// table from lut, entries [begin, end) of the S^3. Without one the forward reads lut itself.
OCTET_KERNEL const char* apply_lut3d_table_cuda(const ApplyLut3dParams* p, void* stream);
OCTET_KERNEL void apply_lut3d_table_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end);
/// out from image and table, pixels [begin, end).
OCTET_KERNEL const char* apply_lut3d_cuda(const ApplyLut3dParams* p, void* stream);
OCTET_KERNEL void apply_lut3d_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end);
/// Both for contiguous uint8 images; see kernels/apply_lut3d/bytes.cu.
OCTET_KERNEL const char* apply_lut3d_ranges_cuda(const ApplyLut3dParams* p, void* stream);
OCTET_KERNEL const char* apply_lut3d_bytes_cuda(const ApplyLut3dParams* p, void* stream);
/// By which kernels this device does a forward.
OCTET_KERNEL Lut3dWay apply_lut3d_way_cuda(const ApplyLut3dParams* p, int32_t device);
/// Sets run, copies and parts for a gradient to lut on this device.
OCTET_KERNEL void apply_lut3d_plan_cuda(ApplyLut3dParams* p, int32_t device);
/// For contiguous images of floating point; see kernels/apply_lut3d/shared.cu.
OCTET_KERNEL const char* apply_lut3d_shared_cuda(const ApplyLut3dParams* p, void* stream);
/// grad_image and sums, each unless it is null. CPU: parts [begin, end) of the pixels.
OCTET_KERNEL const char* apply_lut3d_backward_cuda(const ApplyLut3dParams* p, void* stream);
OCTET_KERNEL void apply_lut3d_backward_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end);
/// On a GPU of float32; what other images need is compiled behind (include/torch/rest.h).
OCTET_KERNEL const char* apply_lut3d_backward_others_cuda(const ApplyLut3dParams* p, void* stream);
struct ApplyLut3dRest {
    const char* (*backward)(const ApplyLut3dParams* p, void* stream);
};
/// grad_lut from sums, entries [begin, end).
OCTET_KERNEL const char* apply_lut3d_sum_cuda(const ApplyLut3dParams* p, void* stream);
OCTET_KERNEL void apply_lut3d_sum_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end);

/// Whether so few pixels are better off on the CPU without a table, which takes longer to make than
/// they do.
inline bool apply_lut3d_directly(const ApplyLut3dParams& p) {
    constexpr auto r = kLut3dCpuRates;
    const double table = r.entry * double(p.entries) / 1000,
                 direct = r.pixel_more * double(p.N) / 1000;
    const bool few = p.N <= r.few || direct <= table;
    tell_choice("apply_lut3d", "table", few ? "lut itself" : "a copy in fours",
                "what a copy of the table takes against what its pixels then save",
                {{"lut itself", direct}, {"a copy in fours", table}});
    return few;
}

/// How many entries a step along each axis is.
struct EntrySteps {
    int red, green, blue = 1;

    /// In planes both are even, and chosen so that the corners of nearby cells, which lanes ask for
    /// at once, are seldom in the same bank of shared memory.
    HD static constexpr EntrySteps planes(int S) {
        const int green = (S + 2) & ~1;
        return {S * green + 4, green};
    }
    HD static constexpr EntrySteps cells(int S) { return {S * S, S}; }
};

/// Of a plane of numbers of 4 bytes; of one of 4 and one of 2.
HD inline int plane_bytes(int S) { return (S * EntrySteps::planes(S).red * 4 + 15) & ~15; }
HD inline int planes_bytes(int S) {
    return plane_bytes(S) + ((S * EntrySteps::planes(S).red * 2 + 15) & ~15);
}

/// As what a GPU's shared memory holds a table for images of floating point.
enum class Lut3dShared : int32_t {
    kNone,     // it does not
    kHalves,   // 16-bit numbers, of image and table alike, in two planes
    kEntries,  // float32, red and green together and blue apart
    kChannel,  // a plane of float32: a third of the blocks to each channel
};
inline Lut3dShared apply_lut3d_shared(const ApplyLut3dParams& p, int64_t shared_bytes) {
    const bool words = reinterpret_cast<uintptr_t>(p.image) % 4 == 0;
    if (p.bytes || p.dtype == DType::kDouble || p.tables != 1 || !p.image_at.dense() || !words ||
        4 * int64_t(p.entries) > shared_bytes)
        return Lut3dShared::kNone;
    if (p.dtype != DType::kFloat && p.lut_dtype == p.dtype && planes_bytes(p.S) <= shared_bytes)
        return Lut3dShared::kHalves;
    if (12 * int64_t(p.entries) <= shared_bytes) return Lut3dShared::kEntries;
    return plane_bytes(p.S) <= shared_bytes ? Lut3dShared::kChannel : Lut3dShared::kNone;
}

/// By which kernels a GPU is quickest, of those that can do it.
inline Lut3dWay apply_lut3d_way(const ApplyLut3dParams& p, int64_t shared_bytes) {
    constexpr auto r = kLut3dRates;
    const bool four = p.method == Lut3dMethod::kTetrahedral;
    const double pixels = double(p.N) * 1e-6,
                 made = r.launch + r.table + r.entry * 1e-6 * p.entries;
    const bool one = p.tables == 1 && p.image_at.dense();
    const bool words = reinterpret_cast<uintptr_t>(p.image) % 4 == 0;
    const Lut3dShared held = apply_lut3d_shared(p, shared_bytes);
    const bool whole = held == Lut3dShared::kHalves || held == Lut3dShared::kEntries;
    const Way ways[] = {
        // in the order of Lut3dWay
        {"a table in the L1 cache",
         made + pixels * (p.bytes ? r.table_byte_pixel : r.table_pixel)[four]},
        {"lut itself", r.launch + pixels * r.direct_pixel[four]},
        {"a table of integers", p.bytes && one && words && p.S <= 255
                                    ? made + r.bytes + pixels * r.bytes_pixel[four]
                                    : kUnknown},
        {"a table in shared memory",
         whole && p.S >= r.shared_least ? r.launch + r.shared + r.shared_entry * 1e-6 * p.entries +
                                              pixels * r.shared_pixel[held == Lut3dShared::kEntries]
                                        : kUnknown}};
    int best = 0;
    for (int i = 1; i < 4; ++i)  // false for those that cannot
        if (ways[i].us < ways[best].us) best = i;
    if (best == 0 && held == Lut3dShared::kChannel && pixels >= r.looked_at) {
        tell_choice(
            "apply_lut3d", "table", "in the L1 cache or in shared memory",
            "a look at some pixels tells the GPU whether neighbours' colours lie far apart");
        return Lut3dWay::kProbe;
    }
    tell_choice("apply_lut3d", "table", ways[best].name, "the least by the model",
                {ways[0], ways[1], ways[2], ways[3]});
    return Lut3dWay(best);
}

/// Sets how a GPU sums a gradient to lut up: run, copies and parts. Long runs of pixels write less
/// where neighbours share a cell, short ones keep the GPU busy where there are few; parts and
/// copies keep apart what would add to the same entry at once.
inline void apply_lut3d_plan(ApplyLut3dParams& p, int64_t shared_bytes) {
    constexpr auto r = kLut3dSumRates;
    p.run = r.longest_run, p.copies = 0, p.parts = 1;
    if (p.deterministic) return;
    const int64_t copy = 3 * int64_t(p.entries) * (p.dtype == DType::kDouble ? 8 : 4);
    const bool small = p.entries <= r.small, middle = p.entries <= r.middle;
    if (p.tables == 1 && p.entries <= r.tiny && copy <= shared_bytes) {
        p.run = p.N < r.many ? 1 : 4;
        for (p.copies = 1; p.copies < 32 && 2 * p.copies * copy <= r.shared_bytes;) p.copies *= 2;
        tell_choice("apply_lut3d", "gradient to lut", "sums in shared memory", "few entries");
        return;
    }
    if (p.N < r.few) {
        p.run = 2;
    } else if (p.N < r.fair || (middle && p.N < r.many) || small) {
        p.run = 4;
    }
    if (p.N >= (small ? r.few : r.fair) && middle) p.parts = small && p.N >= r.many ? 64 : 8;
    tell_choice("apply_lut3d", "gradient to lut", p.parts > 1 ? "sums in several copies" : "sums",
                "pixels and entries");
}

/// Bytes of `work` in the forward: two planes or cells of 16 bytes, ranges of blocks, a header; or
/// what a look has told.
inline int64_t apply_lut3d_work(const ApplyLut3dParams& p) {
    if (p.way == Lut3dWay::kProbe) return sizeof(int32_t);
    return 256 + ceil_div(p.entries, kLutThreads) * 8 + 64 + int64_t(p.entries) * 16;
}

/// Bytes of `sums` where the CUDA kernels sum in whole numbers; see
/// kernels/apply_lut3d/backward.cuh.
inline int64_t apply_lut3d_fixed_bytes(const ApplyLut3dParams& p) {
    const int64_t sums = 3 * int64_t(p.entries);
    return 256 + sums * (4 + 8 * (p.dtype == DType::kDouble ? 2 : 1));
}

/// Calls `body` with a value of the C++ type of an image's elements.
template <typename Body>
inline void dispatch_image(const ApplyLut3dParams& p, const Body& body) {
    if (p.bytes) return body(Byte{});
    dispatch(p.dtype, body);
}

/// The cell along an axis of a value in [0, 1], and the place in it. What lies outside is moved to
/// the border; a NaN to 0, since comparisons with it fail.
template <typename A>
HD inline int32_t cell_of(A x, int32_t S, A* t) {
    const A scaled = (x > 0 ? (x < 1 ? x : A(1)) : A(0)) * A(S - 1);
    const int32_t cell = int32_t(scaled) < S - 2 ? int32_t(scaled) : S - 2;
    *t = scaled - A(cell);
    return cell;
}

/// The same of a level 0 to 255, by whole numbers: the place is exact but for one rounding.
HD inline int32_t cell_of_level(float level, int32_t S, float* t) {
    const float scaled = level * float(S - 1);  // times 1 / 255 a whole number, or 1 / 255 off it
    const int32_t whole = int32_t((scaled + 0.5f) * (1 / 255.0f));
    const int32_t cell = whole < S - 2 ? whole : S - 2;
    *t = (scaled - 255.0f * float(cell)) * (1 / 255.0f);
    return cell;
}

/// A colour's cell, by the entry that is its lowest corner, and the place in it.
template <typename A>
struct Place {
    A t[3];
    int32_t entry;
};

/// The four corners of a tetrahedron and their weights. Of equal t the earlier axis counts as
/// larger. kMinima: weights by minima and maxima, on a GPU one instruction where a choice takes
/// two, but a register or two more.
template <typename A, bool kMinima = false>
struct Tetrahedron {
    int32_t offset[4];  // of entries from the cell's lowest corner
    A weight[4];
    int32_t rank[3];  // of an axis in falling order of t

    HD Tetrahedron(const A* t, int32_t S) : Tetrahedron(t, S * S, S, 1) {}
    /// `r`, `g` and `b`: what a step along each axis is.
    HD Tetrahedron(const A* t, int32_t r, int32_t g, int32_t b) {
        const int32_t step[] = {r, g, b}, all = r + g + b;
        const bool rg = t[0] >= t[1], rb = t[0] >= t[2], gb = t[1] >= t[2];
        rank[0] = int32_t(!rg) + int32_t(!rb);
        rank[1] = int32_t(rg) + int32_t(!gb);
        rank[2] = int32_t(rb) + int32_t(gb);
        const A low = lesser(t[0], t[1], !rg), high = larger(t[0], t[1], rg);
        const A first = larger(high, t[2], high >= t[2]), last = lesser(low, t[2], low < t[2]);
        const A within = lesser(high, t[2], high < t[2]);
        const A middle = larger(low, within, low > within);
        offset[0] = 0, offset[3] = all;
        offset[1] = rg && rb ? step[0] : gb ? step[1] : step[2];
        offset[2] = all - (rb && gb ? step[2] : rg ? step[1] : step[0]);
        weight[0] = 1 - first, weight[1] = first - middle, weight[2] = middle - last;
        weight[3] = last;
    }

  private:
    /// a where `first`, else b.
    HD static A lesser(A a, A b, bool first) {
        if constexpr (kMinima) return fmin(a, b);
        return first ? a : b;
    }
    HD static A larger(A a, A b, bool first) {
        if constexpr (kMinima) return fmax(a, b);
        return first ? a : b;
    }
};

/// Corner k = 4 i + 2 j + l of a cell lies i, j and l entries from the lowest along r, g and b.
HD inline int32_t corner_offset(int k, int32_t S) {
    return (k & 4 ? S * S : 0) + (k & 2 ? S : 0) + (k & 1);
}
template <typename A>
HD inline A corner_weight(int k, const A* t) {
    return corner_share<CornerOrder<3, false>>(
        k, 0, A(1), [&](int axis, bool upper) { return upper ? t[axis] : 1 - t[axis]; });
}

/// The first entry of the table that a pixel goes through.
HD inline int32_t first_entry(const ApplyLut3dParams& p, int64_t table) {
    return int32_t(table) * (p.S * p.S * p.S);
}

/// Derivatives along the three axes of a mean of the corners whose values are v, of 8 corners.
template <typename A>
HD inline void trilinear_slopes(const A* v, const A* t, A* slope) {
    for (int axis = 0; axis < 3; ++axis) {
        const int a = 4 >> axis, b = axis == 0 ? 2 : 4, c = axis == 2 ? 2 : 1;
        const A x = t[axis == 0 ? 1 : 0], y = t[axis == 2 ? 1 : 2];
        const A lower = (1 - y) * (v[a] - v[0]) + y * (v[a + c] - v[c]);
        const A upper = (1 - y) * (v[a + b] - v[b]) + y * (v[a + b + c] - v[b + c]);
        slope[axis] = (1 - x) * lower + x * upper;
    }
}

/// Where the table has entry i, in elements, and the writing of an element of its gradient.
HD inline int64_t lut_offset(const ApplyLut3dParams& p, int64_t i) {
    return i / (p.S * p.S) * p.lut_stride[0] + i / p.S % p.S * p.lut_stride[1] +
           i % p.S * p.lut_stride[2];
}
HD inline void store_lut(const ApplyLut3dParams& p, int64_t i, double x) {
    store_as(p.lut_dtype, p.grad_lut, i, x);
}

/// Whether a gradient reaches a coordinate: as torch.clamp has it, also on the border itself.
template <typename A>
HD inline bool within(A x) {
    return x >= 0 && x <= 1;
}
