// grid_sample's backward kernels; see linear_backward.cuh, general.cuh and field.cuh.
#include "field.cuh"

const char* grid_sample_backward(GridSampleJob& job, int V, cudaStream_t stream) {
    if (job.field) return launch_field<float>(job, stream);
    if (job.across) return launch_words_to_grid<float, 4, true>(job, stream);
    return (V == 4 ? launch_backward<float, 4> : launch_backward<float, 1>)(job, stream);
}
