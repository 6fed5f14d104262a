// grid_sample's backward kernels for nearest interpolation, an element at a time. A source of their
// own, which is compiled beside the others'.
#include "nearest_backward.cuh"

const char* grid_sample_nearest(GridSampleJob& job, cudaStream_t stream) {
    return (job.p.D == 3 ? launch_nearest<float, 3> : launch_nearest<float, 2>)(job, stream);
}
