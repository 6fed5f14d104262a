// hash_grid_encoding on the GPU, float16 and bfloat16; see launch.cu.
// Two types: as Short, one for both, forward takes up to 30 % longer.
#include "points.cuh"

const char* hash_grid_16bit_cuda(const HashGridParams* p, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    return p->dtype == DType::kHalf ? encode<Half>(*p, s) : encode<BFloat16>(*p, s);
}

const char* hash_grid_points_16bit_cuda(const HashGridParams* p, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    return p->dtype == DType::kHalf ? points_gradient<Half>(*p, s)
                                    : points_gradient<BFloat16>(*p, s);
}
