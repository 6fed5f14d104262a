// Trilinear interpolation on the GPU, float64; see trilinear_interpolation.cu.
#include "multilinear.cuh"
#include "trilinear_interpolation.h"

const char* trilinear_interpolation_double_cuda(const MultilinearParams* p, void* stream) {
    return multilinear_double_cuda<TrilinearCell>(*p, stream);
}
