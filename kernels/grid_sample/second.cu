// grid_sample's second derivative; see general.cuh.
#include "general.cuh"

template <typename T>
const char* second(GridSampleJob& job, cudaStream_t stream) {
    return launch_points(job.p.D == 3 ? second_kernel<T, 3> : second_kernel<T, 2>, job,
                         32 >> job.lanes_log2, stream);
}

const char* grid_sample_second(GridSampleJob& job, cudaStream_t stream) {
    switch (job.p.dtype) {
        case DType::kFloat: return second<float>(job, stream);
        case DType::kDouble: return second<double>(job, stream);
        default: return second<Short>(job, stream);
    }
}
