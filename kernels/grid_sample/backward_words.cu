// grid_sample's backward kernels for words of four channels; see linear_backward.cuh and
// general.cuh. A source of their own, which is compiled beside the others'.
#include "linear_backward.cuh"

const char* grid_sample_backward_words(GridSampleJob& job, cudaStream_t stream) {
    if (job.across) return launch_words_to_grid<float, 4, true>(job, stream);
    return launch_backward<float, 4>(job, stream);
}
