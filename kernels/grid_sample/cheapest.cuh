// Which of two ways grid_sample on the GPU does a job in: what each costs, by the rates of
// rates/grid_sample.h.
#pragma once
#include "plan.cuh"

namespace {

/// Both ways, and when to take the second: always, never, or beyond so many sectors. The second
/// turns channels last, or sums in shared memory (`field`, `runs`, which look at the points too).
struct Plans {
    Plan plain, turned;
    enum { kPlain, kTurned, kProbe } take = kPlain;
    float few = 0;
    // Microseconds by rates/grid_sample.h: turned; as it is, with points that neighbour each other,
    // that do not. Of the gradient to the input, what each takes beyond what all do.
    double turning = kUnknown, near = kUnknown, far = kUnknown;
    const char* why =
        "there is one way for this: channels side by side, one channel, few points, "
        "float64, bicubic or fixed point";
};

constexpr int64_t kChoiceBytes = 256;

/// Microseconds of a million rows of two turned pixels of `pad` elements, of `size` bytes each.
double rows_of(int64_t pad, int size) {
    constexpr auto r = kGridSampleRates;
    return pad == 4 ? r.words : r.row + r.row_byte * std::max(2. * pad * size - 32, 0.);
}

/// The two ways' costs, where channels are turned last or not: turned fields have one row where
/// others have one for each channel, but take a pass of their own.
Plans cheapest_read(const GridSampleParams& p, Plans plans) {
    constexpr auto r = kGridSampleRates;
    const int size = element_size(p.dtype);
    const int64_t pad = plans.turned.pad, field = p.C * voxel_count(p) * size;
    const bool nearest = p.interpolation == Interpolation::kNearest;
    const double rows = double(p.B) * p.P * (nearest ? 1 : 1 << (p.D - 1)) * 1e-6;
    const double each = rows_of(pad, size);
    const double held = std::max(1., double(p.B) * p.C * voxel_count(p) * size * 1e-6);
    const double missed = r.missed * std::max(0., 1 - r.large / held);
    const double turned = r.turn +
                          double(p.B) * voxel_count(p) * (p.C + pad) * size * 1e-6 / r.stream +
                          rows * (each + missed);
    const bool last = p.input_stride[1] == 1;
    const double fetched =
        last ? std::min(r.scattered, r.last + r.last_byte * double(p.C * size) + missed / p.C)
             : r.scattered + missed;
    const double coherent = rows * p.C * r.coherent;
    const double scattered =
        rows * p.C * (field <= r.cache ? r.cached : fetched) * (by_planes(p) ? r.by_planes : 1);
    plans.turning = turned, plans.near = coherent, plans.far = scattered;
    plans.why = "turning costs more than it saves";
    if (nearest && last) return plans;  // a pixel is read at once as it is
    if (turned < r.gain * std::min(coherent, scattered)) {
        plans.take = Plans::kTurned, plans.why = "turning pays wherever the points lie";
    } else if (turned < r.look * scattered && scattered > r.least) {
        plans.take = Plans::kProbe, plans.why = "it pays where points are scattered";
        plans.few = r.near + (r.far - r.near) * float((turned - coherent) / (scattered - coherent));
    }
    return plans;
}

/// Of the gradient to the grid turning pays where the sectors that scattered points fetch channel
/// by channel outweigh the pass over the field.
Plans cheapest_grid(const GridSampleParams& p, Plans plans) {
    constexpr auto r = kGridSampleGradientRates;
    const int size = element_size(p.dtype), rows = 1 << (p.D - 1);
    if (p.C * voxel_count(p) * size <= kGridSampleRates.cache) {
        plans.why = "an L1 cache holds the field";
        return plans;
    }
    const double points = double(p.B) * p.P * 1e-6, voxels = double(p.B) * voxel_count(p) * 1e-6;
    const double pair = std::max<double>(2.0 * plans.turned.pad * size, 32);
    const double turning = voxels * (p.C + plans.turned.pad) * size / r.stream +
                           points * rows * pair * r.pair / r.sectors;
    // For each sector that 32 neighbouring points lie in, in each row of each channel.
    double sector = points * p.C * rows * r.sector / r.sectors;
    if (p.input_stride[1] == 1) sector *= r.last * size / 32;  // one for several channels
    plans.turning = turning, plans.near = r.look * sector, plans.far = 32 * sector;
    plans.why = "turning costs more than it saves, or all takes too little time for a look";
    if (p.C < 4 || turning > plans.far || plans.far < r.least) return plans;
    plans.take = turning < plans.near ? Plans::kTurned : Plans::kProbe;
    plans.why = plans.take == Plans::kProbe ? "it pays where points are scattered"
                                            : "turning pays wherever the points lie";
    plans.few = std::max(float(turning / sector), r.apart);
    return plans;
}

/// Microseconds of a plan's passes over whole fields for the gradient to the input.
double passes_of(const GridSampleParams& p, const Plan& plan) {
    constexpr auto r = kGridSampleGradientRates;
    const double field = double(p.B) * p.C * voxel_count(p) * element_size(p.dtype) * 1e-6;
    const double sums = plan.sum_bytes * 1e-6;
    double us = (plan.sums ? sums : field) / r.zeroed;
    if (plan.sums) us += (sums + field) / (plan.order ? r.rounded : r.stream);
    if (plan.copy) us += (plan.copy_bytes * 1e-6 + field) / r.stream;
    return us;
}

/// Of gradients to the input turning pays where words of four channels, added to at once, save more
/// than the passes over the field take.
Plans cheapest_sums(const GridSampleParams& p, Plans plans) {
    constexpr auto r = kGridSampleGradientRates;
    constexpr auto read = kGridSampleRates;
    const bool nearest = p.interpolation == Interpolation::kNearest;
    const double taps = double(p.B) * p.P * (nearest ? 1 : 1 << p.D) * 1e-6;
    const double words = double(plans.turned.pad) / 4;
    const double sums = double(p.B) * p.C * voxel_count(p) * 4e-6;
    const double missed = r.missed * std::max(0., 1 - read.large / sums);
    double near = taps * (p.C * r.add_near - words * r.word_near);
    double held = taps * (p.C * r.add_far - words * r.word_far);  // scattered, in the L2 cache
    double far = held + taps * (p.C - words) * missed;
    if (plans.turned.copy) {
        const double rows = taps / 2, each = rows_of(plans.turned.pad, 4);
        near += rows * (p.C * read.coherent - each);
        const double read_far = rows * (p.C * read.scattered - each) / 2;
        held += read_far, far += read_far;
    }
    const double passes = passes_of(p, plans.turned) - passes_of(p, plans.plain) + r.launches;
    plans.turning = passes, plans.near = near, plans.far = far;
    plans.why = "passes over the field take longer than words of four channels save";
    if (plans.turned.V == 1 || p.B * p.P < r.few || passes > far) return plans;
    if (passes < near) {
        plans.take = Plans::kTurned;
        plans.why = "words of four channels save more than passes take";
    } else if (far - passes > r.worth) {
        plans.take = Plans::kProbe, plans.why = "it pays where points are scattered";
        // What the cache misses costs points that share nothing: not those between.
        const double share = held > near ? (passes - near) / (held - near) : 1;
        plans.few = float(std::min(r.most, r.look + (32 - r.look) * share));
    }
    return plans;
}

Plans plans_of(const GridSampleParams& p) {
    Plans plans;
    plans.plain = plan_of(p, false);
    const bool sums = p.grad_out && p.grad_input && !is_second(p) && !plans.plain.fixed;
    if (sums && p.interpolation == Interpolation::kLinear) {
        if (is_dense(p) && by_runs(p)) {
            plans.turned.runs = true;
            plans.turned.sum_bytes = runs_of(p).bytes();
            plans.take = Plans::kProbe;
            plans.why = "16 bits, and far more pixels than points; unless these crowd in places";
            return plans;
        }
        if ((plans.turned.field = field_channels(p))) {
            plans.turned.sums = plans.turned.order = element_size(p.dtype) == 2;
            if (plans.turned.sums) plans.turned.sum_bytes = field_bytes(p, p.C * 4);
            plans.turned.pad = p.C;
            plans.take = Plans::kProbe, plans.few = kGridSampleGradientRates.field_few;
            plans.why = "shared memory pays where points of the same pixels do not neighbour";
            return plans;
        }
    }
    if (plans.plain.V > 1 || p.C == 1 || p.dtype == DType::kDouble || is_second(p) ||
        plans.plain.fixed || p.interpolation == Interpolation::kCubic || !fits_last(p) ||
        p.P < 1024)
        return plans;
    plans.turned = plan_of(p, true);
    return (!p.grad_out ? cheapest_read : p.grad_input ? cheapest_sums : cheapest_grid)(p, plans);
}

/// The jobs that make one of the gradients.
GridSampleParams to_input_of(GridSampleParams p) {
    p.grad_grid = nullptr;
    return p;
}
GridSampleParams to_grid_of(GridSampleParams p) {
    p.grad_input = nullptr;
    return p;
}

/// True if both gradients are made one after the other: where sums lie in another order than the
/// input, whose copy in that order would take longer than reading it as it is.
bool is_apart(const GridSampleParams& p) {
    constexpr auto r = kGridSampleRates;
    if (!p.grad_input || !p.grad_grid || is_second(p) || p.deterministic || p.C == 1 ||
        p.dtype == DType::kDouble || p.interpolation != Interpolation::kLinear || !fits_last(p))
        return false;
    const Plan turned = plan_of(p, true);
    if (!turned.copy) return false;
    const Plans input = plans_of(to_input_of(p));
    const bool added = input.take == Plans::kPlain && input.plain.V == 1;
    if (added || input.turned.runs || input.turned.field) return false;
    const double field = double(p.B) * p.C * voxel_count(p) * element_size(p.dtype) * 1e-6;
    const double copy = (turned.copy_bytes * 1e-6 + field) / kGridSampleGradientRates.stream;
    const double rows = double(taps_of(p)) / 2 * 1e-6;
    return copy + rows * rows_of(turned.pad, 4) > rows * p.C * (r.coherent + r.scattered) / 2;
}

int64_t bytes_of(const Plan& plan) { return plan.copy_bytes + plan.sum_bytes; }

}  // namespace
