// grid_sample on the GPU: which kernels a job takes. The kernels are in linear_forward.cuh and
// linear_backward.cuh, and in
//   point_backward.cuh, nearest_backward.cuh: gradients to the input, an element at a time
//   to_grid.cuh: gradients to the grid alone
//   scattered.cuh: gradients to the input of scattered points, slab by slab
//   touched.cuh: 16-bit gradients of channels side by side, where points touch few pixels
//   general.cuh: bicubic images, deterministic, fields of more than 2^30 pixels
//   cubic.rest.cu, second.rest.cu: bicubic volumes; second derivatives
//   field.cuh, pixel_runs.rest.cu: gradients that are summed in shared memory.
//
// Bytes that must move (float32), for P points of C channels in a volume of V voxels: forward
// 4 (P (D + C) + min(V, 2^D P) C), but a voxel is fetched in sectors of 32 bytes. Channels last, a
// corner of 16 channels is two sectors; channels first it is sixteen, of which 4 bytes each are
// used unless neighbouring points use the rest. Where points are many and scattered the input is
// therefore turned channels last first, in one streaming pass, and gradients are summed so. Whether
// they are scattered is looked up in a sample of the grid, on the device (look.cuh): both ways are
// launched, and the kernels of one return at once. The same look tells whether a field that the L2
// cache does not hold is taken slab by slab.
#include <algorithm>
#include <climits>
#include <cmath>
#include <utility>

#include "cell.cuh"
#include "cheapest.cuh"
#include "general.cuh"
#include "look.cuh"
#include "slabs.cuh"
#include "touched.cuh"
#include "turn.cuh"
#include "words.cuh"

namespace {

void set_points(GridSampleJob& job, const Plan& plan) {
    GridSampleParams& p = job.p;
    if (!p.grad_input) {
        std::copy(p.input_stride, p.input_stride + 5, p.grad_input_stride);
        job.sum_dtype = p.dtype;
    }
    job.input = steps_of(p, p.input_stride, element_size(p.dtype));
    job.sums = steps_of(p, p.grad_input_stride, element_size(job.sum_dtype));
    job.general = plan.fixed || !job.input.fits || !job.sums.fits;
    const bool lines = p.grad_input && !plan.fixed && job.sum_dtype == DType::kFloat &&
                       reinterpret_cast<uintptr_t>(p.grad_input) % 16 == 0;
    job.line = lines && plan.pixels                   ? Line::kPixel
               : lines && p.grad_input_stride[4] == 1 ? Line::kRow
                                                      : Line::kNone;
    const int64_t sums = p.B * (plan.pixels ? plan.pad : p.C) * voxel_count(p);
    if (lines) job.whole_words = static_cast<const float*>(p.grad_input) + sums / 4 * 4;
    const auto last16 = reinterpret_cast<uintptr_t>(p.grad_input) + (sums - 1) * 2;
    job.lone = p.grad_input && element_size(job.sum_dtype) == 2 && last16 % 4 == 0
                   ? reinterpret_cast<const void*>(last16)
                   : nullptr;
    job.same_steps = std::equal(job.input.step, job.input.step + 3, job.sums.step);
    const PointsView& points = p.grid_points;
    const int size = element_size(p.grid_dtype);
    job.packed =
        p.grid_stride[1] == 1 && points.count[1] == p.P && std::abs(points.stride[2]) < 1 << 27;
    job.point_step = job.packed ? int(points.stride[2]) * size : 0;
    const bool pairs = (reinterpret_cast<uintptr_t>(p.grid) | uintptr_t(job.point_step) |
                        uintptr_t(p.grid_stride[0] * size)) %
                           (2 * size) ==
                       0;
    job.read_as = job.packed ? read_as(p.grid_dtype, p.D == 2 && pairs) : 0;
    for (int d = 0; d < 3; ++d) {
        job.axes[d] = axis_of<float>(p, d);
        job.exact_axes[d] = axis_of<double>(p, d);
    }
    job.lanes_log2 = lanes_log2(p, plan);
    job.narrow = narrow_of(p);
    job.alone = !job.general && grid_alone(p, plan);
    const bool shared = job.alone && job.lanes_log2 > 0;  // whose blocks are kThreads
    job.threads = job.general || shared ? kThreads : threads_of(p, plan);
    job.reads = reads_input(p);
    job.planes = by_planes(p) &&
                 (p.grad_out ? plan.V == 1 && p.grad_input_stride[1] != 1 && job.lanes_log2 == 0
                             : job.narrow == Narrow::kPlanar);
    if (job.planes && p.interpolation == Interpolation::kCubic) job.lanes_log2 = 0;
    job.words = p.C <= 4 || takes_points(p) || (plan.across && p.C <= plan.V);
    job.across = plan.across;
    int64_t last = (p.B - 1) * p.input_stride[0] + (p.C - 1) * p.input_stride[1];
    for (int d = 0; d < 3; ++d) last += (p.size[d] - 1) * p.input_stride[2 + d];
    job.input_end = reinterpret_cast<uintptr_t>(p.input) + (last + 1) * element_size(p.dtype);
    const int words = int(ceil_div(p.C, plan.V));
    const int most = p.grad_out ? kMostWords / 2 : kMostWords;
    job.together = int(ceil_div(words, ceil_div(words, most)));
    job.shares = job.planes ? int(p.C) : shares_of(p);
}

template <typename T>
const char* copy_input(GridSampleJob& job, const Plan& plan, char* scratch, Choice choice,
                       Chain& chain) {
    GridSampleParams& p = job.p;
    const Voxels from = voxels_of(const_cast<void*>(p.input), p.input_stride, p.size);
    last_strides(p, plan.pad, p.input_stride);
    const Voxels to = voxels_of(scratch, p.input_stride, p.size);
    p.input = scratch;
    chain.follows = false;  // constant, to the next one
    choice.claims = chain.take();
    return turn<T, T>(from, to, p, int(plan.pad), choice, chain.processors, chain.stream);
}

template <typename T>
const char* round_sums(const GridSampleJob& job, const Plan& plan, const GridSampleParams& caller,
                       Choice choice, Chain& chain) {
    const int64_t count = caller.B * caller.C * voxel_count(caller);
    int64_t dense[5];
    last_strides(caller, caller.C, dense);
    const int64_t size[] = {caller.B, caller.C, caller.size[0], caller.size[1], caller.size[2]};
    bool same = plan.pad == caller.C;
    for (int d = 0; d < 5; ++d)
        same = same && (dense[d] == caller.grad_input_stride[d] || size[d] == 1);
    same = (same || plan.order) && reinterpret_cast<uintptr_t>(caller.grad_input) % 16 == 0;
    if (same) {
        const int64_t blocks =
            std::min<int64_t>(ceil_div(count, 16 / sizeof(T) * kTurners * 2), 16 * job.processors);
        start(round_kernel<T>, unsigned(blocks), kTurners, 0, chain.follows, chain.stream,
              static_cast<const float*>(job.p.grad_input), static_cast<T*>(caller.grad_input),
              count, choice);
        return launch_error();
    }
    const Voxels from = voxels_of(job.p.grad_input, job.p.grad_input_stride, caller.size);
    const Voxels to = voxels_of(caller.grad_input, caller.grad_input_stride, caller.size);
    choice.claims = chain.take();
    return turn<float, T>(from, to, caller, int(caller.C), choice, chain.processors, chain.stream);
}

/// The caller's gradient in 16 bits.
Rounded rounded_of(const GridSampleParams& caller) {
    return {static_cast<uint16_t*>(caller.grad_input), caller.grad_input_stride[0],
            steps_of(caller, caller.grad_input_stride, 2),
            vector_of(caller, caller.grad_input, caller.grad_input_stride) >= 4};
}

/// M of the second derivative's addends: |grad_out| |to_grad_grid| times how the weights change.
__global__ void bound_kernel(unsigned long long* bounds, double slope) {
    bounds[1] = __double_as_longlong(__longlong_as_double(bounds[0]) *
                                     __longlong_as_double(bounds[1]) * slope);
}

Strided points_of(const void* data, DType dtype, int64_t B, int64_t b_stride, int64_t C,
                  int64_t c_stride, const PointsView& at, int64_t P) {
    const int64_t rest = P / (at.count[0] * at.count[1]);
    return {data,
            dtype,
            5,
            {B, C, rest, at.count[0], at.count[1]},
            {b_stride, c_stride, at.stride[0], at.stride[1], at.stride[2]}};
}

/// Prepares sums in fixed point: their memory and bound. One word before them is for the bound of
/// grad_out where the addends' is a product.
void begin_fixed(GridSampleJob& job, char* scratch, int64_t bytes, cudaStream_t stream) {
    GridSampleParams& p = job.p;
    auto* const words = reinterpret_cast<unsigned long long*>(scratch);
    job.fixed = words + 1, job.places = p.B * p.C * voxel_count(p);
    // All taps of a point may be the same pixel, with weights below 2.
    job.terms = p.P * (p.interpolation == Interpolation::kCubic && p.D == 3 ? 128 : 32);
    cudaMemsetAsync(scratch, 0, bytes, stream);
    const Strided grad_out = points_of(p.grad_out, p.dtype, p.B, p.grad_out_stride[0], p.C,
                                       p.grad_out_stride[1], p.grad_out_points, p.P);
    find_largest(grad_out, is_second(p) ? words : words + 1, stream);
    if (!p.to_grad_grid) return;
    find_largest(points_of(p.to_grad_grid, p.grid_dtype, p.B, p.to_grad_grid_stride[0], p.D,
                           p.to_grad_grid_stride[1], p.to_grad_grid_points, p.P),
                 words + 1, stream);
    double slope = 0;
    for (int d = 0; d < p.D; ++d) slope += p.whole[2 - d];
    bound_kernel<<<1, 1, 0, stream>>>(words, slope);
}

Chain chain_on(cudaStream_t stream) {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return {stream, processors, can_follow(zero_kernel)};
}

/// Launches what computes a job's results.
const char* launch_kernels(GridSampleJob& job, int V, cudaStream_t stream) {
    const GridSampleParams& p = job.p;
    const bool exact = p.dtype == DType::kDouble, bits16 = element_size(p.dtype) == 2;
    if (p.interpolation == Interpolation::kCubic && (p.D == 3 || is_second(p)))
        return p.rest->cubic(job, V, stream);
    if (is_second(p)) return p.rest->second(job, V, stream);
    if (!p.grad_out)
        return (bits16  ? p.rest->forward_16bit
                : exact ? p.rest->forward_double
                        : grid_sample_forward)(job, V, stream);
    return (bits16  ? p.rest->backward_16bit
            : exact ? p.rest->backward_double
                    : grid_sample_backward)(job, V, stream);
}

/// The same where a look tells whether points are scattered: at once, or slab after slab.
const char* launch_slabs(GridSampleJob& job, int V, int slabs, cudaStream_t stream) {
    job.neighbours = job.asked == 0, job.asked |= Choice::kScattered;
    if (const char* error = launch_kernels(job, V, stream)) return error;
    job.chosen |= Choice::kScattered, job.slabs = true, job.neighbours = job.follows = false;
    const int size = job.p.size[3 - job.p.D], each = int(ceil_div(size, slabs));
    for (int begin = 0; begin < size; begin += each) {
        const int first = begin > 0 ? begin : INT_MIN;  // cells begin outside, too
        const int end = begin + each < size ? begin + each : INT_MAX;
        job.slab = first, job.slab_size = unsigned(end) - unsigned(first);
        if (const char* error = launch_kernels(job, V, stream)) return error;
    }
    return nullptr;
}

/// Sets what p.grad_input is to point to: the caller's gradient, or sums in `scratch`, of which
/// those that kernels add to become zeros.
const char* begin_sums(GridSampleJob& job, const Plan& plan, char* scratch, Choice choice,
                       Chain& chain) {
    GridSampleParams& p = job.p;
    job.sum_dtype = p.dtype;
    if (plan.fixed) {
        begin_fixed(job, scratch, plan.sum_bytes, chain.stream);
        chain.follows = false;
        return nullptr;
    }
    if (!p.grad_input || plan.runs) return nullptr;
    void* zeros = p.grad_input;
    int64_t bytes = p.B * p.C * voxel_count(p) * element_size(p.dtype);
    if (plan.sums) {
        p.grad_input = scratch + plan.copy_bytes;
        if (!plan.order) last_strides(p, plan.pad, p.grad_input_stride);
        job.sum_dtype = DType::kFloat;
        if (!plan.touched) zeros = p.grad_input, bytes = plan.sum_bytes;
    }
    const bool ordered = plan.pixels && p.interpolation == Interpolation::kLinear;
    return zero(zeros, bytes, choice, chain, ordered ? pixel_shared(kTurners) : 0);
}

/// Writes sums of another type or order to the caller's gradient.
template <typename T>
const char* finish_sums(GridSampleJob& job, const Plan& plan, const GridSampleParams& caller,
                        Choice choice, Chain& chain) {
    if (plan.touched) return touch<true>(job, rounded_of(caller), chain.stream);
    if constexpr (sizeof(T) < 8)
        if (!plan.fixed) return round_sums<T>(job, plan, caller, choice, chain);
    finish_fixed_point(static_cast<T*>(caller.grad_input), job.fixed, job.places, job.terms,
                       chain.stream);
    return launch_error();
}

const char* run(const GridSampleParams& caller, const Plan& plan, Choice choice, Chain& chain) {
    const char* error = nullptr;
    const cudaStream_t stream = chain.stream;
    GridSampleJob job{caller};
    GridSampleParams& p = job.p;
    const bool flat = p.grad_grid && p.interpolation == Interpolation::kNearest;
    const auto zero_grid = [&] {
        const int64_t bytes = p.B * p.P * p.D * element_size(p.grid_dtype);
        return zero(std::exchange(p.grad_grid, nullptr), bytes, choice, chain);
    };
    if (flat && (!p.grad_input || is_second(p) || plan.fixed)) {
        if ((error = zero_grid()) || (!p.grad_input && !is_second(p))) return error;
    }
    char* const scratch = static_cast<char*>(p.scratch) + kChoiceBytes;
    const bool bits16 = element_size(p.dtype) == 2;
    job.choice = choice.made, job.asked = choice.asked, job.chosen = choice.chosen;
    job.processors = chain.processors, job.counter = chain.take();
    if (plan.copy)
        error = (bits16 ? copy_input<Half> : copy_input<float>)(job, plan, scratch, choice, chain);
    if (error || (error = begin_sums(job, plan, scratch, choice, chain))) return error;
    set_points(job, plan);
    if (plan.field.channels || plan.runs) {  // pixels in the order of their numbers
        const int step[] = {p.size[2] * p.size[1], p.size[2], 1};
        std::copy_n(step, 3, job.sums.step);
    }
    job.field = plan.field.channels, job.field_blocks = plan.field.blocks;
    if (plan.runs) {
        PixelRuns runs = runs_of(p);
        runs.place(p.scratch);
        job.follows = chain.follows = chain.can;
        return p.rest->pixel_runs(job, runs, stream);
    }
    const int slabs = choice.slabs && !job.general ? slabs_of(caller, plan).count : 1;
    // The kernels for small offsets write these zeros on their way: one launch less.
    const bool zeros = job.general || slabs > 1;
    if (flat && p.grad_grid && zeros && (error = zero_grid())) return error;
    if (plan.touched) {
        job.follows = chain.follows, chain.follows = chain.can;
        if ((error = touch<false>(job, rounded_of(caller), stream))) return error;
    }
    job.follows = chain.follows && p.grad_input;  // where work is little, waiting tells
    error =
        slabs > 1 ? launch_slabs(job, plan.V, slabs, stream) : launch_kernels(job, plan.V, stream);
    job.follows = chain.follows = chain.can;
    if (error || !(plan.sums || plan.fixed)) return error;
    return (p.dtype == DType::kDouble  ? finish_sums<double>
            : p.dtype == DType::kFloat ? finish_sums<float>
            : p.dtype == DType::kHalf  ? finish_sums<Half>
                                       : finish_sums<BFloat16>)(job, plan, caller, choice, chain);
}

/// Of the way that scattered points ask for.
Slabs slabs_of(const GridSampleParams& p, const Plans& plans) {
    return slabs_of(p, plans.take == Plans::kPlain ? plans.plain : plans.turned);
}
/// True if a call begins with a look at the points.
bool looks(const GridSampleParams& p, const Plans& plans) {
    return plans.take == Plans::kProbe || slabs_of(p, plans).count > 1;
}
/// What a look is to tell of slabs.
Spread spread_of(const Slabs& slabs) {
    return {slabs.count > 1, float(slabs.gain), float(slabs.cost),
            float(kGridSampleSlabRates.held / std::max(slabs.field, 1.)), int(slabs.window)};
}

/// Both gradients by kernels of their own, as `plan` is that of kernels that make no other than
/// that to the input.
const char* run_apart(const GridSampleParams& p, const Plan& plan, Choice choice, Chain& chain) {
    const GridSampleParams to_grid = to_grid_of(p), to_input = to_input_of(p);
    if (p.grad_grid) {
        const char* error = run(to_grid, plan_of(to_grid, false), choice, chain);
        if (error) return error;
    }
    return run(to_input, plan, choice, chain);
}

}  // namespace

int64_t grid_sample_scratch_cuda(const GridSampleParams* p) {
    if (is_apart(*p)) {
        const GridSampleParams to_grid = to_grid_of(*p), to_input = to_input_of(*p);
        return std::max(grid_sample_scratch_cuda(&to_grid), grid_sample_scratch_cuda(&to_input));
    }
    const Plans plans = plans_of(*p);
    int64_t bytes = 0;
    if (plans.take != Plans::kTurned) bytes = bytes_of(plans.plain);
    if (plans.take != Plans::kPlain) bytes = std::max(bytes, bytes_of(plans.turned));
    return bytes || looks(*p, plans) ? kChoiceBytes + bytes : 0;
}

static void tell(const GridSampleParams& p, const Plans& plans) {
    static const char* const names[] = {"as it is", "channels turned last", "a look at the points"};
    if (plans.take == Plans::kPlain ? plans.plain.touched : plans.turned.touched)
        tell_choice("grid_sample", "zeros and rounding", "of pixels that points touch",
                    "16 bits, four channels or more side by side, and far more pixels than points");
    if (plans.turned.field.channels || plans.turned.runs) {
        tell_choice("grid_sample", "sums of the gradient to input",
                    plans.turned.runs              ? "by runs of pixels"
                    : plans.take == Plans::kTurned ? "in shared memory"
                                                   : names[Plans::kProbe],
                    plans.why,
                    {{"in memory, points in order", plans.as_it_is.near},
                     {"in memory, points scattered", plans.as_it_is.far},
                     {"in shared memory", plans.turning.near}});
        return;
    }
    if (slabs_of(p, plans).count > 1)
        tell_choice(
            "grid_sample", "order of points", names[Plans::kProbe],
            "the L2 cache holds slabs of this field: one after the other, all points of each, "
            "where they are scattered");
    tell_choice("grid_sample", p.grad_out ? "layout, of gradients" : "layout", names[plans.take],
                plans.why,
                {{"as it is, points in order", plans.as_it_is.near},
                 {"turned, points in order", plans.turning.near},
                 {"as it is, points scattered", plans.as_it_is.far},
                 {"turned, points scattered", plans.turning.far}});
}

const char* grid_sample_cuda(const GridSampleParams* p, void* stream_pointer) {
    if (is_apart(*p)) {
        const GridSampleParams to_grid = to_grid_of(*p), to_input = to_input_of(*p);
        const char* error = grid_sample_cuda(&to_grid, stream_pointer);
        return error ? error : grid_sample_cuda(&to_input, stream_pointer);
    }
    const Plans plans = plans_of(*p);
    tell(*p, plans);
    Chain chain = chain_on(static_cast<cudaStream_t>(stream_pointer));
    const bool both = plans.take == Plans::kProbe, turned = plans.take == Plans::kTurned;
    const bool in_shared = turned && plans.turned.field.channels;
    if (in_shared || (plans.turned.runs && p->grad_grid && !slopes_by_runs(*p)))
        return run_apart(*p, plans.turned, {}, chain);
    if (!looks(*p, plans)) return run(*p, turned ? plans.turned : plans.plain, {}, chain);
    int* const choice = static_cast<int*>(p->scratch);
    GridSampleJob job{*p};
    set_points(job, plans.plain);
    float field = 1;  // sectors
    for (int d = 0; d < 3; ++d)
        field += float(p->size[d] - 1) * float(p->input_stride[2 + d]) *
                 float(element_size(p->dtype)) / 32;
    start(p->D == 3 ? probe_kernel<3> : probe_kernel<2>, 1, 1024, 0, false, chain.stream, job,
          plans.saved, spread_of(slabs_of(*p, plans)), field, choice);
    chain.follows = chain.can;
    chain.counters = reinterpret_cast<unsigned*>(choice) + 1, chain.left = kCounters;
    if (const char* error = launch_error()) return error;
    const int asked = both ? Choice::kTurned : 0;
    if (!turned) {
        if (const char* error = run(*p, plans.plain, {choice, asked, 0, !both}, chain))
            return error;
    }
    if (plans.take == Plans::kPlain) return nullptr;
    const Choice second{choice, asked, both ? Choice::kTurned : 0, true};
    return (plans.turned.field.channels ? run_apart : run)(*p, plans.turned, second, chain);
}
