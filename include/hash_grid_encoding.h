// Multiresolution hash encoding (Mueller et al. 2022, eq. 1-5): what CPU and CUDA share.
//   out[n, l F + f] = sum over the 2^D corners k of weight_k(l, n) * table[l, row_k(l, n), f]
// Level l is a grid of cells; a point lies at x * scale + 1/2 in it. With `along` (a direction u
// for each point) the weights are the derivative of weight_k along u instead: the same sums then
// give the derivatives of the gradient to the points.
#pragma once
#include "corners.h"
#include "fixed_point.cuh"

/// One grid. `rows` is what indices are taken modulo: of a hashed level T, of a dense one fewer.
struct HashLevel {
    float scale;
    uint32_t resolution, rows, hashed;
};

constexpr int64_t kMostLevels = 128, kMostFeatures = 1 << 20;

struct HashGridParams {
    const void* points;    // (N, D)
    const void* along;     // (N, D), dtype of points, or null
    const void* table;     // (L, T, F)
    const void* grad_out;  // (N, L * F), dtype of table
    void* out;             // contiguous (N, L * F), or grad_points (N, D), or grad_table (L, T, F)
    void* scratch;         // CUDA: hash_grid_points_scratch or hash_grid_table_scratch bytes
    int64_t N, L, T;
    int32_t D, F, parts;  // parts: into how many ranges of rows a level is cut (CPU, grad_table)
    int64_t points_stride[2], along_stride[2], table_stride[3], grad_out_stride[2];  // in elements
    DType dtype, points_dtype;
    bool deterministic;
    HashLevel level[kMostLevels];
    const struct HashGridRest* rest;  // for the gradient to a table that needs it
};

/// out. CPU: points [begin, end).
OCTET_KERNEL const char* hash_grid_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL void hash_grid_cpu(const HashGridParams* p, int64_t begin, int64_t end);
/// grad_points. CPU: points [begin, end).
OCTET_KERNEL const char* hash_grid_points_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL void hash_grid_points_cpu(const HashGridParams* p, int64_t begin, int64_t end);
/// grad_table. CPU: [begin, end) of the L * parts.
OCTET_KERNEL const char* hash_grid_table_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL void hash_grid_table_cpu(const HashGridParams* p, int64_t begin, int64_t end);

/// The same for other elements than float32, and for any number of features.
OCTET_KERNEL const char* hash_grid_16bit_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL const char* hash_grid_double_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL const char* hash_grid_any_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL const char* hash_grid_points_16bit_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL const char* hash_grid_points_double_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL const char* hash_grid_points_any_cuda(const HashGridParams* p, void* stream);
OCTET_KERNEL const char* hash_grid_table_double_cuda(const HashGridParams* p, void* stream);
/// The gradient of table levels [first, first + levels), added as table.cuh's kernel does.
OCTET_KERNEL void hash_grid_table_any_cuda(const HashGridParams* p, int first, int levels,
                                           void* sums, unsigned long long* memory, void* stream);

/// The CPU's for other elements than float32.
OCTET_KERNEL void hash_grid_others_cpu(const HashGridParams* p, int64_t begin, int64_t end);
OCTET_KERNEL void hash_grid_points_others_cpu(const HashGridParams* p, int64_t begin, int64_t end);
OCTET_KERNEL void hash_grid_table_others_cpu(const HashGridParams* p, int64_t begin, int64_t end);

/// What elements other than float32 need, and CUDA where `needs_rest`: include/torch/rest.h.
struct HashGridRest {
    decltype(&hash_grid_others_cpu) on_cpu, points_on_cpu, table_on_cpu;
    decltype(&hash_grid_16bit_cuda) of_16bit, of_double, of_any;
    decltype(&hash_grid_points_16bit_cuda) points_of_16bit, points_of_double, points_of_any;
    decltype(&hash_grid_table_double_cuda) table_of_double;
    decltype(&hash_grid_table_any_cuda) table_any;
};

/// Whether there are CUDA kernels for this number of features alone.
inline bool own_kernels(const HashGridParams& p) { return p.F <= 8 && (p.F & (p.F - 1)) == 0; }
/// For the gradient to the table less: `needs_rest_for_table`.
inline bool needs_rest(const HashGridParams& p) {
    return p.dtype != DType::kFloat || !own_kernels(p);
}
inline bool needs_rest_for_table(const HashGridParams& p) {
    return p.dtype == DType::kDouble || !own_kernels(p);
}

/// Levels that the CUDA kernels take at a time: those whose outputs fill a 32-byte sector, since
/// sectors written in pieces cost a read and a write each; their tables have to stay in the L2.
inline int64_t hash_grid_group(const HashGridParams& p) {
    const int64_t bytes = int64_t(p.F) * (p.dtype == DType::kDouble  ? 8
                                          : p.dtype == DType::kFloat ? 4
                                                                     : 2);
    return bytes < 32 ? 32 / bytes : 1;
}

/// Bytes of scratch on the GPU. Gradients to the points: sums of each group of levels.
inline int64_t hash_grid_points_scratch(const HashGridParams& p) {
    return ceil_div(p.L, hash_grid_group(p)) * p.N * p.D * (p.dtype == DType::kDouble ? 8 : 4);
}
/// The table's gradient: what one group of levels is accumulated in, where that is not the output.
inline int64_t hash_grid_table_scratch(const HashGridParams& p) {
    const int64_t group = hash_grid_group(p), places = (group < p.L ? group : p.L) * p.T * p.F;
    if (p.deterministic) return 8 * (1 + fixed_point_words(places));
    return p.dtype == DType::kHalf || p.dtype == DType::kBFloat16 ? 4 * places : 0;
}

/// Which of a level's rows a corner has, before the remainder: its hash, or its place in the grid.
template <int D>
HD inline uint32_t number_of(const HashLevel& level, const uint32_t* corner) {
    if (level.hashed) {
        const uint32_t hash = corner[0] ^ corner[1] * 2654435761u;
        return D == 3 ? hash ^ corner[2] * 805459861u : hash;
    }
    const uint32_t plane = D == 3 ? corner[2] * level.resolution : 0;
    return corner[0] + (corner[1] + plane) * level.resolution;
}

/// The remainder. In a dense level numbers beyond the last row are those of points at its far end.
HD inline uint32_t row_of(const HashLevel& level, uint32_t number) {
    const uint32_t mask = level.rows - 1;
    if (level.hashed && (level.rows & mask) == 0) return number & mask;
    return number < level.rows ? number : number % level.rows;
}

/// Where a coordinate lies in a level: its cell and the place in it. Coordinates of any size have a
/// cell; NaN and infinite ones have a NaN as their place, which spreads to what they weigh.
template <typename C>
HD inline uint32_t cell_of(C x, float scale, C* fraction) {
    constexpr C kFirst = C(-2147483648.0), kLast = C(2147483520.0);  // integers as float and int
    const C position = x * C(scale) + C(0.5);
#ifdef __CUDA_ARCH__
    C below = floor(position);
#else
    C below = __builtin_floor(position);
#endif
    *fraction = position - below;
    below = below > kFirst ? below : below == below ? kFirst : 0;
    return uint32_t(int32_t(below < kLast ? below : kLast));
}

/// A point's corners in one level. A is the type of weights.
template <int D, typename A>
struct Corners {
    uint32_t cell[D];
    A place[D], along[D];
    A scale;
    bool directed;

    /// weight_k. Bit d of k says on which side of axis d the corner lies.
    HD A weight(int k) const {
        if (!directed) return share(k, 0);
        A sum = 0;
        for (int d = 0; d < D; ++d) sum += along[d] * share(k, 1 << d);
        return sum;
    }
    /// The derivative of weight_k by coordinate `axis` of the point. Written out: by `share` nvcc
    /// makes 5 to 7 % more instructions of the kernels with it.
    HD A slope(int k, int axis) const {
        const A sign = k >> axis & 1 ? scale : -scale;
        A sum = 0;
        for (int d = 0; d < D; ++d) {
            if (directed && d == axis) continue;  // each weight is linear along each axis
            A w = directed ? along[d] : A(1);
            for (int e = 0; e < D; ++e) {
                if (e == axis) continue;
                const A factor = k >> e & 1 ? place[e] : 1 - place[e];
                w *= directed && e == d ? (k >> e & 1 ? scale : -scale) : factor;
            }
            sum += w;
            if (!directed) break;
        }
        return sign * sum;
    }
    HD uint32_t row(const HashLevel& level, int k) const {
        uint32_t corner[D];
        for (int d = 0; d < D; ++d) corner[d] = cell[d] + (k >> d & 1);
        return row_of(level, number_of<D>(level, corner));
    }

  private:
    HD A share(int k, int derived) const {
        return corner_share<CornerOrder<D, true>>(
            k, derived, scale, [&](int d, bool upper) { return upper ? place[d] : 1 - place[d]; });
    }
};
