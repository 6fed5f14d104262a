// square on the CPU; the loop is elementwise_cpu.h's.
#include "elementwise_cpu.h"
#include "square.h"

void square_cpu(const ElementwiseParams* p, int64_t begin, int64_t end) {
    elementwise_cpu<Square>(*p, begin, end);
}

void square_backward_cpu(const ElementwiseParams* p, int64_t begin, int64_t end) {
    elementwise_cpu<SquareBackward>(*p, begin, end);
}
