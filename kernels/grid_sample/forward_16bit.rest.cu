// grid_sample's forward kernels for 16-bit elements; see linear_forward.cuh and
// general.cuh.
#include "linear_forward.cuh"

template <typename T>
const char* forward(GridSampleJob& job, int V, cudaStream_t stream) {
    if (V == 8) return launch_forward<T, 8>(job, stream);
    return (V == 4 ? launch_forward<T, 4> : launch_forward<T, 1>)(job, stream);
}

const char* grid_sample_forward_16bit(GridSampleJob& job, int V, cudaStream_t stream) {
    return (job.p.dtype == DType::kHalf ? forward<Half> : forward<BFloat16>)(job, V, stream);
}
