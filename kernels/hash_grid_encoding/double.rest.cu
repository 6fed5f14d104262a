// hash_grid_encoding on the GPU, float64; see launch.cu.
#include "table.cuh"

const char* hash_grid_double_cuda(const HashGridParams* p, void* stream) {
    return encode<double>(*p, static_cast<cudaStream_t>(stream));
}

const char* hash_grid_points_double_cuda(const HashGridParams* p, void* stream) {
    return points_gradient<double>(*p, static_cast<cudaStream_t>(stream));
}

const char* hash_grid_table_double_cuda(const HashGridParams* p, void* stream) {
    return table_gradient<double>(*p, static_cast<cudaStream_t>(stream));
}
