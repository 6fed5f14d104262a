// How the kernels of multilinear_tiles.cuh and multilinear_sums.cuh divide a call into tiles, and
// which calls they suit.
#pragma once
#include "multilinear.h"
#include "rates/rows.cuh"

namespace tiles {

/// How a tensor's part of a tile lies in shared memory.
enum Kind : int {
    kOne,    // all of it is one run
    kCells,  // the rows of each point are
    kRows,   // each row is
    kNone    // it is read where it is
};
struct Part {
    Kind kind;
    int pitch, bytes;   // from run to run; of all of it
    unsigned step[3];   // from point to point, row to row, element to element, in bytes
    int64_t stride[3];  // the same in elements
};

struct Plan {
    int points, width, chunks;  // of a tile; how many tiles share a point's features
    int log_lanes;              // of how many threads share a point
    Part feats, grad_out;
    // Of the gradient to feats: whether a tile is one run that begins on a word, or rows are.
    bool one_run;
    int pitch, bytes;
};

/// A plan and the threads of a block.
struct Tiling {
    Plan plan;
    int threads;
};

constexpr int kTileBytes = 16384, kLargest = 32768;  // of features, in shared memory
constexpr int kSumsBytes = 24576;                    // and where they are summed
constexpr int kFewBytes = 12288;                     // of a point, of which a warp has too much
constexpr int kMostGaps = 45000;                     // of a run that is not dense
constexpr int kSkipped = 64;   // bytes between runs that are worth a run of their own
constexpr int kShifted = 256;  // of a cell, from which to twice as many it may be worth one
constexpr int kLongRow = 64;   // features, from where threads of a forward keep to a point, and
                               // corners side by side are read as words
constexpr int kThreads = 128, kMostThreads = 256;  // of a block
constexpr int kFairBlocks = kRowRates.fair_blocks;

inline HD int rounded(int64_t bytes) { return int((bytes + 15) / 16 * 16); }

/// How a part of a tile is to lie in shared memory: in as few runs as there are, unless what lies
/// between them is worth skipping, or more than half of a run; `chunked`: any of it, which is the
/// next tile's; `shifted`: cells are to begin at banks of their own.
inline Part part_of(const int64_t* stride, int K, int64_t points, int64_t width, int size,
                    bool chunked, bool shifted = false) {
    const int64_t row = (width - 1) * stride[2] + 1, cell = (K - 1) * stride[1] + row;
    const int64_t all = (points - 1) * stride[0] + cell;
    Part part{};
    for (int i = 0; i < 3; ++i) {
        part.stride[i] = stride[i];
        part.step[i] = unsigned(stride[i] * size);
    }
    int64_t length = row, runs = points * K;
    const int64_t own = points * K * width;
    const int times = chunked ? 1 : 2;
    if (all <= times * own && (all * size <= kMostGaps || all == own) &&
        (points == 1 || (!shifted && (stride[0] - cell) * size < kSkipped)))
        part.kind = kOne, length = all, runs = 1;
    else if (cell <= times * K * width)
        part.kind = kCells, length = cell, runs = points;
    else
        part.kind = row == width ? kRows : kNone;
    part.pitch = rounded(length * size) + 16;
    part.bytes = part.kind == kNone ? 0 : int(runs * part.pitch);
    return part;
}

/// As many points to a tile as there are, may be and leave work for every multiprocessor; rounded
/// down to where tiles begin on words.
inline int64_t evened(int64_t points, int64_t most, int64_t N) {
    points = max(int64_t(1), min(min(points, most), ceil_div(N, kFairBlocks)));
    for (int even = 16; even > 1; even /= 2)
        if (points >= even) return points - points % even;
    return points;
}

/// Divides a call into tiles of `points` points with all their features, or a point's into
/// `chunks`.
inline void divide(Plan& plan, const MultilinearParams& p, int K, int64_t points, int64_t chunks,
                   int size, bool shifted = false) {
    int64_t width = p.F;
    if (chunks > 1) width = ceil_div(ceil_div(p.F, chunks) * size, 16) * 16 / size;
    plan.points = int(points), plan.width = int(width), plan.chunks = int(ceil_div(p.F, width));
    const int64_t grad_stride[3] = {p.grad_out_stride[0], 0, p.grad_out_stride[1]};
    if (p.feats)
        plan.feats = part_of(p.feats_stride, K, points, width, size, plan.chunks > 1, shifted);
    if (p.grad_out) plan.grad_out = part_of(grad_stride, 1, points, width, size, plan.chunks > 1);
}

/// The tiles of a forward or of the gradient to feats, and not of what else is asked for.
template <typename T, int K>
inline Tiling plan_of(const MultilinearParams& p, int most_threads = kMostThreads) {
    const int size = sizeof(T);
    const int64_t cell = K * p.F * size;
    const int threads = cell > kTileBytes / 2 ? most_threads : kThreads;
    Plan plan{};
    const int64_t points =
        evened((threads == kMostThreads ? kLargest : kTileBytes) / cell, threads, p.N);
    int64_t chunks = 1;
    if (points == 1) {
        chunks = ceil_div(cell, kLargest);
        if (p.N * chunks < kFairBlocks)
            chunks = max(chunks, min(ceil_div(kFairBlocks, p.N), p.F * size / 256));
    }
    divide(plan, p, K, points, chunks, size);
    // As many as points leave, and none for a row that is short.
    plan.log_lanes = plan.width < kLongRow ? 0 : 5;
    while (plan.log_lanes && points << (plan.log_lanes + 1) <= threads) ++plan.log_lanes;
    plan.one_run = plan.chunks == 1 && points * cell % 16 == 0;
    plan.pitch = rounded(plan.width * size) + 16;
    if (p.grad_feats) plan.bytes = plan.one_run ? rounded(points * cell) : K * plan.pitch;
    return {plan, threads};
}

/// The tiles of sums over features. What sums up a point's features in which order depends on F
/// alone, and not on how many points there are.
template <typename T, int K>
inline Plan sums_plan_of(const MultilinearParams& p) {
    const int size = sizeof(T);
    const int64_t cell = K * p.F * size;
    Plan plan{};
    while (plan.log_lanes < 7 && (kThreads >> plan.log_lanes) * cell > kSumsBytes) ++plan.log_lanes;
    const int64_t points = evened(kThreads >> plan.log_lanes, kThreads, p.N);
    // Rows that all begin at the same few banks: narrower cells are not worth a run each, and of
    // wider ones more threads share a point.
    const bool shifted =
        p.feats_stride[1] * size % 32 == 0 && cell >= kShifted && cell < 2 * kShifted;
    divide(plan, p, K, points, points == 1 ? ceil_div(cell, kLargest) : 1, size, shifted);
    return plan;
}

/// Whether a warp to a point would leave most of the GPU idle, and a block has to sum its features.
template <typename T>
inline bool are_few(const MultilinearParams& p, int corners) {
    return p.N < kRowRates.few_points && corners * p.F * int64_t(sizeof(T)) > kFewBytes;
}

/// Whether tiles are what a forward is quickest with, as far as measurements on an H200 tell.
template <typename T>
inline bool suits(const MultilinearParams& p, const Plan& plan, int corners) {
    const bool even = p.feats_stride[2] == 1;
    const bool dense = even && p.feats_stride[1] == p.F && p.feats_stride[0] == corners * p.F;
    if (plan.feats.kind == kNone || sizeof(T) == 8) return false;
    const int64_t bytes = p.N * corners * p.F * int64_t(sizeof(T));
    constexpr auto r = kRowRates;
    if (bytes < r.few && p.F <= r.wide) return false;
    if (sizeof(T) == 4) return dense ? plan.chunks == 1 : p.F > r.narrow && p.F <= 2 * r.wide;
    return dense || (p.F > 2 && (even || p.F <= 8 * r.wide));
}

/// Whether sums over features are.
template <typename T>
inline bool suits_sums(const MultilinearParams& p, const Plan& plan, int corners) {
    const int64_t row = p.F * int64_t(sizeof(T)), bytes = p.N * corners * row;
    constexpr auto r = kRowRates;
    if (plan.feats.kind == kNone || (plan.feats.kind == kRows && row < r.row_alone)) return false;
    const int64_t many = sizeof(T) == 8 ? r.many_double : r.many;
    return p.F >= r.least && (bytes >= many || row >= r.long_row);
}

}  // namespace tiles
