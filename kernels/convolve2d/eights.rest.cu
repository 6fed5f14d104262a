// Tiles of 64 columns of eights_forward.cuh, and which file has those of 32.
#include "eights_forward.cuh"

const char* convolve2d_eights_cuda(const Convolve2dParams* p, void* stream) {
    const EightsPlan plan(*p);
    const auto on = static_cast<cudaStream_t>(stream);
    return plan.groups == 4 ? convolve2d_eights_narrow(*p, plan, on) : run_eights<8>(*p, plan, on);
}
