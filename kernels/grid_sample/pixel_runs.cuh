// How the gradient to the input is cut into runs of pixels (pixel_runs.rest.cu): where a field in
// 16 bits is far larger than what is added to it.
#pragma once
#include "job.cuh"

/// Elements of a run, whose sums a block has in shared memory.
constexpr int kRunElements = 8192;

/// The pixels of each image in memory's order, cut into runs; a point stands in a bin of each run
/// that it adds to.
struct PixelRuns {
    static constexpr int kBins = 16;        // of a run, so that fewer points wait for each other
    static constexpr int kBinPoints = 512;  // at most: a run of more would take too long
    static constexpr int kHeadBytes = 256;  // `crowded`, which others look at

    int pixels_log2;       // of a run
    bool last;             // a pixel's channels lie side by side, and a run has them all
    int each, count;       // runs of an image, of all
    int* crowded;          // whether a bin has more
    int *counts, *points;  // of the bins

    int64_t zero_bytes() const { return kHeadBytes + int64_t(count) * kBins * sizeof(int); }
    /// Of scratch memory.
    int64_t bytes() const {
        return zero_bytes() + int64_t(count) * kBins * kBinPoints * sizeof(int);
    }
    void place(void* scratch) {
        crowded = static_cast<int*>(scratch), counts = crowded + kHeadBytes / sizeof(int);
        points = counts + int64_t(count) * kBins;
    }
};
