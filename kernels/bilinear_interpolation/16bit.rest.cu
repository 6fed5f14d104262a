// Bilinear interpolation on the GPU, float16 and bfloat16; see bilinear_interpolation.cu.
#include "bilinear_interpolation.h"
#include "multilinear.cuh"

const char* bilinear_interpolation_16bit_cuda(const MultilinearParams* p, void* stream) {
    return multilinear_16bit_cuda<BilinearCell>(*p, stream);
}
