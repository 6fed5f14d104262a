// What few calls of convolve2d need: see Convolve2dRest.
#include "convolve2d.h"
#include "torch/rest_table.h"

static const Convolve2dRest* table() {
    static const Convolve2dRest functions = {
        OCTET_CUDA_LAUNCHER(convolve2d_strips_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_bands_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_columns_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_strips_parts_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_columns_parts_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_eights_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_eights_parts_cuda),
        convolve2d_others_cpu,
        convolve2d_fold_others_cpu,
        convolve2d_parts_others_cpu,
    };
    return &functions;
}

OCTET_REST(convolve2d, table)
