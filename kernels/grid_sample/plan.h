// How grid_sample on the CPU does a job: what is copied to rows, how work is shared out.
#pragma once
#include <numeric>

#include "choices.h"
#include "rates/grid_sample_cpu.h"
#include "taps.h"

namespace {

bool has_rows(const GridSampleParams& p, const int64_t (&stride)[5]) {
    return p.C >= 4 && stride[1] == 1;
}

int64_t pixels(const GridSampleParams& p) { return int64_t(p.size[0]) * p.size[1] * p.size[2]; }

int64_t taps(const GridSampleParams& p) {
    const int64_t each = p.interpolation == Interpolation::kLinear    ? 2
                         : p.interpolation == Interpolation::kNearest ? 1
                                                                      : 4;
    return each * each * (p.D == 3 ? each : 1);
}

/// The largest offset within one channel of an image fits 32 bits.
bool is_small(const GridSampleParams& p, const Field& f) {
    int64_t last = 0;
    for (int a = 0; a < 3; ++a) last += (p.size[a] - 1) * f.stride[2 + a];
    return last <= 0x7fffffff;
}

/// Whether most points lie far from the next one, in pixels: looked at in a sample of them.
[[maybe_unused]] bool is_scattered(const GridSampleParams& p) {
    constexpr int kPairs = 64, kFar = 8;
    if (p.P < 2) return false;
    int far = 0;
    dispatch(p.grid_dtype, [&](auto element) {
        const auto* const grid = static_cast<const decltype(element)*>(p.grid);
        for (int i = 0; i < kPairs; ++i) {
            // By the golden ratio: at even distances all could be ends of rows.
            const int64_t at = uint64_t(i) * 0x9E3779B97F4A7C15 % uint64_t(p.P - 1);
            const auto *one = grid + p.grid_points.at(at), *next = grid + p.grid_points.at(at + 1);
            double away = 0;
            for (int d = 0; d < p.D; ++d) {
                const int64_t k = d * p.grid_stride[1];
                away += fabs(double(load(next[k])) - double(load(one[k]))) * p.whole[2 - d] / 2;
            }
            far += !(away < kFar);
        }
    });
    return far > kPairs / 2;
}

/// What is done, in which order, by how many.
struct Plan : Fields {
    enum Step { kCopy, kPoints, kScatter, kAdd };
    Step steps[4];
    int count = 0;
    bool sum;                // the gradient is summed in scratch memory, and copied from there
    bool touched;            // of which only the pixels that points touch are used
    bool fused;              // the scattering step does all
    int64_t pieces;          // of the points, of copies
    int64_t shares, splits;  // of the scattering: images are shared, and each is split
    int64_t slabs;           // of a part of an image that is summed, one after the other
    int64_t slab;            // elements of one, in scratch memory
    int64_t parts;           // of an image's points, with sums of their own; or none
    bool by_channel;
    bool planes;  // planes_cpu.cpp does the points, and all but the cubic scattering
    bool cubic;   // cubic_cpu.rest.cpp does both: bicubic volumes and second derivatives
    int64_t element, field_bytes;  // of what is computed in: one's bytes, and a whole field's

    explicit Plan(const GridSampleParams& p) {
        const bool exact = p.dtype == DType::kFloat || p.dtype == DType::kDouble;
        element = p.dtype == DType::kDouble ? 8 : 4;
        const int64_t V = pixels(p), all = p.B * p.C * V;
        const int64_t work = p.B * p.P * (taps(p) * p.C + 24), fair = kGridSampleCpuRates.fair;
        field_bytes = (all * element + 63) / 64 * 64;
        input = field(p.input, p.input_stride, p);
        upstream = field(p.to_grad_input, p.to_grad_input_stride, p);
        target = field(p.grad_input, p.grad_input_stride, p);
        const bool dense = p.P * taps(p) >= 2 * V && work > fair;
        const bool flat = p.interpolation == Interpolation::kNearest;
        const bool reads_own = !p.grad_out || reads_input(p) || (p.to_grad_grid && p.out);
        const bool reads = reads_own || (p.to_grad_input && p.out);
        const bool keys = p.interpolation == Interpolation::kCubic,
                   wide = p.C * V > kGridSampleCpuRates.large;
        cubic = keys && (p.D == 3 || p.to_grad_input || p.to_grad_grid);
        // Bicubic volumes are read and added to more quickly by rows, too, where points are many.
        const bool many = !cubic || p.P * 4 >= V;
        if (!exact)
            copy = dense;
        else if (input.rows && (!upstream.data || upstream.rows))
            copy = false;
        else
            copy = cubic ? dense && p.C >= 4 && many : rows_save(p) > copy_takes(p);
        copy &= reads;
        const bool adds_rows =
            p.D == 3 || keys ? p.C >= 4 && many : p.C >= 8 && (p.scattered || !wide) && !flat;
        sum = p.grad_input && (!exact || (dense && adds_rows && !target.rows));
        touched = sum && !exact && !cubic && p.P * taps(p) * kGridSampleCpuRates.touched < V;
        if (!copy && (!exact || (upstream.data && input.rows != upstream.rows)))
            input.rows = upstream.rows = false;
        char* memory = static_cast<char*>(p.scratch);
        if (copy) {
            set_rows(p, input, memory), memory += field_bytes;
            if (upstream.data) set_rows(p, upstream, memory), memory += field_bytes;
        }
        if (sum) set_rows(p, target, memory);
        pieces = std::clamp<int64_t>(work / fair, 1, p.threads);
        const bool narrow = p.size[1] < 2 || p.size[2] < 2;
        const bool kept = exact && !copy && !sum;
        planes = p.D == 2 && (keys ? exact || copy : kept) &&
                 (element == 8) == (p.grid_dtype == DType::kDouble) && !p.to_grad_input &&
                 !p.to_grad_grid && !(narrow && !flat) && is_small(p, input) &&
                 (keys || !p.grad_input || is_small(p, target));
        const bool points = p.out || p.grad_grid;
        fused = true, shares = 1, splits = 1, by_channel = true;
        if (p.grad_input) {
            const int64_t want = std::clamp<int64_t>((work + all) / fair, 1, p.threads);
            if (want > 1) {
                shares = p.B >= 4 * want ? want : p.B;
                splits = p.B >= 4 * want ? 1 : want / std::gcd(p.B, want);
            }
            const int64_t units = target.rows ? ceil_div(p.C, 16) : p.C;
            // Threads that add to neighbouring floats would pass their cache lines to and fro, and
            // zeros are most of what few points need: written to rows in one piece.
            const bool apart = target.rows ? p.P * taps(p) * kGridSampleCpuRates.written >= V
                                           : std::abs(target.stride[1]) * element >= 64;
            const bool even = target.rows ? p.C % (16 * splits) == 0 : units % splits == 0;
            by_channel = splits == 1 || (apart && (even || units >= 4 * splits));
            if (!by_channel) splits = std::min<int64_t>(splits, p.size[3 - p.D]);
        }
        share_sums(p);
        fused = splits == 1 && slabs == 1;
        // Threads that share rows of an image go through all of its points: where these are many
        // beside pixels, parts of them have sums of their own; as many whatever the threads are.
        constexpr auto r = kGridSampleCpuRates;
        const bool is_one_run = p.B == 1 || p.grad_input_stride[0] == p.C * V;
        const bool few = p.C <= r.few_channels && p.B < r.most_parts && is_one_run;
        parts = 0;
        if (p.grad_input && planes && !keys && few && work > fair)
            parts = std::min({p.P * taps(p) / (V * r.crowded), r.most_parts,
                              int64_t(r.mapped) / std::max<int64_t>(field_bytes, 1)});
        if (parts < 2) parts = 0;
        fused = fused || parts;
        if (copy) steps[count++] = kCopy;
        if (points && !(p.grad_input && fused)) steps[count++] = kPoints;
        if (p.grad_input) steps[count++] = kScatter;
        if (parts) steps[count++] = kAdd;
    }

    static Field field(const void* data, const int64_t (&stride)[5], const GridSampleParams& p) {
        Field f{const_cast<void*>(data), {}, has_rows(p, stride)};
        std::copy_n(stride, 5, f.stride);
        return f;
    }
    /// Microseconds of a thread that reads by rows save, and those that a copy to them takes.
    /// Images of 2 x 2 taps or one are read by planes as quickly, in vectors of points, while a
    /// cache has them.
    double rows_save(const GridSampleParams& p) const {
        constexpr auto r = kGridSampleCpuRates;
        const bool keys = p.interpolation == Interpolation::kCubic, back = p.grad_out;
        const bool far = p.scattered && p.C * pixels(p) > r.large;
        if (p.interpolation == Interpolation::kNearest || p.C < 4) return 0;
        if (!keys && p.D == 2 && !far) return 0;
        const auto& by = keys ? r.bicubic : p.D == 2 ? r.far_image : far ? r.far_volume : r.volume;
        return p.B * p.P * 1e-3 * double(p.C - by.spared[back]) * by.saved[back];
    }
    double copy_takes(const GridSampleParams& p) const {
        constexpr auto r = kGridSampleCpuRates;
        const double thousands = double(p.B) * p.C * double(pixels(p)) * 1e-3;
        return thousands * (r.convert + (double(field_bytes) < r.mapped ? 0 : r.fresh));
    }
    /// How sums lie in memory: a part of an image for each that is at work, or a slab of it where
    /// those would be too large for memory that a process keeps.
    void share_sums(const GridSampleParams& p) {
        constexpr auto r = kGridSampleCpuRates;
        slabs = 1, slab = 0;
        if (!sum) return;
        const int64_t size = p.size[3 - p.D], line = p.C * pixels(p) / size;
        const int64_t most = by_channel ? size : ceil_div(size, splits);
        const int64_t bytes = sums_at_once() * most * line * element;
        const int64_t want = double(bytes) < r.mapped ? 1 : ceil_div(bytes, r.kept);
        // Each slab looks at all points, and does all but the sums for those of others nearby.
        const double pass =
            p.P * 1e-3 * (p.scattered ? r.again + r.again_each * (p.C + taps(p)) : r.looked);
        if ((want - 1) * pass < most * line * 1e-3 * r.fresh)
            slabs = std::clamp<int64_t>(want, 1, most);
        slab = ceil_div(most, slabs) * line;
        target.stride[0] = 0;
        if (!target.rows) target.stride[1] = slab / p.C;
    }
    /// Parts of images with sums of their own: those that share channels have them in common.
    int64_t sums_at_once() const { return by_channel ? shares : shares * splits; }
    static void set_rows(const GridSampleParams& p, Field& f, void* memory) {
        f.data = memory, f.rows = p.C >= 4;
        if (f.rows) {
            f.stride[1] = 1, f.stride[4] = p.C;
        } else {
            f.stride[4] = 1, f.stride[1] = pixels(p);
        }
        f.stride[3] = f.stride[4] * p.size[2], f.stride[2] = f.stride[3] * p.size[1];
        f.stride[0] = p.C * pixels(p);
    }
    void tell(const GridSampleParams& p) const {
        const char* const what = p.grad_out ? "layout, of gradients" : "layout";
        tell_choice("grid_sample", what, copy ? "a copy, channels last" : "as it is",
                    copy     ? "reads of its rows save more than it takes, or 16 bits"
                    : planes ? "points in vectors, or channels that neighbour in memory"
                             : "few points, channels last already, or one channel");
        if (p.grad_input)
            tell_choice("grid_sample", "sums of the gradient to input",
                        touched ? "a copy, of pixels that points touch"
                        : sum   ? "a copy, channels last"
                        : parts ? "several, each of a part of the points"
                                : "in place",
                        touched ? "16 bits, and far more pixels than points"
                        : sum   ? "many channels to a pixel, or 16 bits"
                        : parts ? "far more points than pixels, few channels"
                                : "few channels or points");
    }
    /// The job with the input where it is read.
    GridSampleParams read_by(const GridSampleParams& p) const {
        GridSampleParams own = p;
        own.input = input.data;
        std::copy_n(input.stride, 5, own.input_stride);
        return own;
    }
    /// Where the k-th part of the points has its sums.
    void* sums(const GridSampleParams& p, int64_t k) const {
        return static_cast<char*>(p.scratch) + k * field_bytes;
    }
    int64_t scratch() const {
        return field_bytes * ((copy ? 1 + (upstream.data != nullptr) : 0) + parts) +
               (sum ? sums_at_once() * slab * element : 0);
    }
    int64_t items(const GridSampleParams& p) const {
        if (p.phase >= count) return 0;
        switch (steps[p.phase]) {
            case kPoints: return pieces;
            case kScatter: return parts ? p.B * parts : shares * splits;
            default: return std::min<int64_t>(p.threads, ceil_div(p.B * p.C * pixels(p), 1 << 14));
        }
    }
};

}  // namespace
