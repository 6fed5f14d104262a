// The gradients of apply_lut3d on the GPU, of float32; see backward.cuh.
#include "backward.cuh"

void apply_lut3d_plan_cuda(ApplyLut3dParams* p, int32_t device) {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    apply_lut3d_plan(*p, bytes);
}

const char* apply_lut3d_backward_cuda(const ApplyLut3dParams* p, void* stream) {
    return launch_backward<float>(*p, stream);
}

/// A deterministic sum.
template <typename A>
__device__ inline double fixed_sum(const ApplyLut3dParams& p, int64_t at) {
    const Fixed fixed(p);
    double sum = double(static_cast<long long>(fixed.high[at]));
    if constexpr (sizeof(A) == 8)
        sum += scalbn(double(static_cast<long long>(fixed.low[at])), -fixed.bits);
    sum /= fixed.scale();
    const double infinity = __longlong_as_double(0x7ff0000000000000);
    const int flags = fixed.flags[at];
    if (flags) sum = flags == 1 ? infinity : flags == 2 ? -infinity : infinity - infinity;
    return sum;
}

template <typename A>
__global__ void sum_kernel(const __grid_constant__ ApplyLut3dParams p, int32_t entries) {
    const int32_t i = blockIdx.x * kLutThreads + threadIdx.x;
    if (i >= entries) return;
    A sum[3] = {};
    if (!p.deterministic)
        for (int64_t k = 0; k < p.parts; ++k) {
            const Rgb<A> part =
                entry(static_cast<const A*>(p.sums) + k * (4 * int64_t(entries)), i);
#pragma unroll
            for (int c = 0; c < 3; ++c) sum[c] += part.at[c];
        }
#pragma unroll
    for (int c = 0; c < 3; ++c) {
        const int64_t at = 3 * int64_t(i) + c;
        store_lut(p, at, p.deterministic ? fixed_sum<A>(p, at) : double(sum[c]));
    }
}

const char* apply_lut3d_sum_cuda(const ApplyLut3dParams* p, void* stream) {
    const int32_t entries = p->entries;
    const auto blocks = unsigned(ceil_div(entries, kLutThreads));
    const auto on = static_cast<cudaStream_t>(stream);
    if (p->dtype == DType::kDouble)
        sum_kernel<double><<<blocks, kLutThreads, 0, on>>>(*p, entries);
    else
        sum_kernel<float><<<blocks, kLutThreads, 0, on>>>(*p, entries);
    return launch_error();
}
