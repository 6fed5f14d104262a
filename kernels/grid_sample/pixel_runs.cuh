// How the gradient to the input is cut into runs of pixels (pixel_runs.rest.cu): where a field in
// 16 bits is far larger than what is added to it.
#pragma once
#include "job.cuh"

/// Elements of a run, whose sums a block has in shared memory.
constexpr int kRunElements = 8192;

/// The pixels of each image in memory's order, cut into runs; a point stands in a bin of each run
/// that it adds to. Where points crowd, so that a bin would have too many, a run's sums are in
/// memory instead.
struct PixelRuns {
    static constexpr int kBins = 16;        // of a run, so that fewer points wait for each other
    static constexpr int kBinPoints = 512;  // at most: a run of more would take too long

    int pixels_log2;       // of a run
    bool last;             // a pixel's channels lie side by side, and a run has them all
    int each, count;       // runs of an image, of all
    int *any, *crowded;    // whether points crowd in one of the runs, in each of them
    int *counts, *points;  // of the bins
    float* sums;           // of all elements

    int64_t heads() const { return (int64_t(count) + 4) / 4 * 4; }
    int64_t zero_bytes() const { return (heads() + int64_t(count) * kBins) * sizeof(int); }
    /// Of scratch memory, for so many elements.
    int64_t bytes(int64_t elements) const {
        return zero_bytes() + int64_t(count) * kBins * kBinPoints * sizeof(int) +
               elements * sizeof(float);
    }
    void place(void* scratch) {
        any = static_cast<int*>(scratch), crowded = any + 1, counts = any + heads();
        points = counts + int64_t(count) * kBins;
        sums = reinterpret_cast<float*>(points + int64_t(count) * kBins * kBinPoints);
    }
};
