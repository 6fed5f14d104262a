// What hash_grid_encoding needs for elements other than float32, and on a GPU for any number of
// features: see HashGridRest.
#include "hash_grid_encoding.h"
#include "torch/rest_table.h"

static const HashGridRest* table() {
    static const HashGridRest functions = {
        hash_grid_others_cpu,
        hash_grid_points_others_cpu,
        hash_grid_table_others_cpu,
        OCTET_CUDA_LAUNCHER(hash_grid_16bit_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_double_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_any_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_points_16bit_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_points_double_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_points_any_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_table_double_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_table_any_cuda),
    };
    return &functions;
}

OCTET_REST(hash_grid_encoding, table)
