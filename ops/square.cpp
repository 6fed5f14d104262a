// square and its backward for torch.
#include "square.h"

#include "torch/elementwise_glue.h"

OCTET_ELEMENTWISE(square, Square, x)
OCTET_ELEMENTWISE_BACKWARD(square, SquareBackward, x)
