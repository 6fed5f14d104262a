// grid_sample on the GPU: which kernels a job takes. The kernels are in grid_sample_linear.cuh (and
// grid_sample.cuh: bicubic, deterministic, second derivatives, fields of more than 2^30 pixels).
//
// Bytes that must move (float32), for P points of C channels in a volume of V voxels: forward
// 4 (P (D + C) + min(V, 2^D P) C), but a voxel is fetched in sectors of 32 bytes. Channels last, a
// corner of 16 channels is two sectors; channels first it is sixteen, of which 4 bytes each are
// used unless neighbouring points use the rest. Where points are many and scattered the input is
// therefore turned channels last first, in one streaming pass, and gradients are summed so. Whether
// they are scattered is looked up in a sample of the grid, on the device: both ways are launched,
// and the kernels of one return at once.
#include <algorithm>
#include <cmath>

#include "fixed_point.cuh"
#include "grid_sample_linear.cuh"

namespace {

/// Which launches work: those whose `chosen` is in `*made`; all of them without `made`.
struct Choice {
    int* made = nullptr;
    int chosen = 0;

    __device__ bool idle() const { return made && *made != chosen; }
};

/// A tensor of images as rows of voxels: what turning its channels needs to know.
struct Voxels {
    void* data;
    int64_t b_stride, c_stride;
    PointsView at;
};

constexpr int kTurners = 256;

/// Copies (B, C, voxels) between tensors, one with neighbouring voxels and one with neighbouring
/// channels, through tiles in shared memory. Channels from C up to `pad` become zeros.
template <typename From, typename To>
__global__ void __launch_bounds__(kTurners, 8)
    turn_kernel(const Voxels from, const Voxels to, int64_t voxels, int C, int pad,
                int channels_log2, unsigned across, unsigned deep, unsigned tiles, Choice choice) {
    if (choice.idle()) return;
    __shared__ From tile[8 * kTurners + 32];
    // Up to 8 elements a thread: `channels` rows of `wide` voxels.
    const int each_log2 = channels_log2 < 3 ? channels_log2 : 3, each = 1 << each_log2;
    const int wide_log2 = 8 + each_log2 - channels_log2, wide = 1 << wide_log2;
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        const unsigned block = index / across;
        const int64_t v0 = int64_t(index % across) << wide_log2, b = block / deep;
        const int c0 = int(block % deep) << channels_log2;
        const int most = voxels - v0 < wide ? int(voxels - v0) : wide;
        const From* source = static_cast<const From*>(from.data) + b * from.b_stride;
        To* target = static_cast<To*>(to.data) + b * to.b_stride;
        // Calls body(c, v, offset in elements) for a thread's elements.
        const auto walk = [&](const Voxels& x, const auto& body) {
            if (x.c_stride == 1 && pad > 1) {
                const int c = threadIdx.x & ((1 << channels_log2) - 1);
                int v = threadIdx.x >> channels_log2;
#pragma unroll 8
                for (int j = 0; j < each; ++j, v += kTurners >> channels_log2)
                    if (v < most) body(c, v, c0 + c + x.at.at(v0 + v));
            } else {
                const int v = threadIdx.x & (wide - 1);
                int c = threadIdx.x >> wide_log2;
                int64_t at = (c0 + c) * x.c_stride + x.at.at(v0 + v);
#pragma unroll 8
                for (int j = 0; j < each; ++j, c += kTurners >> wide_log2) {
                    if (v < most) body(c, v, at);
                    at += (kTurners >> wide_log2) * x.c_stride;
                }
            }
        };
        __syncthreads();
        walk(from, [&](int c, int v, int64_t at) {
            tile[c * (wide + 1) + v] = c0 + c < C ? source[at] : From{};
        });
        __syncthreads();
        walk(to, [&](int c, int v, int64_t at) {
            if (c0 + c < pad) target[at] = store<To>(load(tile[c * (wide + 1) + v]));
        });
    }
}

template <typename From, typename To>
const char* turn(const Voxels& from, const Voxels& to, const GridSampleParams& p, int pad,
                 Choice choice, int processors, cudaStream_t stream) {
    const int64_t voxels = int64_t(p.size[0]) * p.size[1] * p.size[2];
    int channels_log2 = 0;
    while (1 << channels_log2 < pad && channels_log2 < 5) ++channels_log2;
    const int wide_log2 = 8 + std::min(channels_log2, 3) - channels_log2;
    const int64_t across = ceil_div(voxels, 1 << wide_log2);
    const int64_t deep = ceil_div(pad, 1 << channels_log2);
    if (double(across) * deep * p.B > 0x7fffffff) return "more voxels than one CUDA grid can hold";
    const unsigned tiles = unsigned(across * deep * p.B);
    const unsigned blocks = choice.made ? std::min(tiles, 64u * processors) : tiles;
    turn_kernel<From, To><<<blocks, kTurners, 0, stream>>>(from, to, voxels, int(p.C), pad,
                                                           channels_log2, unsigned(across),
                                                           unsigned(deep), tiles, choice);
    return launch_error();
}

/// Zeros, 16 bytes at a time: a memset that may be left out.
__global__ void __launch_bounds__(kTurners)
    zero_kernel(uint4* to, int64_t words, char* tail, int bytes, Choice choice) {
    if (choice.idle()) return;
    const int64_t step = int64_t(gridDim.x) * kTurners;
    const int64_t first = int64_t(blockIdx.x) * kTurners + threadIdx.x;
    for (int64_t i = first; i < words; i += step) to[i] = uint4{};
    if (first < bytes) tail[first] = 0;
}

const char* zero(void* to, int64_t bytes, Choice choice, int processors, cudaStream_t stream) {
    if (!choice.made || reinterpret_cast<uintptr_t>(to) % 16) {
        cudaMemsetAsync(to, 0, bytes, stream);
        return launch_error();
    }
    const int64_t words = bytes / 16, blocks = ceil_div(words, kTurners) + 1;
    zero_kernel<<<unsigned(std::min<int64_t>(blocks, 8 * processors)), kTurners, 0, stream>>>(
        static_cast<uint4*>(to), words, static_cast<char*>(to) + words * 16, int(bytes % 16),
        choice);
    return launch_error();
}

/// Rounds sums that lie in the order of what they are rounded to, four at a time.
template <typename To>
__global__ void __launch_bounds__(kTurners)
    round_kernel(const float* from, To* to, int64_t count, Choice choice) {
    if (choice.idle()) return;
    const int64_t step = int64_t(gridDim.x) * kTurners * 4;
    int64_t i = (int64_t(blockIdx.x) * kTurners + threadIdx.x) * 4;
#pragma unroll 4
    for (; i < count; i += step) {
        const auto sums = load_vector<float, 4>(from + i);  // whole words: the scratch is padded
        Vector<To, 4> rounded;
#pragma unroll
        for (int j = 0; j < 4; ++j) rounded.at[j] = store<To>(sums.at[j]);
        if (i + 4 <= count)
            store_vector(to + i, rounded);
        else
            for (int j = 0; i + j < count; ++j) to[i + j] = rounded.at[j];
    }
}

constexpr int kSamples = 128;  // rows of 32 neighbouring points

/// Chooses 1 where 32 neighbouring points lie in more than `few` sectors on average, else 0.
template <int D>
__global__ void __launch_bounds__(1024)
    probe_kernel(const __grid_constant__ GridSampleJob job, float few, int* choice) {
    __shared__ int sectors;
    if (threadIdx.x == 0) sectors = 0;
    __syncthreads();
    constexpr int64_t kMost = 1 << 30;  // of the points, whose numbers are then an int
    const int lane = threadIdx.x % 32, count = int((job.p.P < kMost ? job.p.P : kMost) / 32);
    const int samples = count < kSamples ? count : kSamples;
    int mine = 0;
#pragma unroll
    for (int j = 0; j < kSamples / 32; ++j) {
        const int s = j * 32 + threadIdx.x / 32;
        if (s >= samples) break;
        const int i = int(int64_t(s) * count / samples) * 32 + lane;
        const int64_t b = int64_t(s) * job.p.B / samples;
        const Coordinates<float, D> at(job, grid_of(job, b), i);
        const auto cell = cell_of<false>(job, job.input, at);
        const int sector = int(int64_t(cell.base) * job.input.unit / 32);
        const unsigned same = __match_any_sync(~0u, sector);
        mine += lane == __ffs(int(same)) - 1;
    }
    atomicAdd(&sectors, mine);
    __syncthreads();
    if (threadIdx.x == 0) *choice = float(sectors) > few * samples;
}

/// Voxels of a tensor with these strides.
Voxels voxels_of(void* data, const int64_t (&stride)[5], const int32_t (&size)[3]) {
    Voxels v{data, stride[0], stride[1], {}};
    int64_t count[3] = {1, 1, 1}, step[3] = {};
    int dims = 0;
    for (int d = 0; d < 3; ++d) {
        if (size[d] == 1) continue;
        if (dims > 0 && step[dims - 1] == size[d] * stride[2 + d]) {
            count[dims - 1] *= size[d];
        } else {
            count[dims++] = size[d];
        }
        step[dims - 1] = stride[2 + d];
    }
    const auto from_end = [&](const int64_t* of, int i, int64_t none) {
        return i < dims ? of[dims - 1 - i] : none;
    };
    v.at.count[1] = from_end(count, 0, 1), v.at.count[0] = from_end(count, 1, 1);
    for (int i = 0; i < 3; ++i) v.at.stride[2 - i] = from_end(step, i, 0);
    return v;
}

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
Steps steps_of(const GridSampleParams& p, const int64_t (&stride)[5], int size) {
    Steps s{};
    int64_t unit = 0, most = 0;
    for (int d = 0; d < 3; ++d)
        if (p.size[d] > 1) unit = gcd(unit, stride[2 + d]);
    if (unit == 0) unit = 1;
    constexpr int64_t kLimit = int64_t(1) << 30;
    for (int d = 0; d < 3; ++d) {
        const int64_t each = p.size[d] > 1 ? stride[2 + d] / unit : 0;
        s.step[d] = int(each);
        most = std::max(most, std::max(each, each * p.size[d]));
    }
    s.unit = int(unit * size);
    s.fits = most < kLimit && unit * size < kLimit;
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

template <typename A>
AxisOf<A> axis_of(const GridSampleParams& p, int d) {
    const A size = A(p.size[d]), infinite = A(INFINITY);
    const bool border = p.padding == Padding::kBorder;
    const A least = border ? A(0) : -infinite, most = border ? size - 1 : infinite;
    return p.align_corners ? AxisOf<A>{A(0.5), size - 1, 0, 1, least, most}
                           : AxisOf<A>{1, size, 1, A(0.5), least, most};
}

/// One way to do a job.
struct Plan {
    bool copy = false;   // of the input, channels last
    bool sums = false;   // of the gradient to the input, in float, channels last
    bool order = false;  // or in the order of the gradient itself
    bool fixed = false;  // or in fixed point, in the order of the gradient itself
    int V = 1;           // channels at a time
    int64_t pad = 0;     // channels of a copy or of sums
    int64_t copy_bytes = 0, sum_bytes = 0;
};

/// Both ways, and when to take the second: always, never, or beyond so many sectors.
struct Plans {
    Plan plain, turned;
    enum { kPlain, kTurned, kProbe } take = kPlain;
    float few = 0;
};

bool is_second(const GridSampleParams& p) { return p.to_grad_input || p.to_grad_grid; }

/// Whether offsets in a copy with the channels last fit in 32 bits.
bool fits_last(const GridSampleParams& p) {
    int64_t stride[5];
    last_strides(p, ceil_div(p.C, 8) * 8, stride);
    return steps_of(p, stride, 4).fits;
}

constexpr int64_t kFewSums = 1 << 17;  // below, kernels' launches decide and not their work

/// `turn`: with the channels last, whatever they are in the input.
Plan plan_of(const GridSampleParams& p, bool turn) {
    Plan plan;
    const int size = element_size(p.dtype);
    const int64_t voxels = voxel_count(p);
    const bool second = is_second(p);
    const bool last = vector_of(p, p.input, p.input_stride) > 1;
    if (p.grad_out && p.grad_input && p.deterministic) {
        plan.fixed = true;
    } else if (!p.grad_out) {
        plan.V = vector_of(p, p.input, p.input_stride);
        plan.copy = turn;
        if (turn) plan.V = size == 2 && p.C > 4 ? 8 : 4;
    } else if (second || p.dtype == DType::kDouble) {
        plan.sums = plan.order = size == 2 && p.grad_input;
    } else if (!p.grad_input) {
        plan.copy = turn;
        plan.V = last || turn ? 4 : 1;
    } else {
        const Steps in_steps = steps_of(p, p.input_stride, 1);
        const Steps sum_steps = steps_of(p, p.grad_input_stride, 1);
        const bool same = std::equal(in_steps.step, in_steps.step + 3, sum_steps.step);
        // A field far larger than what is added to it is not worth a pass in float.
        const bool dense = p.P * 128 >= voxels;
        const bool direct =
            (size == 4 || !dense) && vector_of(p, p.grad_input, p.grad_input_stride) >= 4;
        plan.sums = !direct && (turn || (size == 2 && dense));
        plan.order = plan.sums && (p.C == 1 || p.B * p.P * p.C < kFewSums || !fits_last(p));
        if (fits_last(p) && (direct || (plan.sums && !plan.order))) {
            plan.V = p.C > 1 ? 4 : 1;
            plan.copy = p.C > 1 && p.grad_grid && !(last && same);
        }
    }
    plan.pad = ceil_div(p.C, plan.V) * plan.V;
    const auto bytes = [&](int64_t each) {
        return ceil_div(p.B * voxels * plan.pad * each, 256) * 256;
    };
    if (plan.copy) plan.copy_bytes = bytes(size);
    if (plan.sums) plan.sum_bytes = bytes(4);
    if (plan.fixed) plan.sum_bytes = 8 * (1 + fixed_point_words(p.B * p.C * voxels));
    return plan;
}

constexpr int64_t kChoiceBytes = 256;

/// Turning pays where the sectors that scattered points fetch channel by channel outweigh the
/// passes over the field. The rates are measured ones of an H200, in bytes per microsecond; what
/// matters is their ratio.
Plans plans_of(const GridSampleParams& p) {
    constexpr double kStream = 2.2e6, kSectors = 3.7e6;
    Plans plans;
    plans.plain = plan_of(p, false);
    const bool sums = p.grad_out && p.grad_input;
    if (plans.plain.V > 1 || p.C == 1 || p.dtype == DType::kDouble || is_second(p) ||
        plans.plain.fixed || p.interpolation == Interpolation::kCubic || !fits_last(p))
        return plans;
    plans.turned = plan_of(p, true);
    const Plan& turned = plans.turned;
    const double points = double(p.B) * p.P, voxels = double(p.B) * voxel_count(p);
    const int size = element_size(p.dtype), rows = 1 << (p.D - 1);
    const double pair = std::max<double>(2.0 * turned.pad * size, 32);
    double turning =
        voxels * (p.C + turned.pad) * size / kStream + points * rows * pair * 1.25 / kSectors;
    // For each sector that 32 neighbouring points lie in, in each row of each channel.
    double sector = points / 32 * p.C * rows * 1.2 * 32 / kSectors;
    if (p.input_stride[1] == 1) sector *= 1.5 * size / 32;  // one for several channels
    if (sums) turning *= 2.2, sector *= 3;
    if ((!sums && p.C < 4) || turning > 32 * sector || 32 * sector < (sums ? 500 : 100) ||
        p.P < 1024)
        return plans;
    plans.take = turning < 2 * sector ? Plans::kTurned : Plans::kProbe;
    plans.few = float(turning / sector);
    return plans;
}

int64_t bytes_of(const Plan& plan) { return plan.copy_bytes + plan.sum_bytes; }

/// Threads that share a point.
int lanes_log2(const GridSampleParams& p, const Plan& plan) {
    const int64_t vectors = ceil_div(p.C, plan.V);
    int log2 = 0;
    if (plan.V > 1 && p.interpolation != Interpolation::kCubic) {
        while (log2 < 3 && 1 << log2 < vectors) ++log2;
        return log2 + (p.grad_out ? 1 : 0);  // a column of corners each
    }
    // As many as fill the GPU. Where channels do not neighbour, lanes read far apart: no more than
    // leave whole sectors to neighbouring points.
    const int most = p.input_stride[1] == 1 || !p.grad_out ? 5 : 2, least = plan.V > 1 ? 2 : 0;
    while (log2 < most && 1 << log2 < vectors && (log2 < least || p.B * p.P << log2 < 132 * 1024))
        ++log2;
    return log2;
}

void set_points(GridSampleJob& job, const Plan& plan) {
    GridSampleParams& p = job.p;
    if (!p.grad_input) {
        std::copy(p.input_stride, p.input_stride + 5, p.grad_input_stride);
        job.sum_dtype = p.dtype;
    }
    job.input = steps_of(p, p.input_stride, element_size(p.dtype));
    job.sums = steps_of(p, p.grad_input_stride, element_size(job.sum_dtype));
    job.general = plan.fixed || !job.input.fits || !job.sums.fits;
    job.same_steps = std::equal(job.input.step, job.input.step + 3, job.sums.step);
    const PointsView& points = p.grid_points;
    job.packed = p.grid_dtype == DType::kFloat && p.grid_stride[1] == 1 && points.count[1] == p.P &&
                 std::abs(points.stride[2]) < 1 << 28;
    job.point_step = job.packed ? int(points.stride[2]) * 4 : 0;
    for (int d = 0; d < 3; ++d) {
        job.axes[d] = axis_of<float>(p, d);
        job.exact_axes[d] = axis_of<double>(p, d);
    }
    job.lanes_log2 = lanes_log2(p, plan);
}

template <typename T>
const char* copy_input(GridSampleJob& job, const Plan& plan, char* scratch, Choice choice,
                       cudaStream_t stream) {
    GridSampleParams& p = job.p;
    const Voxels from = voxels_of(const_cast<void*>(p.input), p.input_stride, p.size);
    last_strides(p, plan.pad, p.input_stride);
    const Voxels to = voxels_of(scratch, p.input_stride, p.size);
    p.input = scratch;
    return turn<T, T>(from, to, p, int(plan.pad), choice, job.processors, stream);
}

template <typename T>
const char* round_sums(const GridSampleJob& job, const Plan& plan, const GridSampleParams& caller,
                       Choice choice, cudaStream_t stream) {
    const int64_t count = caller.B * caller.C * voxel_count(caller);
    int64_t dense[5];
    last_strides(caller, caller.C, dense);
    const int64_t size[] = {caller.B, caller.C, caller.size[0], caller.size[1], caller.size[2]};
    bool same = plan.pad == caller.C;
    for (int d = 0; d < 5; ++d)
        same = same && (dense[d] == caller.grad_input_stride[d] || size[d] == 1);
    same = (same || plan.order) &&
           reinterpret_cast<uintptr_t>(caller.grad_input) % (4 * sizeof(T)) == 0;
    if (same) {
        const int64_t blocks =
            std::min<int64_t>(ceil_div(count, 4 * kTurners), 16 * job.processors);
        round_kernel<T><<<unsigned(blocks), kTurners, 0, stream>>>(
            static_cast<const float*>(job.p.grad_input), static_cast<T*>(caller.grad_input), count,
            choice);
        return launch_error();
    }
    const Voxels from = voxels_of(job.p.grad_input, job.p.grad_input_stride, caller.size);
    const Voxels to = voxels_of(caller.grad_input, caller.grad_input_stride, caller.size);
    return turn<float, T>(from, to, caller, int(caller.C), choice, job.processors, stream);
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
    job.terms = p.P * 32;  // up to 16 taps of a point may be the same pixel, weights are below 2
    cudaMemsetAsync(scratch, 0, bytes, stream);
    const Strided grad_out = points_of(p.grad_out, p.dtype, p.B, p.grad_out_stride[0], p.C,
                                       p.grad_out_stride[1], p.grad_out_points, p.P);
    find_largest(grad_out, is_second(p) ? words : words + 1, stream);
    if (!p.to_grad_grid) return;
    find_largest(points_of(p.to_grad_grid, p.grid_dtype, p.B, p.to_grad_grid_stride[0], p.D,
                           p.to_grad_grid_stride[1], p.to_grad_grid_points, p.P),
                 words + 1, stream);
    double slope = 0;
    for (int d = 0; d < p.D; ++d) slope += p.size[2 - d];
    bound_kernel<<<1, 1, 0, stream>>>(words, slope);
}

template <typename T>
const char* finish_fixed(const GridSampleJob& job, const GridSampleParams& caller,
                         cudaStream_t stream) {
    finish_fixed_point(static_cast<T*>(caller.grad_input), job.fixed, job.places, job.terms,
                       stream);
    return launch_error();
}

const char* run(const GridSampleParams& caller, const Plan& plan, Choice choice, int processors,
                cudaStream_t stream) {
    const char* error = nullptr;
    GridSampleJob job{caller};
    GridSampleParams& p = job.p;
    if (p.grad_grid && p.interpolation == Interpolation::kNearest) {
        if ((error = zero(p.grad_grid, p.B * p.P * p.D * element_size(p.grid_dtype), choice,
                          processors, stream)))
            return error;
        p.grad_grid = nullptr;
        if (!p.grad_input && !is_second(p)) return nullptr;
    }
    char* const scratch = static_cast<char*>(p.scratch) + kChoiceBytes;
    const bool bits16 = element_size(p.dtype) == 2;
    job.choice = choice.made, job.chosen = choice.chosen, job.processors = processors;
    if (plan.copy)
        error = (bits16 ? copy_input<Half> : copy_input<float>)(job, plan, scratch, choice, stream);
    if (error) return error;
    job.sum_dtype = p.dtype;
    if (plan.fixed) {
        begin_fixed(job, scratch, plan.sum_bytes, stream);
    } else if (p.grad_input) {
        int64_t bytes = p.B * p.C * voxel_count(p) * element_size(p.dtype);
        if (plan.sums) {
            p.grad_input = scratch + plan.copy_bytes;
            if (!plan.order) last_strides(p, plan.pad, p.grad_input_stride);
            job.sum_dtype = DType::kFloat;
            bytes = plan.sum_bytes;
        }
        if ((error = zero(p.grad_input, bytes, choice, processors, stream))) return error;
    }
    set_points(job, plan);
    if (!p.grad_out)
        error = (bits16 ? grid_sample_forward_16bit : grid_sample_forward)(job, plan.V, stream);
    else if (is_second(p))
        error = grid_sample_second(job, stream);
    else
        error = (bits16 ? grid_sample_backward_16bit : grid_sample_backward)(job, plan.V, stream);
    if (error || !(plan.sums || plan.fixed)) return error;
    switch (p.dtype) {
        case DType::kFloat:
            return plan.fixed ? finish_fixed<float>(job, caller, stream)
                              : round_sums<float>(job, plan, caller, choice, stream);
        case DType::kDouble: return finish_fixed<double>(job, caller, stream);
        case DType::kHalf:
            return plan.fixed ? finish_fixed<Half>(job, caller, stream)
                              : round_sums<Half>(job, plan, caller, choice, stream);
        default:
            return plan.fixed ? finish_fixed<BFloat16>(job, caller, stream)
                              : round_sums<BFloat16>(job, plan, caller, choice, stream);
    }
}

}  // namespace

int64_t grid_sample_scratch_cuda(const GridSampleParams* p) {
    const Plans plans = plans_of(*p);
    int64_t bytes = 0;
    if (plans.take != Plans::kTurned) bytes = bytes_of(plans.plain);
    if (plans.take != Plans::kPlain) bytes = std::max(bytes, bytes_of(plans.turned));
    return bytes || plans.take == Plans::kProbe ? kChoiceBytes + bytes : 0;
}

const char* grid_sample_cuda(const GridSampleParams* p, void* stream_pointer) {
    const auto stream = static_cast<cudaStream_t>(stream_pointer);
    const Plans plans = plans_of(*p);
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (plans.take != Plans::kProbe)
        return run(*p, plans.take == Plans::kTurned ? plans.turned : plans.plain, {}, processors,
                   stream);
    GridSampleJob job{*p};
    set_points(job, plans.plain);
    int* const choice = static_cast<int*>(p->scratch);
    (p->D == 3 ? probe_kernel<3> : probe_kernel<2>)<<<1, 1024, 0, stream>>>(job, plans.few, choice);
    if (const char* error = launch_error()) return error;
    if (const char* error = run(*p, plans.plain, {choice, 0}, processors, stream)) return error;
    return run(*p, plans.turned, {choice, 1}, processors, stream);
}
