// How the kernels of multilinear_tiles.cuh divide a call into tiles, and which calls they suit.
#pragma once
#include <algorithm>

#include "multilinear.h"
#include "rates.h"

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
    int lanes;                  // that share a point where features are summed
    Part feats, grad_out;
    // The gradient to feats: all of it one run that begins on a word, or rows; where it is put
    // together, if not in the place of the features.
    bool one_run, in_place;
    int pitch, bytes;
};

constexpr int kTileBytes = 16384, kLargest = 32768;  // of features, in shared memory
constexpr int kMostGaps = 45000;                     // of a run that is not dense
constexpr int kFairBlocks = kGpu.rows.fair_blocks;

inline HD int rounded(int64_t bytes) { return int((bytes + 15) / 16 * 16); }

template <typename A>
HD int places_bytes(const Plan& plan, int D) {
    return rounded(plan.points * D * int64_t(sizeof(A)));
}

/// How a part of a tile is to lie in shared memory: as few runs as there are, unless more than half
/// of a run would be of no use.
inline Part part_of(const int64_t* stride, int K, int64_t points, int64_t width, int size) {
    const int64_t row = (width - 1) * stride[2] + 1, cell = (K - 1) * stride[1] + row;
    const int64_t all = (points - 1) * stride[0] + cell;
    Part part{};
    for (int i = 0; i < 3; ++i) {
        part.stride[i] = stride[i];
        part.step[i] = unsigned(stride[i] * size);
    }
    int64_t length = row, runs = points * K;
    if (all <= 2 * points * K * width && (all * size <= kMostGaps || all == points * K * width))
        part.kind = kOne, length = all, runs = 1;
    else if (cell <= 2 * K * width)
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
    int64_t points = (threads == 256 ? kLargest : kTileBytes) / cell, chunks = 1;
    plan.lanes = threads;
    if (points >= threads / 32) {
        plan.lanes = 32;
        while (plan.lanes > 8 && threads / plan.lanes < points) plan.lanes /= 2;
        while (plan.lanes > 1 && plan.lanes / 2 * E >= p.F) plan.lanes /= 2;
    }
    if (points > threads) points = threads;
    if (points > ceil_div(p.N, kFairBlocks)) points = ceil_div(p.N, kFairBlocks);
    if (points < 1) points = 1;
    for (int even = 16; even > 1; even /= 2)
        if (points >= even) {
            points -= points % even;
            break;
        }
    if (points == 1) {
        const int64_t most = sums ? kTileBytes : kLargest;
        chunks = ceil_div(cell, most);
        if (!sums && p.N * chunks < kFairBlocks)
            chunks = std::max(chunks, std::min(ceil_div(kFairBlocks, p.N), p.F * size / 256));
    }
    int64_t width = p.F;
    if (chunks > 1) width = ceil_div(ceil_div(p.F, chunks) * size, 16) * 16 / size;
    plan.points = int(points), plan.width = int(width), plan.chunks = int(ceil_div(p.F, width));
    const int64_t grad_stride[3] = {p.grad_out_stride[0], 0, p.grad_out_stride[1]};
    if (p.feats) plan.feats = part_of(p.feats_stride, K, points, width, size);
    if (p.grad_out) plan.grad_out = part_of(grad_stride, 1, points, width, size);
    if (p.grad_feats) {
        plan.one_run = plan.chunks == 1 && points * cell % 16 == 0;
        const int64_t* stride = p.feats_stride;
        plan.in_place = sums && plan.one_run && stride[2] == 1 && stride[1] == p.F &&
                        stride[0] == K * p.F && reinterpret_cast<uintptr_t>(p.feats) % 16 == 0;
        plan.pitch = rounded(width * size) + 16;
        if (!plan.in_place) plan.bytes = plan.one_run ? rounded(points * cell) : K * plan.pitch;
    }
    return {plan, threads};
}

/// Whether tiles are what is quickest, as far as measurements on an H200 tell: always for the
/// gradient to feats; for sums over features not in small calls, nor where rows are long. The sums
/// are the same bits whether the gradient to feats is asked for too: one rule for both.
template <typename T>
inline bool suits(const MultilinearParams& p, const Plan& plan, int corners) {
    if (!p.out && !p.grad_points) return true;
    const bool even = p.feats_stride[2] == 1;
    const bool dense = even && p.feats_stride[1] == p.F && p.feats_stride[0] == corners * p.F;
    if (plan.feats.kind == kNone || sizeof(T) == 8) return false;
    const int64_t bytes = p.N * corners * p.F * int64_t(sizeof(T));
    constexpr auto r = kGpu.rows;
    if (p.out) {
        if (bytes < r.few && p.F <= r.wide) return false;
        if (sizeof(T) == 4) return dense ? plan.chunks == 1 : p.F > r.narrow && p.F <= 2 * r.wide;
        return dense || (p.F > r.narrow && (even || p.F <= 8 * r.wide));
    }
    if (!even || p.F <= (dense ? 1 : 2) * r.narrow) return false;
    return p.F <= r.wide ? bytes >= r.many : sizeof(T) == 2 && p.F > r.long_row;
}

}  // namespace tiles
