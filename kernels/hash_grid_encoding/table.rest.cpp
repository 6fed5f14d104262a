// What hash_grid_encoding needs on a GPU for elements other than float32: see HashGridRest.
#include "hash_grid_encoding.h"
#include "torch/rest.h"

static const HashGridRest* table() {
    static const HashGridRest functions = {
        OCTET_CUDA_LAUNCHER(hash_grid_16bit_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_double_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_points_16bit_cuda),
        OCTET_CUDA_LAUNCHER(hash_grid_points_double_cuda),
    };
    return &functions;
}

OCTET_REST(hash_grid_encoding, table)
