// The phases of grid_sample's work on the CPU for one element type: copies to rows, points, sums,
// rounding. steps.h has what is done on points.
#pragma once
#include "steps.h"

namespace {

/// Images [.., c, z, y, x] copied line by line to other strides and another type.
template <typename From, typename To>
void copy_lines(const GridSampleParams& p, const Field& from, const Field& to, int64_t begin,
                int64_t end, int64_t items) {
    constexpr int64_t kTile = 16;
    const int64_t lines = p.B * p.size[0] * p.size[1], W = p.size[2];
    for (int64_t line = lines * begin / items; line < lines * end / items; ++line) {
        const int64_t y = line % p.size[1], z = line / p.size[1] % p.size[0];
        const int64_t b = line / p.size[1] / p.size[0];
        const From* in = static_cast<const From*>(from.data) + b * from.stride[0] +
                         z * from.stride[2] + y * from.stride[3];
        To* out =
            static_cast<To*>(to.data) + b * to.stride[0] + z * to.stride[2] + y * to.stride[3];
        for (int64_t x = 0; x < W; x += kTile)
            for (int64_t c = 0; c < p.C; c += kTile) {
                const int64_t right = std::min(W, x + kTile), top = std::min(p.C, c + kTile);
                const auto one = [&](int64_t i, int64_t k) {
                    out[i * to.stride[4] + k * to.stride[1]] =
                        store<To>(load(in[i * from.stride[4] + k * from.stride[1]]));
                };
                if (to.stride[1] == 1)
                    for (int64_t i = x; i < right; ++i)
                        for (int64_t k = c; k < top; ++k) one(i, k);
                else
                    for (int64_t k = c; k < top; ++k)
                        for (int64_t i = x; i < right; ++i) one(i, k);
            }
    }
}

/// The gradient is what the parts of the points come to, in their order.
template <typename A>
void add_parts(const GridSampleParams& p, const Plan& plan, int64_t begin, int64_t end,
               int64_t items) {
    const int64_t all = p.B * p.C * pixels(p);
    const int64_t first = all * begin / items, last = all * end / items;
    A* const to = static_cast<A*>(p.grad_input);
    std::copy(static_cast<A*>(plan.sums(p, 0)) + first, static_cast<A*>(plan.sums(p, 0)) + last,
              to + first);
    for (int64_t k = 1; k < plan.parts; ++k) {
        const A* const part = static_cast<const A*>(plan.sums(p, k));
        for (int64_t i = first; i < last; ++i) to[i] += part[i];
    }
}

template <typename T>
void run(const GridSampleParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    const Plan plan(p);
    const int64_t items = plan.items(p);
    switch (plan.steps[p.phase]) {
        case Plan::kCopy:
            copy_lines<T, A>(p, Plan::field(p.input, p.input_stride, p), plan.input, begin, end,
                             items);
            if (plan.upstream.data)
                copy_lines<T, A>(p, Plan::field(p.to_grad_input, p.to_grad_input_stride, p),
                                 plan.upstream, begin, end, items);
            return;
        case Plan::kRound:
            return copy_lines<A, T>(p, plan.target,
                                    Plan::field(p.grad_input, p.grad_input_stride, p), begin, end,
                                    items);
        case Plan::kAdd: return add_parts<A>(p, plan, begin, end, items);
        default: {
            Steps<A> steps(p, plan);
            if (plan.steps[p.phase] == Plan::kPoints)
                steps.points(begin, end);
            else
                steps.scatter_items(begin, end);
        }
    }
}

}  // namespace
