// What work takes, by kind of device: every number by which a call's way is chosen among several
// (choices.h tells which, and why). Microseconds, unless it says otherwise.
#pragma once
#include <cstdint>

/// An H200's, from sweeps with each way forced in turn (cases at random, medians, cold L2 cache). A
/// choice goes by ratios, which other GPUs are taken to share, until one has a table of its own.
struct GpuRates {
    struct GridSampleForward {
        double turn = 10;         // of launching the pass that turns a field's channels last,
        double stream = 2.2;      // and of the pass: MB each, read and written
        double coherent = 2.2;    // a million rows of a channel's pixels that neighbours share,
        double scattered = 6.5;   // that they do not share,
        double cached = 2;        // and where the field fits in an L1 cache
        double last = 3;          // scattered, where a pixel's channels lie side by side,
        double last_byte = 0.01;  // and each byte of the pixel
        double words = 7;         // a million rows of turned pixels of up to four channels,
        double row = 12;          // of more,
        double row_byte = 0.27;   // and each byte of these beyond a sector
        double gain = 0.8;        // turning has to take less of, to be chosen,
        double look = 0.65;       // and for a look at where points lie, which costs some 25 itself:
        double least = 200;       // where scattered points would take so long
        int64_t cache = 100000;   // bytes
        float near = 12, far = 32;  // sectors that 32 points lie in, coherent and scattered ones
        double large = 50;          // MB of the L2 cache; and so much
        double missed = 20;  // a million rows take more, where it holds none: from one of 500 MB
    } grid_sample;
    struct GridSampleGradients {
        double stream = 2.2, sectors = 3.7;  // MB of a pass, and of sectors that points need: each
        double pair = 1.25, sector = 1.2;  // of a turned pixel, of a sector: what it takes of that
        double last = 1.5;  // more, of the share of a sector that channels side by side use
        double turn_sums = 2.2, add = 3;       // times as much, where gradients are summed
        double least = 100, least_sums = 500;  // a look pays where scattered points take so long
        double look = 2;  // sectors that 32 points lie in: where turning pays below, none is needed
    } grid_sample_gradients;
    struct Lut3d {
        double launch = 4, table = 8;    // of the way that reads lut itself; and of making a table,
        double entry = 14;               // and a million entries of it
        double bytes = 20, shared = 13;  // to make and spread tables of integers, of float32
        // A million pixels, trilinear and tetrahedral: lut itself, a table, of integers, in shared
        // memory.
        double direct_pixel[2] = {24, 20}, table_pixel[2] = {9.5, 8.5};
        double table_byte_pixel[2] = {10.5, 7}, bytes_pixel[2] = {4.7, 4};
        double shared_pixel = 7.2;
        int32_t shared_least = 16, shared_least_16bit = 22;  // entries along an axis, below which
                                                             // the L1 cache serves as well
    } lut3d;
    /// Of the gradient to a table, from 249 random cases with 16 ways each in turn.
    struct Lut3dSums {
        int32_t longest_run = 16;                          // pixels of a thread
        int64_t few = 16000, fair = 64000, many = 300000;  // pixels, below which runs are shorter
        int32_t tiny = 512, small = 4913, middle = 64000;  // entries that many pixels meet at once
        int64_t shared_bytes = 110000;  // of copies in shared memory: two blocks to an SM
    } lut3d_sums;
    /// Convolutions forward, from 345 random cases with each way in turn: multiply-adds in tiles,
    /// in strips, bands on tensor cores.
    struct Convolve2d {
        // Tiles are compiled for odd squares up to so wide. Of float32 they are quicker only where
        // rows lie in words of 16 bytes: beside these strips take 0.52 to 0.74 of the time.
        int64_t square = 9, unaligned_pixels = 1000000;
        int64_t strip_taps = 8;     // of float32: strips are as quick from so many on,
        double strip_pixels = 5e5;  // or from so many pixels
        // Of 16 bits strips are slower to fill, which pays from so many products on.
        int64_t strip_taps_16bit = 8, strip_width_16bit = 32;
        double products_16bit = 1.4e7;
        int64_t narrow = 8, strip_most_16bit = 256;  // columns; taps of wider ones
        // A row of taps costs bands the same whether 24 columns are taps or not.
        int64_t bands_taps = 81, bands_columns = 4, bands_wide = 16;
    } convolve2d;
    struct Rows {
        int64_t few = 1000000;          // bytes of a forward that tiles are no help to,
        int64_t many = 12000000;        // and of sums that they are one to
        int64_t few_points = 1056;      // of long rows, to which a warp each is too little
        int64_t row_alone = 128;        // bytes of a row that is worth a run of its own
        int64_t narrow = 8, wide = 64;  // features of a row
        int64_t least = 3;              // of one that is summed, where points lie apart
        int fair_blocks = 528;          // four to each multiprocessor
    } rows;
    const char* device = "H200";
};
constexpr GpuRates kGpu;

/// A CPU's, one thread of it, from sweeps of random cases on an EPYC with AVX-512.
struct CpuRates {
    struct GridSample {
        // A thousand elements of an image converted to float32, read and written; what a thousand
        // samples in 16 bits take longer than in float32, and each of their taps.
        double convert = 0.2, sample = 1.5, tap = 2;
        double calls = 20;        // what the calls for memory take
        int64_t large = 5 << 19;  // elements of an image that fit no cache of one core
        int64_t fair = 1 << 16;   // work that is worth handing to a thread
    } grid_sample;
    struct Lut3d {
        double entry = 3, pixel_more = 45;  // a thousand: entries copied, pixels without a copy
        int64_t few = 32;                   // pixels that need none in any case
    } lut3d;
};
constexpr CpuRates kCpu;
