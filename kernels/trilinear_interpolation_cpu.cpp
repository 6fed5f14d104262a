// Trilinear interpolation on the CPU. The loops are multilinear_cpu.h's, for TrilinearCell.
#include "multilinear_cpu.h"
#include "trilinear_interpolation.h"

void trilinear_interpolation_cpu(const MultilinearParams* p, int64_t begin, int64_t end) {
    multilinear_cpu<TrilinearCell>(*p, begin, end);
}
