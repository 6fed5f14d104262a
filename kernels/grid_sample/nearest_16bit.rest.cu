// grid_sample's backward kernels for nearest interpolation of 16-bit elements, one at a time.
#include "nearest_backward.cuh"

const char* grid_sample_nearest_16bit(GridSampleJob& job, cudaStream_t stream) {
    return (job.p.D == 3 ? launch_nearest<Short, 3> : launch_nearest<Short, 2>)(job, stream);
}
