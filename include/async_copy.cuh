// Copies between global and shared memory that no register takes part in: of whole runs (Hopper on)
// and of 16-byte words into shared memory (Ampere on), and of whole runs out of it (Hopper on);
// plain loads and stores before.
#pragma once
#include "common.h"

__device__ inline unsigned shared_address(const void* in_shared) {
    return unsigned(__cvta_generic_to_shared(in_shared));
}

/// The word at `from`, of which `bytes` count (the rest is not read), to `to` in shared memory.
__device__ inline void copy_word(void* to, uintptr_t from, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
#else
    if (bytes >= 16)
        *static_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
        memcpy(to, reinterpret_cast<const void*>(from), bytes);
#endif
}

/// Until this thread's words are in shared memory; a barrier makes them the block's.
__device__ inline void wait_for_words() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/// What a block waits for: the copies that its threads began, and what they wrote to shared memory
/// themselves. Lies in shared memory.
struct Arrivals {
    uint64_t barrier;

    /// By the whole block, before its first copy.
    __device__ void prepare() {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
                         "r"(blockDim.x)
                         : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
#endif
    }
#if __CUDA_ARCH__ >= 900
    /// The words at `from`, `bytes` in all, to `to`: one instruction of one thread.
    __device__ void copy(void* to, uintptr_t from, int bytes) {
        const unsigned at = shared_address(&barrier);
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at),
                     "r"(bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(shared_address(to)),
            "l"(from), "r"(bytes), "r"(at)
            : "memory");
    }
#endif
    /// By the whole block, until all is in shared memory, the turn-th time, from 0 on. Before the
    /// next copies to the same place the block has to meet again.
    __device__ void wait(int turn = 0) {
#if __CUDA_ARCH__ >= 900
        const unsigned at = shared_address(&barrier);
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
        asm volatile(
            "{\n"
            ".reg .pred arrived;\n"
            "again: mbarrier.try_wait.parity.shared.b64 arrived, [%0], %1;\n"
            "@!arrived bra again;\n"
            "}" ::"r"(at),
            "r"(turn & 1)
            : "memory");
#else
        wait_for_words();
        __syncthreads();
#endif
    }
};

/// A run that begins on a word, from shared memory, by the whole block; what the last word lacks is
/// written in elements. Nothing may write to `from` afterwards.
template <typename T>
__device__ inline void store_run(T* to, const T* from, int elements) {
    constexpr int kPer = 16 / sizeof(T);
    const int words = elements / kPer;
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0 && words > 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(from)), "r"(words * 16)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
#else
    __syncthreads();
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
#endif
    for (int i = words * kPer + threadIdx.x; i < elements; i += blockDim.x) to[i] = from[i];
}
