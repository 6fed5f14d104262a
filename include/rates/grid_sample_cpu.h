// What work of grid_sample takes on a CPU, by which a call's way is chosen among several (choices.h
// tells which, and why). Microseconds, unless it says otherwise.
#pragma once
#include <cstdint>

/// A CPU's, one thread of it, from sweeps of random cases on an EPYC with AVX-512.
struct GridSampleCpuRates {
    // A thousand elements of an image converted to float32, read and written; what a thousand
    // samples in 16 bits take longer than in float32, and each of their taps.
    double convert = 0.2, sample = 1.5, tap = 2;
    double calls = 20;  // what the calls for memory take
    // What a thousand samples of a channel take less by rows of channels than by planes, to values
    // and to gradients; and so many channels that rows are no quicker by.
    struct Rows {
        double saved[2];
        int spared[2];
    };
    Rows bicubic = {{3.2, 3.2}, {8, 10}}, volume = {{0.4, 0.2}, {2, 16}};  // of 4 x 4, 2 x 2 x 2
    // The same where reads by planes miss the cache: most points of a field that fits none lie far
    // from the next.
    Rows far_image = {{2, 8}, {0, 44}}, far_volume = {{12, 6}, {0, 0}};
    // A copy of so many bytes is mapped anew each time: what the faults of a thousand elements
    // take.
    double mapped = 1 << 25, fresh = 0.7;
    // Sums that are mapped anew are made in slabs of so many bytes in all, unless that takes
    // longer: a thousand points that are looked at once more, and what those take of whose
    // neighbours some are added.
    int64_t kept = 1 << 24;
    double looked = 3, again = 30, again_each = 2;  // the last for each tap and channel
    int64_t large = 5 << 19;  // elements of an image that fit no cache of one core
    int64_t fair = 1 << 16;   // work that is worth handing to a thread
    // So many pixels to a tap: sums in 16 bits are made of those alone that are touched; threads
    // share channels, not rows of pixels that are mostly written as zeros.
    int64_t touched = 16, written = 4;
    // Taps to a pixel in each part of the points that has sums of its own, at least, of images of
    // so few channels; and such parts of an image at most.
    int64_t crowded = 16, few_channels = 4, most_parts = 8;
};
constexpr GridSampleCpuRates kGridSampleCpuRates;
