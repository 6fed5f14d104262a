// Whether grid_sample on the GPU takes a field slab by slab, which the L2 cache then holds.
#pragma once
#include "plan.cuh"

namespace {

/// Launches one after the other, each of the points of one slab of the field, which the L2 cache
/// then holds; all read all coordinates. Of points that are scattered over the field.
struct Slabs {
    int count = 1;
    double field = 0;   // MB of an image that are read or added to
    double gain = 0;    // microseconds more where the cache holds nothing of these,
    double cost = 0;    // and those of reading all coordinates again
    double window = 0;  // points that read as much as makes the cache lose the field

    double saved() const { return gain * (1 - kGridSampleSlabRates.held / field) - cost; }
};

/// Of 16-bit coordinates those near the borders lie apart: the share of an axis that they reach.
double reached(DType dtype, int size) {
    return dtype == DType::kHalf       ? std::min(1., 2560. / size)
           : dtype == DType::kBFloat16 ? std::min(1., 320. / size)
                                       : 1;
}

/// Where kernels take slabs and these may pay.
Slabs slabs_of(const GridSampleParams& p, const Plan& plan) {
    constexpr auto r = kGridSampleSlabRates;
    if (p.P < r.few || p.interpolation == Interpolation::kCubic || p.dtype == DType::kDouble ||
        p.B > r.images || is_second(p) || plan.fixed || plan.touched || plan.runs ||
        plan.field.channels)
        return {};
    const bool linear = p.interpolation == Interpolation::kLinear, words = plan.V == 4;
    const bool takes = p.grad_input ? plan.V == 1 || (words && p.C <= 8)
                       : p.grad_out ? grid_alone(p, plan)
                       : words      ? linear && p.C <= 4
                                    : linear && plan.V == 1 && narrow_of(p) != Narrow::kNot;
    const int size = element_size(p.dtype), sum_size = plan.sums ? 4 : size;
    const double elements =
        double(voxel_count(p)) * double(words || p.grad_out || !by_planes(p) ? plan.pad : 1) * 1e-6;
    const double bytes =
        elements * ((p.grad_input ? sum_size : 0) + (p.grad_input && !reads_input(p) ? 0 : size));
    if (!takes || bytes < r.least || !steps_of(p, p.input_stride, size).fits) return {};
    Slabs slabs;
    slabs.field = bytes;  // as far as coordinates reach it
    for (int d = 0; d < 2; ++d) slabs.field *= reached(p.grid_dtype, p.size[d]);
    const double points = double(p.B) * p.P * 1e-6;
    const double rows = points * (linear ? 1 << (p.D - 1) : 1);
    // A row's sectors, or words.
    const bool last = plan.pixels || (p.C > 1 && p.input_stride[1] == 1);
    const double read = words ? 1 : last ? ceil_div(p.C * size, 32) : p.C;
    const double added = words  ? double(plan.pad) / 4 * (linear ? 2 : 1)
                         : last ? ceil_div(p.C * sum_size, 32)
                                : p.C;
    if (p.grad_input) slabs.gain = rows * added * (words ? r.words : r.sums);
    if (!p.grad_input || reads_input(p))
        slabs.gain += rows * read * (p.grad_out ? r.slopes : r.forward);
    const int most = std::min(p.size[3 - p.D], r.most);
    const int count = std::min(most, int(std::ceil(bytes / (p.grad_input ? r.slab_sums : r.slab))));
    const double place = p.D * element_size(p.grid_dtype), values = double(p.C) * size;
    const double written = !p.grad_out ? values : reads_input(p) ? place : 0;
    const double each =
        (words && p.grad_input ? r.pass_words : r.pass) + place * r.place + written * r.written;
    slabs.cost = (count - 1) * points * (each + (p.grad_out ? values * r.read : 0));
    slabs.window = std::max(
        r.window, std::min(double(p.P), r.traffic / 32 / (rows / points * std::max(read, added))));
    const double worth = p.D == 2 ? r.worth_image : r.worth_volume;
    if (slabs.saved() > worth * (r.look + count * r.launch)) slabs.count = count;
    return slabs;
}

}  // namespace
