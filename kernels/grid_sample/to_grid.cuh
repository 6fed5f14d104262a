// grid_sample's gradient to the grid alone on the GPU, by linear interpolation.
//
// grid_backward: a thread to a point, or several, which takes one channel or four at a time.
//
// words_to_grid: many channels that lie side by side. A warp works on 32 points at a time, as in
// linear_forward.cuh: threads share out the points' words of V channels. What each word gives the
// slopes of its point goes through shared memory to the thread that has the point.
#pragma once
#include "cell.cuh"
#include "words.cuh"

/// The gradient that arrives at point i of an image of the launch, its first channel.
template <typename T>
__device__ inline const T* grad_out_of(const GridSampleJob& job, unsigned image, int i) {
    return job.out_step < 0
               ? reinterpret_cast<const T*>(job.outs.at(image)) +
                     job.p.grad_out_points.at(job.first + i)
               : reinterpret_cast<const T*>(job.outs.at(image) +
                                            uint64_t(unsigned(i)) * unsigned(job.out_step));
}

template <typename G, typename A, int D>
__device__ inline void store_slopes_as(const GridSampleJob& job, unsigned image, unsigned i,
                                       const A (&slope)[D]) {
    G* const to = reinterpret_cast<G*>(job.slopes.at(image)) + uint64_t(i) * D;
    constexpr int V = D == 2 ? 2 : 1;
#pragma unroll
    for (int d = 0; d < D; d += V) {
        Vector<G, V> word;
#pragma unroll
        for (int j = 0; j < V; ++j) word.at[j] = store<G>(Acc<G>(slope[d + j]));
        store_vector(to + d, word);
    }
}
/// Writes the gradient to the coordinates of point i of an image of the launch.
template <typename A, int D>
__device__ inline void store_slopes(const GridSampleJob& job, unsigned image, unsigned i,
                                    const A (&slope)[D]) {
    const DType dtype = job.p.grid_dtype;
    if (dtype == DType::kFloat) return store_slopes_as<float>(job, image, i, slope);
    if (dtype == DType::kHalf) return store_slopes_as<Half>(job, image, i, slope);
    if (dtype == DType::kBFloat16) return store_slopes_as<BFloat16>(job, image, i, slope);
    store_slopes_as<double>(job, image, i, slope);
}

/// Blocks to an SM. Fewer of planes: spilled registers would miss an L1 cache that scattered points
/// fill; and where threads share few points.
template <typename T, int D, int C, bool kShared>
constexpr int kToGridBlocks = kNarrowBlocks<T, D, C> - (kShared && sizeof(T) < 8 ? 4
                                                        : D == 2 && C == 1       ? 2
                                                                                 : 0);

/// The gradient to the grid alone: a thread to a point, or several where kShared, C channels at a
/// time. Of planes one: an L1 cache then holds more of what neighbours read again (0.94 of the time
/// of four, the mean of 120 drawn cases; forward it is 1.04). Where threads share a point, one of
/// any layout: few points wait for memory, and the less the more threads there are (0.88 of the
/// time of fewer threads with four channels each, the mean of 606 drawn cases).
template <typename T, int D, int C, Narrow kLayout, bool kShared, bool kTurns>
__global__ void __launch_bounds__((kLargest<T, kLayout>),
                                  (blocks_of<T, kLayout>(kToGridBlocks<T, D, C, kShared>)))
    grid_backward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    constexpr int K = 1 << D;
    if (kShared && idle(job)) return;
    each_block<kTurns>(job, [&](unsigned block, unsigned image, unsigned) {
        const GridSampleParams& p = job.p;
        const int lanes_log2 = kShared ? job.lanes_log2 : 0;
        const int thread = block * blockDim.x + threadIdx.x, in_warp = threadIdx.x % 32;
        const int lane = in_warp >> (5 - lanes_log2), own = kShared ? lane * C : 0;
        const int q = kShared
                          ? (thread >> 5 << (5 - lanes_log2)) + (in_warp & ((32 >> lanes_log2) - 1))
                          : thread;
        if (!kShared && q >= job.count) return;
        const int i = kShared ? min(q, job.count - 1) : q;
        const Coordinates<A, D> coordinates(job, job.grids.at(image), i);
        const auto spot = spot_of<true>(job, coordinates, false);
        if (lanes_log2 == 0 && !spot.in_slab(job)) return;
        const auto cell = spot.in(job.input, spot.flags(p, false));
        constexpr bool kLast = kLayout == Narrow::kLast || kLayout == Narrow::kWords;
        const int64_t c_step = kLast ? int64_t(sizeof(T)) : p.input_stride[1] * int(sizeof(T));
        const char* first = job.inputs.at(image) + int64_t(cell.base) * job.input.unit;
        const T* grad_out = grad_out_of<T>(job, image, i);
        if (kShared) first += own * c_step, grad_out += own * p.grad_out_stride[1];
        A dot[K] = {}, slope[D];
        const bool whole = of_all(cell.whole());
#pragma unroll 1
        for (int left = int(p.C) - own; left > 0;
             left -= C << lanes_log2, first += (C << lanes_log2) * c_step) {
            Pixels<T, D, C, kLayout, (C > 1)> pixels;
            pixels.read(job, whole, [&] { return cell.flags; }, first, c_step, left);
#pragma unroll
            for (int c = 0; c < C; ++c, grad_out += p.grad_out_stride[1]) {
                if (C > 1 && c >= left) break;
                const A grad = value_of(*grad_out, p.dtype);
#pragma unroll
                for (int k = 0; k < K; ++k) dot[k] += grad * pixels.value(k, c, p.dtype);
            }
            if (kShared) grad_out += ((C << lanes_log2) - C) * p.grad_out_stride[1];
        }
        cell.slopes(dot, slope);
#pragma unroll
        for (int d = 0; d < D; ++d) {
            // The signs take registers, which several channels need.
            const A moved = spot.sign[d] * job.template axis<A>(2 - d).scale;
            slope[d] *= C == 1 ? moved : cell.moved(d, job);
            if (kShared)
                for (int m = 32 >> lanes_log2; m < 32; m *= 2)
                    slope[d] += __shfl_xor_sync(kAll, slope[d], m);
        }
        if (!kShared || (lane == 0 && q < job.count)) store_slopes(job, image, i, slope);
    });
}

template <typename T, int D, int C, Narrow kLayout>
const char* launch_grid_backward_of(GridSampleJob& job, cudaStream_t stream, InTurn way) {
    return launch_in_turn(grid_backward<T, D, C, kLayout, false, true>,
                          grid_backward<T, D, C, kLayout, false, false>, job, 32, stream, way);
}

template <typename T, int D>
const char* launch_grid_backward(GridSampleJob& job, cudaStream_t stream) {
    if (job.lanes_log2 > 0)
        return launch_points(grid_backward<T, D, 1, Narrow::kNot, true, false>, job,
                             32 >> job.lanes_log2, stream);
    return (job.narrow == Narrow::kLast
                ? launch_grid_backward_of<T, D, 4, Narrow::kLast>
                : launch_grid_backward_of<T, D, 1, Narrow::kPlanar>)(job, stream, kPlanes);
}

/// Words of four channels.
template <typename T, int D>
const char* launch_grid_backward_words(GridSampleJob& job, cudaStream_t stream) {
    if (job.lanes_log2 > 0)
        return launch_points(grid_backward<T, D, 4, Narrow::kWords, true, false>, job,
                             32 >> job.lanes_log2, stream);
    return launch_grid_backward_of<T, D, 4, Narrow::kWords>(job, stream,
                                                            claimed(kToGridBlocks<T, D, 4, false>));
}

template <typename T, int V, int D, bool kAcross>
__global__ void __launch_bounds__(kThreads, (kWordBlocks<V, D>))
    words_to_grid(const __grid_constant__ GridSampleJob job) {
    constexpr int K = 1 << D;
    extern __shared__ uint4 staging[];
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, words = job.together;
    const int stride = blockDim.x * gridDim.x, C = int(p.C);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t b = job.image + blockIdx.y;
    const char* grid = job.grids.at(blockIdx.y);
    const auto held = [&](int i) { return i < job.count ? i : job.count - 1; };
    const char* in = job.inputs.at(blockIdx.y);
    asm("" : "+l"(in));  // found once
    const T* grad_out = static_cast<const T*>(p.grad_out) + b * p.grad_out_stride[0];
    const WordStage<T, V> grads(staging, words);
    const WordStage<float, D> slopes(
        reinterpret_cast<T*>(staging) + blockDim.x / 32 * grads.elements(words), words);
    const WordOf first_word(words);
    Coordinates<float, D> next(job, grid, held(i));
#pragma unroll 1
    for (; i - in_warp < job.count; i += stride) {
        const Cell<float, D> own = cell_of<true>(job, job.input, next);
        next = Coordinates<float, D>(job, grid, held(i + stride));
        const T* from = grad_out + p.grad_out_points.at(job.first + held(i));
        float sum[D] = {};
#pragma unroll 1
        for (int c0 = 0; c0 < C; c0 += V * words) {
            const auto stage = [&](int w, auto has) {
#pragma unroll
                for (int j = 0; j < V; ++j, from += p.grad_out_stride[1])
                    grads.row(w, j)[in_warp] = has(j) ? *from : T{};
            };
            const int whole = min(words, (C - c0) / V);
#pragma unroll 1
            for (int w = 0; w < whole; ++w) stage(w, [](int) { return true; });
            if (whole < words) stage(whole, [&](int j) { return c0 + whole * V + j < C; });
            __syncwarp();
            WordOf of = first_word;
#pragma unroll 1
            for (int r = 0; r < words; ++r, of.advance()) {
                const Cell<float, D> cell = own.from(of.point);
                const int c = c0 + of.word * V;
                float dot[K] = {}, slope[D];
                if (c < C) {
                    Vector<T, V> value[K];
                    load_corners<T, V, D, kAcross>(job, in + c * int(sizeof(T)), cell, value,
                                                   C - c);
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        if (kAcross && c + j >= C) break;
                        const float grad = load(grads.row(of.word, j)[of.point]);
#pragma unroll
                        for (int k = 0; k < K; ++k) dot[k] += grad * load(value[k].at[j]);
                    }
                }
                cell.slopes(dot, slope);
#pragma unroll
                for (int d = 0; d < D; ++d) slopes.row(of.word, d)[of.point] = slope[d];
            }
            __syncwarp();
#pragma unroll 1
            for (int w = 0; w < words; ++w)
#pragma unroll
                for (int d = 0; d < D; ++d) sum[d] += slopes.row(w, d)[in_warp];
        }
        if (i >= job.count) continue;
#pragma unroll
        for (int d = 0; d < D; ++d) sum[d] *= own.moved(d, job);
        store_slopes(job, blockIdx.y, i, sum);
    }
}

template <typename T, int V, bool kAcross>
const char* launch_words_to_grid(GridSampleJob& job, cudaStream_t stream) {
    const auto launch = [&](auto kernel, auto D) {
        const int bytes = WordStage<T, V>::elements(job.together) * int(sizeof(T)) +
                          WordStage<float, D>::elements(job.together) * int(sizeof(float));
        return launch_points(kernel, job, 32, stream, job.processors * kWordBlocks<V, D>, 1,
                             kThreads / 32 * bytes);
    };
    using std::integral_constant;
    return job.p.D == 3 ? launch(words_to_grid<T, V, 3, kAcross>, integral_constant<int, 3>{})
                        : launch(words_to_grid<T, V, 2, kAcross>, integral_constant<int, 2>{});
}
