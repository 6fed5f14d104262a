// Kernels that follow others of the same call without the pause between two launches:
// "Programmatic dependent launch", CUDA programming guide, on GPUs of sm_90 and later.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

/// What a kernel begins with that `start` may let follow another, or be followed: waits for the
/// former, and lets the latter be made ready.
__device__ inline void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Launches a kernel, with so many bytes of dynamic shared memory. `follows`: behind another
/// kernel, on a GPU of sm_90 or later. Its blocks are then made ready once all of the other's have
/// come to `follow`, or while they end, and wait in it; what the other writes they must not read by
/// `load_constant`.
template <typename... Params, typename... Args>
inline void start(void (*kernel)(Params...), dim3 blocks, int threads, int shared, bool follows,
                  cudaStream_t stream, const Args&... args) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{blocks, dim3(unsigned(threads)), size_t(shared), stream, &overlap,
                              follows};
    cudaLaunchKernelEx(&config, kernel, args...);
}

/// True if kernels, of which this is one, are compiled for the present GPU such that they can
/// follow each other.
template <typename... Params>
inline bool can_follow(void (*kernel)(Params...)) {
    constexpr int kMost = 64;
    static std::atomic<int8_t> known[kMost];  // 1: no; 2: yes
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kMost) return false;
    int8_t can = known[device].load(std::memory_order_relaxed);
    if (can == 0) {
        cudaFuncAttributes of{};
        if (cudaFuncGetAttributes(&of, kernel) != cudaSuccess) {
            cudaGetLastError();  // the launches' own error tells more
            return false;
        }
        can = of.ptxVersion >= 90 ? 2 : 1;
        known[device].store(can, std::memory_order_relaxed);
    }
    return can == 2;
}
