// Images: bicubic interpolation in vectors of points, whose rows of four pixels are turned to
// columns; or, where pixels have many channels side by side, in vectors of these.
#pragma once
#include "blocks.h"
#include "planes.h"

namespace {

template <typename A>
inline void Planes<A>::place_fours(const Window& in, const A* floored,
                                   A (&index)[4][kBlock]) const {
    A place[kBlock], sign[kBlock];
    for (int k = 0; k < 4; ++k) {
        for (int i = 0; i < kBlock; ++i) place[i] = floored[i] + A(k - 1);
        pad(place, index[k], sign, kBlock, A(in.whole), p.padding, p.align_corners);
        for (int i = 0; i < kBlock; ++i) index[k][i] -= A(in.first);
    }
}

template <typename A>
NOINLINE void Planes<A>::set_rows(const Window& in, const A* floored) {
    alignas(64) A index[4][kBlock];
    place_fours(in, floored, index);
    const A last = A(in.size - 1);
    for (int k = 0; k < 4; ++k)
        for (int i = 0; i < kBlock; ++i) {
            const A at = index[k][i], low = at > 0 ? at : A(0), kept = low < last ? low : last;
            down.at[k][i] = int(kept), down.mask[k][i] = -Int(kept == at);
        }
}

template <typename A>
NOINLINE void Planes<A>::move_columns(const Window& in, const A* floored) {
    alignas(64) A index[4][kBlock];
    place_fours(in, floored, index);
    std::fill_n(across.mask[0], 4 * kBlock, Int(-1));
    const V last = V{} + A(in.size - 4);
    const auto least = [](V a, V b) { return a < b ? a : b; };
    int moved[kBlock / L], count = 0;  // without a branch, which random points would have guessed
    for (int i = 0; i < kBlock; i += L) {
        const V begin = lanes(floored + i) - A(in.first + 1);
        moved[count] = i, count += sum_lanes<Int, L>((begin < A(0)) | (begin > last)) != 0;
    }
    for (int m = 0; m < count; ++m) {
        const int i = moved[m];
        V at[4], weight[4] = {}, slope[4] = {};
        Mask used[4] = {};
        for (int k = 0; k < 4; ++k) at[k] = lanes(index[k] + i);
        const V low = least(least(at[0], at[1]), least(at[2], at[3]));
        const V kept = least(low > A(0) ? low : V{}, last);
        for (int l = 0; l < L; ++l) across.at[0][i + l] = int(kept[l]);
        for (int j = 0; j < 4; ++j) {
            const V to = at[j] - kept, w = lanes(across.weight[j] + i);
            const V s = slopes ? lanes(across.slope[j] + i) : V{};
            for (int k = 0; k < 4; ++k) {
                const Mask here = to == A(k);
                weight[k] += only(here, w), slope[k] += only(here, s), used[k] |= here;
            }
        }
        for (int k = 0; k < 4; ++k) {
            memcpy(across.weight[k] + i, weight + k, sizeof(V));
            memcpy(across.mask[k] + i, used + k, sizeof(V));
            if (slopes) memcpy(across.slope[k] + i, slope + k, sizeof(V));
        }
    }
}

template <typename A>
NOINLINE bool Planes<A>::find_fours(int axis, Fours& to) {
    A x[kBlock], at[kBlock], floored[kBlock];
    coordinates(axis, x);
    const Window in = p.window(axis);
    const A size = A(in.whole), unit = pixels_per_unit(size, p.align_corners);
    const A first = A(in.first), last = A(in.size - 4);
    int strange = 0, outside = 0;
    for (int i = 0; i < kBlock; ++i) {
        at[i] = unnormalized(x[i], size, p.align_corners);
        strange |= !(fabs(at[i]) < A(1 << 22));
    }
    if (strange || in.size < 4) return false;
    for (int i = 0; i < kBlock; ++i) {
        floored[i] = floor(at[i]);
        A weight[4];
        Taps<A, 4>::cubic(weight, at[i] - floored[i]);
        for (int k = 0; k < 4; ++k) to.weight[k][i] = weight[k];
        const A begin = floored[i] - 1 - first;
        to.at[0][i] = int(begin), outside |= (begin < 0) | (begin > last);
    }
    if (slopes)
        for (int i = 0; i < kBlock; ++i) {
            A slope[4];
            Taps<A, 4>::cubic_slope(slope, at[i] - floored[i], unit);
            for (int k = 0; k < 4; ++k) to.slope[k][i] = slope[k];
        }
    to.inside = !outside;
    if (axis == 1) {
        if (outside)
            set_rows(in, floored);
        else
            for (int k = 1; k < 4; ++k)
                for (int i = 0; i < kBlock; ++i) to.at[k][i] = to.at[0][i] + k;
    } else if (outside) {
        move_columns(in, floored);
    }
    return true;
}

template <typename A>
template <int K>
inline void Planes<A>::fetch_row(const A* in, int i, int j, V (&to)[4 * K]) const {
    const int32_t* const at = offsets[j] + i;
    if (K > 1 || sx == 1) {
        for (int q = 0; q < K; ++q) {
            V four[4];
            fetch_fours(in + 4 * q, at, four);
            for (int k = 0; k < 4; ++k) to[4 * q + k] = four[k];
        }
    } else {
        fetch_apart(in, sx, at, to);
    }
    if (inside) return;
    const Mask row = load_lanes<Mask>(down.mask[j] + i);
    for (int k = 0; k < 4 * K; ++k)
        to[k] = V(Mask(to[k]) & row & load_lanes<Mask>(across.mask[k / K] + i));
}

template <typename A>
template <int K>
NOINLINE void Planes<A>::sum_fours(int64_t c, int count) {
    for (int i = 0; i < n; i += L)
        for (int64_t from = c; from < c + count; from += K) {
            const A* const in = plane(from);
            V sum[K] = {};
#pragma GCC unroll 1  // or g++ keeps each row's addresses, in memory
            for (int j = 0; j < 4; ++j) {
                V row[4 * K];
                fetch_row<K>(in, i, j, row);
                for (int q = 0; q < K; ++q) {
                    V mixed = {};
                    for (int k = 0; k < 4; ++k)
                        mixed += lanes(across.weight[k] + i) * row[K * k + q];
                    sum[q] += lanes(down.weight[j] + i) * mixed;
                }
            }
            for (int q = 0; q < K; ++q) put(out(from + q), sum[q], i, n);
        }
}

template <typename A>
template <int K>
NOINLINE void Planes<A>::differentiate_fours(int64_t c, int count) {
    const A *in[4], *grads[4];
    for (int k = 0; k < count; ++k) grads[k] = grad(c + k, buffer[k]), in[k] = plane(c + k);
    for (int i = 0; i < n; i += L) {
        V dx = lanes(along[0] + i), dy = lanes(along[1] + i);
#pragma GCC unroll 1
        for (int j = 0; j < 4; ++j) {
            V sum[4] = {}, mixed = {}, steep = {};  // over channels of grad_out * pixel, by columns
            for (int from = 0; from < count; from += K) {
                V row[4 * K];
                fetch_row<K>(in[from], i, j, row);
                for (int q = 0; q < K; ++q)
                    for (int k = 0; k < 4; ++k)
                        sum[k] += lanes(grads[from + q] + i) * row[K * k + q];
            }
            for (int k = 0; k < 4; ++k) {
                mixed += lanes(across.weight[k] + i) * sum[k];
                steep += lanes(across.slope[k] + i) * sum[k];
            }
            dx += lanes(down.weight[j] + i) * steep, dy += lanes(down.slope[j] + i) * mixed;
        }
        memcpy(along[0] + i, &dx, sizeof(dx)), memcpy(along[1] + i, &dy, sizeof(dy));
    }
}

template <typename A>
NOINLINE void Planes<A>::mix(int64_t c) {
    const A *in = plane(c), *g = slopes ? grad(c, buffer[0]) : nullptr;
    A* const to = slopes ? nullptr : out(c);
    for (int i = 0; i < n; ++i) {
        A sum = 0, dx = 0, dy = 0;
        for (int j = 0; j < 4; ++j)
            for (int k = 0; k < 4; ++k) {
                const int64_t y = rows.index[j][i], x = columns.index[k][i];
                const A pixel = (y | x) < 0 ? A(0) : in[y * sy + x * sx];
                if (slopes) {
                    dx += rows.weight[j][i] * columns.slope[k][i] * pixel;
                    dy += rows.slope[j][i] * columns.weight[k][i] * pixel;
                } else {
                    sum += rows.weight[j][i] * columns.weight[k][i] * pixel;
                }
            }
        if (slopes)
            along[0][i] += g[i] * dx, along[1][i] += g[i] * dy;
        else
            to[i] = sum;
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
inline void Planes<A>::run_fours() {
    inside = down.inside && across.inside;
    if (!inside)
        for (Fours* axis : {&down, &across})
            if (axis->inside) std::fill_n(axis->mask[0], 4 * kBlock, Int(-1));
    for (int j = 0; j < 4; ++j) set_offsets(down.at[j], sy, across.at[0], sx, offsets[j]);
    const auto run = [&](auto channels) {
        constexpr int K = decltype(channels)::value;
        for (int64_t c = 0; c < p.C; c += 4) {
            const int count = int(std::min<int64_t>(4, p.C - c));
            slopes ? differentiate_fours<K>(c, count) : sum_fours<K>(c, count);
        }
    };
    if (side_by_side && p.C == 3)
        run(std::integral_constant<int, 3>());
    else if (side_by_side && p.C == 2)
        run(std::integral_constant<int, 2>());
    else
        run(std::integral_constant<int, 1>());
}

template <typename A>
inline void Planes<A>::run_rows() {
    for (int i = 0; i < n; ++i) {
        const int first = columns.index[0][i];
        const int up = rows.index[0][i] | rows.index[1][i] | rows.index[2][i] | rows.index[3][i];
        regular[i] = (first >= 0) & (columns.index[3][i] - first == 3) & (up >= 0);
    }
    each_piece<true>(0, p.C, [&](auto lanes, auto vectors, int64_t from, int had) {
        constexpr int L = decltype(lanes)::value, V = decltype(vectors)::value;
        if constexpr (L > 1)
            for (int64_t c = from; c < from + L * V; c += L)
                slopes ? mix_rows<L, true>(c, had) : mix_rows<L, false>(c, had);
    });
}

template <typename A>
inline void Planes<A>::cubic() {
    if (slopes) std::fill_n(along[0], 2 * kBlock, A(0));
    const bool vectors = p.C >= 4 && p.input_stride[1] == 1;
    if (!vectors && find_fours(1, down) && find_fours(2, across)) {
        run_fours();
    } else {
        A at[kBlock];
        coordinates(1, at);  // y
        find_taps<4>(at, n, p.window(1), p.padding, p.align_corners, slopes, rows);
        coordinates(2, at);
        find_taps<4>(at, n, p.window(2), p.padding, p.align_corners, slopes, columns);
        if (vectors)
            run_rows();
        else
            for (int64_t c = 0; c < p.C; ++c) mix(c);
    }
    if (slopes) write_grid();
}

}  // namespace
