// grid_sample's forward kernels; see linear_forward.cuh and general.cuh.
#include "linear_forward.cuh"

const char* grid_sample_forward(GridSampleJob& job, int V, cudaStream_t stream) {
    return (V == 4 ? launch_forward<float, 4> : launch_forward<float, 1>)(job, stream);
}
