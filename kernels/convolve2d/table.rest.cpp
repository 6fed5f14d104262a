// What kernels of more taps than forward.cu is compiled for need on a GPU: see Convolve2dRest.
#include "convolve2d.h"
#include "torch/rest_table.h"

static const Convolve2dRest* table() {
    static const Convolve2dRest functions = {
        OCTET_CUDA_LAUNCHER(convolve2d_strips_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_bands_cuda),
        OCTET_CUDA_LAUNCHER(convolve2d_bands_parts_cuda),
    };
    return &functions;
}

OCTET_REST(convolve2d, table)
