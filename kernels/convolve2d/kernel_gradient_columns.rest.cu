// The gradient of convolve2d to its kernel by columns: float32, and which file has other elements.
#include "kernel_gradient_columns.cuh"

const char* convolve2d_columns_parts_cuda(const Convolve2dParams* p, void* stream) {
    if (p->dtype != DType::kFloat) return convolve2d_columns_parts_16bit(*p, stream);
    return columns_parts_of<float>(*p, stream);
}
