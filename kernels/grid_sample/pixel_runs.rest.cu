// grid_sample's gradient to an input of 16 bits that is far larger than what is added to it, by
// linear or nearest interpolation. Sums are float and rounded once, so in memory they would take
// passes of their own over the whole field: zeros, sums, what is rounded, 4 + 8 + 6 bytes a pixel.
// Here points are listed by the runs of pixels that they add to; a block has a run's sums in shared
// memory and writes the pixels, each once: 2 bytes, and for each point twice its coordinates. Of
// runs where points crowd, at a border to which they are clamped for one, sums are in memory.
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

/// Writes the gradient to the coordinates of point i of image b, by all channels.
template <int D>
__device__ inline void slopes_of(const GridSampleJob& job, const Cell<float, D>& cell, int64_t b,
                                 int i) {
    const GridSampleParams& p = job.p;
    const Short* const in = static_cast<const Short*>(p.input) + b * p.input_stride[0];
    const Short* const grad_out =
        static_cast<const Short*>(p.grad_out) + b * p.grad_out_stride[0] + p.grad_out_points.at(i);
    float dot[1 << D] = {}, slope[D];
#pragma unroll 1
    for (int64_t c = 0; c < p.C; ++c) {
        Vector<Short, 1> value[1 << D];
        const char* const from = reinterpret_cast<const char*>(in + c * p.input_stride[1]);
        load_corners<Short, 1, D>(job, from, cell, value);
        const float grad = value_of(grad_out[c * p.grad_out_stride[1]], p.dtype);
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) dot[k] += grad * value_of(value[k].at[0], p.dtype);
    }
    cell.slopes(dot, slope);
#pragma unroll
    for (int d = 0; d < D; ++d)
        store_as(p.grid_dtype, p.grad_grid, (b * p.P + i) * D + d, cell.moved(d, job) * slope[d]);
}

/// Lists points of image blockIdx.y in a bin of each run that they add to; tells of runs where one
/// of the bins is full. kSlopes: with the gradient to the grid.
template <int D, bool kSlopes>
__global__ void __launch_bounds__(kRunThreads)
    list_kernel(const __grid_constant__ GridSampleJob job, const __grid_constant__ PixelRuns runs) {
    constexpr int kBins = PixelRuns::kBins, kBinPoints = PixelRuns::kBinPoints;
    const int i = blockIdx.x * kRunThreads + threadIdx.x, lane = threadIdx.x % 32, P = int(job.p.P);
    const int64_t b = blockIdx.y;
    const bool inside = i < P;
    const Coordinates<float, D> coordinates(job, grid_of(job, b), inside ? i : P - 1);
    follow();
    const bool nearest = job.p.interpolation == Interpolation::kNearest;
    const auto spot = spot_of<true>(job, coordinates, nearest);
    const uint32_t flags = spot.flags(job.p, nearest);
    if (kSlopes && inside) slopes_of(job, spot.in(job.input, flags), b, i);
    auto cell = spot.in(job.sums, flags);
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
        before[k] = 0, first[k] = 0;
        if (!__any_sync(kAll, run[k] >= 0)) continue;  // most of those behind another along x
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
        if (!__any_sync(kAll, run[k] >= 0)) continue;
        const int place = __shfl_sync(kAll, before[k], first[k]) + lane - first[k];
        if (run[k] < 0) continue;
        const int64_t own = b * runs.each + run[k];
        if (place < kBinPoints)
            runs.points[(own * kBins + bin) * kBinPoints + place] = i;
        else
            *runs.any = runs.crowded[own] = 1;
    }
}

/// A run of pixels of an image, in channel c or in all.
struct Run {
    int64_t b;
    int first, pixels, count;  // first pixel; how many there are; elements
    Short* to;
    float* sums;  // in memory

    __device__ Run(const GridSampleParams& p, const PixelRuns& runs, unsigned run, int64_t c) {
        const unsigned image = run / unsigned(runs.each);
        const int64_t all = int64_t(p.size[0]) * p.size[1] * p.size[2], C = runs.last ? p.C : 1;
        b = image, first = int(run - image * runs.each) << runs.pixels_log2;
        pixels = min(1 << runs.pixels_log2, int(all) - first), count = pixels * int(C);
        to = static_cast<Short*>(p.grad_input) + b * p.grad_input_stride[0] +
             c * p.grad_input_stride[1] + first * C;
        sums = runs.sums + (b * p.C + c) * all + first * C;
    }
};

/// Of runs where points crowd: adds what they give to the sums in memory.
template <int D>
__global__ void __launch_bounds__(kRunThreads)
    add_kernel(const __grid_constant__ GridSampleJob job, const __grid_constant__ PixelRuns runs) {
    follow();
    if (!*runs.any) return;
    const GridSampleParams& p = job.p;
    const int64_t C = p.C, pixels = int64_t(p.size[0]) * p.size[1] * p.size[2], all = p.B * p.P;
    const int64_t c_step = runs.last ? 1 : pixels, pixel_step = runs.last ? C : 1;
    for (int64_t q = int64_t(blockIdx.x) * kRunThreads + threadIdx.x; q < all;
         q += int64_t(gridDim.x) * kRunThreads) {
        const int64_t b = q / p.P;
        const int i = int(q - b * p.P);
        const auto cell =
            cell_of<true>(job, job.sums, Coordinates<float, D>(job, grid_of(job, b), i));
        const Short* const grad_out = static_cast<const Short*>(p.grad_out) +
                                      b * p.grad_out_stride[0] + p.grad_out_points.at(i);
        float weight[1 << D];
        cell.weights(weight);
        for (int64_t c = 0; c < C; ++c) {
            const float grad = value_of(grad_out[c * p.grad_out_stride[1]], p.dtype);
            float* const sums = runs.sums + b * C * pixels + c * c_step;
            each_corner(p, cell, [&](int pixel, int corner) {
                if (runs.crowded[b * runs.each + (pixel >> runs.pixels_log2)])
                    atomicAdd(sums + pixel * pixel_step, weight[corner] * grad);
            });
        }
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

/// Of runs where points crowd: rounds the sums in memory.
__global__ void __launch_bounds__(kRunThreads)
    round_kernel(const __grid_constant__ GridSampleJob job,
                 const __grid_constant__ PixelRuns runs) {
    follow();
    if (!*runs.any) return;
    const unsigned channels = runs.last ? 1 : unsigned(job.p.C), all = runs.count * channels;
    for (unsigned part = blockIdx.x; part < all; part += gridDim.x) {
        const unsigned own = part / channels;
        if (!runs.crowded[own]) continue;
        const Run run(job.p, runs, own, part - own * channels);
        for (int j = threadIdx.x; j < run.count; j += kRunThreads)
            run.to[j] = stored<Short>(run.sums[j], job.p.dtype);
    }
}

/// Sums a run of pixels, of one channel or, where kLast, of all, and writes it: eight elements a
/// thread, a word of memory. Blocks of the same points follow one another.
template <int D, bool kLast>
__global__ void __launch_bounds__(kRunThreads, 6)
    sum_kernel(const __grid_constant__ GridSampleJob job, const __grid_constant__ PixelRuns runs) {
    constexpr int kBins = PixelRuns::kBins, kBinPoints = PixelRuns::kBinPoints;
    constexpr int kWords = kRunElements / 8 + 1;  // a run may begin and end within one
    __shared__ __align__(16) float4 sums[2 * kWords];
    follow();
    const GridSampleParams& p = job.p;
    const int C = kLast ? int(p.C) : 1, lane = threadIdx.x % 32;
    const unsigned channels = kLast ? 1 : unsigned(p.C), own = blockIdx.x / channels;
    const int64_t c = blockIdx.x - own * channels;
    const int64_t bins = int64_t(own) * kBins;
    int end = runs.counts[bins + lane % kBins];  // of a bin's points among all of the run's
    const bool crowded = runs.crowded[own];
    const Run run(p, runs, own, c);
    if (crowded) {  // `add_kernel` takes over
        for (int j = threadIdx.x; j < run.count; j += kRunThreads) run.sums[j] = 0;
        return;
    }
#pragma unroll
    for (int m = 1; m < kBins; m *= 2) {
        const int other = __shfl_up_sync(kAll, end, m, kBins);
        if (lane % kBins >= m) end += other;
    }
    const int points = __shfl_sync(kAll, end, kBins - 1), count = run.count;
    // Elements that the first word has before the run.
    const int before = int(reinterpret_cast<uintptr_t>(run.to) / sizeof(Short) & 7);
    const char* const grid = grid_of(job, run.b);
    const Short* const grad_out = static_cast<const Short*>(p.grad_out) +
                                  run.b * p.grad_out_stride[0] + c * p.grad_out_stride[1];
    // The point of a place, for all threads of a warp at a time.
    const auto point = [&](int place) {
        int bin = 0;
#pragma unroll
        for (int m = kBins / 2; m > 0; m /= 2)
            if (__shfl_sync(kAll, end, bin + m - 1) <= place) bin += m;
        const int last = __shfl_sync(kAll, end, bin > 0 ? bin - 1 : 0);
        if (place >= points) return 0;
        return runs.points[(bins + bin) * kBinPoints + place - (bin > 0 ? last : 0)];
    };
    const int warp_place = threadIdx.x - lane;
    Listed<D> next(job, grid, grad_out, warp_place < points ? point(threadIdx.x) : 0, C);
#pragma unroll
    for (int k = 0; k <= 2 * kWords / kRunThreads; ++k)
        if (const int j = k * kRunThreads + threadIdx.x; j < 2 * kWords) sums[j] = float4{};
    if (points > 0) __syncthreads();
#pragma unroll 1
    for (int base = warp_place; base < points; base += kRunThreads) {
        const int place = base + lane;
        Listed<D> at = next;
        if (base + kRunThreads < points)
            next = Listed<D>(job, grid, grad_out, point(place + kRunThreads), C);
        if (place >= points) continue;
        const auto cell = cell_of<true>(job, job.sums, at.at);
        float weight[1 << D];
        cell.weights(weight);
#pragma unroll 1
        for (int step = 0; step < C; ++step) {
            if (kLast && step > 0 && step % 4 == 0) {
                at.from += 4 * p.grad_out_stride[1];
                at.read(p.grad_out_stride[1], C - step);
            }
            // Neighbours begin with another of four channels: of other banks.
            const int k = kLast && (step | 3) < C ? (step & ~3) | ((step + lane) & 3) : step;
            const float grad = value_of(at.grad(k), p.dtype);
            float* const slots = reinterpret_cast<float*>(sums) + k + before;
            each_corner(p, cell, [&](int pixel, int corner) {
                const int at = pixel - run.first;
                if (unsigned(at) < unsigned(run.pixels))
                    atomicAdd(slots + at * C, weight[corner] * grad);
            });
        }
    }
    if (points > 0) __syncthreads();
    const bool half = p.dtype == DType::kHalf;
    const int second = lane >> 2 & 1;  // four threads begin with the other half: all banks
    for (int word = threadIdx.x; word < (count + before + 7) / 8; word += kRunThreads) {
        uint4 rounded{};
        if (points > 0) {
            const float4 a = sums[2 * word + second], b = sums[2 * word + 1 - second];
            const uint2 x{pair_of(a.x, a.y, half), pair_of(a.z, a.w, half)};
            const uint2 y{pair_of(b.x, b.y, half), pair_of(b.z, b.w, half)};
            rounded = second ? uint4{y.x, y.y, x.x, x.y} : uint4{x.x, x.y, y.x, y.y};
        }
        const int first = 8 * word - before;
        if (first >= 0 && first + 8 <= count) {
            *reinterpret_cast<uint4*>(run.to + first) = rounded;
        } else {
            const auto each = bit_copy<Vector<Short, 8>>(rounded);
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (unsigned(first + k) < unsigned(count)) run.to[first + k] = each.at[k];
        }
    }
}

template <int D>
const char* run(const GridSampleJob& job, const PixelRuns& runs, cudaStream_t stream) {
    const GridSampleParams& p = job.p;
    cudaMemsetAsync(runs.any, 0, runs.zero_bytes(), stream);
    const auto launch = [&](auto kernel, dim3 blocks, bool follows) {
        start(kernel, blocks, kRunThreads, 0, follows, stream, job, runs);
    };
    const dim3 listers(unsigned(ceil_div(p.P, kRunThreads)), unsigned(p.B));
    launch(p.grad_grid ? list_kernel<D, true> : list_kernel<D, false>, listers, false);
    const unsigned summers = unsigned(runs.count) * unsigned(runs.last ? 1 : p.C);
    launch(runs.last ? sum_kernel<D, true> : sum_kernel<D, false>, summers, job.follows);
    const unsigned few = 8u * unsigned(job.processors);  // which do nothing, as a rule
    launch(add_kernel<D>, few, job.follows);
    launch(round_kernel, few, job.follows);
    return launch_error();
}

}  // namespace

const char* grid_sample_pixel_runs(const GridSampleJob& job, const PixelRuns& runs,
                                   cudaStream_t stream) {
    return (job.p.D == 3 ? run<3> : run<2>)(job, runs, stream);
}
