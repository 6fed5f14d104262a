// How the kernels of multilinear_tiles.cuh divide a call into tiles, and which calls they suit.
#pragma once
#include <algorithm>

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
    // The gradient to feats: all of it one run that begins on a word, or rows; where it is put
    // together, if not in the place of the features.
    bool one_run, in_place;
    bool regular;  // rows are whole multiples of 4 units, where features are summed
    int pitch, bytes;
};

constexpr int kTileBytes = 16384, kLargest = 32768;  // of features, in shared memory
// And where they are summed; where gradients to them lie beside them; of a warp's points at most.
constexpr int kSumsBytes = 32768, kSumsBeside = 24576, kMostSumsBytes = 49152;
constexpr int kMostGaps = 45000;  // of a run that is not dense
constexpr int kLongRow = 64;      // features, from where threads of a forward keep to a point
constexpr int kFairBlocks = kRowRates.fair_blocks;

inline HD int rounded(int64_t bytes) { return int((bytes + 15) / 16 * 16); }

template <typename A>
HD int places_bytes(const Plan& plan, int D) {
    return rounded(plan.points * D * int64_t(sizeof(A)));
}

/// How a part of a tile is to lie in shared memory: as few runs as there are, unless more than half
/// of a run would be of no use; `chunked`: any of it, which is the next tile's.
inline Part part_of(const int64_t* stride, int K, int64_t points, int64_t width, int size,
                    bool chunked) {
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
    if (all <= times * own && (all * size <= kMostGaps || all == own))
        part.kind = kOne, length = all, runs = 1;
    else if (cell <= times * K * width)
        part.kind = kCells, length = cell, runs = points;
    else
        part.kind = row == width ? kRows : kNone;
    part.pitch = rounded(length * size) + 16;
    part.bytes = part.kind == kNone ? 0 : int(runs * part.pitch);
    return part;
}

/// A plan and the threads of a block.
struct Tiling {
    Plan plan;
    int threads;
};

/// The tiles of a call. What sums up a point's features in which order depends on F alone, and not
/// on how many points there are.
template <typename T, int K>
inline Tiling plan_of(const MultilinearParams& p, int E) {
    const int size = sizeof(T);
    const int64_t cell = K * p.F * size;
    const bool sums = p.grad_points;
    const int threads = cell > kTileBytes / 2 && !sums ? 256 : 128;
    Plan plan{};
    // Whether gradients to feats may take the place of feats, bytes for bytes.
    const bool compact = p.feats && p.feats_stride[2] == 1 && p.feats_stride[1] == p.F &&
                         p.feats_stride[0] == K * p.F &&
                         reinterpret_cast<uintptr_t>(p.feats) % 16 == 0;
    const int room = compact ? kSumsBytes : kSumsBeside;
    while (plan.log_lanes < 5 && (threads >> plan.log_lanes) * cell > room) ++plan.log_lanes;
    if ((threads >> plan.log_lanes) * cell > kMostSumsBytes) plan.log_lanes = 7;
    // Rows that all begin at the same few banks: threads side by side take 16 bytes of each.
    plan.regular = sums && p.feats && plan.log_lanes < 5 && p.feats_stride[1] / E % 4 == 0;
    while (plan.regular && (E * size << plan.log_lanes) < 16) ++plan.log_lanes;
    int64_t points = sums             ? threads >> plan.log_lanes
                     : threads == 256 ? kLargest / cell
                                      : kTileBytes / cell;
    points = std::min({points, int64_t(threads), ceil_div(p.N, kFairBlocks)});
    if (points < 1) points = 1;
    for (int even = 16; even > 1; even /= 2)
        if (points >= even) {
            points -= points % even;
            break;
        }
    int64_t chunks = 1;
    if (points == 1) {
        chunks = ceil_div(cell, kLargest);
        if (!sums && p.N * chunks < kFairBlocks)
            chunks = std::max(chunks, std::min(ceil_div(kFairBlocks, p.N), p.F * size / 256));
    }
    int64_t width = p.F;
    if (chunks > 1) width = ceil_div(ceil_div(p.F, chunks) * size, 16) * 16 / size;
    plan.points = int(points), plan.width = int(width), plan.chunks = int(ceil_div(p.F, width));
    const int64_t grad_stride[3] = {p.grad_out_stride[0], 0, p.grad_out_stride[1]};
    if (!sums) {  // of a forward: as many as points leave, and none for a row that is short
        plan.log_lanes = width < kLongRow ? 0 : 5;
        while (plan.log_lanes && points << (plan.log_lanes + 1) <= threads) ++plan.log_lanes;
    }
    if (p.feats) plan.feats = part_of(p.feats_stride, K, points, width, size, plan.chunks > 1);
    if (p.grad_out) plan.grad_out = part_of(grad_stride, 1, points, width, size, plan.chunks > 1);
    if (p.grad_feats) {
        plan.one_run = plan.chunks == 1 && points * cell % 16 == 0;
        plan.in_place = sums && plan.one_run && compact && plan.feats.kind == kOne;
        plan.pitch = rounded(width * size) + 16;
        if (!plan.in_place) plan.bytes = plan.one_run ? rounded(points * cell) : K * plan.pitch;
    }
    return {plan, threads};
}

/// Whether a warp to a point would leave most of the GPU idle, and a block has to sum its features.
template <typename T>
inline bool are_few(const MultilinearParams& p, int corners) {
    return sizeof(T) < 8 && p.N < kRowRates.few_points &&
           corners * p.F * int64_t(sizeof(T)) > kMostSumsBytes / 4;
}

/// Whether tiles are what is quickest, as far as measurements on an H200 tell: always for the
/// gradient to feats; for sums over features not in small calls. The sums are the same bits whether
/// the gradient to feats is asked for too: one rule for both.
template <typename T>
inline bool suits(const MultilinearParams& p, const Plan& plan, int corners) {
    if (!p.out && !p.grad_points) return true;
    const bool even = p.feats_stride[2] == 1;
    const bool dense = even && p.feats_stride[1] == p.F && p.feats_stride[0] == corners * p.F;
    if (plan.feats.kind == kNone || sizeof(T) == 8) return false;
    const int64_t bytes = p.N * corners * p.F * int64_t(sizeof(T));
    constexpr auto r = kRowRates;
    if (p.out) {
        if (bytes < r.few && p.F <= r.wide) return false;
        if (sizeof(T) == 4) return dense ? plan.chunks == 1 : p.F > r.narrow && p.F <= 2 * r.wide;
        return dense || (even ? p.F > 2 : p.F > r.narrow && p.F <= 8 * r.wide);
    }
    const bool short_rows = plan.feats.kind == kRows && p.F * int64_t(sizeof(T)) < r.row_alone;
    return even && !short_rows && p.F >= r.least && (bytes >= r.many || are_few<T>(p, corners));
}

}  // namespace tiles
