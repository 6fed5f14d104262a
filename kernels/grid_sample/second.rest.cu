// grid_sample's second derivatives for linear and nearest interpolation; see general.cuh.
#include "general.cuh"

template <typename T>
const char* second(GridSampleJob& job, cudaStream_t stream) {
    return launch_points(job.p.D == 3 ? second_kernel<T, 3> : second_kernel<T, 2>, job,
                         32 >> job.lanes_log2, stream);
}

const char* grid_sample_second(GridSampleJob& job, int, cudaStream_t stream) {
    return (job.p.dtype == DType::kDouble  ? second<double>
            : job.p.dtype == DType::kFloat ? second<float>
                                           : second<Short>)(job, stream);
}
