// The CPU loop of elementwise operators; see elementwise.h.
#pragma once
#include <algorithm>

#include "elementwise.h"
#include "lanes.h"

namespace elementwise {

constexpr int64_t kRun = 1024;   // elements whose inputs stay in the cache from output to output
constexpr int64_t kBlock = 256;  // elements that are collected at a time
constexpr int64_t kAtOnce = 8;  // converted: more are written in parts and read as one, which waits
// Elements to a register of 32 bytes: where memory decides, those of 64 are slower by a tenth.
template <typename T>
constexpr int64_t kChunk = kConverts<T>     ? kAtOnce
                           : sizeof(T) == 2 ? 16
                                            : 32 / sizeof(T);
constexpr int64_t kShort = 16;  // elements of a row that is not worth a loop of its own,
constexpr int64_t kRows = 256;  // of which so many are gone through column by column

/// Elements [i, i + count) of output M, of those that the CPU converts itself.
template <typename T, typename Function, int M, size_t... I>
inline void convert(const T* const* from, int64_t i, int64_t count, T* to,
                    std::index_sequence<I...>) {
    float number[sizeof...(I)][kAtOnce] = {}, result[kAtOnce];
    (load_run(from[I] + i, count, number[I]), ...);
    for (int64_t j = 0; j < kAtOnce; ++j) result[j] = pick<M>(Function()(number[I][j]...));
    store_run(result, count, to + i);
}

/// Elements [i, i + kChunk<T>) of output M: as many as the compiler knows fill vectors.
template <typename T, typename Function, int M, size_t... I>
inline void chunk(const T* const* from, int64_t i, T* __restrict to,
                  std::index_sequence<I...> all) {
    if constexpr (kConverts<T>)
        convert<T, Function, M>(from, i, kChunk<T>, to, all);
    else
#pragma omp simd
        for (int64_t j = i; j < i + kChunk<T>; ++j)
            to[j] = store<T>(pick<M>(Function()(load(from[I][j])...)));
}

/// `count` elements of output M, from and to neighbours, which do not overlap.
template <typename T, typename Function, int M, size_t... I>
inline void run_dense(const T* const* from, int64_t count, T* __restrict to,
                      std::index_sequence<I...> all) {
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + kChunk<T> <= count; i += kChunk<T>) chunk<T, Function, M>(from, i, to, all);
    if (i < count && count >= kChunk<T>) {  // some of them twice
        chunk<T, Function, M>(from, count - kChunk<T>, to, all);
    } else if constexpr (kConverts<T>) {
        if (i < count) convert<T, Function, M>(from, i, count - i, to, all);
    } else {
        for (; i < count; ++i) to[i] = store<T>(pick<M>(Function()(load(from[I][i])...)));
    }
}

/// Rows of output M that lie one after the other, each from neighbours or, where its step is 0,
/// from one element; `pitch` from row to row. Rows shorter than a chunk are computed with what lies
/// behind them, in the outputs the next rows, which come later.
template <typename T, typename Function, int M, size_t... I>
__attribute__((noinline)) void rows_dense(const T* const* in, const int64_t* step,
                                          const int64_t* pitch, int64_t width, int64_t rows,
                                          T* __restrict out, std::index_sequence<I...> all) {
    constexpr int64_t kMost = std::max(kBlock, kChunk<T>);
    T filled[sizeof...(I)][kMost];
    const T *at[] = {in[I]...}, *from[] = {in[I]...};
    int64_t r = 0, whole = 0;
    if (width < kChunk<T>) {
        whole = rows - (kChunk<T> - 1) / width;  // behind the last rows there may be no memory
        const auto check = [&](size_t n) {
            if (step[n] == 0 || pitch[n] >= width) return;
            if (pitch[n] != 0) {
                whole = 0;
                return;
            }
            at[n] = from[n] = std::copy_n(in[n], width, filled[n]) - width;
            std::fill_n(filled[n] + width, kChunk<T> - width, filled[n][0]);
        };
        (check(I), ...);
    }
    const auto fill = [&](int64_t count) {
        const auto input = [&](size_t n) {
            if (step[n] == 0)
                from[n] = std::fill_n(filled[n], count, *at[n]) - count;
            else
                from[n] = at[n];
            at[n] += pitch[n];
        };
        (input(I), ...);
    };
    for (; r < whole; ++r, out += width) {
        fill(kChunk<T>);
        chunk<T, Function, M>(from, 0, out, all);
    }
    for (; r < rows; ++r, out += width) {
        fill(width);
        run_dense<T, Function, M>(from, width, out, all);
    }
}

/// What computes one output of elements of one type. Addresses are in bytes: what goes through
/// tensors is one function for all types and formulas, which compilers have to read once.
struct Loops {
    /// As `rows_dense`.
    void (*rows)(const char* const* in, const int64_t* step, const int64_t* pitch, int64_t width,
                 int64_t rows, char* out);
    /// Elements one by one, from and to anywhere: where they are few.
    void (*few)(const char* const* in, const int64_t* step, char* out, int64_t out_step,
                int64_t length);
    /// Every other element, to neighbours; or null.
    void (*every_other)(const char* const* in, int64_t length, char* out);
};

template <typename T, typename Function, int M, typename All>
struct Output;
template <typename T, typename Function, int M, size_t... I>
struct Output<T, Function, M, std::index_sequence<I...>> {
    static const T* typed(const char* from) { return reinterpret_cast<const T*>(from); }
    static Acc<T> one(const T* from) {
        Acc<T> number;
        load_run(from, 1, &number);
        return number;
    }

    static void rows(const char* const* in, const int64_t* step, const int64_t* pitch,
                     int64_t width, int64_t rows, char* out) {
        const T* const from[] = {typed(in[I])...};
        rows_dense<T, Function, M>(from, step, pitch, width, rows, reinterpret_cast<T*>(out),
                                   std::index_sequence<I...>());
    }
    static void few(const char* const* in, const int64_t* step, char* out, int64_t out_step,
                    int64_t length) {
        T* const to = reinterpret_cast<T*>(out);
#pragma GCC unroll 1
        for (int64_t i = 0; i < length; ++i) {
            const Acc<T> result = pick<M>(Function()(one(typed(in[I]) + i * step[I])...));
            store_run(&result, 1, to + i * out_step);
        }
    }
    static void every_other(const char* const* in, int64_t length, char* out) {
        const T* const from[] = {typed(in[I])...};
        T* __restrict const to = reinterpret_cast<T*>(out);
        for (int64_t i = 0; i < length; ++i)
            to[i] = store<T>(pick<M>(Function()(load(from[I][2 * i])...)));
    }
    static constexpr Loops loops = {rows, few, kConverts<T> ? nullptr : every_other};
};

/// `count` elements, `from_step` and `to_step` apart. A step of 0 is the same element each time.
template <typename Bits>
__attribute__((noinline)) void copy_apart(const char* from, int64_t from_step, int64_t count,
                                          char* to, int64_t to_step) {
    typedef Bits Any __attribute__((may_alias));
    const Any* const in = reinterpret_cast<const Any*>(from);
    Any* __restrict const out = reinterpret_cast<Any*>(to);
    if (to_step != 1)
        for (int64_t i = 0; i < count; ++i) out[i * to_step] = in[i];
    else if (from_step == 2)  // known to the vectoriser
        for (int64_t i = 0; i < count; ++i) out[i] = in[2 * i];
    else
#pragma GCC unroll 8
        for (int64_t i = 0; i < count; ++i) out[i] = in[i * from_step];
}
inline void copy_apart(int64_t size, const char* from, int64_t from_step, int64_t count, char* to,
                       int64_t to_step) {
    (size == 2   ? copy_apart<uint16_t>
     : size == 4 ? copy_apart<uint32_t>
                 : copy_apart<uint64_t>)(from, from_step, count, to, to_step);
}

/// `length` elements of an output along one dimension, from the addresses given.
template <int N>
void run(const Loops& loops, int64_t size, const char* const* in, const int64_t* step, char* out,
         int64_t out_step, int64_t length) {
    const auto all = [&](int64_t apart) {
        return std::all_of(step, step + N, [&](int64_t each) { return each == apart; });
    };
    if (out_step == 1 && all(1)) return loops.rows(in, step, step, length, 1, out);
    if (out_step == 1 && loops.every_other && all(2)) return loops.every_other(in, length, out);
    if (length < kAtOnce) return loops.few(in, step, out, out_step, length);
    alignas(64) char packed[N][kBlock * 8], results[kBlock * 8];
    int64_t dense[N];
    std::fill_n(dense, N, 1);
    for (int64_t at = 0; at < length; at += kBlock) {
        const int64_t count = std::min(length - at, kBlock);
        const char* from[N];
        for (int n = 0; n < N; ++n) {
            from[n] = in[n] + size * at * step[n];
            if (step[n] == 1) continue;
            copy_apart(size, from[n], step[n], count, packed[n], 1);
            from[n] = packed[n];
        }
        char* const to = out + size * at * out_step;
        loops.rows(from, dense, dense, count, 1, out_step == 1 ? to : results);
        if (out_step != 1) copy_apart(size, results, 1, count, to, out_step);
    }
}

/// Where a run of elements begins in each tensor, of so many bytes an element.
template <int N, int Outs>
struct Place {
    int64_t size;
    const char* in[N];
    char* out[Outs];  // null where not asked for

    Place(const ElementwiseParams& p, int64_t size, int64_t row, int64_t column) : size(size) {
        const int inner = p.dims - 1;
        int64_t in_at[N], out_at[Outs];
        for (int n = 0; n < N; ++n) in_at[n] = column * p.in_stride[n][inner];
        for (int m = 0; m < Outs; ++m) out_at[m] = column * p.out_stride[m][inner];
        for (int d = inner - 1; d >= 0; --d) {
            const int64_t index = row % p.size[d];
            for (int n = 0; n < N; ++n) in_at[n] += index * p.in_stride[n][d];
            for (int m = 0; m < Outs; ++m) out_at[m] += index * p.out_stride[m][d];
            row /= p.size[d];
        }
        for (int n = 0; n < N; ++n) in[n] = static_cast<const char*>(p.in[n]) + size * in_at[n];
        for (int m = 0; m < Outs; ++m)
            out[m] = p.out[m] ? static_cast<char*>(p.out[m]) + size * out_at[m] : nullptr;
    }
    void move(const ElementwiseParams& p, int d) {
        for (int n = 0; n < N; ++n) in[n] += size * p.in_stride[n][d];
        for (int m = 0; m < Outs; ++m)
            if (out[m]) out[m] += size * p.out_stride[m][d];
    }
};

/// Elements [begin, end) in row-major order: runs of the innermost dimension; rows that lie one
/// after the other together, short ones a column of all at a time. One function for all types.
template <int N, int Outs>
__attribute__((noinline)) void range(const ElementwiseParams& p, int64_t size, const Loops* loops,
                                     int64_t begin, int64_t end) {
    const int inner = p.dims - 1;
    const int64_t width = p.size[inner];
    Place<N, Outs> at(p, size, 0, 0);
    // `length` elements along dimension d.
    const auto along = [&](int d, int64_t length) {
        int64_t step[N];
        for (int n = 0; n < N; ++n) step[n] = p.in_stride[n][d];
        for (int m = 0; m < Outs; ++m)
            if (at.out[m])
                run<N>(loops[m], size, at.in, step, at.out[m], p.out_stride[m][d], length);
    };
    int64_t step[N];
    bool in_rows = inner > 0 && p.out_stride[0][inner] == 1 && p.out_stride[0][inner - 1] == width;
    for (int n = 0; n < N; ++n) {
        step[n] = p.in_stride[n][inner];
        in_rows = in_rows && (step[n] == 1 || (step[n] == 0 && width <= kBlock));
    }
    while (begin < end) {
        const int64_t row = begin / width, column = begin % width;
        at = Place<N, Outs>(p, size, row, column);
        int64_t rows = column > 0 || inner == 0 ? 0 : (end - begin) / width;
        if (rows > 1) rows = std::min(rows, p.size[inner - 1] - row % p.size[inner - 1]);
        if (rows > 1 && in_rows) {
            if (Outs > 1) rows = std::min(rows, std::max<int64_t>(kRun / width, 1));
            int64_t pitch[N];
            for (int n = 0; n < N; ++n) pitch[n] = p.in_stride[n][inner - 1];
            for (int m = 0; m < Outs; ++m)
                if (at.out[m]) loops[m].rows(at.in, step, pitch, width, rows, at.out[m]);
            begin += rows * width;
            continue;
        }
        if (rows > 1 && (Outs == 1 || width <= kRun)) {
            const bool columns = width < kShort && rows > width;
            if (columns) rows = std::min(rows, kRows);
            for (int64_t i = 0; i < (columns ? width : rows); ++i) {
                along(columns ? inner - 1 : inner, columns ? rows : width);
                at.move(p, columns ? inner : inner - 1);
            }
            begin += rows * width;
            continue;
        }
        int64_t length = std::min(width - column, end - begin);
        if (Outs > 1 && length > kRun) length = kRun;
        along(inner, length);
        begin += length;
    }
}

template <typename T, typename Function, int... M>
void range_of(const ElementwiseParams& p, int64_t begin, int64_t end,
              std::integer_sequence<int, M...>) {
    using All = std::make_index_sequence<inputs<Function>>;
    static constexpr Loops loops[] = {Output<T, Function, M, All>::loops...};
    range<inputs<Function>, sizeof...(M)>(p, sizeof(T), loops, begin, end);
}

}  // namespace elementwise

template <typename Function>
void elementwise_cpu(const ElementwiseParams& p, int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
        elementwise::range_of<decltype(element), Function>(
            p, begin, end, std::make_integer_sequence<int, elementwise::outputs<Function>>());
    });
}
