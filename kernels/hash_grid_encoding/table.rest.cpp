// What hash_grid_encoding needs on a GPU for elements other than float32, and for any number
// of features: see HashGridRest.
#include "hash_grid_encoding.h"
#include "torch/rest_table.h"

static const HashGridRest* table() {
    static const HashGridRest functions = {
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
