// What trilinear_interpolation needs on a GPU for float16 and bfloat16: see MultilinearRest.
#include "torch/rest_table.h"
#include "trilinear_interpolation.h"

static const MultilinearRest* table() {
    static const MultilinearRest functions = {
        OCTET_CUDA_LAUNCHER(trilinear_interpolation_16bit_cuda)};
    return &functions;
}

OCTET_REST(trilinear_interpolation, table)
