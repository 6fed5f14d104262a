// trilinear_interpolation and its backward for torch; checks and allocation in multilinear_glue.h.
#include "trilinear_interpolation.h"

#include "multilinear_glue.h"

struct Trilinear : TrilinearCell {
    static constexpr const char* name = "trilinear_interpolation";
    static constexpr const char* corner_order = "corner 4i + 2j + l at (i, j, l)";
    static constexpr auto on_cpu = &trilinear_interpolation_cpu;
    static constexpr auto on_cuda = OCTET_CUDA_LAUNCHER(trilinear_interpolation_cuda);
};

OCTET_MULTILINEAR(trilinear_interpolation, Trilinear)
