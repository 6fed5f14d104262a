// The gradient to the table of hash_grid_encoding on the GPU, in float32 and 16 bits; see
// table.cuh.
#include "table.cuh"

const char* hash_grid_table_cuda(const HashGridParams* p, void* stream) {
    return table_gradient<float>(*p, static_cast<cudaStream_t>(stream));
}
