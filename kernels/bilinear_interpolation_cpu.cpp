// Bilinear interpolation on the CPU. The loops are multilinear_cpu.h's, for BilinearCell.
#include "bilinear_interpolation.h"
#include "multilinear_cpu.h"

void bilinear_interpolation_cpu(const MultilinearParams* p, int64_t begin, int64_t end) {
    multilinear_cpu<BilinearCell>(*p, begin, end);
}
