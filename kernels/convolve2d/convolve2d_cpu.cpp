// Two-dimensional convolution on the CPU; the sums are written out in convolve2d.h.
// An image is walked in strips of up to kStrip columns, row by row. The kh rows of input that a row
// of output needs lie in a ring of buffers, extended beyond the borders and in the accumulating
// type, each gathered once: the loops over taps then know no borders, strides or element types, and
// run along neighbouring columns in vector registers.
#include <algorithm>
#include <vector>

#include "convolve2d.h"
#include "lanes.h"

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
          pitch_(reach_ + kLanes<A>),  // the last vector of a row may pass its end
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

void convolve2d_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) { convolve_rows<decltype(element)>(*p, begin, end); });
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

void convolve2d_fold_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) { fold_pixels<decltype(element)>(*p, begin, end); });
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
        for (int64_t x = 0; x < p.OW; x += kStrip) {
            const int64_t width = std::min(p.OW - x, kStrip);
            Ring<T> rows(p, x, width);
            for (int64_t row = first; row < first + count; ++row) {
                const int64_t n = row / p.OH, y = row % p.OH;
                rows.move_to(n, y);
                gather(static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0] +
                           y * p.grad_out_stride[1] + x * p.grad_out_stride[2],
                       p.grad_out_stride[2], width, grad);
                for (int64_t i = 0; i < p.kh; ++i) {
                    int64_t j = 0;
                    for (; j + 4 <= p.kw; j += 4)
                        dots<4, A>(grad, rows[i] + j, width, &sums[i * p.kw + j]);
                    for (; j < p.kw; ++j) dots<1, A>(grad, rows[i] + j, width, &sums[i * p.kw + j]);
                }
            }
        }
        // From the order of correlation to that of the kernel, which is the reverse.
        A* partial = static_cast<A*>(p.partial) + part * p.kh * p.kw;
        std::copy(sums.rbegin(), sums.rend(), partial);
    }
}

void convolve2d_parts_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) { gradient_parts<decltype(element)>(*p, begin, end); });
}

void convolve2d_sum_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) {
        using A = Acc<decltype(element)>;
        const int64_t taps = p->kh * p->kw;
        for (int64_t i = begin; i < end; ++i) {
            const A* part =
                static_cast<const A*>(p->partial) + i / taps * p->splits * taps + i % taps;
            double sum = 0;
            for (int64_t s = 0; s < p->splits; ++s) sum += part[s * taps];
            store_tap(*p, i, sum);
        }
    });
}
