// What few calls of grid_sample need: see GridSampleRest.
#include "grid_sample.h"
#include "torch/rest.h"

static const GridSampleRest* table() {
    static const GridSampleRest functions = {
        grid_sample_cubic_cpu,
        OCTET_CUDA_LAUNCHER(grid_sample_cubic),
        OCTET_CUDA_LAUNCHER(grid_sample_forward_16bit),
        OCTET_CUDA_LAUNCHER(grid_sample_backward_16bit),
    };
    return &functions;
}

OCTET_REST(grid_sample, table)
