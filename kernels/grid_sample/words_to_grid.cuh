// grid_sample's gradient to the grid alone on the GPU, by linear interpolation, of many channels
// that lie side by side. A warp works on 32 points at a time, as in linear_forward.cuh: threads
// share out the points' words of V channels. What each word gives the slopes of its point goes
// through shared memory to the thread that has the point.
#pragma once
#include "cell.cuh"

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
    const char* grid = grid_of(job, b);
    const auto held = [&](int i) { return i < job.count ? i : job.count - 1; };
    const char* in = static_cast<const char*>(p.input) + b * p.input_stride[0] * int(sizeof(T));
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
        if (i < job.count)
#pragma unroll
            for (int d = 0; d < D; ++d)
                store_as(p.grid_dtype, p.grad_grid, (b * p.P + job.first + i) * D + d,
                         own.moved(d, p) * sum[d]);
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
