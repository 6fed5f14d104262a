// What apply_lut3d needs on a GPU for gradients of other than float32: see ApplyLut3dRest.
#include "apply_lut3d.h"
#include "torch/rest_table.h"

static const ApplyLut3dRest* table() {
    static const ApplyLut3dRest functions = {OCTET_CUDA_LAUNCHER(apply_lut3d_backward_others_cuda)};
    return &functions;
}

OCTET_REST(apply_lut3d, table)
