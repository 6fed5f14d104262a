// Elements of 16 bits of kernel_gradient_columns.rest.cu.
#include "kernel_gradient_columns.cuh"

const char* convolve2d_columns_parts_16bit(const Convolve2dParams& p, void* stream) {
    return columns_parts_of<Short>(p, stream);
}
