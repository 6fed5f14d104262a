// What work of grid_sample takes on a GPU: every number by which a call's way is chosen among
// several (choices.h tells which, and why). Microseconds, unless it says otherwise.
#pragma once
#include <cstdint>

/// An H200's, from sweeps with each way forced in turn (cases at random, medians, cold L2 cache). A
/// choice goes by ratios, which other GPUs are taken to share, until one has rates of its own.
struct GridSampleRates {
    double turn = 10;           // of launching the pass that turns a field's channels last,
    double stream = 2.6;        // and of the pass: MB each, read and written
    double coherent = 2.2;      // a million rows of a channel's pixels that neighbours share,
    double scattered = 6.5;     // that they do not share,
    double cached = 2;          // and where the field fits in an L1 cache
    double last = 3;            // scattered, where a pixel's channels lie side by side,
    double last_byte = 0.01;    // and each byte of the pixel
    double words = 7;           // a million rows of turned pixels of up to four channels,
    double row = 12;            // of more,
    double row_byte = 0.27;     // and each byte of these beyond a sector
    double gain = 0.8;          // turning has to take less of, to be chosen,
    double look = 0.65;         // and for a look at where points lie, which costs some 25 itself:
    double least = 200;         // where scattered points would take so long
    int64_t cache = 45000;      // bytes
    float near = 12, far = 32;  // sectors that 32 points lie in, coherent and scattered ones
    double large = 50;          // MB of the L2 cache; and so much
    double missed = 20;         // a million rows take more, where it holds none: from one of 500 MB
    int64_t held = 256 << 10;   // bytes of an image that threads to a point read quicker
    int64_t lonely = 5;         // pixels to a point, from where points have no neighbours,
    double plane_field = 2e7;   // and bytes of a field of which channels are then read one by one:
    double by_planes = 0.65;    // that takes of what scattered ones would
    int64_t few = 1 << 15;      // points, below which a warp to 32 of them leaves a GPU idle
    int64_t filled = 132 << 10;  // threads that fill it
};
constexpr GridSampleRates kGridSampleRates;

/// Of its gradients.
struct GridSampleGradientRates {
    double stream = 2.6, sectors = 3.7;  // MB of a pass, and of sectors that points need: each
    double pair = 1.25, sector = 1.2;    // of a turned pixel, of a sector: what it takes of that
    double last = 1.5;   // more, of the share of a sector that channels side by side use
    double least = 100;  // a look pays where scattered points take so long
    double held = 1e8;   // bytes of a field that threads to a point read quicker
    double look = 2;     // sectors that 32 points lie in, in order;
    float apart = 25;    // and up to which a turned image's rows still share them in the caches
    double zeroed = 4.3, rounded = 4;        // MB of passes that turn nothing: each
    double add_near = 5.3, add_far = 10;     // a million additions: of points in order, scattered,
    double word_near = 7.5, word_far = 8.6;  // and of words of four channels
    double missed = 35;   // that take more where the L2 cache holds no sums: of more than 500 MB
    double launches = 5;  // what passes take in any case
    int64_t short_zeros = 16 << 20;  // bytes, up to which a kernel writes them that others follow
    int64_t few = 1 << 14;           // points, below which a warp to 32 of them leaves a GPU idle,
    int64_t few_sums = 1 << 17;  // and elements of theirs, below which launches decide, not work
    // Pixels to a point, beyond which passes in float do not pay, and those that turn.
    double rare = 128, rare_nearest = 32, sparse = 4;
    // So many points to a pixel, and lanes no longer share the channels of one: each then adds up
    // what its own points give the same pixel. Where channels neighbour, later.
    double crowded = 0.5, crowded_last = 1.25;
    double most = 31;         // sectors that 32 points lie in: scattered ones are in hardly more
    double worth = 25;        // what has to be saved by a look, which costs half of it
    int64_t field = 110000;   // bytes of a channel's sums in shared memory, of two blocks to an SM
    double field_adds = 512;  // to each pixel, and in all, from where that is worth a look
    double field_least = 1.6e7;
    float field_few = 6;     // sectors that 32 points lie in, from where it pays
    double passes = 4.4e-6;  // of an element in 16 bits, in float, beyond writing it;
    double listed = 3.9e-5;  // of a point in the lists of runs of pixels,
    double summed = 8.9e-6;  // of each of its gradients,
    double lists = 24;       // of launching what makes these,
    double lists_last = 12;  // and more where channels lie side by side
};
constexpr GridSampleGradientRates kGridSampleGradientRates;
