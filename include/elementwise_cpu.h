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

/// `count` elements side by side: where they are, or in `to`.
template <typename T>
const T* collected(const T* from, int64_t step, int64_t count, T* to) {
    if (step == 1) return from;
    if (step == 0)
        std::fill_n(to, count, *from);
    else if (step == 2)  // known to the vectoriser
        for (int64_t i = 0; i < count; ++i) to[i] = from[2 * i];
    else
#pragma GCC unroll 8
        for (int64_t i = 0; i < count; ++i) to[i] = from[i * step];
    return to;
}

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

/// `length` elements of output M along one dimension, from the addresses given.
template <typename T, typename Function, int M, size_t... I>
void run(const T* const* in, const int64_t* step, T* __restrict out, int64_t out_step,
         int64_t length, std::index_sequence<I...> all) {
    if (out_step == 1 && ((step[I] == 1) && ...))
        return rows_dense<T, Function, M>(in, step, step, length, 1, out, all);
    if (!kConverts<T> && out_step == 1 && ((step[I] == 2) && ...)) {
        for (int64_t i = 0; i < length; ++i)
            out[i] = store<T>(pick<M>(Function()(load(in[I][2 * i])...)));
        return;
    }
    if (length < kAtOnce) {
        for (int64_t i = 0; i < length; ++i)
            out[i * out_step] = store<T>(pick<M>(Function()(load(in[I][i * step[I]])...)));
        return;
    }
    T packed[sizeof...(I)][kBlock], results[kBlock];
    const int64_t dense[] = {(void(I), int64_t(1))...};
    for (int64_t at = 0; at < length; at += kBlock) {
        const int64_t count = std::min(length - at, kBlock);
        const T* from[] = {collected(in[I] + at * step[I], step[I], count, packed[I])...};
        T* const to = out_step == 1 ? out + at : results;
        rows_dense<T, Function, M>(from, dense, dense, count, 1, to, all);
        if (out_step == 1) continue;
        for (int64_t i = 0; i < count; ++i) out[(at + i) * out_step] = results[i];
    }
}

/// Where a run of elements begins in each tensor.
template <typename T, int N, int Outs>
struct Place {
    const T* in[N];
    T* out[Outs];  // null where not asked for

    Place(const ElementwiseParams& p, int64_t row, int64_t column) {
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
        for (int n = 0; n < N; ++n) in[n] = static_cast<const T*>(p.in[n]) + in_at[n];
        for (int m = 0; m < Outs; ++m)
            out[m] = p.out[m] ? static_cast<T*>(p.out[m]) + out_at[m] : nullptr;
    }
    void move(const ElementwiseParams& p, int d) {
        for (int n = 0; n < N; ++n) in[n] += p.in_stride[n][d];
        for (int m = 0; m < Outs; ++m)
            if (out[m]) out[m] += p.out_stride[m][d];
    }
};

/// Elements [begin, end) in row-major order: runs of the innermost dimension; rows that lie one
/// after the other together, short ones a column of all at a time.
template <typename T, typename Function, int... M>
void range(const ElementwiseParams& p, int64_t begin, int64_t end,
           std::integer_sequence<int, M...>) {
    constexpr int N = inputs<Function>, Outs = sizeof...(M);
    const int inner = p.dims - 1;
    const int64_t width = p.size[inner];
    Place<T, N, Outs> at(p, 0, 0);
    // `length` elements along dimension d.
    const auto along = [&](int d, int64_t length) {
        int64_t step[N];
        for (int n = 0; n < N; ++n) step[n] = p.in_stride[n][d];
        const auto output = [&](auto m) {
            if (at.out[m])
                run<T, Function, m>(at.in, step, at.out[m], p.out_stride[m][d], length,
                                    std::make_index_sequence<N>());
        };
        (output(std::integral_constant<int, M>()), ...);
    };
    int64_t step[N];
    bool in_rows = inner > 0 && p.out_stride[0][inner] == 1 && p.out_stride[0][inner - 1] == width;
    for (int n = 0; n < N; ++n) {
        step[n] = p.in_stride[n][inner];
        in_rows = in_rows && (step[n] == 1 || (step[n] == 0 && width <= kBlock));
    }
    const auto dense = [&](int64_t rows) {
        int64_t pitch[N];
        for (int n = 0; n < N; ++n) pitch[n] = p.in_stride[n][inner - 1];
        const auto output = [&](auto m) {
            if (at.out[m])
                rows_dense<T, Function, m>(at.in, step, pitch, width, rows, at.out[m],
                                           std::make_index_sequence<N>());
        };
        (output(std::integral_constant<int, M>()), ...);
    };
    while (begin < end) {
        const int64_t row = begin / width, column = begin % width;
        at = Place<T, N, Outs>(p, row, column);
        int64_t rows = column > 0 || inner == 0 ? 0 : (end - begin) / width;
        if (rows > 1) rows = std::min(rows, p.size[inner - 1] - row % p.size[inner - 1]);
        if (rows > 1 && in_rows) {
            if (Outs > 1) rows = std::min(rows, std::max<int64_t>(kRun / width, 1));
            dense(rows);
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

}  // namespace elementwise

template <typename Function>
void elementwise_cpu(const ElementwiseParams& p, int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
        elementwise::range<decltype(element), Function>(
            p, begin, end, std::make_integer_sequence<int, elementwise::outputs<Function>>());
    });
}
