// How the gradient to the input is cut into runs of pixels (pixel_runs.rest.cu): where a field in
// 16 bits is far larger than what is added to it.
#pragma once
#include "job.cuh"

/// Elements of a run, whose sums a block has in shared memory, and points that it takes at most:
/// with more it would take too long.
constexpr int kRunElements = 8192, kRunMost = 4096;

/// The pixels of each image in memory's order, cut into runs; a point stands in the list of each
/// run that it adds to.
struct PixelRuns {
    int pixels_log2;     // of a run
    bool last;           // a pixel's channels lie side by side, and a run has them all
    int each, count;     // runs of an image, of all
    int* crowded;        // whether a run has more than kRunMost points
    int *used, *points;  // length of `list`; how many points of it are a run's
    int *begins, *list;  // where these begin
    int* ranks;          // which one of a run's a point is, for each corner

    static constexpr int64_t kHeadBytes = 256 + 4;  // `crowded`, which others look at, and `used`

    /// Scratch memory for so many points in all lists, at most.
    int64_t bytes(int64_t listed) const {
        return kHeadBytes + 2 * (int64_t(count) + listed) * int64_t(sizeof(int));
    }
    void place(void* scratch, int64_t listed) {
        crowded = static_cast<int*>(scratch), used = crowded + 64;
        points = used + 1, begins = points + count;
        list = begins + count, ranks = list + listed;
    }
};
