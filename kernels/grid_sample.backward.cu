// grid_sample's backward kernels; see grid_sample.cuh and grid_sample_linear.cuh.
#include "grid_sample_linear.cuh"

const char* grid_sample_backward(GridSampleJob& job, int V, cudaStream_t stream) {
    if (job.p.dtype == DType::kDouble) return launch_backward<double, 1>(job, stream);
    return (V == 4 ? launch_backward<float, 4> : launch_backward<float, 1>)(job, stream);
}
