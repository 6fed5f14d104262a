// Which of two ways grid_sample on the GPU does a job in: what each costs, by the rates of
// rates/grid_sample.h.
#pragma once
#include <utility>

#include "plan.cuh"

namespace {

/// Microseconds that a way takes by rates/grid_sample.h, beyond what all do: of points that share
/// what they read with their neighbours, of points that share nothing.
struct Cost {
    double near = kUnknown, far = kUnknown;
};

/// What the second way saves, as a look judges it: `near`, and of the share of 32 neighbouring
/// points that lie in sectors of their own `apart`; and `missed`, as far as these lie all over the
/// field.
struct Savings {
    float near, apart, missed;
    bool pixels = false;  // not sectors, but pixels of their own
};

/// Beyond so many sectors, or pixels, that 32 points lie in.
Savings beyond(float sectors) { return {(1 - sectors) / 31, 1, 0}; }

/// Both ways, and when to take the second: always, never, or by a look at the points. The second
/// turns channels last, or sums in shared memory (`field`, `runs`).
struct Plans {
    Plan plain, turned;
    enum { kPlain, kTurned, kProbe } take = kPlain;
    Savings saved{};
    Cost as_it_is, turning;
    const char* why =
        "there is one way for this: channels side by side, one channel, few points, "
        "float64 or fixed point";
};

constexpr int64_t kChoiceBytes = 256;  // of a choice, and of counters behind it
constexpr int kCounters = kChoiceBytes / 4 - 1;

/// How far 32 points that lie anywhere are apart: 0 where all are in one of so many places, 1 where
/// each is in another, by how many places 32 draws meet, or half of 64.
double apart(double places, int draws = 32) {
    places = std::max(places, 1.);
    double left = 1 - 1 / places;  // of the places, after one draw
    for (int n = 1; n < draws; n *= 2) left *= left;
    return std::max(0., (places * (1 - left) * 32 / draws - 1) / 31);
}

/// Microseconds more to turn planes that have gaps between their rows.
double gaps_of(const GridSampleParams& p) {
    const int64_t* const stride = p.input_stride;
    const bool dense = (p.size[1] == 1 || stride[3] == stride[4] * p.size[2]) &&
                       (p.size[0] == 1 || stride[2] == stride[3] * p.size[1]);
    if (dense || (p.C > 1 && stride[1] == 1)) return 0;
    const double each = p.C <= 4 ? kGridSampleRates.gaps_few : kGridSampleRates.gaps;
    return double(p.B * p.C * voxel_count(p)) * 1e-6 * each;
}

/// Chooses by what is read of the field: turned ones have one row where others have one for each
/// channel, but take a pass of their own. What a call takes goes with the sectors that 32
/// neighbouring points lie in; a look counts them where either way may lose more than that takes.
Plans cheapest_read(const GridSampleParams& p, Plans plans, const GridSampleReadRates& r) {
    const int size = element_size(p.dtype);
    const bool nearest = p.interpolation == Interpolation::kNearest;
    const bool last = p.input_stride[1] == 1;
    const double pixels = double(voxel_count(p)), pad = double(plans.turned.pad);
    const double field = double(p.B) * pixels * 1e-6 * double(p.C) * size;  // MB
    const double copy = double(p.B) * pixels * 1e-6 * pad * size;
    const double points = double(p.B) * double(p.P) * 1e-6, pair = nearest ? 1 : 2;
    const double rows = points * (nearest ? 1 : 1 << (p.D - 1)), all = rows * double(p.C);
    const auto missed = [](double bytes, double held) {
        return bytes > held ? 1 - held / bytes : 0.;
    };
    const auto by_l1 = [&](double bytes) {
        return missed(bytes / double(p.B), kGridSampleRates.small);
    };
    const auto by_l2 = [&](double bytes) { return missed(bytes, kGridSampleRates.large); };
    // Sectors that two pixels of so many bytes lie in, wherever they begin.
    const auto sectors = [&](double bytes) { return pair * bytes / 32 + 31. / 32; };
    // A look takes the sectors of cells' first rows, and of their second.
    const double most =
        apart(pixels * std::min(1., double(last ? p.C : 1) * size / 32), nearest ? 32 : 64);
    const double share = (1 + 31 * most) / 32;  // of 32 points' sectors that are read
    const auto& as_is = last ? r.last : r.planes;
    Cost& plain = plans.as_it_is;
    plain.near = all * as_is.row;
    const double spread = last ? most : apart(pixels * size / 128);
    const double plain_lost =
        share * as_is.lost * by_l2(field) * (last ? rows * sectors(double(p.C) * size) : all);
    plain.far = plain.near + all * (as_is.spread * spread + share * as_is.missed * by_l1(field)) +
                plain_lost;

    const auto& words = !p.grad_out && takes_points(p) ? r.single : r.shared;
    const double far = apart(pixels);  // pixels that 32 points lie in; neighbours by their distance
    const double to_point = pixels / double(p.P);
    const double near = std::min(far, p.D == 2 ? std::sqrt(to_point) : std::cbrt(to_point));
    const double read = rows * pair * pad / plans.turned.V, moved = rows * sectors(pad * size);
    const double passes =
        r.turn + r.stream * (field + copy) + gaps_of(p) + points * (r.point + r.out * double(p.C));
    const double beyond = read * words.spread + moved * words.missed * by_l1(copy);
    Cost& turned = plans.turning;
    turned.near = passes + read * words.row + near * beyond;
    const double turned_lost = moved * far * words.lost * by_l2(copy);
    turned.far = passes + read * words.row + far * beyond + turned_lost;

    const double in_order = plain.near - turned.near, scattered = plain.far - turned.far;  // saved
    const double by_plain = std::max({in_order, scattered, 0.});
    const double by_turned = std::max({-in_order, -scattered, 0.});
    constexpr double kLeast = 0.02;  // that a look can tell from none
    if (most > kLeast && std::min(by_plain, by_turned) > r.worth) {
        plans.take = Plans::kProbe, plans.why = "it pays where points are scattered";
        const double lost = plain_lost - turned_lost;
        plans.saved = {float(in_order), float((scattered - in_order - lost) / most),
                       float(lost / most)};
    } else if (by_plain > by_turned * r.bet) {
        plans.take = Plans::kTurned, plans.why = "turning pays wherever the points lie";
    } else {
        plans.why = "turning costs more than it saves, or all takes too little time for a look";
    }
    return plans;
}

/// Microseconds of a million rows of two turned pixels of `pad` elements.
double rows_of(int64_t pad) {
    constexpr auto r = kGridSampleGradientRates;
    return pad == 4 ? r.words : r.row + r.row_byte * (2. * double(pad) * 4 - 32);
}

/// Microseconds of a plan's passes over whole fields for the gradient to the input.
double passes_of(const GridSampleParams& p, const Plan& plan) {
    constexpr auto r = kGridSampleGradientRates;
    const double field = double(p.B) * p.C * voxel_count(p) * element_size(p.dtype) * 1e-6;
    double us = plan.touched ? touched_us(p, plan)
                : plan.sums  ? whole_us(p, plan)
                             : field / r.zeroed;
    if (plan.copy) us += (plan.copy_bytes * 1e-6 + field) / r.stream + gaps_of(p);
    return us;
}

/// The additions of a plan to the gradient to the input, or to sums of it, and what takes a million
/// of them how long. `near`, `far` as in Cost; `held`: scattered, but in the L2 cache.
struct Adding {
    double near, held, far;

    Adding(const GridSampleParams& p, const Plan& plan) {
        constexpr auto r = kGridSampleGradientRates;
        const bool nearest = p.interpolation == Interpolation::kNearest;
        const bool words = plan.V > 1 || plan.pads();
        const auto& rates = words          ? (nearest ? r.add_nearest_word : r.add_word)
                            : nearest      ? r.add_nearest
                            : plan.pixels  ? r.add_pixel
                            : sums_last(p) ? r.add_beside
                                           : r.add_row;
        const double adds = double(taps_of(p)) * 1e-6 * double(words ? plan.pad / 4 : p.C);
        const double to_point = double(voxel_count(p)) / double(p.P);  // pixels
        const double apart = std::min(1., std::max(0., std::log2(to_point) / 2));
        const bool one = !words && nearest && by_planes(p);
        const double sums = double(p.B * voxel_count(p)) * 4e-6 * double(one ? 1 : plan.pad);
        const double missed = std::max(0., 1 - rates.held / sums) * rates.missed;
        const double points = words && !nearest ? double(p.B * p.P) * 1e-6 * r.add_word_point : 0;
        near = points + adds * (rates.near + apart * rates.apart);
        held = points + adds * rates.far, far = held + adds * missed;
    }
};

/// Of gradients to the input turning pays where words of four channels, added to at once, save more
/// than the passes over the field take.
Plans cheapest_sums(const GridSampleParams& p, Plans plans) {
    constexpr auto r = kGridSampleGradientRates;
    const Adding plain(p, plans.plain), turned(p, plans.turned);
    double near = plain.near - turned.near, held = plain.held - turned.held;
    double far = plain.far - turned.far;
    if (plans.turned.copy) {
        const double rows = double(taps_of(p)) / 2 * 1e-6, each = rows_of(plans.turned.pad);
        near += rows * (p.C * r.coherent - each);
        const double read_far = rows * (p.C * r.scattered - each) / 2;
        held += read_far, far += read_far;
    }
    const double passes = passes_of(p, plans.turned) - passes_of(p, plans.plain) + r.launches;
    plans.turning = {passes, passes}, plans.as_it_is = {near, far};
    plans.why = "passes over the field take longer than words of four channels save";
    // Threads that share few points add to channels side by side at once.
    const bool few = sums_last(p) && p.B * p.P < r.few;
    const bool none = plans.turned.V == 1 && !plans.turned.pixels;
    if (none || few || passes > std::max(near, far)) return plans;
    // Or, of scattered points, much more, and else hardly less: a look would take as long.
    const double look = r.worth + double(p.B * p.P) * 1e-6 * r.idle;
    const bool much = far - passes > look;
    if (passes < near || (much && passes - near < look / 2)) {
        plans.take = Plans::kTurned;
        plans.why = "words of four channels save more than passes take";
    } else if (much) {
        plans.take = Plans::kProbe, plans.why = "it pays where points are scattered";
        // What the cache misses costs points that share nothing: not those between.
        const double share = held > near ? (passes - near) / (held - near) : 1;
        plans.saved = beyond(float(std::min(r.most, r.look + (32 - r.look) * share)));
    }
    return plans;
}

/// True if sums of float64 in shared memory save enough for a look; then `plans` tell of both ways.
bool saves_in_field(const GridSampleParams& p, const FieldSums& field, Plans& plans) {
    constexpr auto r = kGridSampleDoubleRates;
    constexpr double kSector = 4;  // elements
    const double adds = double(taps_of(p)) * double(p.C) * 1e-6, voxels = double(voxel_count(p));
    const double sector = double(taps_of(p) / p.B) / voxels * kSector * 1e-6;  // additions to each
    const double flushed = double(field.blocks) * double(p.B * p.C) * voxels * 1e-6;
    const double near = adds * r.near, far = adds * r.far + sector * r.waiting;
    const double sums = r.launch + adds * r.sum + flushed * r.flush;
    if (near + far - sums <= r.worth) return false;
    // At least half of the sectors that 32 points anywhere would lie in: those in order wait less.
    const double pixel = double(std::abs(p.input_stride[p.size[2] > 1 ? 4 : 1]));
    const double sectors = std::max(1., voxels * std::min(1., pixel / kSector));
    const double anywhere = sectors * (1 - std::pow(1 - 1 / sectors, 32));
    plans.saved = {-float(std::max(sums - near, far * (anywhere - 1) / 62)), float(far), 0};
    plans.as_it_is = {near, near + far}, plans.turning = {sums, sums};
    return true;
}

/// What sums of scattered points take in memory, and sums in shared memory.
void cost_in_field(const GridSampleParams& p, const FieldSums& field, Plans& plans) {
    const auto& r = p.interpolation == Interpolation::kNearest ? kGridSampleNearestField
                                                               : kGridSampleLinearField;
    const bool last = sums_last(p);
    const double pixels = double(voxel_count(p)), points = double(p.B * p.P) * 1e-6;
    const double adds = double(taps_of(p)) * double(p.C) * 1e-6, beside = last ? double(p.C) : 1;
    // A request of a sector serves those of a warp's 32 points that lie in it.
    const double sectors = std::max(1., pixels * beside / 8);
    const double met = 1 - std::pow(1 - 1 / sectors, 32);
    const double requests = double(taps_of(p)) / double(p.B) * beside / 32 * met * 1e-3;
    const auto& memory = last ? r.last : r.planes;
    const double scattered = memory.least + adds * memory.add + requests * memory.wait;
    const double shares = double(ceil_div(p.C, field.channels));
    const double flushed = double(field.blocks) * double(p.B * p.C) * pixels * 1e-6;
    const double shared = r.least + points * shares * r.point + adds * r.add + flushed * r.flush;
    plans.as_it_is = {kUnknown, scattered}, plans.turning = {shared, shared};
}

/// True if sums in shared memory are chosen, or a look may choose them.
bool in_field(const GridSampleParams& p, Plans& plans) {
    constexpr auto r = kGridSampleGradientRates;
    const bool exact = p.dtype == DType::kDouble;
    const bool linear = p.interpolation == Interpolation::kLinear;
    const double adds = double(taps_of(p)) / double(p.B * voxel_count(p));  // to each
    if (exact ? !linear : adds < r.field_adds) return false;
    const FieldSums field = field_sums(p);
    if (field.channels == 0 || (exact && !saves_in_field(p, field, plans))) return false;
    plans.take = Plans::kProbe;
    plans.why = "shared memory pays where points of the same pixels do not neighbour";
    if (!exact) {
        cost_in_field(p, field, plans);
        const double shared = plans.turning.far, saved = plans.as_it_is.far - shared;
        const bool tiny = voxel_count(p) <= r.field_pixels, quick = shared < r.worth;
        if ((linear && (adds >= r.field_sure || tiny)) || (quick && (tiny || saved > 0))) {
            plans.take = Plans::kTurned;
            plans.why = "so many more points than pixels that additions to memory would wait";
        } else if (saved < r.worth) {
            return false;
        }
        plans.saved = beyond(r.field_few), plans.saved.pixels = true;
    }
    plans.turned.field = field, plans.turned.pad = p.C;
    plans.turned.sums = plans.turned.order = element_size(p.dtype) == 2;
    if (plans.turned.sums) plans.turned.sum_bytes = field_bytes(p, p.C * 4);
    return true;
}

/// Microseconds of bicubic interpolation as it is, and of words of four channels, without passes.
std::pair<Cost, Cost> cubic_costs(const GridSampleParams& p) {
    constexpr auto r = kGridSampleCubicRates;
    const bool last = p.input_stride[1] == 1;
    const double rows = double(p.B) * double(p.P) * (p.D == 2 ? 4 : 16) * 1e-6;
    const double channels = rows * double(p.C), words = rows * double(ceil_div(p.C, 4));
    const auto both = [&](double plain, double word) -> std::pair<Cost, Cost> {
        return {{channels * plain, channels * plain}, {words * word, words * word}};
    };
    if (p.grad_input) {
        const double add = last || p.D == 3 ? r.add : r.add_row, reads = reads_input(p) ? 1 : 0;
        return both(4 * add + reads * r.read, 4 * r.add_word + reads * r.read_word);
    }
    if (p.D == 3)
        return p.grad_out ? both(r.volume_slopes, r.word_slopes) : both(r.volume, r.volume_word);
    return {{channels * (last ? r.last_near : r.near), channels * (last ? r.last_far : r.far)},
            {words * r.word_near, words * r.word_far}};
}

/// Bicubic interpolation is bound by instructions, of which words of four channels need fewer. A
/// look is for images that are read alone: scattered points miss the L1 cache in each channel.
Plans cheapest_cubic(const GridSampleParams& p, Plans plans) {
    constexpr auto r = kGridSampleCubicRates;
    if (plans.turned.V == 1) return plans;
    if (p.D == 2 && p.grad_out && !p.grad_input) {
        plans.why = "the gradient to the grid of images gains nothing by words of four channels";
        return plans;
    }
    const double voxels = double(p.B) * double(voxel_count(p)) * element_size(p.dtype) * 1e-6;
    const double passes = p.grad_input
                              ? r.launches + passes_of(p, plans.turned) - passes_of(p, plans.plain)
                              : r.turn + voxels * double(p.C + plans.turned.pad) / r.stream +
                                    double(p.B) * double(p.P) * double(p.C) * 1e-6 * r.out;
    auto [plain, turned] = cubic_costs(p);
    turned.near += passes, turned.far += passes;
    plans.as_it_is = plain, plans.turning = turned;
    const double near = plain.near - turned.near, far = plain.far - turned.far;  // saved
    const double idle = double(p.B * p.P << lanes_log2(p, plans.plain)) * 1e-6 * r.idle;
    if (near > 0) {
        plans.take = Plans::kTurned;
        plans.why = "words of four channels save more than passes take";
    } else if (std::min(far - idle, -near) > r.worth * r.look) {
        plans.take = Plans::kProbe, plans.why = "it pays where points are scattered";
        plans.saved = {float(near), float(far - near), 0};
    } else {
        plans.why = "passes over the field take longer than words of four channels save";
    }
    return plans;
}

Plans plans_of(const GridSampleParams& p) {
    Plans plans;
    plans.plain = plan_of(p, false);
    const bool sums = p.grad_out && p.grad_input && !is_second(p) && !plans.plain.fixed;
    const bool linear = p.interpolation == Interpolation::kLinear;
    if (sums && p.interpolation != Interpolation::kCubic) {
        if (is_dense(p) && by_runs(p)) {
            plans.turned.runs = true;
            plans.turned.sum_bytes = runs_of(p).bytes(p.B * p.C * voxel_count(p));
            plans.take = Plans::kTurned;
            plans.why = "16 bits, and far more pixels than points";
            return plans;
        }
        if (in_field(p, plans)) return plans;
    }
    const bool beaten = sums && linear && is_crowded(p);  // pixels' channels, by padded sums
    if (plans.plain.V > 1 || (plans.plain.pixels && !beaten) || p.C == 1 ||
        p.dtype == DType::kDouble || is_second(p) || plans.plain.fixed || !fits_last(p) ||
        p.P < 1024)
        return plans;
    plans.turned = plan_of(p, true);
    if (p.interpolation == Interpolation::kCubic) return cheapest_cubic(p, plans);
    if (p.grad_input) return cheapest_sums(p, plans);
    return cheapest_read(p, plans, p.grad_out ? kGridSampleSlopeRates : kGridSampleForwardRates);
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
    constexpr auto r = kGridSampleGradientRates;
    if (!p.grad_input || !p.grad_grid || is_second(p) || p.deterministic || p.C == 1 ||
        p.dtype == DType::kDouble || p.interpolation != Interpolation::kLinear || !fits_last(p))
        return false;
    const Plan turned = plan_of(p, true);
    if (!turned.copy) return false;
    const Plans input = plans_of(to_input_of(p));
    const bool added = input.take == Plans::kPlain && input.plain.V == 1;
    if (added || input.turned.runs || input.turned.field.channels) return false;
    const double field = double(p.B) * p.C * voxel_count(p) * element_size(p.dtype) * 1e-6;
    const double copy = (turned.copy_bytes * 1e-6 + field) / r.stream;
    const double rows = double(taps_of(p)) / 2 * 1e-6;
    const double fused = r.fused + r.fused_word * double(turned.pad / 4 - 1);
    const double alone = p.input_stride[1] == 1 ? r.alone_last : r.alone;
    return copy + rows * fused > rows * double(p.C) * alone;
}

int64_t bytes_of(const Plan& plan) { return plan.copy_bytes + plan.sum_bytes; }

}  // namespace
