// bilinear_interpolation and its backward for torch; checks and allocation in multilinear_glue.h.
#include "bilinear_interpolation.h"

#include "multilinear_glue.h"

struct Bilinear : BilinearCell {
    static constexpr const char* name = "bilinear_interpolation";
    static constexpr const char* corner_order = "corner i + 2j at (i, j)";
    static constexpr auto on_cpu = &bilinear_interpolation_cpu;
    static constexpr auto on_cuda = OCTET_CUDA_LAUNCHER(bilinear_interpolation_cuda);
};

OCTET_MULTILINEAR(bilinear_interpolation, Bilinear)
