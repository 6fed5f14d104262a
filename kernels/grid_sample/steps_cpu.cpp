// grid_sample and its derivatives on the CPU; grid_sample.h has the formula.
//
// Points are taken in blocks of kBlock, whose taps are computed first, in vectors of points. Three
// steps then do every job: `sample` sums weight * pixel over the taps, `differentiate` does so with
// the weights' derivatives and grad_out, `scatter` adds weight * grad_out to the taps' pixels. Each
// comes in two forms: by planes, a channel at a time in vectors of points; and by rows, a point at
// a time in vectors of channels, where those are neighbours. Rows read whole cache lines: where
// many points fall on an image of several channels it is copied to rows first, and 16-bit gradients
// are summed in float rows and rounded once.
//
// No two threads write the same pixel: they share images, channels, or slabs of the slowest axis.
// Each pixel's sum is in the order of points however that is done, so results never depend on the
// number of threads.
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

int64_t grid_sample_scratch_cpu(GridSampleParams* p) {
    p->scattered = p->C * pixels(*p) > 1 << 18 && is_scattered(*p);
    const Plan plan(*p);
    plan.tell(*p);
    return plan.scratch();
}

int64_t grid_sample_items_cpu(const GridSampleParams* p) { return Plan(*p).items(*p); }

void grid_sample_cpu(const GridSampleParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) { run<decltype(element)>(*p, begin, end); });
}
