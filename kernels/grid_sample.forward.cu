// grid_sample's forward kernels; see grid_sample.cuh and grid_sample_linear.cuh.
#include "grid_sample_linear.cuh"

const char* grid_sample_forward(GridSampleJob& job, int V, cudaStream_t stream) {
    if (job.p.dtype == DType::kDouble) return launch_forward<double, 1>(job, stream);
    return (V == 4 ? launch_forward<float, 4> : launch_forward<float, 1>)(job, stream);
}
