// Bilinear interpolation on the GPU. The kernels are multilinear.cuh's, for BilinearCell.
#include "bilinear_interpolation.h"
#include "multilinear.cuh"

const char* bilinear_interpolation_cuda(const MultilinearParams* p, void* stream) {
    return is_16bit(p->dtype) ? bilinear_interpolation_16bit_cuda(p, stream)
                              : multilinear_cuda<BilinearCell>(*p, stream);
}
