// Planes: linear and nearest interpolation.
#pragma once
#include "planes.h"

namespace {

template <typename A>
NOINLINE void Planes<A>::find_pairs(int axis, Pairs& to) {
    A x[kBlock], at[kBlock];
    const Window in = p.window(axis);
    // As the last block, what follows would be done in vain; and reflection rounds those inside
    // too.
    if (!to.plain || p.padding == Padding::kReflection)
        return find_places(axis, x, at) ? move_pairs(at, in, to) : find_strange_pairs(x, in, to);
    coordinates(axis, x);
    const A size = A(in.whole), most = most_moderate(size), first = A(in.first);
    const A last = A(in.size - 2), least = p.padding == Padding::kZeros ? A(-1) : A(0);
    int strange = sizeof(A) == 4 && in.whole > 1 << 24, outside = 0;
    for (int i = 0; i < kBlock; ++i) {
        strange |= !(fabs(x[i]) < most);
        at[i] = unnormalized(x[i], size, p.align_corners);
        const A in_window = at[i] - first, floored = floor(in_window);
        const A low = floored > 0 ? floored : A(0), kept = low < last ? low : last;
        outside |= (kept != floored) | !(at[i] > least);
        to.first[i] = int(kept);
        // To the bits of move_pairs: what a point gives does not go by those of its block.
        to.weight[0][i] = 1 - (in_window - kept), to.weight[1][i] = 1 - (kept + 1 - in_window);
    }
    if (strange) return find_strange_pairs(x, in, to);
    if (outside) return move_pairs(at, in, to);
    to.inside = true;
    std::fill_n(to.moved, kBlock, 0);
    if (!slopes) return;
    const A unit = pixels_per_unit(size, p.align_corners);
    std::fill_n(to.slope[0], kBlock, -unit), std::fill_n(to.slope[1], kBlock, unit);
}

template <typename A>
NOINLINE void Planes<A>::find_strange_pairs(const A* x, const Window& in, Pairs& to) const {
    const int last = in.size - 2;
    to.inside = true;
    for (int i = 0; i < kBlock; ++i) {
        const auto t = p.grad_out
                           ? Taps<A, 2>::template of<true>(x[i], in, p.padding, p.align_corners)
                           : Taps<A, 2>::template of<false>(x[i], in, p.padding, p.align_corners);
        const int left = t.index[0], right = t.index[1];
        to.first[i] = left < 0 ? 0 : std::min(left, last);
        to.moved[i] = left >= 0 ? left - to.first[i] : right >= 0 ? -1 : 2;
        const bool one[2] = {to.moved[i] == -1, to.moved[i] == 1};
        for (int k = 0; k < 2; ++k) {
            const bool used = to.moved[i] == 0 || one[k];
            const int from = one[k] ? 1 - k : k;
            to.weight[k][i] = used ? t.weight[from] : 0;
            if (slopes) to.slope[k][i] = used ? t.slope[from] : 0;
        }
        to.inside &= to.moved[i] == 0;
    }
}

template <typename A>
NOINLINE void Planes<A>::move_pairs(const A* at, const Window& in, Pairs& to) const {
    A moved[kBlock], sign[kBlock];
    const A whole = A(in.whole), first = A(in.first),
            unit = pixels_per_unit(whole, p.align_corners);
    const int last = in.size - 2;
    int outside = 0, padded = 0;
    const A* place = at;
    if (p.padding != Padding::kZeros) {
        pad(at, moved, sign, kBlock, whole, p.padding, p.align_corners);
        for (int i = 0; i < kBlock; ++i) padded |= (moved[i] != at[i]) | !(at[i] > 0);
        place = moved;
    }
    // A weight is how much less than a pixel its own is away.
    for (int i = 0; i < kBlock; ++i) {
        const A in_window = place[i] - first, floored = floor(in_window);
        const A low = floored > 0 ? floored : A(0);
        const A kept = low < A(last) ? low : A(last);
        const A left = 1 - fabs(in_window - kept), right = 1 - fabs(in_window - (kept + 1));
        const int by = int(floored - kept);
        to.first[i] = int(kept), to.moved[i] = by;
        to.weight[0][i] = left > 0 ? left : A(0);
        to.weight[1][i] = right > 0 ? right : A(0);
        outside |= by;
    }
    to.inside = !outside, to.plain = !outside && !padded;
    if (slopes)
        for (int i = 0; i < kBlock; ++i) {
            const A slope = p.padding == Padding::kZeros ? unit : unit * sign[i];
            const A by = A(to.moved[i]), left = by + A(0.5), right = by - A(0.5);
            to.slope[0][i] = fabs(left) < 1 ? -2 * left * slope : A(0);
            to.slope[1][i] = fabs(right) < 1 ? -2 * right * slope : A(0);
        }
}

template <typename A>
NOINLINE void Planes<A>::find_nearest(int axis, Pairs& to) {
    A x[kBlock], at[kBlock], moved[kBlock], sign[kBlock];
    const bool moderate = find_places(axis, x, at);
    const Window in = p.window(axis);
    const A whole = A(in.whole), first = A(in.first), last = A(in.size - 1);
    Int outside = 0;
    if (!moderate) {
        for (int i = 0; i < kBlock; ++i) {
            using T = Taps<A, 1>;
            const auto t = p.grad_out ? T::template of<true>(x[i], in, p.padding, p.align_corners)
                                      : T::template of<false>(x[i], in, p.padding, p.align_corners);
            const int index = t.index[0];
            to.first[i] = std::max(index, 0), to.mask[0][i] = -Int(index >= 0);
            outside |= index < 0;
        }
    } else {
        const A* place = at;
        if (p.padding != Padding::kZeros) {
            pad(at, moved, sign, kBlock, whole, p.padding, p.align_corners);
            place = moved;
        }
        for (int i = 0; i < kBlock; ++i) {
            const A index = rint(place[i]) - first, low = index > 0 ? index : A(0);
            const A kept = low < last ? low : last;
            const Int is_in = -Int(index == kept);
            to.first[i] = int(kept), to.mask[0][i] = is_in, outside |= ~is_in;
        }
    }
    to.inside = !outside;
}

template <typename A>
template <int K, bool kNeighbours, bool kInside>
NOINLINE void Planes<A>::sample() {
    for (int64_t c0 = 0; c0 < p.C; c0 += 4) {
        const int count = int(std::min<int64_t>(4, p.C - c0));
        const A* in[4];
        A* to[4];
        for (int k = 0; k < count; ++k) in[k] = plane(c0 + k), to[k] = out(c0 + k);
        for (int i = 0, end = n; i < end; i += L) {
            const V left = lanes(x.weight[0] + i), right = lanes(x.weight[1] + i);
            const V top = lanes(y.weight[0] + i), bottom = lanes(y.weight[1] + i);
            const auto mean = [&](V upper_left, V upper_right, V lower_left, V lower_right) {
                return top * (left * upper_left + right * upper_right) +
                       bottom * (left * lower_left + right * lower_right);
            };
            if constexpr (K > 1) {
                V upper[2][K], lower[2][K];
                corners_of_channels<K, kInside>(in[0], i, upper, lower);
                for (int k = 0; k < K; ++k)
                    put(to[k], mean(upper[0][k], upper[1][k], lower[0][k], lower[1][k]), i, end);
            } else {
                for (int k = 0; k < count; ++k) {
                    V upper[2], lower[2];
                    corners<kNeighbours, kInside>(in[k], i, upper, lower);
                    put(to[k], mean(upper[0], upper[1], lower[0], lower[1]), i, end);
                }
            }
        }
    }
}

template <typename A>
template <int K>
NOINLINE void Planes<A>::sample_channels(int64_t c) {
    const A* in = plane(c);
    A* const to = out(c);
    const int64_t P = p.P;
    alignas(64) A columns[K][kBlock];
    for (int i = 0; i < n; ++i) {
        Channels<K> pixels[2][2];
        pixels_at<K>(in, i, pixels);
        const Channels<K> sum = mixed(i, pixels, y.weight, x.weight);
        for (int k = 0; k < K; ++k) (K > 4 ? columns[k] : to + k * P)[i] = sum[k];
    }
    if (K > 4)
        for (int k = 0; k < K; ++k) memcpy(to + k * P, columns[k], n * sizeof(A));
}

template <typename A>
template <int K>
NOINLINE void Planes<A>::differentiate_channels(int64_t c) {
    const A* in = plane(c);
    const Upstream<K> upstream(*this, c);
    Channels<K> pixels[2][2];
    for (int i = 0; i < n; ++i) {
        pixels_at<K>(in, i, pixels);
        const Channels<K> factor = upstream.at(i);
        const Channels<K> dx = factor * mixed(i, pixels, y.weight, x.slope);
        const Channels<K> dy = factor * mixed(i, pixels, y.slope, x.weight);
        along[0][i] += total<K>(dx), along[1][i] += total<K>(dy);
    }
}

template <typename A>
template <int K>
NOINLINE void Planes<A>::scatter_channels(int64_t c, int count, bool all) {
    const int64_t right = p.grad_input_stride[4], below = p.grad_input_stride[3];
    const Upstream<K> upstream(*this, c);
    A* to = target(c);
    const auto add = [](A* at, Channels<K> x) {
        x += load_lanes<Channels<K>>(at);
        memcpy(at, &x, sizeof(x));
    };
    for (int j = 0; j < count; ++j) {
        const int i = all ? j : near[j];
        A* at = to + offset[i];
        const Channels<K> g = upstream.at(i);
        if (p.interpolation == Interpolation::kNearest) {
            add(at, g);
            continue;
        }
        const Channels<K> upper = g * y.weight[0][i], lower = g * y.weight[1][i];
        if (taken[i] & 1) add(at, upper * x.weight[0][i]);
        if (taken[i] & 2) add(at + right, upper * x.weight[1][i]);
        if (taken[i] & 4) add(at + below, lower * x.weight[0][i]);
        if (taken[i] & 8) add(at + below + right, lower * x.weight[1][i]);
    }
}

template <typename A>
template <int K, bool kNeighbours, bool kInside>
NOINLINE void Planes<A>::differentiate() {
    for (int64_t c0 = 0; c0 < p.C; c0 += 4) {
        const int count = int(std::min<int64_t>(4, p.C - c0));
        const A *in[4], *grads[4];
        for (int k = 0; k < count; ++k) grads[k] = grad(c0 + k, buffer[k]), in[k] = plane(c0 + k);
        for (int i = 0; i < n; i += L) {
            const V left = lanes(x.weight[0] + i), right = lanes(x.weight[1] + i);
            const V top = lanes(y.weight[0] + i), bottom = lanes(y.weight[1] + i);
            V from[2] = {}, down[2] = {};
            // Sums over channels of grad_out * pixel, by corners.
            if constexpr (K > 1) {
                V upper[2][K], lower[2][K];
                corners_of_channels<K, kInside>(in[0], i, upper, lower);
                for (int k = 0; k < K; ++k) {
                    const V g = lanes(grads[k] + i);
                    for (int j = 0; j < 2; ++j)
                        from[j] += g * upper[j][k], down[j] += g * lower[j][k];
                }
            } else {
                V upper[2], lower[2];
                for (int k = 0; k < count; ++k) {
                    const V g = lanes(grads[k] + i);
                    corners<kNeighbours, kInside>(in[k], i, upper, lower);
                    for (int j = 0; j < 2; ++j) from[j] += g * upper[j], down[j] += g * lower[j];
                }
            }
            V dx = lanes(x.slope[0] + i) * (top * from[0] + bottom * down[0]) +
                   lanes(x.slope[1] + i) * (top * from[1] + bottom * down[1]);
            V dy = lanes(y.slope[0] + i) * (left * from[0] + right * from[1]) +
                   lanes(y.slope[1] + i) * (left * down[0] + right * down[1]);
            if (c0 > 0) dx += lanes(along[0] + i), dy += lanes(along[1] + i);
            memcpy(along[0] + i, &dx, sizeof(dx)), memcpy(along[1] + i, &dy, sizeof(dy));
        }
    }
    write_grid();
}

template <typename A>
NOINLINE void Planes<A>::scatter() {
    const int64_t *stride = p.grad_input_stride, right = stride[4], below = stride[3];
    const int low = int(part.rows[0]), high = int(part.rows[1]);
    int apart = 0;
    for (int i = 0; i < n; ++i) {
        const int first = y.first[i], dx = x.moved[i], dy = y.moved[i];
        // The upper and the lower row: within the part, and of the two that the point has.
        const int upper = (first >= low) & (first < high) & (dy == 0 || dy == -1);
        const int lower = (first + 1 >= low) & (first + 1 < high) & (dy == 0 || dy == 1);
        const int west = dx == 0 || dx == -1, east = dx == 0 || dx == 1;
        taken[i] = int8_t((upper & west) | (upper & east) << 1 | (lower & west) << 2 |
                          (lower & east) << 3);
        offset[i] = int32_t(first * below + x.first[i] * right);
        apart |= taken[i] != kAll;
    }
    const int count = apart ? sort_out() : n;
    if (count == 0 || scatter_vectors(count, !apart)) return;
    alignas(64) A share[4][kBlock];
    for (int64_t c = part.channels[0]; c < part.channels[1]; ++c) {
        const A* g = grad(c, buffer[0]);
        A* to = target(c);
        for (int k = 0; k < 4; ++k)
            for (int i = 0; i < n; ++i)
                share[k][i] = g[i] * y.weight[k / 2][i] * x.weight[k % 2][i];
        const auto add = [&](int i) {
            A* at = to + offset[i];
            at[0] += share[0][i], at[right] += share[1][i];
            at[below] += share[2][i], at[below + right] += share[3][i];
        };
        if (!apart) {
            for (int i = 0; i < n; ++i) add(i);
            continue;
        }
        for (int j = 0; j < count; ++j) {
            const int i = near[j];
            if (taken[i] == kAll) {
                add(i);
                continue;
            }
            A* at = to + offset[i];
            if (taken[i] & 1) at[0] += share[0][i];
            if (taken[i] & 2) at[right] += share[1][i];
            if (taken[i] & 4) at[below] += share[2][i];
            if (taken[i] & 8) at[below + right] += share[3][i];
        }
    }
}

template <typename A>
inline void Planes<A>::linear() {
    find_pairs(1, y);
    if (!part.points && !reaches()) return;
    find_pairs(2, x);
    inside = x.inside && y.inside;
    if (part.points && (p.out || p.grad_grid)) {
        if (!inside) set_masks(x), set_masks(y);
        set_offsets(sy, sx);
        if (in_vectors()) {
            if (p.grad_out) std::fill_n(along[0], 2 * kBlock, A(0));
            const auto run = [&](auto channels, int64_t c) {
                constexpr int K = decltype(channels)::value;
                p.grad_out ? differentiate_channels<K>(c) : sample_channels<K>(c);
            };
            if constexpr (sizeof(A) == 8)
                p.C == 3 ? run(std::integral_constant<int, 3>(), 0) : each_vector(0, p.C, run);
            else
                each_vector(0, p.C, run);
            if (p.grad_out) write_grid();
        } else {
            with_shape([&](auto channels, auto neighbours, auto all) {
                constexpr int K = decltype(channels)::value;
                constexpr bool N = decltype(neighbours)::value, I = decltype(all)::value;
                p.grad_out ? differentiate<K, N, I>() : sample<K, N, I>();
            });
        }
    }
    if (part.scatter) scatter();
}

template <typename A>
inline void Planes<A>::nearest() {
    find_nearest(1, y), find_nearest(2, x);
    inside = x.inside && y.inside;
    if (!inside)
        for (int i = 0; i < kBlock; ++i) x.mask[0][i] &= y.mask[0][i];
    if (!p.grad_out) {
        set_offsets(sy, sx);
        for (int64_t c = 0; c < p.C; ++c) {
            const A* in = plane(c);
            A* to = out(c);
            for (int i = 0; i < n; i += L) {
                const V value = gather(in, offset + i, std::make_integer_sequence<int, L>());
                put(to, V(Mask(value) & load_lanes<Mask>(x.mask[0] + i)), i, n);
            }
        }
    }
    if (!part.scatter) return;
    const int64_t* stride = p.grad_input_stride;
    const int low = int(part.rows[0]), high = int(part.rows[1]);
    int some = 0, all = 1;
    for (int i = 0; i < n; ++i) {
        taken[i] = (y.first[i] >= low) & (y.first[i] < high) & (x.mask[0][i] != 0);
        some |= taken[i], all &= taken[i];
    }
    if (!some) return;
    const int count = all ? n : sort_out();
    set_offsets(stride[3], stride[4]);
    if (scatter_vectors(count, all)) return;
    for (int64_t c = part.channels[0]; c < part.channels[1]; ++c) {
        const A* g = grad(c, buffer[0]);
        A* to = target(c);
        if (all)
            for (int i = 0; i < n; ++i) to[offset[i]] += g[i];
        else
            for (int j = 0; j < count; ++j) to[offset[near[j]]] += g[near[j]];
    }
}

}  // namespace
