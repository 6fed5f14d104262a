// Trilinear interpolation on the GPU. The kernels are multilinear.cuh's, for TrilinearCell.
#include "multilinear.cuh"
#include "trilinear_interpolation.h"

const char* trilinear_interpolation_cuda(const MultilinearParams* p, void* stream) {
    return is_16bit(p->dtype) ? trilinear_interpolation_16bit_cuda(p, stream)
                              : multilinear_cuda<TrilinearCell>(*p, stream);
}
