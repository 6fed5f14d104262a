// Two-dimensional convolution on the CPU; the sums are written out in convolve2d.h.
// An image is walked in strips of up to kStrip columns, row by row. The kh rows of input that a row
// of output needs lie in a ring of buffers, extended beyond the borders and in the accumulating
// type, each gathered once: the loops over taps then know no borders, strides or element types, and
// run along neighbouring columns in vector registers.
#pragma once
#include <algorithm>
#include <vector>

#include "convolve2d.h"
#include "lanes.h"

namespace {

constexpr int64_t kStrip = 512;

template <typename A>
constexpr int kLanes = kVector / sizeof(A);
template <typename A>
using Vector = typename Lanes<A, kLanes<A>>::type;

/// The rows of input below which a strip's current row of output lies.
template <typename T>
class Ring {
    using A = Acc<T>;
    const Convolve2dParams& p_;
    const int64_t first_, reach_, pitch_;
    int64_t image_ = -1, top_ = 0;
    std::vector<A> buffer_;
    std::vector<A*> rows_;  // into the buffer, the topmost first

    void fetch(int64_t y, A* to) {
        const int64_t row = extended(y, p_.H, p_.boundary);
        if (row < 0) return void(std::fill_n(to, reach_, A(0)));
        const T* from =
            static_cast<const T*>(p_.in) + image_ * p_.in_stride[0] + row * p_.in_stride[1];
        const int64_t left = std::clamp<int64_t>(-first_, 0, reach_);
        const int64_t right = std::clamp<int64_t>(p_.W - first_, left, reach_);
        gather(from + (first_ + left) * p_.in_stride[2], p_.in_stride[2], right - left, to + left);
        const auto outside = [&](int64_t i) {
            const int64_t x = extended(first_ + i, p_.W, p_.boundary);
            to[i] = x < 0 ? A(0) : load(from[x * p_.in_stride[2]]);
        };
        for (int64_t i = 0; i < left; ++i) outside(i);
        for (int64_t i = right; i < reach_; ++i) outside(i);
    }

  public:
    /// Columns [x, x + width) of the output.
    Ring(const Convolve2dParams& p, int64_t x, int64_t width)
        : p_(p),
          first_(x + p.shift[1] - (p.kw - 1)),
          reach_(width + p.kw - 1),
          pitch_(reach_ + 2 * kLanes<A>),  // the last vectors of a row may pass its end
          buffer_(p.kh * pitch_),
          rows_(p.kh) {
        for (int64_t i = 0; i < p.kh; ++i) rows_[i] = buffer_.data() + i * pitch_;
    }

    /// Makes row y of image n's output the current one.
    void move_to(int64_t n, int64_t y) {
        const int64_t top = y + p_.shift[0] - (p_.kh - 1);
        const bool next = n == image_ && top == top_ + 1;
        image_ = n, top_ = top;
        if (next) std::rotate(rows_.begin(), rows_.begin() + 1, rows_.end());
        for (int64_t i = next ? p_.kh - 1 : 0; i < p_.kh; ++i) fetch(top + i, rows_[i]);
    }
    /// What the i-th row of taps meets, from the strip's first column on.
    const A* operator[](int64_t i) const { return rows_[i]; }
};

/// The kernel of group g, in the order of correlation.
template <typename A>
void gather_taps(const Convolve2dParams& p, int64_t g, std::vector<A>& taps) {
    taps.resize(p.kh * p.kw);
    for (int64_t i = 0; i < p.kh; ++i)
        for (int64_t j = 0; j < p.kw; ++j) taps[i * p.kw + j] = tap_at<A>(p, g, i, j);
}

/// V vectors of output from column x of a strip on; their sums stay in registers.
template <int V, typename T>
void run(const Convolve2dParams& p, const Ring<T>& rows, const Acc<T>* taps, int64_t x,
         Acc<T>* __restrict out) {
    using A = Acc<T>;
    Vector<A> sum[V] = {};
    for (int64_t i = 0; i < p.kh; ++i) {
        const A* row = rows[i] + x;
        for (int64_t j = 0; j < p.kw; ++j) {
            const A tap = taps[i * p.kw + j];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                sum[v] += tap * load_lanes<Vector<A>>(row + j + v * kLanes<A>);
        }
    }
    memcpy(out, sum, sizeof(sum));
}

template <typename T>
void convolve_rows(const Convolve2dParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    constexpr int64_t L = kLanes<A>;
    A sums[kStrip];
    std::vector<A> taps;
    for (int64_t x = 0; x < p.OW; x += kStrip) {
        const int64_t width = std::min(p.OW - x, kStrip);
        Ring<T> rows(p, x, width);
        int64_t group = -1;
        for (int64_t row = begin; row < end; ++row) {
            const int64_t n = row / p.OH, y = row % p.OH, g = group_of(p, n);
            if (g != group) gather_taps(p, group = g, taps);
            rows.move_to(n, y);
            int64_t at = 0;
            for (; at + 4 * L <= width; at += 4 * L) run<4>(p, rows, taps.data(), at, sums + at);
            for (; at < width; at += L) run<1>(p, rows, taps.data(), at, sums + at);
            T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + y * p.out_stride[1] + x;
            store_run(sums, width, out);
        }
    }
}

template <typename T>
void fold_pixels(const Convolve2dParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    const int64_t each = border_pixels(p);
    std::vector<A> taps;
    int64_t group = -1;
    for (int64_t index = begin; index < end; ++index) {
        const int64_t n = index / each, g = group_of(p, n);
        if (g != group) gather_taps(p, group = g, taps);
        int64_t at[2];
        border_pixel(p, index % each, at);
        const Copies ys(p, 0, at[0]), xs(p, 1, at[1]);
        A sum = 0;
        for (int64_t k = ys.begin; k < ys.end; ++k) {
            if (!ys.has(ys.at(k))) continue;
            const int64_t y = ys.at(k) + p.shift[0] - (p.kh - 1);
            const Overlap rows(y, p.kh, p.H);
            for (int64_t l = xs.begin; l < xs.end; ++l) {
                if (!xs.has(xs.at(l))) continue;
                const int64_t x = xs.at(l) + p.shift[1] - (p.kw - 1);
                const Overlap columns(x, p.kw, p.W);
                for (int64_t i = rows.begin; i < rows.end; ++i) {
                    const T* in = static_cast<const T*>(p.in) + n * p.in_stride[0] +
                                  (y + i) * p.in_stride[1] + x * p.in_stride[2];
                    for (int64_t j = columns.begin; j < columns.end; ++j)
                        sum += taps[i * p.kw + j] * load(in[j * p.in_stride[2]]);
                }
            }
        }
        T* out = static_cast<T*>(p.out) + n * p.out_stride[0] + at[0] * p.out_stride[1];
        out[at[1]] = store<T>(sum);
    }
}

/// sums[k] += the product of `grad` with the `width` elements from row[k] on, k = 0 ... K - 1.
template <int K, typename A>
void dots(const A* grad, const A* row, int64_t width, double* sums) {
    Vector<A> sum[K] = {};
    int64_t x = 0;
    for (; x + kLanes<A> <= width; x += kLanes<A>) {
        const auto g = load_lanes<Vector<A>>(grad + x);
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) sum[k] += g * load_lanes<Vector<A>>(row + x + k);
    }
    for (int k = 0; k < K; ++k) {
        A rest = 0;
        for (int64_t i = x; i < width; ++i) rest += grad[i] * row[i + k];
        for (int lane = 0; lane < kLanes<A>; ++lane) rest += sum[k][lane];
        sums[k] += rest;
    }
}

/// The same with taps in lanes, of R rows: held[r][j] += the sum of grad[x] * rows[r][x + j], where
/// the taps j of a row fill W vectors. No sum crosses lanes, so narrow images cost no more.
template <int R, int W, typename A>
void tap_lanes(const A* grad, const A* const* rows, int64_t width, A* held) {
    constexpr int L = kLanes<A>;
    Vector<A> sum[R][W];
    memcpy(sum, held, sizeof(sum));
    for (int64_t x = 0; x < width; ++x)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w)
                sum[r][w] += grad[x] * load_lanes<Vector<A>>(rows[r] + x + w * L);
    memcpy(held, sum, sizeof(sum));
}

/// The sums of a part where taps are in lanes: in A for up to kChain columns, then in double.
template <int W, typename T>
class TapLanes {
    using A = Acc<T>;
    static constexpr int64_t kChain = 256, kPitch = W * kLanes<A>;
    static constexpr int kRows = W > 2 ? 2 : 4;
    const int64_t kh_, kw_;
    int64_t columns_ = 0;
    std::vector<A> held_;
    double* const sums_;

    template <int R>
    void rows_from(const A* grad, const Ring<T>& rows, int64_t i, int64_t x, int64_t count) {
        const A* some[R];
        for (int r = 0; r < R; ++r) some[r] = rows[i + r] + x;
        tap_lanes<R, W>(grad, some, count, &held_[i * kPitch]);
    }

  public:
    TapLanes(const Convolve2dParams& p, double* sums)
        : kh_(p.kh), kw_(p.kw), held_(p.kh * kPitch), sums_(sums) {}

    void add(const A* grad, const Ring<T>& rows, int64_t width) {
        for (int64_t x = 0; x < width; x += kChain) {
            const int64_t count = std::min(width - x, kChain);
            if (columns_ + count > kChain) flush();
            columns_ += count;
            int64_t i = 0;
            for (; i + kRows <= kh_; i += kRows) rows_from<kRows>(grad + x, rows, i, x, count);
            // Not one by one: sums of one row wait for each other.
            if (kh_ - i == 3) rows_from<3>(grad + x, rows, i, x, count);
            if (kh_ - i == 2) rows_from<2>(grad + x, rows, i, x, count);
            if (kh_ - i == 1) rows_from<1>(grad + x, rows, i, x, count);
        }
    }
    void flush() {
        for (int64_t i = 0; i < kh_; ++i)
            for (int64_t j = 0; j < kw_; ++j) sums_[i * kw_ + j] += held_[i * kPitch + j];
        std::fill(held_.begin(), held_.end(), A(0));
        columns_ = 0;
    }
};

/// As TapLanes, with columns in lanes.
template <typename T>
struct ColumnLanes {
    const Convolve2dParams& p;
    double* const sums;

    void add(const Acc<T>* grad, const Ring<T>& rows, int64_t width) {
        for (int64_t i = 0; i < p.kh; ++i) {
            int64_t j = 0;
            for (; j + 4 <= p.kw; j += 4) dots<4>(grad, rows[i] + j, width, &sums[i * p.kw + j]);
            for (; j < p.kw; ++j) dots<1>(grad, rows[i] + j, width, &sums[i * p.kw + j]);
        }
    }
    void flush() {}
};

/// Calls `body` with what sums up a part's rows most quickly: taps in lanes where they fill enough
/// of a vector, or columns are few.
template <typename T, typename Body>
void with_sums(const Convolve2dParams& p, double* sums, const Body& body) {
    constexpr int64_t L = kLanes<Acc<T>>;
    const int64_t vectors = ceil_div(p.kw, L);
    const bool many = 2 * p.kw >= L || p.OW < 4 * L;
    if (vectors > 4 || !many) return body(ColumnLanes<T>{p, sums});
    if (vectors == 1) return body(TapLanes<1, T>(p, sums));
    if (vectors == 2) return body(TapLanes<2, T>(p, sums));
    body(TapLanes<4, T>(p, sums));
}

template <typename T>
void gradient_parts(const Convolve2dParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    A grad[kStrip];
    std::vector<double> sums(p.kh * p.kw);
    const int64_t all = p.N / p.G * p.OH;  // rows of a group
    for (int64_t part = begin; part < end; ++part) {
        const int64_t g = part / p.splits, s = part % p.splits;
        const int64_t first = g * all + all / p.splits * s + std::min(all % p.splits, s);
        const int64_t count = all / p.splits + (s < all % p.splits);
        std::fill(sums.begin(), sums.end(), 0);
        with_sums<T>(p, sums.data(), [&](auto way) {
            for (int64_t x = 0; x < p.OW; x += kStrip) {
                const int64_t width = std::min(p.OW - x, kStrip);
                Ring<T> rows(p, x, width);
                for (int64_t row = first; row < first + count; ++row) {
                    const int64_t n = row / p.OH, y = row % p.OH;
                    rows.move_to(n, y);
                    gather(static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0] +
                               y * p.grad_out_stride[1] + x * p.grad_out_stride[2],
                           p.grad_out_stride[2], width, grad);
                    way.add(grad, rows, width);
                }
            }
            way.flush();
        });
        // From the order of correlation to that of the kernel, which is the reverse.
        A* partial = static_cast<A*>(p.partial) + part * p.kh * p.kw;
        std::copy(sums.rbegin(), sums.rend(), partial);
    }
}

}  // namespace
