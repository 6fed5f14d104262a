// grid_sample's forward on the GPU, for linear and nearest interpolation.
//
// narrow_forward: a thread to a point. The compiler knows how many channels there are
// (or takes four at a time) and that pixels along x, or channels, are neighbours in memory. What
// binds it where points follow one another in the field is the L2 cache; blocks that are tiles of
// the output, two or four points to a thread and loops with the next point's coordinates ahead were
// no faster on an H200.
//
// linear_forward: many channels that lie side by side. A warp works on 32 points at a time. Each
// thread finds the cell of one point; then threads share out the points' words of V channels, and
// take their cells by shuffles, so that finding cells costs as little as with one thread to a
// point.
#pragma once
#include "cell.cuh"
#include "general.cuh"
#include "words.cuh"

/// Writes the channels of a warp's 32 points, all that `stage` has from channel c0 on, to
/// out[channel * P + point]. 16-bit ones are written in pairs where points lie so in memory.
template <typename T, int V>
__device__ inline void write_words(const WordStage<T, V>& stage, T* out, int64_t P, int c0, int C,
                                   int points, bool pairs) {
    const int in_warp = threadIdx.x % 32, count = min(stage.words * V, C - c0);
    const auto write = [&](auto element, int side, int point, int sides) {
        using E = decltype(element);
        if (point >= points) return;
        T* to = out + (c0 + side) * P + point;
        const int64_t next = sides * P;
        const auto word = [&](int w, auto has) {
            const T* from = stage.row(w, side) + point;
#pragma unroll
            for (int j = 0; j < V;
                 j += sides, to += next, from += sides * stage.words * stage.pitch)
                if (has(j + side)) *reinterpret_cast<E*>(to) = *reinterpret_cast<const E*>(from);
        };
        const int whole = count / V, rest = count % V;
#pragma unroll 1
        for (int w = 0; w < whole; ++w) word(w, [](int) { return true; });
        if (rest > 0) word(whole, [&](int j) { return j < rest; });
    };
    if (sizeof(T) == 2 && pairs)
        write(unsigned{}, in_warp / 16, in_warp % 16 * 2, 2);
    else
        write(T{}, 0, in_warp, 1);
}

/// V > 1: words of V channels that lie side by side.
template <typename T, int V, int D, bool kAcross>
__global__ void __launch_bounds__(kThreads, (kWordBlocks<V, D>))
    linear_forward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    extern __shared__ uint4 staging[];
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, words = job.together;
    const int stride = blockDim.x * gridDim.x, C = int(p.C);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const char* grid = job.grids.at(blockIdx.y);
    const auto coordinates = [&](int i) {
        return Coordinates<A, D>(job, grid, i < job.count ? i : job.count - 1);
    };
    const char* in = job.inputs.at(blockIdx.y);
    asm("" : "+l"(in));  // found once
    T* out = reinterpret_cast<T*>(job.outs.at(blockIdx.y));
    const bool pairs = (reinterpret_cast<uintptr_t>(out) | p.P * sizeof(T)) % (2 * sizeof(T)) == 0;
    const WordStage<T, V> stage(staging, words);
    const WordOf first_word(words);
    Coordinates<A, D> next = coordinates(i);
#pragma unroll 1
    for (; i - in_warp < job.count; i += stride) {
        const Cell<A, D> own = cell_of<false>(job, job.input, next);
        next = coordinates(i + stride);
#pragma unroll 1
        for (int c0 = 0; c0 < C; c0 += V * words) {
            WordOf of = first_word;
#pragma unroll 1
            for (int r = 0; r < words; ++r, of.advance()) {
                const Cell<A, D> cell = own.from(of.point);
                const int c = c0 + of.word * V;
                if (c >= C) continue;
                A weight[1 << D];
                cell.weights(weight);
                Vector<T, V> value[1 << D];
                load_corners<T, V, D, kAcross>(job, in + c * int(sizeof(T)), cell, value, C - c);
                T* to = stage.row(of.word, 0) + of.point;
#pragma unroll
                for (int j = 0; j < V; ++j, to += words * stage.pitch) {
                    A sum = 0;
#pragma unroll
                    for (int k = 0; k < 1 << D; ++k) sum += weight[k] * load(value[k].at[j]);
                    *to = store<T>(sum);
                }
            }
            __syncwarp();
            write_words(stage, out + (i - in_warp), p.P, c0, C, job.count - (i - in_warp), pairs);
            __syncwarp();
        }
    }
}

/// Blocks to an SM. Fewer where threads take turns of volumes of three channels, or of shares, two
/// channels at a time: registers for the loops.
template <typename T, int D, int C, bool kShares, bool kTurns>
constexpr int kForwardBlocks = kNarrowBlocks<T, D, C> - (!kTurns             ? 0
                                                         : kShares && C == 2 ? 3
                                                         : D == 3 && C == 3  ? 2
                                                                             : 0);

/// A thread takes a point and C channels; or, where kShares, all of a share's, C at a time.
template <typename T, int D, int C, Narrow kLayout, bool kShares, bool kTurns>
__global__ void __launch_bounds__((kLargest<T, kLayout>),
                                  (blocks_of<T, kLayout>(kForwardBlocks<T, D, C, kShares, kTurns>)))
    narrow_forward(const __grid_constant__ GridSampleJob job) {
    constexpr int K = 1 << D;
    constexpr bool kAcross = kLayout == Narrow::kAcross, kWords = kLayout == Narrow::kWords;
    each_block<kTurns>(job, [&](unsigned block, unsigned image, unsigned part) {
        const GridSampleParams& p = job.p;
        const int i = block * blockDim.x + threadIdx.x;
        if (i >= job.count) return;
        const Coordinates<float, D> coordinates(job, job.grids.at(image), i);
        const int64_t c_step =
            kLayout == Narrow::kPlanar ? p.input_stride[1] * int(sizeof(T)) : int64_t(sizeof(T));
        // Of words, whole ones.
        constexpr int kPart = kWords || kAcross ? C : 1;
        const int share = kShares ? int(ceil_div(ceil_div(p.C, kPart), job.parts)) * kPart : C;
        const unsigned begin = part * unsigned(share);
        int left = kShares ? min(share, int(p.C) - int(begin)) : C;
        if (kPart > 1 && left <= 0) return;
        T* to = reinterpret_cast<T*>(job.outs.at(image)) + i;
        const char* in = job.inputs.at(image);
        if (job.parts > 1) to += begin * p.P, in += begin * c_step;
        if (p.interpolation == Interpolation::kNearest) {
            const Cell<float, D> cell = cell_of<false>(job, job.input, coordinates);
            const char* first = in + int64_t(cell.base) * job.input.unit;
            const bool valid = cell.valid(0);
            if constexpr (kWords) {
#pragma unroll 4
                for (; left > 0; left -= C, first += C * c_step) {
                    Vector<T, C> value{};
                    if (valid) value = load_constant<T, C>(reinterpret_cast<const T*>(first));
#pragma unroll
                    for (int c = 0; c < C; ++c, to += p.P)
                        if (c < left) *to = value.at[c];
                }
            } else {
#pragma unroll 4
                for (; left > 0; --left, first += c_step, to += p.P)
                    *to =
                        valid ? load_constant<T, 1>(reinterpret_cast<const T*>(first)).at[0] : T{};
            }
            return;
        }
        const auto spot = spot_of<false>(job, coordinates, false);
        if (!spot.in_slab(job)) return;
        const auto cell = spot.in(job.input, kShares ? spot.flags(p, false) : 0);
        const char* first = in + int64_t(cell.base) * job.input.unit;
        float weight[K];
        cell.weights(weight);
        const bool inside = kShares ? cell.whole() : spot.whole;
        const bool whole = kShares && !kAcross ? of_all(inside) : inside;
#pragma unroll 1
        for (;; left -= C, first += C * c_step, to += C * p.P) {
            Pixels<T, D, C, kLayout, kShares> pixels;
            const auto flags = [&] { return kShares ? cell.flags : spot.corners(p, false); };
            pixels.read(job, whole, flags, first, c_step, left);
#pragma unroll
            for (int c = 0; c < C; ++c) {
                if (kShares && C > 1 && c >= left) break;
                float sum = 0;
#pragma unroll
                for (int k = 0; k < K; ++k) sum += weight[k] * pixels.value(k, c, p.dtype);
                to[c * p.P] = store<T>(sum);
            }
            if (!kShares || left <= C) break;
        }
    });
}

/// V = 1: a thread to a point, or threads that share one, U channels at a time.
template <typename T, int D, int U>
__global__ void __launch_bounds__(kThreads)
    linear_forward_any(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    if (!at.inside) return;
    const Coordinates<A, D> coordinates(job, job.grids.at(blockIdx.y), at.i);
    const char* in = job.inputs.at(blockIdx.y);
    T* out = reinterpret_cast<T*>(job.outs.at(blockIdx.y)) + at.i;
    const int C = int(p.C);
    const int64_t c_step = p.input_stride[1] * int(sizeof(T));
    const Cell<A, D> cell = cell_of<false>(job, job.input, coordinates);
    if (p.interpolation == Interpolation::kNearest) {
        const char* first = in + int64_t(cell.base) * job.input.unit;
#pragma unroll 4
        for (int c = at.lane; c < C; c += at.lanes)
            out[c * p.P] = cell.valid(0) ? *reinterpret_cast<const T*>(first + c * c_step) : T{};
        return;
    }
    A weight[1 << D];
    cell.weights(weight);
#pragma unroll 1
    for (int c = at.lane; c < C; c += U * at.lanes) {
        Vector<T, 1> value[U][1 << D];
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (u == 0 || c + u * at.lanes < C)
                load_corners(job, in + (c + u * at.lanes) * c_step, cell, value[u]);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            if (u > 0 && c + u * at.lanes >= C) break;
            A sum = 0;
#pragma unroll
            for (int k = 0; k < 1 << D; ++k)
                sum += weight[k] * value_of(value[u][k].at[0], p.dtype);
            out[(c + u * at.lanes) * p.P] = stored<T>(sum, p.dtype);
        }
    }
}

/// The kernel for the job's channels and layout.
template <typename T, int D>
const char* launch_narrow_forward(GridSampleJob& job, cudaStream_t stream) {
    const bool last = job.narrow == Narrow::kLast;
    using std::integral_constant;
    const auto launch = [&](auto C, auto layout, auto shares) {
        return launch_in_turn(narrow_forward<T, D, C, layout, shares, true>,
                              narrow_forward<T, D, C, layout, shares, false>, job, 32, stream,
                              kPlanes, job.shares);
    };
    constexpr integral_constant<Narrow, Narrow::kLast> kLast;
    constexpr integral_constant<Narrow, Narrow::kPlanar> kPlanar;
    constexpr std::false_type kAll;
    const auto channels = [&](auto C) {
        return last ? launch(C, kLast, kAll) : launch(C, kPlanar, kAll);
    };
    switch (job.planes ? 1 : job.p.C) {
        case 1: return launch(integral_constant<int, 1>{}, kPlanar, kAll);
        case 2: return channels(integral_constant<int, 2>{});
        case 3: return channels(integral_constant<int, 3>{});
    }
    constexpr std::true_type kSome;
    if (last) return launch(integral_constant<int, 4>{}, kLast, kSome);
    // Of images two at a time, of which an L1 cache holds more (0.975 of the time of four, the mean
    // of 203 drawn cases; of volumes 1.013, of 132).
    constexpr int kAtOnce = D == 2 ? 2 : 4;
    return launch(integral_constant<int, kAtOnce>{}, kPlanar, kSome);
}

template <typename T, int V, int D, bool kAcross>
const char* launch_word_forward(GridSampleJob& job, cudaStream_t stream) {
    constexpr auto kLayout = kAcross ? Narrow::kAcross : Narrow::kWords;
    if constexpr (V == 4 || kAcross)
        if (job.words)
            return launch_in_turn(narrow_forward<T, D, V, kLayout, true, true>,
                                  narrow_forward<T, D, V, kLayout, true, kAcross>, job, 32, stream,
                                  kAcross ? kGivenWords : claimed(kNarrowBlocks<T, D, V>),
                                  job.shares);
    const int bytes = kThreads / 32 * WordStage<T, V>::elements(job.together) * int(sizeof(T));
    return launch_points(linear_forward<T, V, D, kAcross>, job, 32, stream,
                         job.processors * kWordBlocks<V, D>, 1, bytes);
}

template <typename T, int V, int D>
const char* launch_linear_forward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (V * sizeof(T) == 16)
        if (job.across) return launch_word_forward<T, V, D, true>(job, stream);
    if constexpr (V > 1) return launch_word_forward<T, V, D, false>(job, stream);
    using S = Stored<T>;
    const int each = 32 >> job.lanes_log2;
    if (job.general) return launch_points(wide_forward<S, D>, job, each, stream);
    if constexpr (sizeof(T) < 8)
        if (job.narrow != Narrow::kNot) return launch_narrow_forward<T, D>(job, stream);
    constexpr int U = sizeof(S) == 8 ? 2 : 4;  // registers
    return launch_points(linear_forward_any<S, D, U>, job, each, stream);
}
template <typename T, int V>
const char* launch_forward(GridSampleJob& job, cudaStream_t stream) {
    if (job.p.interpolation == Interpolation::kCubic) {
        using S = Stored<T>;
        constexpr InTurn kAll{1 << 20}, kWay = V == 1 ? kAll : claimed(V == 4 ? 8 : 6);
        return launch_in_turn(cubic_forward<S, V, 2, (V > 1)>, cubic_forward<S, V, 2, false>, job,
                              32 >> job.lanes_log2, stream, kWay, job.planes ? job.shares : 1);
    }
    return (job.p.D == 3 ? launch_linear_forward<T, V, 3> : launch_linear_forward<T, V, 2>)(job,
                                                                                            stream);
}
