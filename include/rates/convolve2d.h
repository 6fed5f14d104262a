// By what convolve2d's way is chosen among several: choices.h tells which, and why.
#pragma once
#include <cstdint>

/// An H200's, from 170 random cases with each way forced in turn (medians, cold L2 cache):
/// multiply-adds in tiles, in strips, bands on tensor cores. Other GPUs are taken to share them,
/// until one has rates of its own.
struct Convolve2dRates {
    // Up to how many outputs (of float64 twice as many) and products (more of float64 where the
    // border is zero) each output has its threads, and of how few products in any case (of float32
    // and the odd squares that tiles are compiled for, of other kernels or 16 bits, of float64; of
    // more where the taps of float32 are several, half as many where the border is not zero); and
    // up to how many outputs and products each tap has a block, also where the rest is quick. From
    // 3,600 cases on an H100.
    double small_outputs = 16400, small_products = 1.1e7, small_products_double = 2.4e7;
    double few_products_square = 7e5, few_products = 1.4e6, few_products_double = 4e6;
    double some_products_square = 2e6, some_products = 6e6, beyond_borders = 0.5;
    int64_t several_taps = 30;
    double small_sums = 23000, small_sum_products = 4e6;
    double small_sums_quick = 16000, small_sum_products_quick = 1e6;
    int64_t square = 9;             // columns of odd squares, which tiles are compiled for
    int64_t tall = 16;              // rows of taps that tiles hold at a time; of more strips do
    int64_t strip_taps = 80;        // from which on strips are quicker than tiles,
    int64_t strip_taps_large = 38;  // and of float32 in large images
    double large = 1e6;             // pixels of all images together
    // Of 16 bits strips want wide outputs, and in large images bands are quicker from so many taps
    // on, except for narrow kernels.
    int64_t strip_width_16bit = 32, strip_most_16bit = 115, narrow = 8;
    // A row of taps costs bands the same whether 24 columns are taps or not: of few taps only wide
    // rows in large images are theirs.
    int64_t bands_taps = 81, bands_columns = 4, bands_wide = 16;
    // Columns without a tile: of 16 bits and many taps (5 x 5, or more than 4 x 4) below how many
    // outputs. Of the gradient to the kernel in float32, up to how many taps.
    double columns_few = 2e5;
    int64_t columns_taps = 110;
    // Below how many tiles (of 64 x 64, of bands' and eights' own size) warps share taps and tiles
    // get smaller, and of the gradient to the kernel, tiles of 64, 32 and 16 rows lower: of eights
    // 64 rows of up to 16 and of 32 taps, and the others. From 1,500 cases on an H100.
    double strips_few = 150, bands_few = 170, bands_fewer = 240;
    double eights_few = 330, eights_fewer = 240, eights_parts_few = 270;
    double eights_parts_tall = 1024, eights_parts_tall_32 = 400;
    // Below how many tiles times chunks of taps the gradient to a float32 kernel in strips has
    // lower tiles: than 64 rows of one slice, and others. From 316 cases on an H100, heights of 8
    // to 128.
    double strips_parts_tall = 1300, strips_parts_few = 200;
    // Numbers of 16 bits as they are: from how many products on they are quicker than threads of
    // each output; and in images of fewer pixels than columns from so many taps on.
    double few_products_eights = 1.2e6, eights_pixels = 4.5e5;
    int64_t eights_taps = 26;
    // Otherwise of more columns of taps than these, or of more taps than these where the columns
    // are more than four, and four.
    int64_t eights_columns = 6, eights_taps_wide = 12, eights_taps_narrow = 16;
};
constexpr Convolve2dRates kConvolve2dRates;
