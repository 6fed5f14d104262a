// Trilinear interpolation on the GPU, float16 and bfloat16; see trilinear_interpolation.cu.
#include "multilinear.cuh"
#include "trilinear_interpolation.h"

const char* trilinear_interpolation_16bit_cuda(const MultilinearParams* p, void* stream) {
    return multilinear_16bit_cuda<TrilinearCell>(*p, stream);
}
