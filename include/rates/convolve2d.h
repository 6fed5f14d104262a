// By what convolve2d's way is chosen among several: choices.h tells which, and why.
#pragma once
#include <cstdint>

/// An H200's, from 170 random cases with each way forced in turn (medians, cold L2 cache):
/// multiply-adds in tiles, in strips, bands on tensor cores. Other GPUs are taken to share them,
/// until one has rates of its own.
struct Convolve2dRates {
    int64_t square = 9;             // columns of odd squares, which tiles are compiled for
    int64_t tall = 16;              // rows of taps that tiles hold at a time; of more strips do
    int64_t strip_taps = 80;        // strips are quicker from so many on; of float32 from so many
    int64_t strip_taps_large = 38;  // where pixels are as many as
    double large = 1e6;
    // Of 16 bits strips want wide outputs, and bands are quicker where pixels are many and taps
    // more than these, and not narrow.
    int64_t strip_width_16bit = 32, strip_most_16bit = 115, narrow = 8;
    // A row of taps costs bands the same whether 24 columns are taps or not: few taps are theirs
    // only where rows are wide and pixels many.
    int64_t bands_taps = 81, bands_columns = 4, bands_wide = 16;
};
constexpr Convolve2dRates kConvolve2dRates;
