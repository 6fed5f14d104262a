// Parts of images for grid_sample on the CPU: cleared, and copied to other strides and types.
#pragma once
#include "taps.h"

namespace {

/// A part of an image: of its channels, z, y and x.
struct Box {
    int64_t image, begin[4], end[4];
};
/// Zeros to a box of a field of elements E.
template <typename E>
NOINLINE void clear(const Field& f, const Box& box) {
    // Axes c, z, y, x, the innermost last; then merged where they lie in one piece.
    int order[4] = {0, 1, 2, 3};
    const int64_t* stride = f.stride + 1;
    for (int i = 1; i < 4; ++i)  // stable; std::stable_sort is long to compile
        for (int j = i; j > 0 && stride[order[j - 1]] < stride[order[j]]; --j)
            std::swap(order[j - 1], order[j]);
    E* to = static_cast<E*>(f.data) + box.image * f.stride[0];
    int64_t size[4] = {1, 1, 1, 1}, step[4] = {}, last = 4;
    for (int k = 3; k >= 0; --k) {
        const int axis = order[k];
        const int64_t count = box.end[axis] - box.begin[axis];
        to += box.begin[axis] * stride[axis];
        if (count == 1) continue;
        if (last < 4 && stride[axis] == size[last] * step[last])
            size[last] *= count;
        else
            --last, size[last] = count, step[last] = stride[axis];
    }
    if (last == 4) step[3] = 1;
    for (int64_t q = 0; q < size[0]; ++q)
        for (int64_t r = 0; r < size[1]; ++r)
            for (int64_t s = 0; s < size[2]; ++s) {
                E* row = to + q * step[0] + r * step[1] + s * step[2];
                if (step[3] == 1)
                    std::fill_n(row, size[3], E{});
                else
                    for (int64_t t = 0; t < size[3]; ++t) row[t * step[3]] = E{};
            }
}

/// A run of elements in another type.
template <typename From, typename To>
void convert_run(const From* from, int64_t count, To* to) {
    if constexpr (std::is_same_v<From, To>)
        std::copy_n(from, count, to);
    else if constexpr (std::is_same_v<To, Acc<From>>)
        load_run(from, count, to);
    else
        store_run(from, count, to);
}
/// A line of an image, channels [begin, end) of it, copied to other strides and another type.
template <typename From, typename To>
void copy_line(const Field& from, const Field& to, int64_t b, int64_t z, int64_t y, int64_t W,
               int64_t begin, int64_t end) {
    constexpr int64_t kTile = 16;
    const auto line = [&](const Field& f) {
        return b * f.stride[0] + z * f.stride[2] + y * f.stride[3] + begin * f.stride[1];
    };
    const From* const in = static_cast<const From*>(from.data) + line(from);
    To* const out = static_cast<To*>(to.data) + line(to);
    const int64_t c = from.stride[1], x = from.stride[4], C = end - begin;
    const int64_t to_c = to.stride[1], to_x = to.stride[4];
    if (c == 1 && to_c == 1 && x == C && to_x == C)
        convert_run(in, W * C, out);
    else if (c == 1 && to_c == 1)
        for (int64_t i = 0; i < W; ++i) convert_run(in + i * x, C, out + i * to_x);
    else if (x == 1 && to_x == 1)
        for (int64_t k = 0; k < C; ++k) convert_run(in + k * c, W, out + k * to_c);
    else  // in squares, each way within a few cache lines
        for (int64_t i = 0; i < W; i += kTile)
            for (int64_t k = 0; k < C; k += kTile) {
                const int64_t right = std::min(W, i + kTile), top = std::min(C, k + kTile);
                const auto one = [&](int64_t i, int64_t k) {
                    out[i * to_x + k * to_c] = store<To>(load(in[i * x + k * c]));
                };
                if (to_c == 1)
                    for (int64_t j = i; j < right; ++j)
                        for (int64_t l = k; l < top; ++l) one(j, l);
                else
                    for (int64_t l = k; l < top; ++l)
                        for (int64_t j = i; j < right; ++j) one(j, l);
            }
}

}  // namespace
