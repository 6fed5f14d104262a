// The phases of grid_sample's work on the CPU for one element type: copies to rows, points, sums.
// steps.h has what is done on points.
#pragma once
#include "steps.h"

namespace {

/// Images copied line by line to other strides and another type.
template <typename From, typename To>
void copy_lines(const GridSampleParams& p, const Field& from, const Field& to, int64_t begin,
                int64_t end, int64_t items) {
    const int64_t lines = p.B * p.size[0] * p.size[1];
    for (int64_t line = lines * begin / items; line < lines * end / items; ++line) {
        const int64_t y = line % p.size[1], z = line / p.size[1] % p.size[0];
        copy_line<From, To>(from, to, line / p.size[1] / p.size[0], z, y, p.size[2], 0, p.C);
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
