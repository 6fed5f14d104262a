// Bilinear interpolation on the GPU. The kernels are multilinear.cuh's, for BilinearCell.
#include "multilinear.cuh"

#include "bilinear_interpolation.h"

const char* bilinear_interpolation_cuda(const MultilinearParams* p, void* stream) {
    return multilinear_cuda<BilinearCell>(*p, stream);
}
