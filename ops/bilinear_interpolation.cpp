// bilinear_interpolation and its backward for torch.
#include "bilinear_interpolation.h"

#include "torch/multilinear_glue.h"

OCTET_MULTILINEAR(bilinear_interpolation, BilinearCell)
