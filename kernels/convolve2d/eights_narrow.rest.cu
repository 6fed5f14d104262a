// Tiles of 32 columns of eights_forward.cuh: a file of its own, as a compiler has so long to do.
#include "eights_forward.cuh"

const char* convolve2d_eights_narrow(const Convolve2dParams& p, const EightsPlan& plan,
                                     cudaStream_t stream) {
    return run_eights<4>(p, plan, stream);
}
