// Bilinear interpolation on the GPU, float64; see bilinear_interpolation.cu.
#include "bilinear_interpolation.h"
#include "multilinear.cuh"

const char* bilinear_interpolation_double_cuda(const MultilinearParams* p, void* stream) {
    return multilinear_double_cuda<BilinearCell>(*p, stream);
}
