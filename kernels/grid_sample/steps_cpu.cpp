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
// Each pixel's sum is in the order of points however that is done, or of parts of the points that
// do not depend on the number of threads; nor then do results.
#include "phases.h"

int64_t grid_sample_scratch_cpu(GridSampleParams* p) {
    p->scattered = p->C * pixels(*p) > 1 << 18 && is_scattered(*p);
    const Plan plan(*p);
    plan.tell(*p);
    return plan.scratch();
}

int64_t grid_sample_items_cpu(const GridSampleParams* p) { return Plan(*p).items(*p); }

void grid_sample_cpu(const GridSampleParams* p, int64_t begin, int64_t end) {
    switch (p->dtype) {
        case DType::kFloat: return run<float>(*p, begin, end);
        case DType::kDouble: return p->rest->double_cpu(p, begin, end);
        case DType::kHalf: return run<Half>(*p, begin, end);
        case DType::kBFloat16: return run<BFloat16>(*p, begin, end);
    }
}
