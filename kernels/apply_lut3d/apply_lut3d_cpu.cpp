// Colours through a three-dimensional table on the CPU; the formulas are in apply_lut3d.h.
// Pixels are taken a block at a time, in three loops: read, find the cells, blend. The first two
// run along the pixels in vector registers. The third runs along the channels: the table has four
// to an entry, so that a corner is one load of 16 bytes and the two corners along b are one of 32.
#include <algorithm>

#include "apply_lut3d.h"
#include "lanes.h"

constexpr int64_t kBlock = 256;  // pixels at a time,
constexpr int64_t kCells = 32;   // or, with copies of their cells

/// What one block's pixels are and where they lie in the table.
template <typename A>
struct Block {
    A x[3][kBlock], t[3][kBlock];
    int32_t entry[kBlock];
};

template <typename T>
Acc<T> as_number(T x) {
    return load(x);
}
inline float as_number(Byte x) { return float(x.value); }

/// Elements of three channels, planar, of `count` pixels from the begin-th on.
template <typename T, typename A>
void read_pixels(const void* data, const PixelLayout& at, int64_t begin, int64_t count,
                 A (*x)[kBlock]) {
    const T* from = static_cast<const T*>(data);
    if (at.dims == 1) {
        from += begin * at.stride[0];
        if (at.dense())
            for (int64_t i = 0; i < count; ++i)
                for (int c = 0; c < 3; ++c) x[c][i] = as_number(from[3 * i + c]);
        else
            for (int c = 0; c < 3; ++c)
                for (int64_t i = 0; i < count; ++i)
                    x[c][i] = as_number(from[i * at.stride[0] + c * at.channel]);
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        const T* pixel = from + at(begin + i);
        for (int c = 0; c < 3; ++c) x[c][i] = as_number(pixel[c * at.channel]);
    }
}

template <typename T>
void place(const ApplyLut3dParams& p, int64_t begin, int64_t count, Block<Acc<T>>& block) {
    using A = Acc<T>;
    read_pixels<T>(p.image, p.image_at, begin, count, block.x);
    const int32_t S = p.S;
    for (int64_t i = 0; i < count; ++i) {
        int32_t cell[3];
        for (int c = 0; c < 3; ++c) {
            A t;
            if constexpr (sizeof(T) == 1)
                cell[c] = cell_of_level(block.x[c][i], S, &t);
            else
                cell[c] = cell_of(block.x[c][i], S, &t);
            block.t[c][i] = t;
        }
        block.entry[i] = (cell[0] * S + cell[1]) * S + cell[2];
    }
    if (p.tables > 1)
        for (int64_t i = 0; i < count; ++i)
            block.entry[i] += first_entry(p, (begin + i) / p.pixels);
}

/// Row i of `out` from place i, trilinear: along g and r both corners of b at once, where the
/// machine's registers have room for them.
template <typename A>
void blend_trilinear(const A* table, int32_t S, const Block<A>& block, int64_t count, A (*out)[4]) {
    using Four = typename Lanes<A, 4>::type;
    constexpr bool kBoth = 8 * sizeof(A) <= kVector;
    using V = typename Lanes<A, kBoth ? 8 : 4>::type;
    const int64_t g = 4 * int64_t(S), r = g * S;
    for (int64_t i = 0; i < count; ++i) {
        const A* const cell = table + 4 * int64_t(block.entry[i]);
        const A x = block.t[0][i], y = block.t[1][i], z = block.t[2][i];
        const auto blend = [&](const A* at, V& to) {
            const V low = (1 - y) * load_lanes<V>(at) + y * load_lanes<V>(at + g);
            const V high = (1 - y) * load_lanes<V>(at + r) + y * load_lanes<V>(at + r + g);
            to = (1 - x) * low + x * high;
        };
        V first;
        Four near, far;
        blend(cell, first);
        memcpy(&near, &first, sizeof(near));
        if constexpr (kBoth) {
            memcpy(&far, reinterpret_cast<const char*>(&first) + sizeof(near), sizeof(far));
        } else {
            blend(cell + 4, first);
            memcpy(&far, &first, sizeof(far));
        }
        const Four mean = (1 - z) * near + z * far;
        memcpy(out[i], &mean, sizeof(mean));
    }
}

template <typename A>
void blend_tetrahedral(const A* table, int32_t S, const Block<A>& block, int64_t count,
                       A (*out)[4]) {
    using Four = typename Lanes<A, 4>::type;
    int32_t first[kBlock], second[kBlock];
    A weight[4][kBlock];
    for (int64_t i = 0; i < count; ++i) {
        const A t[] = {block.t[0][i], block.t[1][i], block.t[2][i]};
        const Tetrahedron<A> corners(t, S);
        first[i] = corners.offset[1], second[i] = corners.offset[2];
        for (int k = 0; k < 4; ++k) weight[k][i] = corners.weight[k];
    }
    const int64_t last = 4 * (int64_t(S) * S + S + 1);
    for (int64_t i = 0; i < count; ++i) {
        const A* at = table + 4 * int64_t(block.entry[i]);
        Four sum = weight[0][i] * load_lanes<Four>(at);
        sum += weight[1][i] * load_lanes<Four>(at + 4 * int64_t(first[i]));
        sum += weight[2][i] * load_lanes<Four>(at + 4 * int64_t(second[i]));
        sum += weight[3][i] * load_lanes<Four>(at + last);
        memcpy(out[i], &sum, sizeof(sum));
    }
}

/// Copies the cells of `count` pixels out of lut, eight corners each: tables of two entries along
/// an axis, of which `block` then has the places.
template <typename A>
__attribute__((noinline)) const A* cells_of(const ApplyLut3dParams& p, int64_t count,
                                            Block<A>& block, A (*cells)[8][4]) {
    const auto copy = [&](const auto* lut, auto(*to)[8][4], const auto& as) {
        const int64_t* const stride = p.lut_stride;
        for (int64_t i = 0; i < count; ++i) {
            const auto* const cell = lut + lut_offset(p, block.entry[i]);
            for (int k = 0; k < 8; ++k) {
                const auto* const corner = cell + (k & 4 ? stride[0] : 0) +
                                           (k & 2 ? stride[1] : 0) + (k & 1 ? stride[2] : 0);
                for (int c = 0; c < 3; ++c) to[i][k][c] = as(corner[c * stride[3]]);
                to[i][k][3] = {};
            }
            block.entry[i] = int32_t(8 * i);
        }
    };
    dispatch(p.lut_dtype, [&](auto element) {
        using T = decltype(element);
        const T* const lut = static_cast<const T*>(p.lut);
        if constexpr (sizeof(T) > 2) {
            copy(lut, cells, [](T x) { return A(x); });
        } else {
            T found[kCells][8][4];  // converted all at once
            float numbers[32 * kCells];
            copy(lut, found, [](T x) { return x; });
            load_run(found[0][0], 32 * count, numbers);
            std::copy_n(numbers, 32 * count, cells[0][0]);
        }
    });
    return cells[0][0];
}

template <typename T>
void apply(const ApplyLut3dParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    const A* table = static_cast<const A*>(p.table);
    const int32_t S = table ? p.S : 2;
    const int64_t step = table ? kBlock : kCells;
    Block<A> block;
    A cells[kCells][8][4], blended[kBlock][4];
    for (; begin < end; begin += step) {
        const int64_t count = std::min(step, end - begin);
        place<T>(p, begin, count, block);
        if (!p.table) table = cells_of(p, count, block, cells);
        if (p.method == Lut3dMethod::kTrilinear)
            blend_trilinear(table, S, block, count, blended);
        else
            blend_tetrahedral(table, S, block, count, blended);
        T* out = static_cast<T*>(p.out) + 3 * begin;
        for (int64_t i = 0; i < count; ++i)
            for (int c = 0; c < 3; ++c) out[3 * i + c] = store<T>(blended[i][c]);
    }
}

void apply_lut3d_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end) {
    dispatch_image(*p, [&](auto element) { apply<decltype(element)>(*p, begin, end); });
}

/// Calls `body` with a value of the accumulating type.
template <typename Body>
void by_work(const ApplyLut3dParams& p, const Body& body) {
    if (!p.bytes && p.dtype == DType::kDouble)
        body(double{});
    else
        body(float{});
}

void apply_lut3d_table_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end) {
    by_work(*p, [&](auto work) {
        using A = decltype(work);
        A* table = static_cast<A*>(p->table);
        dispatch(p->lut_dtype, [&](auto element) {
            using T = decltype(element);
            const T* const lut = static_cast<const T*>(p->lut);
            const int64_t *stride = p->lut_stride, S = p->S;
            const bool dense =
                stride[3] == 1 && stride[2] == 3 && stride[1] == 3 * S && stride[0] == 3 * S * S;
            Acc<T> run[3 * kBlock];
            for (int64_t i = begin; i < end; i += kBlock) {
                const int64_t count = std::min(kBlock, end - i);
                if (dense)
                    load_run(lut + 3 * i, 3 * count, run);
                else
                    for (int64_t k = 0; k < count; ++k)
                        for (int c = 0; c < 3; ++c)
                            run[3 * k + c] = load(lut[lut_offset(*p, i + k) + c * stride[3]]);
                for (int64_t k = 0; k < count; ++k) {
                    A* const to = table + 4 * (i + k);
                    for (int c = 0; c < 3; ++c) to[c] = A(run[3 * k + c]);
                    to[3] = 0;
                }
            }
        });
    });
}

/// Adds `weight` times `grad` to an entry of sums: of four numbers, the last of them 0, or of
/// three. Those of three are done as two and one: what was stored as four at once and is then
/// loaded as the next entry's four would have to wait for the store.
template <int kWidth, typename A>
inline void add_weighted(A* sum, A weight, typename Lanes<A, 4>::type grad) {
    using Four = typename Lanes<A, 4>::type;
    using Two = typename Lanes<A, 2>::type;
    if constexpr (kWidth == 4) {
        const Four x = load_lanes<Four>(sum) + weight * grad;
        memcpy(sum, &x, sizeof(x));
    } else {
        const Two x = load_lanes<Two>(sum) + weight * Two{grad[0], grad[1]};
        memcpy(sum, &x, sizeof(x));
        sum[2] += weight * grad[2];
    }
}

/// Adds the gradients of `count` pixels to sums, of kWidth numbers to an entry.
template <int kWidth, typename A>
void add_gradients(Lut3dMethod method, int32_t S, const Block<A>& block, const A (*grad)[kBlock],
                   int64_t count, A* sums) {
    for (int64_t i = 0; i < count; ++i) {
        const A t[] = {block.t[0][i], block.t[1][i], block.t[2][i]};
        const typename Lanes<A, 4>::type wanted = {grad[0][i], grad[1][i], grad[2][i], 0};
        A* const cell = sums + kWidth * int64_t(block.entry[i]);
        if (method == Lut3dMethod::kTrilinear) {
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k)
                add_weighted<kWidth, A>(cell + kWidth * int64_t(corner_offset(k, S)),
                                        corner_weight(k, t), wanted);
            continue;
        }
        const Tetrahedron<A> corners(t, S);
        for (int k = 0; k < 4; ++k)
            if (corners.weight[k] != 0)  // 0 times an infinity is no number
                add_weighted<kWidth, A>(cell + kWidth * int64_t(corners.offset[k]),
                                        corners.weight[k], wanted);
    }
}

/// Derivatives along the three axes at each place, times `grad`, trilinear: a cell's corners are
/// read as by `blend_trilinear`.
template <typename A>
void slopes_trilinear(const A* table, int32_t S, const Block<A>& block, const A (*grad)[kBlock],
                      int64_t count, A (*slope)[kBlock]) {
    using Four = typename Lanes<A, 4>::type;
    constexpr bool kBoth = 8 * sizeof(A) <= kVector;
    using V = typename Lanes<A, kBoth ? 8 : 4>::type;
    const int64_t g = 4 * int64_t(S), r = g * S;
    for (int64_t i = 0; i < count; ++i) {
        const A* const cell = table + 4 * int64_t(block.entry[i]);
        const A x = block.t[0][i], y = block.t[1][i], z = block.t[2][i];
        V along_r, along_g, mean;  // of a plane of the cell, or of both
        const auto planes = [&](const A* at) {
            const V c00 = load_lanes<V>(at), c01 = load_lanes<V>(at + g);
            const V c10 = load_lanes<V>(at + r), c11 = load_lanes<V>(at + r + g);
            const V low = (1 - y) * c00 + y * c01, high = (1 - y) * c10 + y * c11;
            along_r = high - low, along_g = (1 - x) * (c01 - c00) + x * (c11 - c10);
            mean = (1 - x) * low + x * high;
        };
        const auto part = [](const V& of, int which) {
            Four four;
            memcpy(&four, reinterpret_cast<const char*>(&of) + which * sizeof(four), sizeof(four));
            return four;
        };
        planes(cell);
        const Four near_r = part(along_r, 0), near_g = part(along_g, 0), near = part(mean, 0);
        if (!kBoth) planes(cell + 4);
        const Four far_r = part(along_r, kBoth), far_g = part(along_g, kBoth);
        const Four along_b = part(mean, kBoth) - near;
        const Four wanted = {grad[0][i], grad[1][i], grad[2][i], 0};
        slope[0][i] = sum_lanes<A, 4>(((1 - z) * near_r + z * far_r) * wanted);
        slope[1][i] = sum_lanes<A, 4>(((1 - z) * near_g + z * far_g) * wanted);
        slope[2][i] = sum_lanes<A, 4>(along_b * wanted);
    }
}

template <typename A>
void slopes_tetrahedral(const A* table, int32_t S, const Block<A>& block, const A (*grad)[kBlock],
                        int64_t count, A (*slope)[kBlock]) {
    using Four = typename Lanes<A, 4>::type;
    for (int64_t i = 0; i < count; ++i) {
        const A t[] = {block.t[0][i], block.t[1][i], block.t[2][i]};
        const Tetrahedron<A> corners(t, S);
        const A* const cell = table + 4 * int64_t(block.entry[i]);
        const Four wanted = {grad[0][i], grad[1][i], grad[2][i], 0};
        Four before = load_lanes<Four>(cell);
        A along[3];  // from each corner to the next
        for (int k = 0; k < 3; ++k) {
            const Four next = load_lanes<Four>(cell + 4 * int64_t(corners.offset[k + 1]));
            along[k] = sum_lanes<A, 4>((next - before) * wanted);
            before = next;
        }
        for (int axis = 0; axis < 3; ++axis) slope[axis][i] = along[corners.rank[axis]];
    }
}

template <typename T, int kWidth>
void gradients(const ApplyLut3dParams& p, int64_t part) {
    using A = Acc<T>;
    const int64_t entries = p.entries;
    const int64_t each = ceil_div(p.N, p.parts), last = std::min(p.N, (part + 1) * each);
    A* sums = p.sums ? static_cast<A*>(p.sums) + kWidth * entries * part : nullptr;
    if (sums) std::fill_n(sums, kWidth * entries, A(0));
    Block<A> block;
    A grad_out[3][kBlock], slope[3][kBlock], cells[kCells][8][4];
    const A* table = static_cast<const A*>(p.table);
    const int64_t step = p.grad_image && !table ? kCells : kBlock;
    for (int64_t begin = part * each; begin < last; begin += step) {
        const int64_t count = std::min(step, last - begin);
        place<T>(p, begin, count, block);
        read_pixels<T>(p.grad_out, p.grad_out_at, begin, count, grad_out);
        if (sums) add_gradients<kWidth>(p.method, p.S, block, grad_out, count, sums);
        if (!p.grad_image) continue;
        const int32_t S = p.table ? p.S : 2;
        if (!p.table) table = cells_of(p, count, block, cells);
        if (p.method == Lut3dMethod::kTrilinear)
            slopes_trilinear(table, S, block, grad_out, count, slope);
        else
            slopes_tetrahedral(table, S, block, grad_out, count, slope);
        T* const out = static_cast<T*>(p.grad_image) + 3 * begin;
        for (int64_t i = 0; i < count; ++i)
            for (int c = 0; c < 3; ++c)
                out[3 * i + c] = store<T>(within(block.x[c][i]) ? slope[c][i] * A(p.S - 1) : A(0));
    }
}

void apply_lut3d_backward_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) {
        using T = decltype(element);
        for (int64_t part = begin; part < end; ++part) {
            if constexpr (sizeof(T) > 2)
                if (p->sums && p->sums == p->grad_lut) {
                    gradients<T, 3>(*p, part);
                    continue;
                }
            gradients<T, 4>(*p, part);
        }
    });
}

void apply_lut3d_sum_cpu(const ApplyLut3dParams* p, int64_t begin, int64_t end) {
    by_work(*p, [&](auto work) {
        using A = decltype(work);
        const A* const sums = static_cast<const A*>(p->sums);
        const int64_t entries = p->entries;
        dispatch(p->lut_dtype, [&](auto element) {
            using T = decltype(element);
            T* const out = static_cast<T*>(p->grad_lut);
            if (p->parts == 1) {
                for (int64_t i = begin; i < end; ++i)
                    for (int c = 0; c < 3; ++c) out[3 * i + c] = store<T>(Acc<T>(sums[4 * i + c]));
                return;
            }
            for (int64_t i = begin; i < end; ++i)
                for (int c = 0; c < 3; ++c) {
                    double sum = 0;
                    for (int64_t part = 0; part < p->parts; ++part)
                        sum += sums[4 * (part * entries + i) + c];
                    out[3 * i + c] = store<T>(Acc<T>(sum));
                }
        });
    });
}
