// Which pixel along one axis the points of a grid need first, as grid_sample on the CPU finds it.
#include "taps.h"

namespace {

template <int kTaps, typename A>
void find_rows(const GridSampleRows& p, int64_t begin, int64_t end) {
    A x[kBlock];
    Axis<A> axis;
    for (int64_t at = begin; at < end;) {
        const int64_t b = at / p.P, q = at % p.P;
        const int n = int(std::min({end - at, p.P - q, int64_t(kBlock)}));
        dispatch(p.grid_dtype, [&](auto element) {
            const auto* const grid = static_cast<const decltype(element)*>(p.grid);
            read_points(grid + b * p.stride[0] + p.coordinate * p.stride[1], p.points, q, n, x);
        });
        find_taps<kTaps>(x, n, p.window(), p.padding, p.align_corners, false, axis);
        for (int i = 0; i < n; ++i) {
            uint32_t first = ~0u;  // as -1 is
            for (int k = 0; k < kTaps; ++k) first = std::min(first, uint32_t(axis.index[k][i]));
            p.out[at + i] = int32_t(first);
        }
        at += n;
    }
}

template <typename A>
void find(const GridSampleRows& p, int64_t begin, int64_t end) {
    switch (p.interpolation) {
        case Interpolation::kLinear: return find_rows<2, A>(p, begin, end);
        case Interpolation::kNearest: return find_rows<1, A>(p, begin, end);
        default: return find_rows<4, A>(p, begin, end);
    }
}

}  // namespace

void grid_sample_rows_cpu(const GridSampleRows* p, int64_t begin, int64_t end) {
    (p->exact ? find<double> : find<float>)(*p, begin, end);
}
