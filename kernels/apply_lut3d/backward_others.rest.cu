// The gradients of apply_lut3d on the GPU, of float64 and 16 bits; see backward.cuh.
#include "backward.cuh"

const char* apply_lut3d_backward_others_cuda(const ApplyLut3dParams* p, void* stream) {
    return p->dtype == DType::kDouble ? launch_backward<double>(*p, stream)
                                      : launch_backward<Short>(*p, stream);
}
