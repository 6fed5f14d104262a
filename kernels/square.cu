// square on the GPU; the kernels are elementwise.cuh's.
#include "elementwise.cuh"
#include "square.h"

const char* square_cuda(const ElementwiseParams* p, void* stream) {
    return elementwise_cuda<Square>(*p, stream);
}

const char* square_backward_cuda(const ElementwiseParams* p, void* stream) {
    return elementwise_cuda<SquareBackward>(*p, stream);
}
