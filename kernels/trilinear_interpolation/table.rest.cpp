// What trilinear_interpolation needs on a GPU for elements other than float32: see MultilinearRest.
#include "torch/rest_table.h"
#include "trilinear_interpolation.h"

static const MultilinearRest* table() {
    static const MultilinearRest functions = {
        OCTET_CUDA_LAUNCHER(trilinear_interpolation_double_cuda),
        OCTET_CUDA_LAUNCHER(trilinear_interpolation_16bit_cuda)};
    return &functions;
}

OCTET_REST(trilinear_interpolation, table)
