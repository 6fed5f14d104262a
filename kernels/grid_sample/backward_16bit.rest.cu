// grid_sample's backward kernels for 16-bit elements; see linear_backward.cuh, general.cuh
// and field.cuh.
#include "field.cuh"

template <typename T>
const char* backward(GridSampleJob& job, int V, cudaStream_t stream) {
    if (job.across) return launch_words_to_grid<T, 8, true>(job, stream);
    if (V == 8 && !job.alone) return launch_words_to_grid<T, 8, false>(job, stream);
    return (V > 1 ? launch_backward<T, 4> : launch_backward<T, 1>)(job, stream);
}

const char* grid_sample_backward_16bit(GridSampleJob& job, int V, cudaStream_t stream) {
    if (job.field) return launch_field<Short>(job, stream);
    return (job.p.dtype == DType::kHalf ? backward<Half> : backward<BFloat16>)(job, V, stream);
}
