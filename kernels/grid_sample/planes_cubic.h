// Images: bicubic interpolation, four pixels of a row at a time; or, where pixels have many
// channels side by side, vectors of these.
#pragma once
#include "blocks.h"
#include "planes.h"

namespace {

template <typename A>
template <int C>
inline void Planes<A>::set_lanes() {
    for (int i = 0; i < n; ++i)
        for (int l = 0; l < 4 * C; ++l) across[4 * C * i + l] = columns.weight[l / C][i];
    if (!slopes) return;
    for (int i = 0; i < n; ++i)
        for (int l = 0; l < 4 * C; ++l) steep[4 * C * i + l] = columns.slope[l / C][i];
}

template <typename A>
template <int C>
NOINLINE void Planes<A>::mix(int64_t c) {
    const A *in = plane(c), *g[C] = {};
    A* to[C] = {};
    for (int k = 0; k < C; ++k) {
        if (p.grad_out)
            g[k] = grad(c + k, buffer[k]);
        else
            to[k] = out(c + k);
    }
    const bool neighbours = C > 1 || sx == 1;
    for (int i = 0; i < n; ++i) {
        Quad row[4][C], mixed[C] = {}, tilted[C] = {};
        if (regular[i]) {
            const A* line = in + columns.index[0][i] * sx;
            for (int j = 0; j < 4; ++j) {
                const A* at = line + rows.index[j][i] * sy;
                if (neighbours)
                    memcpy(row[j], at, sizeof(row[j]));
                else
                    row[j][0] = Quad{at[0], at[sx], at[2 * sx], at[3 * sx]};
            }
        } else {
            A pixels[4][4 * C];
            for (int j = 0; j < 4; ++j)
                for (int l = 0; l < 4 * C; ++l) {
                    const int64_t y = rows.index[j][i], x = columns.index[l / C][i];
                    pixels[j][l] = (y | x) < 0 ? A(0) : in[y * sy + x * sx + l % C];
                }
            memcpy(row, pixels, sizeof(row));
        }
        for (int j = 0; j < 4; ++j)
            for (int q = 0; q < C; ++q) mixed[q] += rows.weight[j][i] * row[j][q];
        A sum[C];
        if (!slopes) {
            sum_row(mixed, across + 4 * C * i, sum);
            for (int k = 0; k < C; ++k) to[k][i] = sum[k];
            continue;
        }
        for (int j = 0; j < 4; ++j)
            for (int q = 0; q < C; ++q) tilted[q] += rows.slope[j][i] * row[j][q];
        sum_row(mixed, steep + 4 * C * i, sum);
        for (int k = 0; k < C; ++k) along[0][i] += g[k][i] * sum[k];
        sum_row(tilted, across + 4 * C * i, sum);
        for (int k = 0; k < C; ++k) along[1][i] += g[k][i] * sum[k];
    }
}

template <typename A>
template <int L, bool kSlopes>
NOINLINE void Planes<A>::mix_rows(int64_t c, int had) {
    using Row = typename Lanes<A, L>::type;
    alignas(64) A tile[kBlock][L];  // grad_out, or values
    if (kSlopes)
        for (int k = 0; k < L; ++k) {
            const A* const from = grad(c + k, buffer[0]);
            for (int i = 0; i < n; ++i) tile[i][k] = from[i];
        }
    const A* const in = plane(c);
    const auto new_ones = ~keep_lanes<A, L>(had);
    const auto sum_over = [](const Row(&pixel)[4], const A(*w)[kBlock], int i) -> Row {
        return (w[0][i] * pixel[0] + w[1][i] * pixel[1]) +
               (w[2][i] * pixel[2] + w[3][i] * pixel[3]);
    };
    const auto total = [&](Row x) { return sum_lanes<A, L>(had ? only(new_ones, x) : x); };
    for (int i = 0; i < n; ++i) {
        Row mixed[4] = {}, tilted[4] = {};
        for (int j = 0; j < 4; ++j) {
            const int64_t y = rows.index[j][i];
            for (int k = 0; k < 4; ++k) {
                const int64_t x = regular[i] ? columns.index[0][i] + k : columns.index[k][i];
                const Row pixel =
                    regular[i] || (y | x) >= 0 ? load_lanes<Row>(in + y * sy + x * sx) : Row{};
                mixed[k] += rows.weight[j][i] * pixel;
                if (kSlopes) tilted[k] += rows.slope[j][i] * pixel;
            }
        }
        if constexpr (kSlopes) {
            const Row g = load_lanes<Row>(tile[i]);
            along[0][i] += total(g * sum_over(mixed, columns.slope, i));
            along[1][i] += total(g * sum_over(tilted, columns.weight, i));
        } else {
            const Row sum = sum_over(mixed, columns.weight, i);
            memcpy(tile[i], &sum, sizeof(sum));
        }
    }
    if (!kSlopes)
        for (int k = had; k < L; ++k) {
            A* const to = out(c + k);
            for (int i = 0; i < n; ++i) to[i] = tile[i][k];
        }
}

template <typename A>
inline void Planes<A>::cubic() {
    A at[kBlock];
    coordinates(1, at);  // y
    find_taps<4>(at, n, p.window(1), p.padding, p.align_corners, slopes, rows);
    coordinates(2, at);
    find_taps<4>(at, n, p.window(2), p.padding, p.align_corners, slopes, columns);
    for (int i = 0; i < n; ++i) {
        const int first = columns.index[0][i];
        const int up = rows.index[0][i] | rows.index[1][i] | rows.index[2][i] | rows.index[3][i];
        regular[i] = (first >= 0) & (columns.index[3][i] - first == 3) & (up >= 0);
    }
    if (slopes) std::fill_n(along[0], 2 * kBlock, A(0));
    const auto run = [&](auto channels) {
        constexpr int C = decltype(channels)::value;
        set_lanes<C>();
        for (int64_t c = 0; c < p.C; c += C) mix<C>(c);
    };
    if (p.C >= 4 && p.input_stride[1] == 1)
        each_piece<true>(0, p.C, [&](auto lanes, auto vectors, int64_t from, int had) {
            constexpr int L = decltype(lanes)::value, V = decltype(vectors)::value;
            if constexpr (L > 1)
                for (int64_t c = from; c < from + L * V; c += L)
                    slopes ? mix_rows<L, true>(c, had) : mix_rows<L, false>(c, had);
        });
    else if (side_by_side && p.C == 3)
        run(std::integral_constant<int, 3>());
    else if (side_by_side && p.C == 2)
        run(std::integral_constant<int, 2>());
    else
        run(std::integral_constant<int, 1>());
    if (slopes) write_grid();
}

}  // namespace
