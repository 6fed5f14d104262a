// By what hash_grid_encoding's gradient to the table is summed in one of two ways on a GPU:
// choices.h tells which, and why.
#pragma once

/// An H200's, from 735 drawn levels with both ways forced in turn (medians, cold L2 cache), in
/// microseconds. Other GPUs are taken to share them, until one has rates of its own.
struct HashGridTableRates {
    double add, wait;   // an addition to memory; more where all of them are to one row
    double launch;      // of sums in shared memory: what these take in any case,
    double sum, flush;  // an addition, and a sum that goes to memory
};
// clang-format off
constexpr HashGridTableRates kHashGridTable{14.5e-6, 18e-3, 6, 2.7e-6, 3.4e-4};
constexpr HashGridTableRates kHashGridDoubleTable{40e-6, 14.5e-3, 5, 6.3e-6, 7.8e-4};
// clang-format on
