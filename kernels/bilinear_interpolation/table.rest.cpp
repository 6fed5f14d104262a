// What bilinear_interpolation needs on a GPU for elements other than float32: see MultilinearRest.
#include "bilinear_interpolation.h"
#include "torch/rest_table.h"

static const MultilinearRest* table() {
    static const MultilinearRest functions = {
        OCTET_CUDA_LAUNCHER(bilinear_interpolation_double_cuda),
        OCTET_CUDA_LAUNCHER(bilinear_interpolation_16bit_cuda)};
    return &functions;
}

OCTET_REST(bilinear_interpolation, table)
