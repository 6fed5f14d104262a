// trilinear_interpolation and its backward for torch.
#include "trilinear_interpolation.h"

#include "torch/multilinear_glue.h"

OCTET_MULTILINEAR(trilinear_interpolation, TrilinearCell)
