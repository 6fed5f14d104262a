// grid_sample's backward kernels, an element at a time; see linear_backward.cuh, general.cuh and
// field.cuh.
#include "field.cuh"

const char* grid_sample_backward(GridSampleJob& job, int V, cudaStream_t stream) {
    if (job.field) return launch_field<float>(job, stream);
    if (V > 1 || job.across) return grid_sample_backward_words(job, stream);
    return launch_backward<float, 1>(job, stream);
}
