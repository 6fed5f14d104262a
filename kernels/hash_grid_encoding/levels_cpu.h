// Multiresolution hash encoding on the CPU; formula and levels in hash_grid_encoding.h.
// hash_grid_encoding_cpu.cpp has it for float32, others_cpu.rest.cpp for what few calls need.
//
// Points are taken kBlock at a time: their rows and weights in one level are computed side by side
// in vector registers, and then used. Level after level, so that one table at a time is in the
// caches. The table's gradient is divided by levels and ranges of rows, each of which one thread
// adds up in the order of the points: no atomics, and the same bits for any number of threads.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "hash_grid_encoding.h"

constexpr int kBlock = 64;

/// Coordinate `from`, `from + step`, ... of the points or the directions, as C.
template <typename C>
inline void load_coordinates(const void* data, DType dtype, int64_t from, int64_t step, int count,
                             C* to) {
    dispatch(dtype, [&](auto element) {
        const auto* x = static_cast<const decltype(element)*>(data) + from;
        for (int i = 0; i < count; ++i) to[i] = C(load(x[i * step]));
    });
}

/// Points [begin, begin + count) in one level.
template <int D, typename A>
struct Block {
    static constexpr int K = 1 << D;
    int64_t begin;
    int count;
    uint32_t row[K][kBlock];
    A weight[K][kBlock];  // or, where points_gradient keeps them, products with grad_out
    A place[D][kBlock], along[D][kBlock] = {};

    __attribute__((noinline)) Block(const HashGridParams& p, int64_t first, int64_t end)
        : begin(first), count(int(std::min<int64_t>(kBlock, end - first))) {
        double_ = p.points_dtype == DType::kDouble;
        for (int d = 0; d < D; ++d) {
            const int64_t *step = p.points_stride, *along_step = p.along_stride;
            const int64_t at = begin * step[0] + d * step[1];
            if (double_)
                load_coordinates(p.points, p.points_dtype, at, step[0], count, x64_[d]);
            else
                load_coordinates(p.points, p.points_dtype, at, step[0], count, x32_[d]);
            if (p.along)
                load_coordinates(p.along, p.points_dtype, begin * along_step[0] + d * along_step[1],
                                 along_step[0], count, along[d]);
        }
    }
    /// Computes cells, places and rows.
    __attribute__((noinline)) void enter(const HashLevel& level) {
        for (int d = 0; d < D; ++d) double_ ? locate(x64_, d, level) : locate(x32_, d, level);
        if (level.hashed)
            number(level, 1);
        else
            number(level, 0);
        const uint32_t mask = level.rows - 1;
        for (int k = 0; k < K; ++k)
            if (level.hashed && (level.rows & mask) == 0)
                for (int i = 0; i < kBlock; ++i) row[k][i] &= mask;
            else
                for (int i = 0; i < count; ++i) row[k][i] = row_of(level, row[k][i]);
    }
    __attribute__((noinline)) void weigh(const HashGridParams& p, const HashLevel& level) {
        by_direction(p, [&](auto directed) {
            for (int k = 0; k < K; ++k)
                for (int i = 0; i < kBlock; ++i)
                    weight[k][i] = corners(level, i, directed()).weight(k);
        });
    }
    /// Adds sum_k slope(k, d) dot[k] to sums[d * step + i], the gradient to coordinate d of point
    /// i.
    __attribute__((noinline)) void add_slopes(const HashGridParams& p, const HashLevel& level,
                                              const A (*dot)[kBlock], A* sums, int64_t step) const {
        by_direction(p, [&](auto directed) {
#pragma GCC unroll 3
            for (int d = 0; d < D; ++d) {
                A sum[kBlock] = {};
                for (int k = 0; k < K; ++k)
                    for (int i = 0; i < kBlock; ++i)
                        sum[i] += corners(level, i, directed()).slope(k, d) * dot[k][i];
                for (int i = 0; i < count; ++i) sums[d * step + i] += sum[i];
            }
        });
    }

  private:
    bool double_;
    uint32_t cell_[D][kBlock];
    float x32_[D][kBlock] = {};
    double x64_[D][kBlock] = {};

    /// Point i's corners, whose `directed` the compiler is to know: then they cost nothing, and the
    /// loops on them are in vector registers.
    Corners<D, A> corners(const HashLevel& level, int i, bool directed) const {
        Corners<D, A> c;
        c.scale = level.scale;
        c.directed = directed;
        for (int d = 0; d < D; ++d) c.place[d] = place[d][i], c.along[d] = along[d][i];
        return c;
    }
    template <typename Body>
    static void by_direction(const HashGridParams& p, const Body& body) {
        p.along ? body(std::true_type()) : body(std::false_type());
    }
    template <typename C>
    void locate(const C (&x)[D][kBlock], int d, const HashLevel& level) {
        for (int i = 0; i < kBlock; ++i) {
            C fraction;
            cell_[d][i] = cell_of(x[d][i], level.scale, &fraction);
            place[d][i] = A(fraction);
        }
    }
    void number(HashLevel level, uint32_t hashed) {
        level.hashed = hashed;  // known to the compiler: the loops below have no branch
        for (int k = 0; k < K; ++k)
            for (int i = 0; i < kBlock; ++i) {
                uint32_t corner[D];
                for (int d = 0; d < D; ++d) corner[d] = cell_[d][i] + (k >> d & 1);
                row[k][i] = number_of<D>(level, corner);
            }
    }
};

/// F elements `step` apart, as A.
template <int F, typename T>
inline void load_features(const T* from, int64_t step, Acc<T>* to) {
    if (step == 1)
        for (int f = 0; f < F; ++f) to[f] = load(from[f]);
    else
        for (int f = 0; f < F; ++f) to[f] = load(from[f * step]);
}

/// Features [first, first + F) of a row; with `kCorners` all that there are. Then the compiler
/// knows all sizes, without which it makes loops that take up to 10 % longer.
template <int kF, int kCorners>
struct Chunk {
    static constexpr int F = kF;
    int64_t begin;

    int64_t first() const { return kCorners ? 0 : begin; }
    int64_t of(const HashGridParams& p) const { return kCorners ? F : p.F; }
    int corners(const HashGridParams& p) const { return kCorners ? kCorners : 1 << p.D; }
};

/// Where a chunk of level l begins: in the table's first row, and in point `begin`'s grad_out.
template <typename T, typename Chunk>
const T* table_at(const HashGridParams& p, int64_t l, Chunk chunk) {
    return static_cast<const T*>(p.table) + l * p.table_stride[0] +
           chunk.first() * p.table_stride[2];
}
template <typename T, typename Chunk>
const T* grad_at(const HashGridParams& p, int64_t l, Chunk chunk, int64_t begin) {
    return static_cast<const T*>(p.grad_out) + begin * p.grad_out_stride[0] +
           (l * chunk.of(p) + chunk.first()) * p.grad_out_stride[1];
}

template <typename T, typename Chunk>
__attribute__((noinline)) void encode_block(const HashGridParams& p, int64_t l, Chunk chunk,
                                            int64_t begin, int count, const uint32_t (*row)[kBlock],
                                            const Acc<T> (*weight)[kBlock]) {
    constexpr int F = Chunk::F;
    const T* table = table_at<T>(p, l, chunk);
    T* out = static_cast<T*>(p.out) + (begin * p.L + l) * chunk.of(p) + chunk.first();
    for (int i = 0; i < count; ++i, out += p.L * chunk.of(p)) {
        Acc<T> sum[F] = {};
        for (int k = 0; k < chunk.corners(p); ++k) {
            Acc<T> feats[F];
            load_features<F>(table + row[k][i] * p.table_stride[1], p.table_stride[2], feats);
            for (int v = 0; v < F; ++v) sum[v] += weight[k][i] * feats[v];
        }
        for (int v = 0; v < F; ++v) out[v] = store<T>(sum[v]);
    }
}

/// dot[k][i] = sum_f grad_out[i, f] table[row[k][i], f], to which those of later chunks are added.
template <typename T, typename Chunk>
__attribute__((noinline)) void dot_block(const HashGridParams& p, int64_t l, Chunk chunk,
                                         int64_t begin, int count, const uint32_t (*row)[kBlock],
                                         Acc<T> (*dot)[kBlock]) {
    constexpr int F = Chunk::F;
    const T* table = table_at<T>(p, l, chunk);
    const T* grad_out = grad_at<T>(p, l, chunk, begin);
    for (int i = 0; i < count; ++i, grad_out += p.grad_out_stride[0]) {
        Acc<T> grad[F];
        load_features<F>(grad_out, p.grad_out_stride[1], grad);
        for (int k = 0; k < chunk.corners(p); ++k) {
            Acc<T> feats[F], sum = chunk.first() > 0 ? dot[k][i] : 0;
            load_features<F>(table + row[k][i] * p.table_stride[1], p.table_stride[2], feats);
            for (int v = 0; v < F; ++v) sum += grad[v] * feats[v];
            dot[k][i] = sum;
        }
    }
}

/// Adds to rows [first, last) of `sums`, which begins with row `first`.
template <typename T, typename Chunk>
__attribute__((noinline)) void scatter_block(const HashGridParams& p, int64_t l, Chunk chunk,
                                             int64_t begin, int count,
                                             const uint32_t (*row)[kBlock],
                                             const Acc<T> (*weight)[kBlock], uint32_t first,
                                             uint32_t last, Acc<T>* sums) {
    constexpr int F = Chunk::F;
    const T* grad_out = grad_at<T>(p, l, chunk, begin);
    for (int i = 0; i < count; ++i, grad_out += p.grad_out_stride[0]) {
        Acc<T> grad[F];
        load_features<F>(grad_out, p.grad_out_stride[1], grad);
        for (int k = 0; k < chunk.corners(p); ++k) {
            if (row[k][i] - first >= last - first) continue;
            Acc<T>* sum = sums + int64_t(row[k][i] - first) * chunk.of(p) + chunk.first();
            Acc<T> added[F];  // all read before one is written: vectors of F
            for (int v = 0; v < F; ++v) added[v] = sum[v] + weight[k][i] * grad[v];
            for (int v = 0; v < F; ++v) sum[v] = added[v];
        }
    }
}

/// Calls `body` with chunks of features, until it has had all.
template <int D, typename Body>
void by_features(const HashGridParams& p, const Body& body) {
    switch (p.F) {
        case 1: return body(Chunk<1, 1 << D>{});
        case 2: return body(Chunk<2, 1 << D>{});
        case 4: return body(Chunk<4, 1 << D>{});
        case 8: return body(Chunk<8, 1 << D>{});
    }
    int64_t f = 0;
    for (; f + 4 <= p.F; f += 4) body(Chunk<4, 0>{f});
    for (; f < p.F; ++f) body(Chunk<1, 0>{f});
}

template <int D, typename T>
void encode(const HashGridParams& p, int64_t begin, int64_t end) {
    for (int64_t l = 0; l < p.L; ++l)
        for (int64_t n = begin; n < end; n += kBlock) {
            Block<D, Acc<T>> block(p, n, end);
            block.enter(p.level[l]);
            block.weigh(p, p.level[l]);
            by_features<D>(p, [&](auto chunk) {
                encode_block<T>(p, l, chunk, n, block.count, block.row, block.weight);
            });
        }
}

template <int D, typename T>
void points_gradient(const HashGridParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    std::vector<A> sums((end - begin) * D, A(0));
    for (int64_t l = 0; l < p.L; ++l)
        for (int64_t n = begin; n < end; n += kBlock) {
            Block<D, A> block(p, n, end);
            block.enter(p.level[l]);
            by_features<D>(p, [&](auto chunk) {
                dot_block<T>(p, l, chunk, n, block.count, block.row, block.weight);
            });
            block.add_slopes(p, p.level[l], block.weight, sums.data() + n - begin, end - begin);
        }
    dispatch(p.points_dtype, [&](auto element) {
        using C = decltype(element);
        C* out = static_cast<C*>(p.out) + begin * D;
        for (int64_t i = 0; i < end - begin; ++i)
            for (int d = 0; d < D; ++d)
                out[i * D + d] = store<C>(Acc<C>(sums[d * (end - begin) + i]));
    });
}

template <int D, typename T>
void table_gradient(const HashGridParams& p, int64_t task) {
    using A = Acc<T>;
    constexpr bool kRounded = !std::is_same_v<T, A>;
    const int64_t l = task / p.parts, part = task % p.parts;
    const int64_t first = p.T * part / p.parts, last = p.T * (part + 1) / p.parts;
    const int64_t count = (last - first) * p.F;
    T* const out = static_cast<T*>(p.out) + (l * p.T + first) * p.F;
    std::vector<A> buffer(kRounded ? count : 0, A(0));
    A* sums = buffer.data();
    if constexpr (!kRounded) sums = std::fill_n(out, count, A(0)) - count;
    for (int64_t n = 0; n < p.N; n += kBlock) {
        Block<D, A> block(p, n, p.N);
        block.enter(p.level[l]);
        block.weigh(p, p.level[l]);
        by_features<D>(p, [&](auto chunk) {
            scatter_block<T>(p, l, chunk, n, block.count, block.row, block.weight, uint32_t(first),
                             uint32_t(last), sums);
        });
    }
    if constexpr (kRounded)
        for (int64_t i = 0; i < count; ++i) out[i] = store<T>(sums[i]);
}

/// Calls `body` with the number of axes as a value.
template <typename Body>
void by_axes(const HashGridParams& p, const Body& body) {
    p.D == 2 ? body(std::integral_constant<int, 2>{}) : body(std::integral_constant<int, 3>{});
}
