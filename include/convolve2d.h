// Two-dimensional convolution of images, forward and both gradients: what CPU and CUDA share.
//   out[n, y, x] = sum over i, j of kernel[g, i, j] * in[n, y + shift0 - i, x + shift1 - j]
// with `in` extended beyond its borders, and image n using kernel g = n / (N / G). It is bilinear:
// the gradient to the image is the same sum with the kernel turned by half a turn, the gradient to
// the kernel a correlation of two images, and derivatives of these are the three again.
#pragma once
#include "common.h"
#include "rates/convolve2d.h"

/// How an image a b c d goes on beyond its border.
enum class Boundary : int32_t {
    kZero,     // 0 0 | a b c d | 0 0
    kReflect,  // b a | a b c d | d c
    kNearest,  // a a | a b c d | d d
};

struct Convolve2dParams {
    const void* in;        // (N, H, W): the image; grad_out where grad_image is computed
    const void* kernel;    // (G, kh, kw)
    const void* grad_out;  // (N, OH, OW), where the gradient to the kernel is computed
    void* out;             // (N, OH, OW), neighbouring columns; or grad_kernel (G, kh, kw)
    void* partial;  // (G, splits, kh, kw) sums of parts of a group's images, accumulating type
    int64_t N, H, W, OH, OW, G, kh, kw, splits;
    int64_t in_stride[3], kernel_stride[3], grad_out_stride[3], out_stride[2];  // in elements
    int64_t shift[2];
    int64_t before[2], after[2];  // fold only: rows and columns by which `out` was extended
    Boundary boundary;            // of `in`; in the fold, of `out`
    bool turned;                  // kernel[kh - 1 - i, kw - 1 - j] stands for kernel[i, j]
    DType dtype, kernel_dtype;    // of in, grad_out and out; of kernel and grad_kernel
};

/// Whether a device multiplies halves as bands.rest.cu does.
OCTET_KERNEL bool convolve2d_tensor_cores(int32_t device);
/// out = the sum above. CPU: rows [begin, end) of the N * OH.
OCTET_KERNEL const char* convolve2d_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL void convolve2d_cpu(const Convolve2dParams* p, int64_t begin, int64_t end);
/// Those pixels of a gradient to the image that the extension repeats: each sums over its copies.
/// CPU: pixels [begin, end) of border_pixels().
OCTET_KERNEL const char* convolve2d_fold_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL void convolve2d_fold_cpu(const Convolve2dParams* p, int64_t begin, int64_t end);
/// `partial` of the gradient to the kernel. CPU: parts [begin, end) of the G * splits.
OCTET_KERNEL const char* convolve2d_parts_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL void convolve2d_parts_cpu(const Convolve2dParams* p, int64_t begin, int64_t end);
/// grad_kernel from `partial`. CPU: taps [begin, end) of the G * kh * kw.
OCTET_KERNEL const char* convolve2d_sum_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL void convolve2d_sum_cpu(const Convolve2dParams* p, int64_t begin, int64_t end);

/// Both for few pixels, in one launch; see kernels/convolve2d/small.cu.
OCTET_KERNEL const char* convolve2d_small_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL const char* convolve2d_small_gradient_cuda(const Convolve2dParams* p, void* stream);

constexpr int kTileRows = 32, kTileColumns = 64;  // of output, to a CUDA block at a time
constexpr int kChunk = 16;                        // taps along an axis that are held at a time

constexpr int kStripTaps = 16;      // columns of taps that strips.rest.cu is compiled for
constexpr int kColumnTaps = 8;      // rows and columns of them of columns.rest.cu, at most:
constexpr int kFloatTaps = 6;       // of float32 columns of up to four rows,
constexpr int kFloatTapsTall = 2;   // and of more
constexpr int kColumnBlocks = 792;  // of kernel_gradient_columns.rest.cu,
constexpr int kColumnWarps = 4;     // and the warps of one
constexpr int kFewRows = 4, kFewColumns = 4;  // of taps that columns sum in 16 bits
constexpr int kEightsBlocks = 1056;           // of kernel_gradient_eights.rest.cu

/// What is compiled behind (include/torch/rest.h): most kernels of a GPU, each of which
/// returns null or the error's text; and all but float32 on the CPU.
struct Convolve2dRest {
    const char* (*strips)(const Convolve2dParams* p, void* stream);
    const char* (*bands)(const Convolve2dParams* p, void* stream);
    const char* (*columns)(const Convolve2dParams* p, void* stream);
    const char* (*strips_parts)(const Convolve2dParams* p, void* stream);
    const char* (*columns_parts)(const Convolve2dParams* p, void* stream);
    const char* (*eights)(const Convolve2dParams* p, void* stream);
    const char* (*eights_parts)(const Convolve2dParams* p, void* stream);
    decltype(&convolve2d_cpu) on_cpu, fold_on_cpu, parts_on_cpu;
};
OCTET_KERNEL const char* convolve2d_strips_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL const char* convolve2d_bands_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL const char* convolve2d_columns_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL const char* convolve2d_columns_parts_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL const char* convolve2d_strips_parts_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL const char* convolve2d_eights_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL const char* convolve2d_eights_parts_cuda(const Convolve2dParams* p, void* stream);
OCTET_KERNEL void convolve2d_others_cpu(const Convolve2dParams* p, int64_t begin, int64_t end);
OCTET_KERNEL void convolve2d_fold_others_cpu(const Convolve2dParams* p, int64_t begin, int64_t end);
OCTET_KERNEL void convolve2d_parts_others_cpu(const Convolve2dParams* p, int64_t begin,
                                              int64_t end);

inline bool convolve2d_in_16_bits(const Convolve2dParams& p) {
    return p.dtype == DType::kHalf || p.dtype == DType::kBFloat16;
}
/// Whether image and kernel are of one 16-bit type, which tensor cores multiply as it is, and
/// eights.rest.cu is quicker than all others: than columns where taps are not few.
inline bool convolve2d_by_eights(const Convolve2dParams& p) {
    constexpr auto r = kConvolve2dRates;
    if (!convolve2d_in_16_bits(p) || p.kernel_dtype != p.dtype) return false;
    if (p.kh > kColumnTaps || p.kw > kColumnTaps) return true;
    const int64_t taps = p.kh * p.kw;
    const bool few = double(p.N) * double(p.OH) * double(p.OW) < r.eights_pixels;
    if (few && taps < r.eights_taps) return false;
    if (p.kw > r.eights_columns) return true;
    return taps > (p.kw > kFewColumns ? r.eights_taps_wide : r.eights_taps_narrow) &&
           p.kw >= kFewColumns;
}
/// The same of the gradient to the kernel, where the kernel's type does not count.
inline bool convolve2d_parts_by_eights(const Convolve2dParams& p) {
    return convolve2d_in_16_bits(p) && (p.kh > kFewRows || p.kw > kFewColumns);
}

/// Whether a GPU does so few pixels soonest by threads of each output.
inline bool convolve2d_is_small(const Convolve2dParams& p) {
    constexpr auto r = kConvolve2dRates;
    if (p.kernel_dtype != p.dtype) return false;
    const double outputs = double(p.N) * p.OH * p.OW, products = outputs * double(p.kh * p.kw);
    if (convolve2d_by_eights(p)) return products <= r.few_products_eights;
    const bool zero = p.boundary == Boundary::kZero;
    double few = r.few_products, most = r.small_products, most_outputs = r.small_outputs;
    if (p.dtype == DType::kDouble) {
        few = r.few_products_double, most_outputs *= 2;
        if (zero) most = r.small_products_double;
    } else if (p.dtype == DType::kFloat) {
        const bool compiled = p.kh == p.kw && p.kw % 2 == 1 && p.kw <= r.square;
        const bool several = p.kh * p.kw >= r.several_taps;
        if (several) few = r.some_products;
        if (compiled) few = several ? r.some_products_square : r.few_products_square;
        if (several && !zero) few *= r.beyond_borders, most = 0;
    }
    return products <= few || (outputs <= most_outputs && products <= most);
}

/// Whether multiply-adds in strips are quicker than those of forward.cu and than tensor cores.
inline bool convolve2d_by_strips(const Convolve2dParams& p) {
    constexpr auto r = kConvolve2dRates;
    const int64_t taps = p.kh * p.kw;
    if (p.dtype == DType::kDouble || p.kw > kStripTaps) return false;
    if (p.kh == p.kw && p.kw % 2 == 1 && p.kw <= r.square) return false;
    const bool large = double(p.N) * p.OH * p.OW >= r.large;
    const bool tall = p.kh > r.tall;
    if (p.dtype == DType::kFloat)
        return tall || taps >= r.strip_taps || (large && taps >= r.strip_taps_large);
    const bool beside_bands = !large || taps <= r.strip_most_16bit || p.kw <= r.narrow;
    return beside_bands && (tall || (taps >= r.strip_taps && p.OW > r.strip_width_16bit));
}
/// Whether kernels of columns.cuh can do these images, whose rows they count as int.
inline bool convolve2d_in_columns(const Convolve2dParams& p) {
    return p.dtype != DType::kDouble && p.H < 1 << 30 && p.OH < 1 << 30;
}
/// Whether columns.rest.cu is quicker than tiles: where traffic decides.
inline bool convolve2d_by_columns(const Convolve2dParams& p) {
    if (!convolve2d_in_columns(p) || p.kh > kColumnTaps || p.kw > kColumnTaps) return false;
    if (p.kh == 3 && p.kw == 3) return false;  // forward.cu has those
    if (p.dtype == DType::kFloat) return p.kw <= (p.kh <= 4 ? kFloatTaps : kFloatTapsTall);
    const bool few = double(p.N) * double(p.OH) * double(p.OW) < kConvolve2dRates.columns_few;
    if (p.kh == p.kw && (p.kw == 5 || p.kw == 7)) return p.kw == 5 && few;  // compiled for tiles
    return p.kh <= 4 || p.kw <= 5 || few;
}
/// Whether tensor cores are quicker than multiply-adds of forward.cu.
inline bool convolve2d_by_bands(const Convolve2dParams& p) {
    constexpr auto r = kConvolve2dRates;
    if (p.dtype == DType::kDouble) return false;
    const bool many = p.kh * p.kw > r.bands_taps;
    if (p.kw > r.bands_wide) return many || double(p.N) * p.OH * p.OW >= r.large;
    return many && p.kw > r.bands_columns;
}
/// Whether the gradient to the kernel is summed in strips, whose rows and columns count as int:
/// quicker than all others but for the small squares that tiles are compiled for.
inline bool convolve2d_parts_by_strips(const Convolve2dParams& p) {
    const bool compiled = p.kh == p.kw && (p.kh == 3 || p.kh == 5);
    return p.dtype == DType::kFloat && p.kh >= 3 && p.kw >= 3 && !compiled &&
           convolve2d_in_columns(p) && p.W < 1 << 30 && p.OW < 1 << 30;
}

/// Whether so few sums are done soonest by a block to each tap.
inline bool convolve2d_is_small_gradient(const Convolve2dParams& p) {
    constexpr auto r = kConvolve2dRates;
    const double outputs = double(p.N) * p.OH * p.OW, taps = double(p.kh * p.kw);
    const bool quick = p.dtype == DType::kFloat || convolve2d_parts_by_eights(p);
    return outputs > 0 && outputs / p.G <= (quick ? r.small_sums_quick : r.small_sums) &&
           taps * outputs <= (quick ? r.small_sum_products_quick : r.small_sum_products);
}

/// How kernel_gradient_columns.rest.cu cuts the rows of taps into chunks of `rows`, and the outputs
/// into `across` x `down` parts of an image, `height` rows each, a warp to each of them.
struct Convolve2dColumns {
    int64_t rows, chunks, across, down;
    int height = 128;

    explicit Convolve2dColumns(const Convolve2dParams& p) : chunks(ceil_div(p.kh, kColumnTaps)) {
        rows = ceil_div(p.kh, chunks) <= 4 ? 4 : kColumnTaps;
        across = ceil_div(p.OW, 33 - p.kw);
        // Fewer rows where warps would be few.
        const double beside = double(p.N) * double(chunks * across);
        while (height > 8 && beside * double(ceil_div(p.OH, height)) < kColumnBlocks * kColumnWarps)
            height /= 2;
        down = ceil_div(p.OH, height);
    }
};
/// Whether it is quicker than others: few columns of taps, and in float32 no strips.
inline bool convolve2d_parts_by_columns(const Convolve2dParams& p) {
    if (!convolve2d_in_columns(p) || convolve2d_parts_by_strips(p)) return false;
    if (p.dtype == DType::kFloat) {
        // Chunks have four rows at least; tiles do one or two of more columns as soon.
        return p.kw <= (p.kh < 3 ? kFewColumns : 2) && p.kh * p.kw <= kConvolve2dRates.columns_taps;
    }
    const bool words = (p.in_stride[1] | p.grad_out_stride[1]) % 4 == 0;
    return p.kh <= kFewRows && p.kw <= kFewColumns && (p.kh != 3 || p.kw != 3 || !words);
}

/// How kernel_gradient_eights.rest.cu cuts the taps into chunks of `rows` x `columns`, and the
/// outputs into `across` x `down` tiles of an image, `height` rows each.
struct Convolve2dEightsParts {
    int rows, columns, height = 64;
    int lead;  // what the first tile holds in front of the first output
    int64_t chunks_across, chunks, across, down;

    explicit Convolve2dEightsParts(const Convolve2dParams& p) {
        constexpr auto r = kConvolve2dRates;
        rows = p.kh <= 16 ? 16 : 32;
        columns = p.kw <= 8 ? 8 : p.kw <= 16 ? 16 : 32;
        const bool on_eights =
            reinterpret_cast<uintptr_t>(p.in) % 16 == 0 && p.in_stride[1] % 8 == 0;
        lead = on_eights ? int((p.shift[1] - (p.kw - 1)) & 7) : 0;
        chunks_across = ceil_div(p.kw, columns), chunks = ceil_div(p.kh, rows) * chunks_across;
        across = ceil_div(p.OW + lead, kTileColumns);
        const double beside = double(p.N) * double(across * chunks);
        const auto few = [&] {
            const double least = height < 64  ? r.eights_parts_few
                                 : rows == 16 ? r.eights_parts_tall
                                              : r.eights_parts_tall_32;
            return beside * double(ceil_div(p.OH, height)) < least;
        };
        while (height > 8 && few()) height /= 2;
        down = ceil_div(p.OH, height);
    }
};

/// How kernel_gradient_strips.rest.cu cuts the taps into chunks of up to `rows` x `columns`, which
/// a block's warps share: `parts` of up to kRowTaps rows each, in `slices` of a tile's rows; and
/// the outputs into `across` x `down` tiles of an image, `height` rows each.
struct Convolve2dStripsParts {
    static constexpr int kRowTaps = 4;
    int rows, columns, parts, slices, height;
    int others;  // where in shared memory sums lie that are made one by one: numbers
    int bytes;   // of shared memory
    int64_t chunks_across, chunks, across, down;

    /// Warps that a block has at most, for so many columns of taps, and the registers of a thread.
    static constexpr int most_warps(int columns) { return columns > 11 ? 6 : 8; }
    static constexpr int registers(int columns) { return columns > 11 ? 168 : 128; }
    /// From row to row of a tile of the input, of which four outputs read whole words.
    static constexpr int pitch(int columns) { return kTileColumns + (columns + 2) / 4 * 4; }

    explicit Convolve2dStripsParts(const Convolve2dParams& p) {
        constexpr auto r = kConvolve2dRates;
        chunks_across = ceil_div(p.kw, kStripTaps), columns = int(ceil_div(p.kw, chunks_across));
        const int64_t chunks_down = ceil_div(p.kh, most_warps(columns) * kRowTaps);
        chunks = chunks_down * chunks_across;
        rows = int(ceil_div(p.kh, chunks_down)), parts = int(ceil_div(rows, kRowTaps));
        slices = parts == 1 ? 4 : parts == 2 ? 2 : 1;
        across = ceil_div(p.OW, kTileColumns);
        height = slices == 4 || columns > 11 ? 64 : 32;
        const double beside = double(p.N) * double(across * chunks);
        const auto few = [&] {
            const bool tall = height == 64 && slices == 1;
            return beside * double(ceil_div(p.OH, height)) <
                   (tall ? r.strips_parts_tall : r.strips_parts_few);
        };
        while (height > 8 * slices && few()) height /= 2;
        down = ceil_div(p.OH, height);
        const int tiles = (height + rows - 1) * pitch(columns) + (height + 1) * kTileColumns;
        const int sums = warps() * kRowTaps * columns;
        others = tiles > sums ? tiles : sums;
        bytes = (others + rows * columns) * int(sizeof(float));
    }
    HD int warps() const { return parts * slices; }
    /// Blocks that an H100 has at a time. A constant and not the GPU's: see convolve2d_splits.
    int64_t resident() const {
        const int by_registers = 65536 / (registers(columns) * 32 * warps());
        const int by_memory = 232448 / (bytes + 1024);
        return 132 * (by_registers < by_memory ? by_registers : by_memory);
    }
};

/// Into how many parts the CUDA kernels cut a group's tiles, or columns, for the gradient to the
/// kernel: about 1024 blocks in all, or as many as an H100 has at a time. A constant and not the
/// GPU's size, so that the result does not depend on it.
inline int64_t convolve2d_splits(const Convolve2dParams& p) {
    int64_t tiles, most;
    if (convolve2d_parts_by_eights(p)) {
        const Convolve2dEightsParts plan(p);
        tiles = p.N / p.G * plan.across * plan.down;
        most = kEightsBlocks / (p.G * plan.chunks);
    } else if (convolve2d_parts_by_strips(p)) {
        const Convolve2dStripsParts plan(p);
        tiles = p.N / p.G * plan.across * plan.down;
        most = plan.resident() / (p.G * plan.chunks);
    } else if (convolve2d_parts_by_columns(p)) {
        const Convolve2dColumns plan(p);
        tiles = ceil_div(p.N / p.G * plan.across * plan.down, kColumnWarps);
        most = kColumnBlocks / (p.G * plan.chunks);
    } else {
        tiles = p.N / p.G * ceil_div(p.OH, kTileRows) * ceil_div(p.OW, kTileColumns);
        most = 1024 / (p.G * ceil_div(p.kh, kChunk) * ceil_div(p.kw, kChunk));
    }
    const int64_t splits = tiles < most ? tiles : most;
    return splits > 1 ? splits : 1;
}

/// Which of an axis' n elements continues it at position i; -1 where it is zero there.
HD inline int64_t extended(int64_t i, int64_t n, Boundary boundary) {
    if (i >= 0 && i < n) return i;
    if (boundary == Boundary::kZero) return -1;
    if (boundary == Boundary::kNearest) return i < 0 ? 0 : n - 1;
    if (i < 0) i = -1 - i;
    if (i >= 2 * n) i %= 2 * n;
    return i < n ? i : 2 * n - 1 - i;
}

/// Which kernel image n is convolved with. Mostly there is one, and a GPU divides slowly.
HD inline int64_t group_of(const Convolve2dParams& p, int64_t n) {
    return p.G == 1 ? 0 : n / (p.N / p.G);
}

/// The tap at row i and column j in the order of correlation: the one that multiplies
/// in[y + shift0 - (kh - 1) + i, x + shift1 - (kw - 1) + j].
template <typename A>
HD inline A tap_at(const Convolve2dParams& p, int64_t g, int64_t i, int64_t j) {
    if (!p.turned) i = p.kh - 1 - i, j = p.kw - 1 - j;
    const int64_t at = g * p.kernel_stride[0] + i * p.kernel_stride[1] + j * p.kernel_stride[2];
    return load_as<A>(p.kernel_dtype, p.kernel, at);
}

HD inline void store_tap(const Convolve2dParams& p, int64_t i, double x) {
    store_as(p.kernel_dtype, p.out, i, x);
}

/// How many elements at an axis' begin and end the extension repeats; together at most n.
struct Edge {
    int64_t first, last;

    HD Edge(const Convolve2dParams& p, int axis) {
        const int64_t n = axis ? p.OW : p.OH;
        const bool reflect = p.boundary == Boundary::kReflect;
        first = reflect ? p.before[axis] : p.before[axis] > 0;
        last = reflect ? p.after[axis] : p.after[axis] > 0;
        first = first < n ? first : n;
        last = last < n - first ? last : n - first;
    }
};

/// Pixels of one image with a repeated row or column.
HD inline int64_t border_pixels(const Convolve2dParams& p) {
    const Edge y(p, 0), x(p, 1);
    return p.OH * p.OW - (p.OH - y.first - y.last) * (p.OW - x.first - x.last);
}

/// The `index`-th of these.
HD inline void border_pixel(const Convolve2dParams& p, int64_t index, int64_t* at) {
    const Edge y(p, 0), x(p, 1);
    const int64_t rows = y.first + y.last, columns = x.first + x.last;
    if (index < rows * p.OW) {
        const int64_t row = index / p.OW;
        at[0] = row < y.first ? row : p.OH - rows + row;
        at[1] = index % p.OW;
    } else {
        index -= rows * p.OW;
        const int64_t column = index % columns;
        at[0] = y.first + index / columns;
        at[1] = column < x.first ? column : p.OW - columns + column;
    }
}

/// Where along an axis the extension has element `q`: at(k) for k in [begin, end), but for those
/// outside of [-before, n + after).
struct Copies {
    int64_t begin, end, q, n, before, after;
    bool reflect;

    HD Copies(const Convolve2dParams& p, int axis, int64_t element)
        : q(element), n(axis ? p.OW : p.OH), before(p.before[axis]), after(p.after[axis]) {
        reflect = p.boundary == Boundary::kReflect;
        if (reflect) {  // k counts mirror images of the axis
            begin = -((before + n - 1) / n);
            end = (after + n - 1) / n + 1;
        } else {
            begin = q == 0 ? -before : 0;
            end = (q == n - 1 ? after : 0) + 1;
        }
    }
    HD int64_t at(int64_t k) const { return !reflect ? q + k : k * n + (k & 1 ? n - 1 - q : q); }
    HD bool has(int64_t i) const { return i >= -before && i < n + after; }
};

/// Taps [begin, end) in the order of correlation that meet an axis of n elements from position
/// `from` on.
struct Overlap {
    int64_t begin, end;

    HD Overlap(int64_t from, int64_t taps, int64_t n)
        : begin(from < 0 ? -from : 0), end(taps < n - from ? taps : n - from) {}
};
