// One way in which grid_sample on the GPU does a job: whether fields are turned, how many channels
// at a time, where gradients are summed. Which one is taken is in cheapest.cuh.
#pragma once
#include <algorithm>
#include <cmath>

#include "choices.h"
#include "fixed_point.cuh"
#include "job.cuh"
#include "pixel_runs.cuh"
#include "rates/grid_sample.h"

namespace {

int64_t voxel_count(const GridSampleParams& p) {
    return int64_t(p.size[0]) * p.size[1] * p.size[2];
}

/// Strides of a contiguous channels-last tensor with C channels.
void last_strides(const GridSampleParams& p, int64_t C, int64_t (&stride)[5]) {
    stride[1] = 1, stride[4] = C, stride[3] = C * p.size[2], stride[2] = stride[3] * p.size[1];
    stride[0] = stride[2] * p.size[0];
}

int64_t gcd(int64_t a, int64_t b) { return b == 0 ? a : gcd(b, a % b); }

/// `size`: bytes of an element.
Offsets steps_of(const GridSampleParams& p, const int64_t (&stride)[5], int size) {
    Offsets s{};
    int64_t unit = 0, most = 0;
    for (int d = 0; d < 3; ++d)
        if (p.size[d] > 1) unit = gcd(unit, stride[2 + d]);
    if (unit == 0) unit = 1;
    constexpr int64_t kLimit = int64_t(1) << 30;
    bool rounds = true;  // as `pixel_of` does it for float
    for (int d = 0; d < 3; ++d) {
        const int64_t each = p.size[d] > 1 ? stride[2 + d] / unit : 0;
        s.step[d] = int(each);
        most = std::max(most, std::max(each, each * p.size[d]));
        rounds = rounds && p.whole[d] < 1 << 21;
    }
    s.unit = int(unit * size);
    s.fits = rounds && most < kLimit && unit * size < kLimit;
    for (int k = 0; k < 8; ++k)
        for (int d = 0; d < 3; ++d)
            if (k >> d & 1) s.corner[k] += int64_t(s.step[2 - d]) * s.unit;
    return s;
}

/// The most channels that can be read in one word.
int vector_of(const GridSampleParams& p, const void* data, const int64_t (&stride)[5]) {
    const int size = element_size(p.dtype);
    if (p.dtype == DType::kDouble || stride[1] != 1 || !steps_of(p, stride, size).fits) return 1;
    for (int V = 16 / size; V >= 4; V /= 2) {
        bool fits = p.C % V == 0 && reinterpret_cast<uintptr_t>(data) % (V * size) == 0 &&
                    stride[0] % V == 0;
        for (int d = 0; d < 3; ++d) fits = fits && (p.size[d] == 1 || stride[2 + d] % V == 0);
        if (fits) return V;
    }
    return 1;
}

/// True if words of channels are read that do not begin where words of memory do: of large images
/// and many points, but not so many that a copy in words of memory pays. Of others kernels that
/// read an element at a time take less time.
bool reads_across(const GridSampleParams& p) {
    constexpr auto r = kGridSampleRates;
    const int size = element_size(p.dtype);
    const int64_t voxels = voxel_count(p);
    const int64_t least = p.grad_out ? kGridSampleGradientRates.few_words : r.across_points;
    const bool quick = size == 4 && p.C <= 16;  // to copy
    return p.C > 4 && p.input_stride[1] == 1 && p.dtype != DType::kDouble &&
           p.interpolation == Interpolation::kLinear && p.B * p.P >= least &&
           double(p.P) <= (quick ? r.across_quick : r.across_most) * double(voxels) &&
           p.C * voxels * size >= r.across_image && steps_of(p, p.input_stride, size).fits;
}

template <typename A>
AxisOf<A> axis_of(const GridSampleParams& p, int d) {
    const A size = A(p.whole[d]), last = size - 1;
    const A span = p.align_corners ? last : size, low = p.align_corners ? 0 : A(-0.5);
    if (p.padding == Padding::kZeros) return {span / 2, low, -2, size + 1, low, span};
    return {span / 2, low, 0, last, low, span};
}

/// Channels to a word of a turned field: a few are not padded to many.
int turned_word(const GridSampleParams& p) {
    const bool even = ceil_div(p.C, 4) % 2 == 0, many = p.C > 40 && !p.grad_out;
    return element_size(p.dtype) == 2 && p.C > 4 && (even || many) ? 8 : 4;
}

/// Sums in shared memory of so many whole channels at a time, where these are not zero, in so many
/// blocks to an image.
struct FieldSums {
    int channels = 0, blocks = 0;
};

/// One way to do a job.
struct Plan {
    bool copy = false;     // of the input, channels last
    bool sums = false;     // of the gradient to the input, in float, channels last
    bool order = false;    // or in the order of the gradient itself
    bool fixed = false;    // or in fixed point, in the order of the gradient itself
    FieldSums field;       // or in shared memory
    bool runs = false;     // or of runs of pixels
    bool touched = false;  // of sums, those of pixels that points touch, and no others
    bool across = false;   // words of V channels do not begin where words of memory do
    bool pixels = false;   // or added to a pixel's channels at once, in words of float sums
    int V = 1;             // channels at a time
    int64_t pad = 0;       // channels of a copy or of sums
    int64_t copy_bytes = 0, sum_bytes = 0;

    /// Sums of pixels whose channels are padded to words.
    bool pads() const { return pixels && sums && !order; }
};

bool is_second(const GridSampleParams& p) { return p.to_grad_input || p.to_grad_grid; }

/// Whether offsets in a copy with the channels last fit in 32 bits.
bool fits_last(const GridSampleParams& p) {
    int64_t stride[5];
    last_strides(p, ceil_div(p.C, 8) * 8, stride);
    return steps_of(p, stride, 4).fits;
}

/// True if the forward has a thread for each point, and not several, whatever the channels; of few
/// points the channels are then shared out.
bool takes_points(const GridSampleParams& p) {
    const int64_t image = p.C * voxel_count(p) * element_size(p.dtype);
    return p.interpolation == Interpolation::kNearest || p.B * p.P < kGridSampleRates.few ||
           image < kGridSampleRates.held;
}

/// True if the forward, or nearest sums, take channel after channel, so that the L2 cache holds
/// what they read or add to at a time: of points that have no neighbours, in a field that the cache
/// does not hold.
bool by_planes(const GridSampleParams& p) {
    constexpr auto r = kGridSampleRates;
    const bool nearest = p.interpolation == Interpolation::kNearest;
    if (p.C == 1 || p.C >= 1 << 16 || (p.grad_out && !(nearest && p.grad_input))) return false;
    const double field = double(p.B) * p.C * voxel_count(p) * element_size(p.dtype);
    const double lonely = nearest && p.D == 2 ? r.lonely_nearest : r.lonely;
    return double(p.P) * lonely < double(voxel_count(p)) &&
           field > (p.grad_out ? r.plane_sums : r.plane_field);
}

int log2_of(int64_t x) {
    int log2 = 0;
    while (2 << log2 <= x) ++log2;
    return log2;
}

/// True if a pixel's channels lie side by side in the gradient to the input.
bool sums_last(const GridSampleParams& p) { return p.C > 1 && p.grad_input_stride[1] == 1; }

/// Additions to a channel by all points.
int64_t taps_of(const GridSampleParams& p) {
    return p.B * p.P << (p.interpolation == Interpolation::kNearest ? 0 : p.D);
}

/// Sums in shared memory, where they may be quicker than sums in memory.
FieldSums field_sums(const GridSampleParams& p) {
    constexpr auto r = kGridSampleGradientRates;
    const int size = element_size(p.dtype);
    const int64_t bytes = voxel_count(p) * std::max(size, 4);
    const bool few = p.C <= (size == 8 ? (1 << 16) - 1 : r.field_channels);
    if (!few || bytes > r.field || p.B > 65535 || p.P > 1 << 30) return {};
    int device = 0, shared = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int64_t fit = std::min<int64_t>(r.field, shared) / bytes;
    if (fit == 0) return {};
    // Few points of many channels leave a GPU idle, unless blocks share these out.
    const int64_t blocks = ceil_div(p.P, kFieldThreads), all = 2 * processors;
    const int64_t fill = std::min(ceil_div(all, p.B * blocks), p.C);
    const int64_t channels = ceil_div(p.C, std::max(ceil_div(p.C, fit), fill));
    const int64_t enough = ceil_div(all, p.B * ceil_div(p.C, channels));
    return {int(channels), int(std::min(blocks, enough))};
}

/// Runs of pixels for the gradient to the input, but for their memory.
PixelRuns runs_of(const GridSampleParams& p) {
    PixelRuns runs{};
    runs.last = sums_last(p);
    runs.pixels_log2 = log2_of(kRunElements / (runs.last ? p.C : 1));
    runs.each = int(ceil_div(voxel_count(p), 1 << runs.pixels_log2));
    runs.count = int(runs.each * p.B);
    return runs;
}

/// True if the gradient to the input is summed by runs of pixels: where passes over the field in
/// float take longer than lists of the points.
bool by_runs(const GridSampleParams& p) {
    constexpr auto r = kGridSampleGradientRates;
    const int64_t voxels = voxel_count(p);
    const bool last = sums_last(p);
    bool fits = element_size(p.dtype) == 2 && (!last || p.C <= 8) && voxels < 1 << 30 &&
                p.B < 1 << 16 && p.C < 1 << 16 && p.P < 1 << 30 &&
                steps_of(p, p.grad_input_stride, 2).fits;
    int64_t dense = last ? p.C : 1;
    for (int d = 2; d >= 0; dense *= p.size[d--])
        fits = fits && (p.size[d] == 1 || p.grad_input_stride[2 + d] == dense);
    const double points = double(p.B) * p.P;
    const double words = last ? 0 : std::max<double>(p.C - 4., 0) * r.summed_word;
    const double lists =
        points * (r.listed + p.C * r.summed + words) + r.lists + (last ? r.lists_last : 0);
    return fits && double(p.B) * p.C * voxels * r.passes > lists;
}

/// True if those who list the points for it make the gradient to the grid too.
bool slopes_by_runs(const GridSampleParams& p) {
    return p.C <= 2 && p.interpolation == Interpolation::kLinear &&
           steps_of(p, p.input_stride, element_size(p.dtype)).fits;
}

/// Scratch memory for a field of so many bytes a pixel.
int64_t field_bytes(const GridSampleParams& p, int64_t each) {
    return ceil_div(p.B * voxel_count(p) * each, 256) * 256;
}

/// True unless a field is so much larger than what is added to it that a pass over it in float does
/// not pay: one in 16 bits is then added to as it is.
bool is_dense(const GridSampleParams& p) {
    constexpr auto r = kGridSampleGradientRates;
    const bool nearest = p.interpolation == Interpolation::kNearest;
    return double(p.P) * (nearest ? r.rare_nearest : r.rare) >= double(voxel_count(p));
}

/// Microseconds of zeros before sums in float of a gradient of 16 bits, and of rounding them: of
/// the whole field.
double whole_us(const GridSampleParams& p, const Plan& plan) {
    constexpr auto r = kGridSampleGradientRates;
    const double field = double(p.B) * p.C * voxel_count(p) * 2e-6, sums = plan.sum_bytes * 1e-6;
    return sums / r.zeroed + (sums + field) / (plan.order ? r.rounded : r.stream);
}

/// Of zeros of the gradient itself, and of the sums of pixels that points touch.
double touched_us(const GridSampleParams& p, const Plan& plan) {
    constexpr auto r = kGridSampleGradientRates;
    const bool nearest = p.interpolation == Interpolation::kNearest;
    const double field = double(p.B) * p.C * voxel_count(p) * 2e-6;
    const double rows = double(p.B) * p.P * (nearest ? 1 : 1 << (p.D - 1)) * 1e-6;
    const double sectors = 1 + double(plan.pad) * (nearest ? 4 : 8) / 32;
    return r.touches + field / r.zeroed + rows * sectors * r.touch;
}

/// True if so many points are beside a field's pixels that hardly any lies alone.
bool is_crowded(const GridSampleParams& p) {
    return double(p.P) * kGridSampleGradientRates.apart > double(voxel_count(p));
}

/// True if a kernel adds to the channels of each pixel, which lie side by side, in words of memory
/// that begin anywhere: one of nearest points; or of up to three channels, of linear points or in
/// rows of a bicubic image's, unless so many points are of the same pixels that padded sums pay,
/// which linear ones of 16 bits have anyway.
bool adds_pixels(const GridSampleParams& p) {
    constexpr auto r = kGridSampleCubicRates;
    const bool dense = p.size[2] == 1 || p.grad_input_stride[4] == p.C;
    if (!sums_last(p) || !dense) return false;
    if (p.interpolation == Interpolation::kCubic)
        return p.D == 2 && p.C <= kPixelChannels && fits_last(p) && p.B * p.P >= r.pixel_points &&
               (p.C == 2 || double(p.P) < r.pixel_crowd * double(voxel_count(p)));
    return p.interpolation == Interpolation::kNearest ||
           (p.C <= kPixelChannels && (element_size(p.dtype) == 4 || !is_crowded(p)));
}

/// `turn`: with the channels last, whatever they are in the input.
Plan plan_of(const GridSampleParams& p, bool turn) {
    constexpr auto r = kGridSampleGradientRates;
    Plan plan;
    const int size = element_size(p.dtype);
    const int64_t voxels = voxel_count(p);
    const bool second = is_second(p);
    const bool last = vector_of(p, p.input, p.input_stride) > 1;
    if (p.grad_out && p.grad_input && p.deterministic) {
        plan.fixed = true;
    } else if (!p.grad_out) {
        plan.V = turn ? turned_word(p) : vector_of(p, p.input, p.input_stride);
        plan.copy = turn;
        // Those whose kernel has a thread for each point take four at a time.
        if (takes_points(p)) plan.V = std::min(plan.V, 4);
        plan.across = plan.V == 1 && reads_across(p);
        if (plan.across) plan.V = 16 / size;
    } else if (second || p.dtype == DType::kDouble) {
        plan.sums = plan.order = size == 2 && p.grad_input;
    } else if (!p.grad_input) {
        plan.copy = turn;
        plan.V = turn ? turned_word(p) : vector_of(p, p.input, p.input_stride);
        if (p.interpolation == Interpolation::kCubic) plan.V = std::min(plan.V, 4);
        plan.across = plan.V == 1 && reads_across(p);
        if (plan.across) plan.V = 16 / size;
    } else {
        const bool dense = is_dense(p), nearest = p.interpolation == Interpolation::kNearest;
        // A thread adds all channels of a point; or, of nearest ones, four or eight at a time.
        plan.pixels = (size == 4 || dense) && !turn && adds_pixels(p);
        const bool direct = !plan.pixels && (size == 4 || !dense) &&
                            vector_of(p, p.grad_input, p.grad_input_stride) >= 4;
        plan.sums = !direct && (turn || (size == 2 && dense));
        // Where points are few beside pixels, passes over the field cost more than they save; so
        // they do where each point adds to one pixel of few channels.
        const bool sparse = !turn && double(p.P) * r.sparse < double(voxels);
        plan.order = plan.sums && (p.C == 1 || sparse || (nearest && p.C < 4 && !turn) ||
                                   plan.pixels || p.B * p.P * p.C < r.few_sums || !fits_last(p));
        if (nearest && plan.sums && !plan.order) plan.pixels = true;
        const bool few = size == 4 && p.B * p.P < r.few;
        if (!plan.pixels && fits_last(p) && ((direct && !few) || (plan.sums && !plan.order))) {
            plan.V = p.C > 1 ? 4 : 1;
            int64_t summed[5];  // strides of what is summed to
            std::copy(p.grad_input_stride, p.grad_input_stride + 5, summed);
            if (plan.sums) last_strides(p, ceil_div(p.C, plan.V) * plan.V, summed);
            const Offsets in_steps = steps_of(p, p.input_stride, 1);
            const Offsets sum_steps = steps_of(p, summed, 1);
            const bool same = std::equal(in_steps.step, in_steps.step + 3, sum_steps.step);
            plan.copy = p.C > 1 && reads_input(p) && !(last && same);
        }
    }
    int64_t words = ceil_div(p.C, plan.V);
    // Where each thread reads a point's words, those of neighbours then lie in other banks.
    const bool single = plan.copy && !p.grad_out && takes_points(p) && words >= 4;
    if (single && voxels * (words | 1) * plan.V * size < kGridSampleRates.odd) words |= 1;
    plan.pad = words * plan.V;
    if (plan.pads()) plan.pad = ceil_div(p.C, 4) * 4;
    if (plan.copy) plan.copy_bytes = field_bytes(p, plan.pad * size);
    if (plan.sums) plan.sum_bytes = field_bytes(p, plan.pad * 4);
    // Their kernels know the pixels of a linear cell, and have words of channels.
    if (plan.sums && size == 2 && p.C >= r.touched_channels && sums_last(p) && is_dense(p) &&
        fits_last(p) && p.interpolation != Interpolation::kCubic) {
        Plan words = plan;
        if (plan.pixels && plan.order) {
            words.order = false, words.pad = ceil_div(p.C, 4) * 4;
            words.sum_bytes = field_bytes(p, words.pad * 4);
        }
        words.touched = !words.order && touched_us(p, words) < whole_us(p, plan);
        if (words.touched) plan = words;
    }
    if (plan.fixed) plan.sum_bytes = 8 * (1 + fixed_point_words(p.B * p.C * voxels));
    return plan;
}

/// Which of the kernels for few channels at a time fits the layout.
Narrow narrow_of(const GridSampleParams& p) {
    if (p.C > 1 && p.input_stride[1] == 1) return Narrow::kLast;
    return p.size[2] > 1 && p.input_stride[4] == 1 ? Narrow::kPlanar : Narrow::kNot;
}

/// Whether the kernel for the gradient to the grid alone does the job, in words or not.
bool grid_alone(const GridSampleParams& p, const Plan& plan) {
    return p.grad_grid && !p.grad_input && !is_second(p) &&
           p.interpolation == Interpolation::kLinear && narrow_of(p) != Narrow::kNot &&
           (plan.V < 4 || p.C == 4 || p.B * p.P < kGridSampleGradientRates.few_words);
}

/// Threads to a block. Where hardly any points of planes are of the same pixels, an L1 cache serves
/// a large block better, since neighbours are in the same SM; else small ones begin and end sooner.
int threads_of(const GridSampleParams& p, const Plan& plan) {
    const bool reads = !p.grad_out || (p.D == 3 && grid_alone(p, plan));
    const bool planes =
        reads && plan.V == 1 && !plan.across && p.C > 1 && narrow_of(p) == Narrow::kPlanar;
    return planes && p.interpolation == Interpolation::kLinear && p.dtype != DType::kDouble &&
                   p.B * p.P >= kGridSampleRates.filled &&
                   double(p.P) <= kGridSampleRates.large_blocks * double(voxel_count(p))
               ? kMostThreads
               : kThreads;
}

/// Threads that share a point.
int lanes_log2(const GridSampleParams& p, const Plan& plan) {
    constexpr auto rates = kGridSampleRates;
    const int64_t vectors = ceil_div(p.C, plan.pixels ? channels_at_once(p.C) : plan.V);
    const bool last = p.input_stride[1] == 1 || plan.pixels;
    if (plan.pixels && p.interpolation != Interpolation::kNearest) return 0;
    const bool wide = p.dtype == DType::kDouble && last && p.B * p.P > rates.wide_points;
    int log2 = 0;
    if (grid_alone(p, plan)) {  // a channel at a time, or a word of them
        const int64_t enough = rates.sharing / (last || p.C > 4 ? 1 : 3);
        while (log2 < (wide ? 3 : 5) && plan.V << log2 < p.C && p.B * p.P << (log2 + 1) <= enough)
            ++log2;
        return log2;
    }
    if (plan.V > 1 && p.interpolation != Interpolation::kCubic) {
        while (log2 < 3 && 1 << log2 < vectors) ++log2;
        return log2 + (p.grad_out ? 1 : 0);  // a column of corners each
    }
    // As many as fill the GPU. Where channels do not neighbour, lanes read far apart: no more than
    // leave whole sectors to neighbouring points, unless these are few.
    const int few = p.B * p.P < rates.fewest ? 5 : p.B * p.P < rates.fewer ? 4 : 2;
    const int most = wide && !p.grad_out ? 3 : last || !p.grad_out ? 5 : few;
    // A pixel of many channels is read by several threads, or an L1 cache has lost it by the next.
    const bool cubic = p.interpolation == Interpolation::kCubic && p.D == 2;
    const bool many = last && p.C * element_size(p.dtype) >= rates.shared_pixel;
    const bool lost = double(p.C * voxel_count(p)) * element_size(p.dtype) > rates.kept;
    const int least = plan.V > 1                                                  ? 2
                      : wide && lost && p.C >= rates.wide_channels && !p.grad_out ? 3
                      : many && cubic && !p.grad_input                            ? 1
                                                                                  : 0;
    // Threads that share a point add nothing up before it goes to memory, which is lost time where
    // points are many beside pixels. Channels last, they share sectors instead.
    const int64_t voxels = voxel_count(p);
    constexpr auto r = kGridSampleGradientRates;
    const double points_a_pixel = double(p.P) / double(voxels);
    const bool crowded = points_a_pixel > (last ? r.crowded_last : r.crowded);
    const bool adds = p.grad_input && p.interpolation != Interpolation::kCubic;
    const int64_t enough = rates.filled / (adds && crowded ? 4 : 1);
    while (log2 < most && 1 << log2 < vectors && (log2 < least || p.B * p.P << log2 < enough))
        ++log2;
    return log2;
}

/// Shares of the channels: as many as fill the GPU.
int shares_of(const GridSampleParams& p) {
    int64_t shares = 1;
    while (shares < 32 && shares * 4 < p.C && p.B * p.P * shares < kGridSampleRates.filled)
        ++shares;
    return int(shares);
}

}  // namespace
