// The CPU loop of elementwise operators; see elementwise.h.
#pragma once
#include "elementwise.h"
#include "lanes.h"

namespace elementwise {

constexpr int64_t kRun = 1024;  // elements whose inputs stay in the cache from output to output
constexpr int64_t kConverted = 256;  // 16-bit elements that are converted at a time

/// `length` elements of output M along the innermost dimension, from the addresses given.
template <typename T, typename Function, int M, size_t... I>
void run(const T* const* in, const int64_t* step, T* __restrict out, int64_t out_step,
         int64_t length, std::index_sequence<I...>) {
    const bool neighbours = out_step == 1 && ((step[I] == 1) && ...);
    if constexpr (kConverts<T>)
        if (neighbours && length >= 16) {
            float number[sizeof...(I)][kConverted], result[kConverted];
            for (int64_t at = 0; at < length; at += kConverted) {
                const int64_t count = length - at < kConverted ? length - at : kConverted;
                (load_run(in[I] + at, count, number[I]), ...);
                for (int64_t i = 0; i < count; ++i)
                    result[i] = pick<M>(Function()(number[I][i]...));
                store_run(result, count, out + at);
            }
            return;
        }
    if (neighbours)
        for (int64_t i = 0; i < length; ++i)
            out[i] = store<T>(pick<M>(Function()(load(in[I][i])...)));
    else
        for (int64_t i = 0; i < length; ++i)
            out[i * out_step] = store<T>(pick<M>(Function()(load(in[I][i * step[I]])...)));
}

/// Elements [begin, end) in row-major order, a run of the innermost dimension at a time.
template <typename T, typename Function, int... M>
void range(const ElementwiseParams& p, int64_t begin, int64_t end,
           std::integer_sequence<int, M...>) {
    constexpr int N = inputs<Function>, Outs = sizeof...(M);
    const int inner = p.dims - 1;
    int64_t step[N];
    for (int n = 0; n < N; ++n) step[n] = p.in_stride[n][inner];
    while (begin < end) {
        int64_t row = begin / p.size[inner], column = begin % p.size[inner];
        int64_t in_at[N], out_at[Outs];
        for (int n = 0; n < N; ++n) in_at[n] = column * step[n];
        for (int m = 0; m < Outs; ++m) out_at[m] = column * p.out_stride[m][inner];
        for (int d = inner - 1; d >= 0; --d) {
            const int64_t index = row % p.size[d];
            for (int n = 0; n < N; ++n) in_at[n] += index * p.in_stride[n][d];
            for (int m = 0; m < Outs; ++m) out_at[m] += index * p.out_stride[m][d];
            row /= p.size[d];
        }
        const T* in[N];
        for (int n = 0; n < N; ++n) in[n] = static_cast<const T*>(p.in[n]) + in_at[n];
        int64_t length = p.size[inner] - column;
        if (end - begin < length) length = end - begin;
        if (Outs > 1 && length > kRun) length = kRun;
        const auto output = [&](auto m) {
            if (p.out[m])
                run<T, Function, m>(in, step, static_cast<T*>(p.out[m]) + out_at[m],
                                    p.out_stride[m][inner], length, std::make_index_sequence<N>());
        };
        (output(std::integral_constant<int, M>()), ...);
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
