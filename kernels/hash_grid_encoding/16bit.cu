// hash_grid_encoding on the GPU, float16 and bfloat16; see launch.cu.
#include "points.cuh"

const char* hash_grid_16bit_cuda(const HashGridParams* p, void* stream) {
    return encode<Short>(*p, static_cast<cudaStream_t>(stream));
}

const char* hash_grid_points_16bit_cuda(const HashGridParams* p, void* stream) {
    return points_gradient<Short>(*p, static_cast<cudaStream_t>(stream));
}
