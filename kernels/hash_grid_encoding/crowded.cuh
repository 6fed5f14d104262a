// The gradient to the table of hash_grid_encoding on the GPU, of levels of few rows: additions to
// the same few wait for each other in the L2 cache, and far less so in shared memory.
#pragma once
#include "points.cuh"
#include "rates/hash_grid_encoding.h"

namespace {

constexpr int kCrowdThreads = 512;  // two blocks to a multiprocessor
constexpr int kCopies = 32768;      // bytes of several copies of a block's sums

/// The gradient of table level `first` + blockIdx.y, added to `sums` (levels, T, F): each block
/// sums what some points give in shared memory, and adds that to memory once. `lanes` threads share
/// a point's features; warps share `copies` of the sums, a power of two.
template <typename A, int D>
__global__ void __launch_bounds__(kCrowdThreads, 2)
    crowded_kernel(const __grid_constant__ HashGridParams p, int first, A* sums, int lanes,
                   int copies) {
    constexpr int K = 1 << D;
    // Points at a time, so that more loads are under way, as far as there are registers.
    constexpr int kPair = K * sizeof(A) > 32 ? 1 : 2;
    extern __shared__ double memory[];
    A* const all = reinterpret_cast<A*>(memory);
    const int l = first + blockIdx.y, F = p.F;
    const HashLevel& level = p.level[l];
    const int count = int(level.rows) * F;
    A* const own = all + (threadIdx.x / 32 & (copies - 1)) * count;
    for (int j = threadIdx.x; j < copies * count; j += kCrowdThreads) all[j] = 0;
    __syncthreads();
    // A thread's points follow one another, and those of its neighbours are far from them: points
    // along a ray would add to the same rows at the same time.
    const int lane = threadIdx.x % lanes, ways = kCrowdThreads / lanes;
    const int64_t each = ceil_div(p.N, int64_t(gridDim.x) * ways);
    const int64_t begin = (int64_t(blockIdx.x) * ways + threadIdx.x / lanes) * each;
    const int64_t end = begin + each < p.N ? begin + each : p.N;
#pragma unroll 1
    for (int64_t n = begin; n < end; n += kPair) {
        const bool two = kPair == 2 && n + 1 < end;
        const Point<D, A> points[2] = {{p, n}, {p, two ? n + 1 : n}};
        int row[kPair][K];
        A weight[kPair][K];
#pragma unroll
        for (int i = 0; i < kPair; ++i) {
            const auto corners = points[i].in(level);
#pragma unroll
            for (int k = 0; k < K; ++k) {
                row[i][k] = int(corners.row(level, k)) * F;
                weight[i][k] = corners.weight(k);
            }
        }
#pragma unroll 1
        for (int f = lane; f < F; f += lanes) {
            A grad[kPair];
#pragma unroll
            for (int i = 0; i < kPair; ++i)
                grad[i] = load_as<A>(p.dtype, p.grad_out,
                                     points[i].n * p.grad_out_stride[0] +
                                         (int64_t(l) * F + f) * p.grad_out_stride[1]);
#pragma unroll
            for (int i = 0; i < kPair; ++i)
#pragma unroll
                for (int k = 0; k < K; ++k)
                    if (i == 0 || two) atomicAdd(own + row[i][k] + f, weight[i][k] * grad[i]);
        }
    }
    __syncthreads();
    A* const to = sums + int64_t(blockIdx.y) * p.T * F;
    for (int j = threadIdx.x; j < count; j += kCrowdThreads) {
        A sum = 0;
        for (int i = 0; i < copies; ++i) sum += all[i * count + j];
        if (sum != 0) atomicAdd(to + j, sum);
    }
}

/// Levels [first, first + count) that are summed so, and what the two ways take.
struct Crowded {
    int first, count = 0;
    double here = 0, in_memory = 0;  // microseconds, by rates/hash_grid_encoding.h
};

/// Of so many levels from `first` on those before one that shared memory does not hold, or that
/// gains nothing by it: levels get finer.
template <typename A>
Crowded crowded_of(const HashGridParams& p, int first, int levels) {
    constexpr auto r = sizeof(A) == 8 ? kHashGridDoubleTable : kHashGridTable;
    Crowded crowded{first};
    if (p.deterministic || p.N == 0) return crowded;
    int device = 0, shared = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const int most = shared / 2 - 2048;  // of each of two blocks
    const double corners = double(p.N) * (1 << p.D);
    const double words = corners * double(sizeof(A) == 8 ? p.F : ceil_div(p.F, 4));
    for (; crowded.count < levels; ++crowded.count) {
        const int64_t rows = p.level[first + crowded.count].rows, elements = rows * p.F;
        if (elements * int64_t(sizeof(A)) > most) break;
        const double in_memory = words * r.add + words / double(rows) * r.wait;
        const double here = r.launch + corners * p.F * r.sum + double(elements) * r.flush;
        if (here > in_memory) break;
        crowded.here += here, crowded.in_memory += in_memory;
    }
    return crowded;
}

/// Adds their gradient to `sums`.
template <typename A>
void add_crowded(const HashGridParams& p, const Crowded& crowded, A* sums, cudaStream_t stream) {
    uint32_t rows = 0;
    for (int i = 0; i < crowded.count; ++i) rows = max(rows, p.level[crowded.first + i].rows);
    int device = 0, processors = 0, lanes = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    while (lanes < p.F && lanes < 8) lanes *= 2;
    int copies = kCrowdThreads / 32, bytes = int(rows * p.F * sizeof(A));
    while (copies > 1 && bytes * copies > kCopies) copies /= 2;
    bytes *= copies;
    const auto kernel = p.D == 3 ? crowded_kernel<A, 3> : crowded_kernel<A, 2>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    const int64_t enough = ceil_div(2 * processors, crowded.count);
    const int64_t most = ceil_div(p.N, kCrowdThreads / lanes);
    const dim3 blocks(unsigned(min(enough, most)), unsigned(crowded.count));
    kernel<<<blocks, kCrowdThreads, bytes, stream>>>(p, crowded.first, sums, lanes, copies);
}

}  // namespace
