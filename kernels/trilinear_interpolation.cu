// Trilinear interpolation on the GPU, float32. The kernels are multilinear.cuh's, for
// TrilinearCell.
#include "multilinear.cuh"
#include "trilinear_interpolation.h"

const char* trilinear_interpolation_cuda(const MultilinearParams* p, void* stream) {
    return multilinear_cuda<TrilinearCell>(*p, stream);
}
