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
    // A copy of so many bytes is mapped anew each time: what the faults of a thousand elements
    // take.
    double mapped = 1 << 25, fresh = 0.7;
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
