// Images in two dimensions, where 4-D grid_sample spends its time: float32, without copies but
// where bicubic, one derivative (float64: double_cpu.rest.cpp); points and results of 16 bits are
// converted some blocks at a time. A channel at a time in vectors of points; or, where channels are
// neighbours in memory, a point at a time in vectors of channels.
//
// An axis' two taps are a pair of neighbouring pixels that always lies within the image: at its
// borders the pair is moved inwards and the weights change places, and what is outside gets none.
// So one offset a point serves all four taps, a pair is one load, and nothing depends on where the
// points are but a mask, which keeps infinite pixels that a point does not touch out of its sum.
#include "planes_cubic.h"
#include "planes_linear.h"
// After these: what is included before their #pragma GCC is no longer inlined, as std::min.
#include <memory>

namespace {

NOINLINE void run(const GridSampleParams& p, const Part& part) { Planes<float>(p, part).run(); }

/// n points (x, y) from the first-th on.
template <typename T>
void convert_pairs(const T* from, const GridSampleParams& p, int64_t first, int64_t n, float* to) {
    const PointsView& view = p.grid_points;
    if (p.grid_stride[1] == 1 && view.stride[2] == 2 && view.count[1] >= p.P)
        return load_run(from + 2 * first, 2 * n, to);
    float along[kBlock];
    for (int d = 0; d < 2; ++d)
        for (int64_t i = 0; i < n; i += kBlock) {
            const int count = int(std::min<int64_t>(kBlock, n - i));
            read_points(from + d * p.grid_stride[1], view, first + i, count, along);
            for (int k = 0; k < count; ++k) to[2 * (i + k) + d] = along[k];
        }
}

/// The same of points, values or gradients of 16 bits: as many points at a time as a core's first
/// caches have room for, as float32.
void run_converted(const GridSampleParams& p, const Part& part) {
    constexpr int64_t kRoom = 1 << 14;
    const int64_t rows = 4 + (p.out || p.grad_out ? p.C : 0);
    const int64_t most = std::max<int64_t>(kRoom / rows / kBlock, 1) * kBlock;
    const std::unique_ptr<float[]> memory(new float[rows * most]);
    float *const grid = memory.get(), *const grad_grid = grid + 2 * most,
                 *const values = grad_grid + 2 * most;
    GridSampleParams q = p;
    Part few = part;
    q.grid_dtype = q.out_dtype = DType::kFloat;
    q.input = static_cast<const float*>(p.input) + part.image * p.input_stride[0];
    if (p.grad_input)
        q.grad_input = static_cast<float*>(p.grad_input) + part.image * p.grad_input_stride[0];
    q.grid = grid, q.grid_stride[0] = 0, q.grid_stride[1] = 1;
    q.grid_points = {{1, most}, {0, 0, 2}};
    if (p.grad_out)
        q.grad_out = values, q.grad_out_stride[0] = 0, q.grad_out_points = {{1, most}, {0, 0, 1}};
    if (p.out) q.out = values;
    if (p.grad_grid) q.grad_grid = grad_grid;
    few.image = few.begin = 0;
    for (int64_t first = part.begin; first < part.end; first += most) {
        const int64_t n = q.P = few.end = std::min(most, part.end - first);
        dispatch_to<float>(p.grid_dtype, [&](auto element) {
            const auto* const from = static_cast<const decltype(element)*>(p.grid);
            convert_pairs(from + part.image * p.grid_stride[0], p, first, n, grid);
        });
        q.grad_out_stride[1] = n;
        dispatch_to<float>(p.out_dtype, [&](auto element) {
            const auto* const from = static_cast<const decltype(element)*>(p.grad_out) +
                                     part.image * p.grad_out_stride[0];
            for (int64_t c = 0; p.grad_out && c < p.C; ++c)
                read_points(from + c * p.grad_out_stride[1], p.grad_out_points, first, int(n),
                            values + c * n);
        });
        run(q, few);
        dispatch_to<float>(p.out_dtype, [&](auto element) {
            auto* const to = static_cast<decltype(element)*>(p.out);
            for (int64_t c = 0; p.out && c < p.C; ++c)
                store_run(values + c * n, n, to + (part.image * p.C + c) * p.P + first);
        });
        dispatch_to<float>(p.grid_dtype, [&](auto element) {
            auto* const to = static_cast<decltype(element)*>(p.grad_grid);
            if (part.points && to) store_run(grad_grid, 2 * n, to + 2 * (part.image * p.P + first));
        });
    }
}

}  // namespace

void grid_sample_planes_cpu(const GridSampleParams* p, const Part* part) {
    if (p->grid_dtype == DType::kFloat && p->out_dtype == DType::kFloat)
        run(*p, *part);
    else
        run_converted(*p, *part);
}
