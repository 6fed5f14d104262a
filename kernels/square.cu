// square on the GPU; the kernels are elementwise.cuh's.
#include "square.h"

#include "elementwise.cuh"

const char* square_cuda(const ElementwiseParams* p, void* stream) {
    return elementwise_cuda<Square>(*p, stream);
}

const char* square_backward_cuda(const ElementwiseParams* p, void* stream) {
    return elementwise_cuda<SquareBackward>(*p, stream);
}
