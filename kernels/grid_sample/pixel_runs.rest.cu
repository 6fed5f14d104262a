// grid_sample's gradient to an input of 16 bits that is far larger than what is added to it, by
// linear interpolation. Sums are float and rounded once, so in memory they would take passes of
// their own over the whole field: zeros, sums, what is rounded, 4 + 8 + 6 bytes a pixel. Here
// points are listed by the runs of pixels that they add to; a block has a run's sums in shared
// memory and writes the pixels, each once: 2 bytes, and for each point twice its coordinates.
#include "cell.cuh"
#include "pixel_runs.cuh"

namespace {

constexpr int kRunThreads = 256;

/// Calls body(pixel, corner) for the corners of a cell that lie in the image, in memory's order.
template <int D, typename Body>
__device__ inline void each_corner(const GridSampleParams& p, const Cell<float, D>& cell,
                                   const Body& body) {
#pragma unroll
    for (int k = 0; k < 1 << D; ++k) {
        const int rows = (k >> 1 & 1) + (k >> 2) * p.size[1];
        if (cell.valid(k)) body(cell.base + (k & 1) + rows * p.size[2], k);
    }
}

/// Lists points of image blockIdx.y in a bin of each run that they add to; tells whether one of the
/// bins is full.
template <int D>
__global__ void __launch_bounds__(kRunThreads)
    list_kernel(const __grid_constant__ GridSampleJob job, const __grid_constant__ PixelRuns runs) {
    constexpr int kBins = PixelRuns::kBins, kBinPoints = PixelRuns::kBinPoints;
    follow();
    volatile int* const crowded = runs.crowded;  // lists that are given up need no more points
    if (__syncthreads_or(*crowded)) return;
    const int i = blockIdx.x * kRunThreads + threadIdx.x, lane = threadIdx.x % 32, P = int(job.p.P);
    const int64_t b = blockIdx.y;
    const bool inside = i < P;
    auto cell = cell_of<true>(job, job.sums,
                              Coordinates<float, D>(job, grid_of(job, b), inside ? i : P - 1));
    if (!inside) cell.flags = 0;
    int last = -1, run[1 << D];  // of the first corner in it, else -1
#pragma unroll
    for (int k = 0; k < 1 << D; ++k) run[k] = -1;
    each_corner(job.p, cell, [&](int pixel, int k) {
        const int own = pixel >> runs.pixels_log2;
        if (own != last) run[k] = last = own;
    });
    // Points that are a power of two apart, neighbours in a run, are in different bins too.
    const int warp = i / 32, bin = (warp ^ warp >> 4 ^ warp >> 8 ^ warp >> 12) % kBins;
    int before[1 << D], first[1 << D];
#pragma unroll
    for (int k = 0; k < 1 << D; ++k) {  // neighbouring points of one run are counted together
        const int left = __shfl_up_sync(kAll, run[k], 1);
        const bool head = lane == 0 || run[k] != left;
        const unsigned heads = __ballot_sync(kAll, head);
        first[k] = 31 - __clz(int(heads & (~0u >> (31 - lane))));
        const unsigned after = lane == 31 ? 0 : heads >> (lane + 1);
        const int length = after ? __ffs(int(after)) : 32 - lane;
        const int64_t at = (b * runs.each + run[k]) * kBins + bin;
        before[k] = head && run[k] >= 0 ? atomicAdd(runs.counts + at, length) : 0;
    }
#pragma unroll
    for (int k = 0; k < 1 << D; ++k) {
        const int place = __shfl_sync(kAll, before[k], first[k]) + lane - first[k];
        if (run[k] < 0) continue;
        if (place < kBinPoints)
            runs.points[((b * runs.each + run[k]) * kBins + bin) * kBinPoints + place] = i;
        else
            *crowded = 1;
    }
}

/// A point of a bin, with what it needs of memory: its coordinates and up to four gradients.
template <int D>
struct Listed {
    Coordinates<float, D> at;
    const Short* from;  // of the first channel
    uint2 grads;

    __device__ Listed(const GridSampleJob& job, const char* grid, const Short* grad_out, int i,
                      int C)
        : at(job, grid, i), from(grad_out + job.p.grad_out_points.at(i)) {
        read(job.p.grad_out_stride[1], C);
    }
    /// The next four of so many channels that are left.
    __device__ void read(int64_t step, int left) {
        unsigned bits[4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (k < left) bits[k] = from[k * step].bits;
        grads = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
    }
    __device__ Short grad(int k) const {
        const unsigned pair = k & 2 ? grads.y : grads.x;
        return {uint16_t(k & 1 ? pair >> 16 : pair)};
    }
};

/// Two sums rounded to neighbouring elements.
__device__ inline unsigned pair_of(float first, float second, bool half) {
#if __CUDA_ARCH__ >= 800
    unsigned pair;
    if (half)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    const DType dtype = half ? DType::kHalf : DType::kBFloat16;
    return stored<Short>(first, dtype).bits | unsigned(stored<Short>(second, dtype).bits) << 16;
#endif
}

/// Sums a run of pixels, of channel blockIdx.y or, where kLast, of all, and writes it: eight
/// elements a thread, a word of memory. In shared memory the first of every eight come first, then
/// the second ones: neighbouring threads read neighbouring floats.
template <int D, bool kLast>
__global__ void __launch_bounds__(kRunThreads, 6)
    sum_kernel(const __grid_constant__ GridSampleJob job, const __grid_constant__ PixelRuns runs) {
    constexpr int kWords = kRunElements / 8 + 1;  // a run may begin and end within one
    __shared__ __align__(16) float sums[8 * kWords];
    follow();
    constexpr int kEach = kRunThreads / PixelRuns::kBins;  // threads to a bin
    const int64_t bin = int64_t(blockIdx.x) * PixelRuns::kBins + threadIdx.x / kEach;
    const int* const list = runs.points + bin * PixelRuns::kBinPoints;
    int place = threadIdx.x % kEach, i = list[place];  // anything, beyond the points that there are
    const int crowded = *runs.crowded, points = runs.counts[bin];
    if (crowded) return;
    if (place >= points) i = 0;
    const GridSampleParams& p = job.p;
    const unsigned b = blockIdx.x / unsigned(runs.each);
    const int first_pixel = int(blockIdx.x - b * runs.each) << runs.pixels_log2;
    const int most = p.size[0] * p.size[1] * p.size[2] - first_pixel;
    const int pixels = min(1 << runs.pixels_log2, most);
    const int C = kLast ? int(p.C) : 1, count = pixels * C;
    const int64_t c = blockIdx.y;
    Short* const to = static_cast<Short*>(p.grad_input) + b * p.grad_input_stride[0] +
                      c * p.grad_input_stride[1] + int64_t(first_pixel) * C;
    // Elements that the first word has before the run.
    const int before = int(reinterpret_cast<uintptr_t>(to) / sizeof(Short) & 7);
    const char* const grid = grid_of(job, b);
    const Short* const grad_out =
        static_cast<const Short*>(p.grad_out) + b * p.grad_out_stride[0] + c * p.grad_out_stride[1];
    Listed<D> own(job, grid, grad_out, i, C);
    for (int j = threadIdx.x; j < 2 * kWords; j += kRunThreads)
        reinterpret_cast<float4*>(sums)[j] = float4{};
    const bool touched = __syncthreads_or(points > 0);
#pragma unroll 1
    while (place < points) {
        if ((place += kEach) < points) i = list[place];
        const auto cell = cell_of<true>(job, job.sums, own.at);
        float weight[1 << D];
        cell.weights(weight);
#pragma unroll 1
        for (int k = 0; k < C; ++k) {
            if (kLast && k > 0 && k % 4 == 0) {
                own.from += 4 * p.grad_out_stride[1];
                own.read(p.grad_out_stride[1], C - k);
            }
            const float grad = value_of(own.grad(k), p.dtype);
            each_corner(p, cell, [&](int pixel, int corner) {
                const int at = pixel - first_pixel, slot = at * C + k + before;
                if (unsigned(at) < unsigned(pixels))
                    atomicAdd(sums + (slot & 7) * kWords + slot / 8, weight[corner] * grad);
            });
        }
        if (place < points) own = Listed<D>(job, grid, grad_out, i, C);
    }
    if (touched) __syncthreads();
    const bool half = p.dtype == DType::kHalf;
    for (int word = threadIdx.x; word < (count + before + 7) / 8; word += kRunThreads) {
        uint4 rounded{};
        if (touched) {
            const float* const own = sums + word;
            rounded.x = pair_of(own[0], own[kWords], half);
            rounded.y = pair_of(own[2 * kWords], own[3 * kWords], half);
            rounded.z = pair_of(own[4 * kWords], own[5 * kWords], half);
            rounded.w = pair_of(own[6 * kWords], own[7 * kWords], half);
        }
        const int first = 8 * word - before;
        if (first >= 0 && first + 8 <= count) {
            *reinterpret_cast<uint4*>(to + first) = rounded;
        } else {
            const auto each = bit_copy<Vector<Short, 8>>(rounded);
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (unsigned(first + k) < unsigned(count)) to[first + k] = each.at[k];
        }
    }
}

template <int D>
const char* run(const GridSampleJob& job, const PixelRuns& runs, cudaStream_t stream) {
    const GridSampleParams& p = job.p;
    cudaMemsetAsync(runs.crowded, 0, runs.zero_bytes(), stream);
    const dim3 listers(unsigned(ceil_div(p.P, kRunThreads)), unsigned(p.B));
    list_kernel<D><<<listers, kRunThreads, 0, stream>>>(job, runs);
    const dim3 summers(unsigned(runs.count), unsigned(runs.last ? 1 : p.C));
    const auto kernel = runs.last ? sum_kernel<D, true> : sum_kernel<D, false>;
    start(kernel, summers, kRunThreads, 0, job.follows, stream, job, runs);
    return launch_error();
}

}  // namespace

const char* grid_sample_pixel_runs(const GridSampleJob& job, const PixelRuns& runs,
                                   cudaStream_t stream) {
    return (job.p.D == 3 ? run<3> : run<2>)(job, runs, stream);
}
