// What work of apply_lut3d takes: every number by which a call's way is chosen among several
// (choices.h tells which, and why). Microseconds, unless it says otherwise.
#pragma once
#include <cstdint>

/// An H200's, from sweeps with each way forced in turn (cases at random, medians, cold L2 cache). A
/// choice goes by ratios, which other GPUs are taken to share, until one has rates of its own.
struct Lut3dRates {
    double launch = 4, table = 8;  // of the way that reads lut itself; and of making a table,
    double entry = 14;             // and a million entries of it
    double bytes = 20;             // to make and spread tables of integers
    // A million pixels, trilinear and tetrahedral: lut itself, a table, of integers.
    double direct_pixel[2] = {24, 20}, table_pixel[2] = {9.5, 8.5};
    double table_byte_pixel[2] = {10.5, 7}, bytes_pixel[2] = {4.7, 4};
    // In shared memory: a table, a million entries of it, a million pixels of 16 bits and of
    // float32; and entries along an axis, from which on it was no slower anywhere. (An H100's: of
    // 2,473 cases of noise, smooth colours and what lies between 1.7 % beyond the better way.)
    double shared = 8, shared_entry = 150, shared_pixel[2] = {6, 7};
    int32_t shared_least = 8;
    // Where only a channel fits: from how many million pixels on a look at them pays; and lines of
    // the table that 32 neighbouring pixels meet, up to which the L1 cache is as quick. (Of
    // four corners it is slower for noise alone, whose lines do not stay in it.)
    double looked_at = 2;
    float few_lines[2] = {16, 31.5f};
};
constexpr Lut3dRates kLut3dRates;

/// Of the gradient to a table, from 249 random cases with 16 ways each in turn.
struct Lut3dSumRates {
    int32_t longest_run = 16;                          // pixels of a thread
    int64_t few = 16000, fair = 64000, many = 300000;  // pixels, below which runs are shorter
    int32_t tiny = 512, small = 4913, middle = 64000;  // entries that many pixels meet at once
    int64_t shared_bytes = 110000;  // of copies in shared memory: two blocks to an SM
};
constexpr Lut3dSumRates kLut3dSumRates;

/// A CPU's, one thread of it, from sweeps of random cases on an EPYC with AVX-512.
struct Lut3dCpuRates {
    double entry = 3, pixel_more = 30;  // a thousand: entries copied, pixels without a copy
    int64_t few = 32;                   // pixels that need none in any case
};
constexpr Lut3dCpuRates kLut3dCpuRates;
