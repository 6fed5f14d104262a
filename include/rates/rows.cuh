// What work of rows of features takes: every number by which a call's way is chosen among several
// (choices.h tells which, and why). Microseconds, unless it says otherwise.
#pragma once
#include <cstdint>

/// An H200's, from sweeps with each way forced in turn (cases at random, medians, cold L2 cache). A
/// choice goes by ratios, which other GPUs are taken to share, until one has rates of its own.
struct RowRates {
    int64_t few = 1000000;                          // bytes of a forward that tiles are no help to,
    int64_t many = 1000000, many_double = 4000000;  // and of sums that they are one to,
    int64_t long_row = 256;                         // where a row has fewer bytes than these
    int64_t few_points = 1056;      // of long rows, to which a warp each is too little
    int64_t row_alone = 128;        // bytes of a row that is worth a run of its own
    int64_t narrow = 8, wide = 64;  // features of a row
    int64_t least = 3;              // of one that is summed, where points lie apart
    int fair_blocks = 528;          // four to each multiprocessor
};
constexpr RowRates kRowRates;
