// Bilinear interpolation on the GPU, float32. The kernels are multilinear.cuh's, for BilinearCell.
#include "bilinear_interpolation.h"
#include "multilinear.cuh"

const char* bilinear_interpolation_cuda(const MultilinearParams* p, void* stream) {
    return multilinear_cuda<BilinearCell>(*p, stream);
}
