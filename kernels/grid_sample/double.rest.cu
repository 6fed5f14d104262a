// grid_sample's kernels for float64; see linear_forward.cuh, linear_backward.cuh and general.cuh.
#include "linear_backward.cuh"
#include "linear_forward.cuh"

const char* grid_sample_forward_double(GridSampleJob& job, int, cudaStream_t stream) {
    return launch_forward<double, 1>(job, stream);
}

const char* grid_sample_backward_double(GridSampleJob& job, int, cudaStream_t stream) {
    return launch_backward<double, 1>(job, stream);
}
