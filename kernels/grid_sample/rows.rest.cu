// Which pixel along one axis the points of a grid need first: a coordinate read and four bytes
// written for each.
#include "grid_sample.h"
#include "vector.cuh"

namespace {

constexpr int kRowThreads = 256;

template <int kTaps, typename A>
__global__ void __launch_bounds__(kRowThreads)
    rows_kernel(const __grid_constant__ GridSampleRows p) {
    const int64_t step = int64_t(gridDim.x) * kRowThreads;
    for (int64_t at = int64_t(blockIdx.x) * kRowThreads + threadIdx.x; at < p.B * p.P; at += step) {
        const int64_t from = at / p.P * p.stride[0] + p.points.at(at % p.P);
        const A x = load_as<A>(p.grid_dtype, p.grid, from + p.coordinate * p.stride[1]);
        const auto taps =
            Taps<A, kTaps>::template of<false>(x, p.window(), p.padding, p.align_corners);
        unsigned first = ~0u;  // as -1 is
#pragma unroll
        for (int k = 0; k < kTaps; ++k) first = min(first, unsigned(taps.index[k]));
        p.out[at] = int(first);
    }
}

template <typename A>
void launch(const GridSampleRows& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.B * p.P, kRowThreads), most = 132 * 8;
    const auto kernel = p.interpolation == Interpolation::kLinear    ? rows_kernel<2, A>
                        : p.interpolation == Interpolation::kNearest ? rows_kernel<1, A>
                                                                     : rows_kernel<4, A>;
    kernel<<<unsigned(blocks < most ? blocks : most), kRowThreads, 0, stream>>>(p);
}

}  // namespace

const char* grid_sample_rows_cuda(const GridSampleRows* p, void* stream) {
    (p->exact ? launch<double> : launch<float>)(*p, static_cast<cudaStream_t>(stream));
    return launch_error();
}
