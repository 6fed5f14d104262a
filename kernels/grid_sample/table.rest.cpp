// What few calls of grid_sample need: see GridSampleRest.
#include "grid_sample.h"
#include "torch/rest_table.h"

static const GridSampleRest* table() {
    static const GridSampleRest functions = {
        grid_sample_cubic_cpu,
        grid_sample_double_cpu,
        OCTET_CUDA_LAUNCHER(grid_sample_cubic),
        OCTET_CUDA_LAUNCHER(grid_sample_second),
        OCTET_CUDA_LAUNCHER(grid_sample_forward_16bit),
        OCTET_CUDA_LAUNCHER(grid_sample_backward_16bit),
        OCTET_CUDA_LAUNCHER(grid_sample_forward_double),
        OCTET_CUDA_LAUNCHER(grid_sample_backward_double),
        OCTET_CUDA_LAUNCHER(grid_sample_pixel_runs),
        grid_sample_rows_cpu,
        OCTET_CUDA_LAUNCHER(grid_sample_rows_cuda),
    };
    return &functions;
}

OCTET_REST(grid_sample, table)
