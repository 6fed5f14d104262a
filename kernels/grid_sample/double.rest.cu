// grid_sample's kernels for float64; see linear_forward.cuh, linear_backward.cuh, general.cuh and
// field.cuh.
#include "field.cuh"
#include "linear_forward.cuh"

const char* grid_sample_forward_double(GridSampleJob& job, int, cudaStream_t stream) {
    return launch_forward<double, 1>(job, stream);
}

const char* grid_sample_backward_double(GridSampleJob& job, int, cudaStream_t stream) {
    if (job.field) return launch_field<double>(job, stream);
    return launch_backward<double, 1>(job, stream);
}
