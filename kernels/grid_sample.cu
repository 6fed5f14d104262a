// grid_sample on the GPU: which kernels a job takes. The kernels are in grid_sample.cuh.
//
// Bytes that must move (float32), for P points of C channels in a volume of V voxels: forward
// 4 (P (D + C) + min(V, 2^D P) C), but a voxel is fetched in sectors of 32 bytes. Channels last, a
// corner of 16 channels is two sectors; channels first it is sixteen, of which 4 bytes each are
// used unless neighbouring points use the rest. Where points are many and scattered the input is
// therefore turned channels last first, in one streaming pass, and gradients are summed so.
#include <algorithm>
#include <cstdlib>

#include "grid_sample.cuh"

namespace {

/// A tensor of images as rows of voxels: what turning its channels needs to know.
struct Voxels {
    void* data;
    int64_t b_stride, c_stride;
    PointsView at;
};

constexpr int kTurners = 256;

template <typename To, typename From>
__device__ inline To converted(From x) {
    return store<To>(load(x));
}

/// Copies (B, C, voxels) between tensors, one with neighbouring voxels and one with neighbouring
/// channels, through a tile in shared memory. Channels from C up to `pad` become zeros.
template <typename From, typename To>
__global__ void __launch_bounds__(kTurners)
    turn_kernel(const Voxels from, const Voxels to, int64_t voxels, int C, int pad,
                int channels_log2, unsigned across, unsigned deep, const int* choice, int chosen) {
    if (choice && *choice != chosen) return;
    __shared__ From tile[8 * kTurners + 32];
    // Up to 8 elements a thread: `channels` rows of `wide` voxels.
    const int each_log2 = channels_log2 < 3 ? channels_log2 : 3, each = 1 << each_log2;
    const int wide_log2 = 8 + each_log2 - channels_log2, wide = 1 << wide_log2;
    const unsigned block = blockIdx.x / across;
    const int64_t v0 = int64_t(blockIdx.x % across) << wide_log2, b = block / deep;
    const int c0 = int(block % deep) << channels_log2;
    const int most = voxels - v0 < wide ? int(voxels - v0) : wide;
    const From* source = static_cast<const From*>(from.data) + b * from.b_stride;
    To* target = static_cast<To*>(to.data) + b * to.b_stride;
    /// Calls body(c, v, offset in elements) for a thread's elements.
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
    walk(from, [&](int c, int v, int64_t at) {
        tile[c * (wide + 1) + v] = c0 + c < C ? source[at] : From{};
    });
    __syncthreads();
    walk(to, [&](int c, int v, int64_t at) {
        if (c0 + c < pad) target[at] = converted<To>(tile[c * (wide + 1) + v]);
    });
}

template <typename From, typename To>
const char* turn(const Voxels& from, const Voxels& to, const GridSampleParams& p, int pad,
                 const int* choice, int chosen, cudaStream_t stream) {
    const int64_t voxels = int64_t(p.size[0]) * p.size[1] * p.size[2];
    int channels_log2 = 0;
    while (1 << channels_log2 < pad && channels_log2 < 5) ++channels_log2;
    const int wide_log2 = 8 + std::min(channels_log2, 3) - channels_log2;
    const int64_t across = ceil_div(voxels, 1 << wide_log2);
    const int64_t deep = ceil_div(pad, 1 << channels_log2);
    if (double(across) * deep * p.B > 0x7fffffff) return "more voxels than one CUDA grid can hold";
    turn_kernel<From, To><<<unsigned(across * deep * p.B), kTurners, 0, stream>>>(
        from, to, voxels, int(p.C), pad, channels_log2, unsigned(across), unsigned(deep), choice,
        chosen);
    return launch_error();
}

/// Rounds sums that lie in the order of what they are rounded to, four at a time.
template <typename To>
__global__ void __launch_bounds__(kTurners)
    round_kernel(const float* from, To* to, int64_t count, const int* choice, int chosen) {
    if (choice && *choice != chosen) return;
    const int64_t i = (int64_t(blockIdx.x) * kTurners + threadIdx.x) * 4;
    if (i >= count) return;
    const auto sums = load_vector<float, 4>(from + i);  // whole words: scratch memory is padded
    Vector<To, 4> rounded;
#pragma unroll
    for (int j = 0; j < 4; ++j) rounded.at[j] = store<To>(sums.at[j]);
    if (i + 4 <= count)
        store_vector(to + i, rounded);
    else
        for (int j = 0; i + j < count; ++j) to[i + j] = rounded.at[j];
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
    if (p.dtype == DType::kDouble || stride[1] != 1) return 1;
    const int size = element_size(p.dtype);
    for (int V = 16 / size; V >= 4; V /= 2) {
        bool fits = p.C % V == 0 && reinterpret_cast<uintptr_t>(data) % (V * size) == 0 &&
                    stride[0] % V == 0;
        for (int d = 0; d < 3; ++d) fits = fits && (p.size[d] == 1 || stride[2 + d] % V == 0);
        if (fits) return V;
    }
    return 1;
}

struct Plan {
    bool copy = false;  // of the input, channels last
    bool sums = false;  // of the gradient to the input, channels last, in float
    int V = 1;
    int64_t pad = 0;  // channels of either
    int64_t copy_bytes = 0, sum_bytes = 0;
};

Plan plan_of(const GridSampleParams& p) {
    Plan plan;
    if (p.dtype == DType::kDouble) return plan;
    const char* env = getenv("OCTET_PLAN");
    const char mode = env ? *env : 'a';
    const int size = element_size(p.dtype);
    const int64_t voxels = voxel_count(p);
    const bool many = mode == 'c' ? true : mode == 'd' ? false : p.P * 2 >= voxels;
    const bool second = p.to_grad_input || p.to_grad_grid;
    if (!p.grad_out) {
        plan.V = vector_of(p, p.input, p.input_stride);
        if (plan.V == 1 && p.C > 1 && many) {
            plan.copy = true;
            plan.V = size == 2 && p.C > 4 ? 8 : 4;
        }
    } else {
        const bool reads = p.grad_grid;
        const Steps in_steps = steps_of(p, p.input_stride, 1);
        const Steps sum_steps = steps_of(p, p.grad_input_stride, 1);
        const bool same = std::equal(in_steps.step, in_steps.step + 3, sum_steps.step);
        const bool last = vector_of(p, p.input, p.input_stride) >= 4;
        if (!p.grad_input) {
            plan.V = last && !second ? 4 : 1;
            if (!last && p.C > 1 && many && !second) plan.copy = true, plan.V = 4;
        } else {
            const bool direct = size == 4 && vector_of(p, p.grad_input, p.grad_input_stride) == 4;
            const bool dense = p.P * 64 >= voxels;
            plan.sums = size == 2 ? dense : !second && !direct && p.C > 1 && many;
            if (!second && p.C > 1 && (direct || plan.sums)) {
                plan.V = 4;
                plan.copy = reads && !(last && same);
            }
        }
    }
    plan.pad = ceil_div(p.C, plan.V) * plan.V;
    const auto bytes = [&](int each) {
        return ceil_div(p.B * voxels * plan.pad * each, 256) * 256;
    };
    if (plan.copy) plan.copy_bytes = bytes(size);
    if (plan.sums) plan.sum_bytes = bytes(4);
    return plan;
}

/// Threads that share a point.
int lanes_log2(const GridSampleParams& p, int V) {
    const int64_t vectors = ceil_div(p.C, V);
    const bool few = p.B * p.P * vectors < 132 * 1024;
    int log2 = 0;
    if (V > 1 && p.interpolation != Interpolation::kCubic) {
        while (log2 < 3 && 1 << log2 < vectors) ++log2;
        if (p.grad_out) ++log2;  // two threads share channels
    } else
        while (log2 < (few ? 5 : V > 1 ? 2 : 0) && 1 << log2 < vectors) ++log2;
    return log2;
}

template <typename T>
const char* copy_input(GridSampleJob& job, const Plan& plan, cudaStream_t stream) {
    GridSampleParams& p = job.p;
    const Voxels from = voxels_of(const_cast<void*>(p.input), p.input_stride, p.size);
    last_strides(p, plan.pad, p.input_stride);
    const Voxels to = voxels_of(p.scratch, p.input_stride, p.size);
    p.input = p.scratch;
    return turn<T, T>(from, to, p, int(plan.pad), nullptr, 0, stream);
}

template <typename T>
const char* round_sums(const GridSampleJob& job, const Plan& plan, const GridSampleParams& caller,
                       cudaStream_t stream) {
    const int64_t count = caller.B * caller.C * voxel_count(caller);
    int64_t dense[5];
    last_strides(caller, caller.C, dense);
    bool same = plan.pad == caller.C;
    for (int d = 0; d < 5; ++d)
        same = same &&
               (dense[d] == caller.grad_input_stride[d] || (d == 0   ? caller.B
                                                            : d == 1 ? caller.C
                                                                     : caller.size[d - 2]) == 1);
    const int64_t blocks = ceil_div(count, 4 * kTurners);
    if (same && blocks < 0x7fffffff &&
        reinterpret_cast<uintptr_t>(caller.grad_input) % (4 * sizeof(T)) == 0) {
        round_kernel<T><<<unsigned(blocks), kTurners, 0, stream>>>(
            static_cast<const float*>(job.p.grad_input), static_cast<T*>(caller.grad_input), count,
            nullptr, 0);
        return launch_error();
    }
    const Voxels from = voxels_of(job.p.grad_input, job.p.grad_input_stride, caller.size);
    const Voxels to = voxels_of(caller.grad_input, caller.grad_input_stride, caller.size);
    return turn<float, T>(from, to, caller, int(caller.C), nullptr, 0, stream);
}

}  // namespace

int64_t grid_sample_scratch_cuda(const GridSampleParams* p) {
    const Plan plan = plan_of(*p);
    return plan.copy_bytes + plan.sum_bytes;
}

const char* grid_sample_cuda(const GridSampleParams* caller, void* stream_pointer) {
    const auto stream = static_cast<cudaStream_t>(stream_pointer);
    GridSampleJob job{*caller};
    GridSampleParams& p = job.p;
    const Plan plan = plan_of(p);
    const char* error = nullptr;
    const bool bits16 = element_size(p.dtype) == 2;
    if (plan.copy) {
        error = bits16 ? copy_input<Half>(job, plan, stream) : copy_input<float>(job, plan, stream);
        if (error) return error;
    }
    job.sum_dtype = p.dtype;
    if (p.grad_input) {
        int64_t bytes = p.B * p.C * voxel_count(p) * element_size(p.dtype);
        if (plan.sums) {
            p.grad_input = static_cast<char*>(p.scratch) + plan.copy_bytes;
            last_strides(p, plan.pad, p.grad_input_stride);
            job.sum_dtype = DType::kFloat;
            bytes = plan.sum_bytes;
        }
        if (cudaMemsetAsync(p.grad_input, 0, bytes, stream) != cudaSuccess) return launch_error();
    }
    if (!p.grad_input) {
        std::copy(p.input_stride, p.input_stride + 5, p.grad_input_stride);
        job.sum_dtype = p.dtype;
    }
    job.input = steps_of(p, p.input_stride, element_size(p.dtype));
    job.sums = steps_of(p, p.grad_input_stride, element_size(job.sum_dtype));
    job.wide = !job.input.fits || !job.sums.fits;
    job.same_steps = std::equal(job.input.step, job.input.step + 3, job.sums.step);
    const PointsView& points = p.grid_points;
    job.packed = p.grid_dtype == DType::kFloat && p.grid_stride[1] == 1 && points.count[1] == p.P &&
                 std::abs(points.stride[2]) < 1 << 28;
    job.point_step = job.packed ? int(points.stride[2]) * 4 : 0;
    for (int d = 0; d < 3; ++d) job.last[d] = float(p.size[d] - 1);
    job.lanes_log2 = lanes_log2(p, plan.V);
    int device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&job.processors, cudaDevAttrMultiProcessorCount, device);
    const bool second = p.to_grad_input || p.to_grad_grid;
    if (!p.grad_out)
        return (bits16 ? grid_sample_forward_16bit : grid_sample_forward)(job, plan.V, stream);
    error = second
                ? grid_sample_second(job, stream)
                : (bits16 ? grid_sample_backward_16bit : grid_sample_backward)(job, plan.V, stream);
    if (error || !plan.sums) return error;
    if (p.dtype == DType::kFloat) return round_sums<float>(job, plan, *caller, stream);
    if (p.dtype == DType::kHalf) return round_sums<Half>(job, plan, *caller, stream);
    return round_sums<BFloat16>(job, plan, *caller, stream);
}
