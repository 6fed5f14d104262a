// A look at the points of a grid, on the GPU: which of two ways of a job they ask for, and whether
// they are scattered.
#pragma once
#include "cell.cuh"
#include "cheapest.cuh"
#include "turn.cuh"

namespace {

constexpr int kSamples = 64;  // rows of 32 neighbouring points

/// What a look has to tell of slabs; see `Slabs`.
struct Spread {
    bool asked;
    float gain, cost, held;  // share of the field that the L2 cache holds
    int window;
};

/// What all threads of a warp have, taken together.
template <typename X, typename Take>
__device__ inline X of_warp(X x, const Take& take) {
#pragma unroll
    for (int m = 1; m < 32; m *= 2) x = take(x, __shfl_xor_sync(kAll, x, m));
    return x;
}

/// Of 1024 cells that a field is cut into so many lie along x, y, z.
HD constexpr int cells_along(int D, int d) { return D == 2 ? 32 : d == 0 ? 16 : 8; }

/// How much of the field 2048 points of a window are spread over: as much as would have two of them
/// in one cell as often (Simpson's index).
template <int D>
__device__ inline float share_of(const GridSampleJob& job, int window) {
    __shared__ int points[1024], pairs;
    points[threadIdx.x] = 0;
    if (threadIdx.x == 0) pairs = 0;
    __syncthreads();
    const char* const grid = grid_of(job, job.p.B / 2);
    constexpr int64_t kMost = 1 << 30;  // of the points, whose numbers are then an int
    const int first = (int(job.p.P < kMost ? job.p.P : kMost) - window) / 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const unsigned part = (2 * threadIdx.x + j) * 0x9E3779B9u;  // by the golden ratio
        const int i = first + int(__umulhi(part, unsigned(window)));
        const auto spot = spot_of<false>(job, Coordinates<float, D>(job, grid, i), false);
        int cell = 0;
#pragma unroll
        for (int d = D - 1; d >= 0; --d) {
            const int size = job.p.size[2 - d], at = min(max(spot.index[d], 0), size - 1);
            cell =
                cell * cells_along(D, d) + int(float(at) / float(size) * float(cells_along(D, d)));
        }
        atomicAdd(points + cell % 1024, 1);
    }
    __syncthreads();
    const int n = points[threadIdx.x];
    const int all = of_warp(n * (n - 1), [](int a, int b) { return a + b; });
    if (threadIdx.x % 32 == 0) atomicAdd(&pairs, all);
    __syncthreads();
    return fminf(1, 2048.f * 2047 / 1024 / float(max(pairs, 1)));
}

/// Sets the counters behind the choice to zero, and chooses Choice::kTurned where the second way
/// saves anything, and Choice::kScattered where slabs do. A field's pixels lie in so many sectors.
template <int D>
__global__ void __launch_bounds__(1024)
    probe_kernel(const __grid_constant__ GridSampleJob job, Savings saved, Spread spread,
                 float field, int* choice) {
    __shared__ int sectors, reach;  // from the first sector to the last, in 4096 parts of a field
    follow();
    if (threadIdx.x == 0) sectors = 0, reach = 0;
    if (threadIdx.x < kCounters) choice[1 + threadIdx.x] = 0;
    __syncthreads();
    constexpr int64_t kMost = 1 << 30;  // of the points, whose numbers are then an int
    const int lane = threadIdx.x % 32, count = int((job.p.P < kMost ? job.p.P : kMost) / 32);
    const int samples = count < kSamples ? count : kSamples;
    const bool nearest = job.p.interpolation == Interpolation::kNearest;
    int mine = 0;  // of two rows
#pragma unroll
    for (int j = 0; j < kSamples / 32; ++j) {
        const int s = j * 32 + threadIdx.x / 32;
        if (s >= samples) break;
        const int i = int(int64_t(s) * count / samples) * 32 + lane;
        const int64_t b = int64_t(s) * job.p.B / samples;
        const Coordinates<float, D> at(job, grid_of(job, b), i);
        const auto cell = cell_of<false>(job, job.input, at);
        const bool outside = (cell.flags & 255) == 0;
        // Of the cells' first rows, and of the next, which along a slope is a neighbour's first.
        const int64_t in_image = int64_t(cell.base) * job.input.unit;
        const int each = saved.pixels ? job.input.unit : 32;
        const int first = outside ? -1 : int(in_image / each);
        const int next = outside ? -1 : int((in_image + job.input.corner[2]) / each);
        const auto least = of_warp(unsigned(first), [](auto a, auto b) { return min(a, b); });
        const int most = of_warp(first, [](int a, int b) { return max(a, b); });
        bool new_first = true, new_next = true;  // no other's, nor one of a lane before
        if (saved.apart != 0) {
            const unsigned before = (1u << lane) - 1;
            new_first = (__match_any_sync(kAll, first) & before) == 0;
            new_next = (__match_any_sync(kAll, next) & before) == 0;
#pragma unroll
            for (int l = 0; l < 32; ++l) new_next &= __shfl_sync(kAll, first, l) != next;
        }
        mine += new_first + (nearest ? new_first : new_next);
        if (lane == 0 && most >= 0) atomicAdd(&reach, int(4096 * float(most - int(least)) / field));
    }
    atomicAdd(&sectors, mine);
    const float share = spread.asked ? share_of<D>(job, spread.window) : 1;
    __syncthreads();
    if (threadIdx.x != 0) return;
    const float apart = (float(sectors) / float(2 * samples) - 1) / 31;
    const float everywhere = fminf(1, float(reach) / float(1024 * samples));
    const bool turned = saved.near + apart * (saved.apart + everywhere * saved.missed) > 0;
    constexpr float kFar = 0.2;
    const bool scattered =
        spread.asked && everywhere > kFar && spread.gain * (1 - spread.held / share) > spread.cost;
    *choice = (turned ? Choice::kTurned : 0) | (scattered ? Choice::kScattered : 0);
}

}  // namespace
