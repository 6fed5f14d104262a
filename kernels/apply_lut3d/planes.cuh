// A table of 16-bit numbers in shared memory: a plane of red and green, as halves of a word, and
// one of blue.
#pragma once
#include "cells.cuh"

/// The word of shared memory at `from` where `wanted` is odd; elsewhere whatever there was, which
/// the caller drops: lanes that do not load leave the banks to others.
__device__ inline unsigned load_if_odd(const unsigned* from, unsigned wanted) {
    unsigned word;
    asm volatile(
        "{\n.reg .pred odd;\n.reg .b32 bit;\nand.b32 bit, %2, 1;\nsetp.ne.u32 odd, bit, 0;\n"
        "@odd ld.shared.u32 %0, [%1];\n}"
        : "=r"(word)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))), "r"(wanted));
    return word;
}

/// Where corners come from. pair(): those of entries i + step and the next, channel by channel, as
/// halves of a word, `step` being even; blues() of blue alone; single(): red and green, and blue,
/// of entry i.
struct SharedTable {
    const unsigned* red_green;
    const unsigned short* blue;

    HD static constexpr EntrySteps steps(int S) { return EntrySteps::planes(S); }
    __device__ uint3 pair(int i, int step) const {
        const unsigned a = red_green[i + step], b = red_green[i + step + 1];
        return {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), blues(i, step)};
    }
    __device__ unsigned blues(int i, int step) const {
        const unsigned* word = reinterpret_cast<const unsigned*>(blue) + (i >> 1) + step / 2;
        const unsigned a = word[0], b = load_if_odd(word + 1, unsigned(i));
        return __funnelshift_r(a, b, unsigned(i) << 4);
    }
    __device__ uint2 single(int i) const { return {red_green[i], blue[i]}; }
};
