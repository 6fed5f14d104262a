// grid_sample's backward on the GPU, for linear and nearest interpolation; mapping as in
// linear_forward.cuh.
#pragma once
#include "general.cuh"
#include "scattered.cuh"

/// Times 32 points that a warp takes in the backward: a group of few threads takes several of the
/// points of a line one after the other.
HD inline int tiles_of(int lanes) { return lanes < 8 ? 8 / lanes : 1; }

/// V > 1, float or 16-bit elements, sums in float. Two threads share V channels of a point: one has
/// the corners at even x, the other those at odd x, side by side in memory. A group of threads
/// takes neighbouring points one after the other, and a thread adds up what goes to the same
/// corners: it goes to memory when the column of corners changes, every other step along x.
template <typename T, int V, int D>
__global__ void __launch_bounds__(kThreads, D == 3 ? 6 : 8)
    linear_backward(const __grid_constant__ GridSampleJob job) {
    constexpr int K = 1 << (D - 1);  // corners of a column
    __shared__ Stage<T, V> stages[kThreads / 32];
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, lanes = 1 << job.lanes_log2, shares = lanes / 2;
    const int tiles = tiles_of(lanes), C = int(p.C);
    const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (int64_t(warp) * 32 * tiles >= job.count) return;
    const int64_t b = job.image + blockIdx.y;
    const int lane = in_warp & (lanes - 1), first = in_warp - lane, share = lane / 2;
    const int i0 = (warp * 32 + first) * tiles + lane;
    const char* in =
        static_cast<const char*>(p.input) + (b * p.input_stride[0] + share * V) * int(sizeof(T));
    const int size = element_size(job.sum_dtype);
    char* const to =
        static_cast<char*>(p.grad_input) + (b * p.grad_input_stride[0] + share * V) * size;
    const T* grad_out = static_cast<const T*>(p.grad_out) + b * p.grad_out_stride[0];
    Stage<T, V>& stage = stages[threadIdx.x / 32];
    const T* const staged = &stage.row(share, 0, shares)[first];
    const char* grid = grid_of(job, b);
    const auto coordinates = [&](int t) {
        const int i = i0 + t * lanes;
        return Coordinates<float, D>(job, grid, i < job.count ? i : job.count - 1);
    };
    float own_grad[D], sum[K][V];
    // With several shares of the channels cells are found anew for each; there is one tile then.
#pragma unroll 1
    for (int c0 = 0; c0 < C; c0 += V * shares) {
        const bool real = c0 + share * V < C;
        char* const sums = to + c0 * size;
        int column = 0;      // offset of the column whose corners are being summed
        uint32_t valid = 0;  // which of them lie in the image
        const auto flush = [&] {
            char* at = sums + int64_t(column) * job.sums.unit;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (!(valid >> k & 1)) continue;
                char* const corner = at + job.sums.corner[2 * k];
                add_word<V>(job, corner, sum[k]);
            }
        };
        Coordinates<float, D> next = coordinates(0);
#pragma unroll 1
        for (int t = 0; t < tiles; ++t) {
            const int i = i0 + t * lanes;
            const bool inside = i < job.count;
            Cell<float, D> own = cell_of<true>(job, job.sums, next);
            if (!inside) own.flags = 0;
            if (t + 1 < tiles) next = coordinates(t + 1);
            __syncwarp();
            const T* row = grad_out + c0 * p.grad_out_stride[1] +
                           p.grad_out_points.at_inline(job.first + (inside ? i : job.count - 1));
#pragma unroll 2
            for (int l = 0; l < shares; ++l) {
#pragma unroll
                for (int j = 0; j < V; ++j, row += p.grad_out_stride[1])
                    stage.row(l, j, shares)[in_warp] = c0 + l * V + j < C ? *row : T{};
            }
            __syncwarp();
#pragma unroll
            for (int d = 0; d < D; ++d)
                if (c0 == 0) own_grad[d] = 0;
#pragma unroll 1
            for (int r = 0; r < lanes; ++r) {
                const Cell<float, D> cell = own.from(first + r);
                float grad[V], grad_grid[D] = {};
#pragma unroll
                for (int j = 0; j < V; ++j) grad[j] = load(staged[j * shares * 33 + r]);
                // Bit 16 says whether the cell's first x is odd.
                const uint32_t side = (cell.flags >> 16 ^ uint32_t(lane)) & 1;
                const uint32_t bits = real && cell.flags >> side & 1 ? cell.column() : 0;
                if (bits != 0) {
                    const int base = cell.base + int(side) * job.sums.step[2];
                    using W = typename Word<sizeof(T) * V>::type;
                    W value[K];
                    if (job.reads) {
                        const char* at = in + c0 * int(sizeof(T)) + int64_t(base) * job.input.unit;
#pragma unroll
                        for (int k = 0; k < K; ++k) {
                            value[k] = {};
                            if (bits >> k & 1)
                                value[k] =
                                    __ldg(reinterpret_cast<const W*>(at + job.input.corner[2 * k]));
                        }
                    }
                    float weight[K];
                    cell.column_weights(weight);
                    const float along = side ? cell.part[0] : 1 - cell.part[0];
                    if (p.grad_input) {
                        if (base != column || bits != valid) {
                            flush();
#pragma unroll
                            for (int k = 0; k < K; ++k)
#pragma unroll
                                for (int j = 0; j < V; ++j) sum[k][j] = 0;
                            column = base, valid = bits;
                        }
#pragma unroll
                        for (int k = 0; k < K; ++k)
#pragma unroll
                            for (int j = 0; j < V; ++j) sum[k][j] += along * weight[k] * grad[j];
                    }
                    if (job.reads) {
                        float dot[K] = {};
#pragma unroll
                        for (int k = 0; k < K; ++k) {
                            keep(value[k]);
                            const auto each = bit_copy<Vector<T, V>>(value[k]);
#pragma unroll
                            for (int j = 0; j < V; ++j) dot[k] += grad[j] * load(each.at[j]);
                        }
                        cell.column_slopes(dot, weight, along, side, grad_grid);
                    }
                }
                if (!job.reads) continue;
#pragma unroll
                for (int d = 0; d < D; ++d) {
                    for (int m = 1; m < lanes; m *= 2)
                        grad_grid[d] += __shfl_xor_sync(kAll, grad_grid[d], m);
                    if (lane == r) own_grad[d] += grad_grid[d];
                }
            }
            if (p.grad_grid && inside && c0 + V * shares >= C)
#pragma unroll
                for (int d = 0; d < D; ++d)
                    store_as(p.grid_dtype, p.grad_grid, (b * p.P + job.first + i) * D + d,
                             job.reads ? own.moved(d, job) * own_grad[d] : 0);
        }
        if (p.grad_input) flush();
    }
}

/// Which of a warp's threads, each with a point, are in the same cell as the thread before them.
struct Runs {
    bool head;          // begins a run
    int reach;          // no run has more threads
    int end;            // its last thread
    bool gives, takes;  // the next run's cell is the next along x; this one's is that of the last
    int before;         // first thread of the run before

    __device__ Runs(int base, uint32_t flags, int step) {
        const int i = threadIdx.x % 32;
        const int last_base = __shfl_up_sync(kAll, base, 1);
        const uint32_t last_flags = __shfl_up_sync(kAll, flags, 1);
        head = i == 0 || base != last_base || flags != last_flags;
        const uint32_t heads = __ballot_sync(kAll, head);
        const uint32_t above = i == 31 ? 0 : heads & (kAll << (i + 1));
        end = above ? __ffs(int(above)) - 2 : 31;
        takes = head && i > 0 && base == last_base + step && (flags & 1) && (last_flags & 2) &&
                ((flags ^ last_flags) & ~3u) == 0;
        const uint32_t takers = __ballot_sync(kAll, takes);
        gives = end < 31 && (takers >> (end + 1) & 1);
        for (reach = 1; __any_sync(kAll, end - i >= reach);) reach *= 2;
        const uint32_t below = i == 0 ? 0 : heads & ((1u << i) - 1);
        before = below ? 31 - __clz(int(below)) : 0;
    }
    /// Sums of each x[k] over each run, in its first thread.
    template <typename A, int K>
    __device__ void sum(A (&x)[K]) const {
        const int i = threadIdx.x % 32;
#pragma unroll 1
        for (int m = 1; m < reach; m *= 2)
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const A other = __shfl_down_sync(kAll, x[k], m);
                if (i + m <= end) x[k] += other;
            }
    }
};

/// Where the cell of a point begins in the sums, whose steps are others than the input's.
template <typename A, int D>
__device__ __noinline__ int base_in_sums(const GridSampleJob& job, Coordinates<A, D> at) {
    return cell_of<true>(job, job.sums, at).base;
}

/// Of a point of so many channels: adds to the corners `mine`, to two pixels along x as one line.
template <int D>
__device__ inline void add_pixels(const GridSampleJob& job, const Runs& runs, uint32_t mine,
                                  const float (&weight)[1 << D],
                                  const float (&grad)[kPixelChannels], char* to) {
    constexpr int U = kPixelChannels;
    const int C = int(job.p.C);
#pragma unroll
    for (int k = 0; k < 1 << D; k += 2) {
        float one[U], two[U];
#pragma unroll
        for (int u = 0; u < U; ++u) one[u] = weight[k] * grad[u], two[u] = weight[k + 1] * grad[u];
        if (runs.reach > 1) runs.sum(one), runs.sum(two);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const float given = __shfl_sync(kAll, two[u], runs.before);
            if (runs.takes) one[u] += given;
        }
        float* const first = reinterpret_cast<float*>(to + job.sums.corner[k]);
        float* const second = reinterpret_cast<float*>(to + job.sums.corner[k + 1]);
        if ((mine >> k & 3) == 3) {
            float both[2 * U];
#pragma unroll
            for (int j = 0; j < 2 * U; ++j) {
                both[j] = j < U ? one[j < U ? j : 0] : 0;
#pragma unroll
                for (int u = 0; u < U; ++u)  // U - 1 channels, or U
                    if ((j == u + U && C == U) || (j == u + U - 1 && C == U - 1)) both[j] = two[u];
            }
            add_line(job, first, both, 2 * C);
            continue;
        }
        if (mine >> k & 1) add_line(job, first, one, C);
        if (mine >> k & 2) add_line(job, second, two, C);
    }
}

/// Writes the gradient to the coordinates of a point, if asked for.
template <int D, typename A>
__device__ inline void store_slopes_of(const GridSampleJob& job, const ThreadPoint& at,
                                       const Cell<A, D>& cell, const A (&dot)[1 << D]) {
    if (!job.p.grad_grid) return;
    A grad_grid[D];
    cell.slopes(dot, grad_grid);
#pragma unroll
    for (int d = 0; d < D; ++d) grad_grid[d] *= cell.moved(d, job);
    store_grad_grid<D>(job, at, grad_grid);
}

/// V = 1: a thread to a point, or, where kLine is none, several. Neighbouring points in the same
/// cell, or in the next along x, add up what goes to the same corners within the warp first. kLine:
/// that of job.line; of pixels, U is kPixelChannels.
template <typename T, int D, int U, Line kLine>
__global__ void __launch_bounds__(kThreads)
    linear_backward_any(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    constexpr int K = 1 << D;
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    const int i = at.inside ? at.i : job.count - 1;
    const Coordinates<A, D> coordinates(job, grid_of(job, at.b), i);
    Cell<A, D> cell = cell_of<true>(job, job.input, coordinates);
    if (!at.inside) cell.flags = 0;
    constexpr uint32_t kBits = (1u << 2 * D) - 1;
    const Runs runs(cell.base, cell.flags & kBits, job.input.step[2]);
    // Threads that share a point have no neighbours to add to.
    constexpr bool kRows = kLine == Line::kRow, kPixels = kLine == Line::kPixel;
    const int lane = kRows || kPixels ? 0 : at.lane, lanes = kRows || kPixels ? 1 : at.lanes;
    const bool alone = lanes == 1;
    // Has kernels of its own; but without the test this one needs more registers.
    const bool nearest = p.interpolation == Interpolation::kNearest;
    A weight[K], dot[K] = {};
    cell.weights(weight);
    const char* in = static_cast<const char*>(p.input) + at.b * p.input_stride[0] * int(sizeof(T));
    const int64_t c_step = p.input_stride[1] * int(sizeof(T));
    const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                        p.grad_out_points.at(job.first + i);
    const int C = int(p.C), size = element_size(job.sum_dtype);
    const int base = job.same_steps || !p.grad_input ? cell.base : base_in_sums(job, coordinates);
    char* const to = static_cast<char*>(p.grad_input) + at.b * p.grad_input_stride[0] * size +
                     int64_t(base) * job.sums.unit;
    // The corners that this thread adds to memory.
    uint32_t mine = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
        mine |= uint32_t(cell.valid(k) && (!alone || (runs.head && !(k % 2 && runs.gives)))) << k;
    const bool longer = alone && runs.reach > 1;
#pragma unroll 1
    for (int c0 = lane; c0 - lane < C; c0 += U * lanes) {
        A grad[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int c = c0 + u * lanes;
            grad[u] = c < C && at.inside ? A(value_of(grad_out[c * p.grad_out_stride[1]], p.dtype))
                                         : A(0);
        }
        if (p.grad_grid) {
            Vector<T, 1> value[U][K];
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (const int c = c0 + u * lanes; c < C)
                    load_corners(job, in + c * c_step, cell, value[u]);
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (c0 + u * lanes < C)
#pragma unroll
                    for (int k = 0; k < K; ++k)
                        dot[k] += grad[u] * value_of(value[u][k].at[0], p.dtype);
        }
        if (!p.grad_input) continue;
        if constexpr (kPixels) {
            add_pixels<D>(job, runs, mine, weight, grad, to);
            return store_slopes_of(job, at, cell, dot);
        } else {
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const int c = c0 + u * lanes;
                if (c - lane >= C) break;
                A part[K];
#pragma unroll
                for (int k = 0; k < K; ++k) part[k] = weight[k] * grad[u];
                if (longer) runs.sum(part);
                if (kRows || (alone && !nearest))
#pragma unroll
                    for (int k = 0; k < K; k += 2) {
                        const A given = __shfl_sync(kAll, part[k + 1], runs.before);
                        if (runs.takes) part[k] += given;
                    }
                if (c >= C) continue;
                char* row = to + c * p.grad_input_stride[1] * size;
                asm("" : "+l"(row));
#pragma unroll
                for (int k = 0; k < K; k += 2) {
                    char* const first = row + job.sums.corner[k];
                    char* const second = row + job.sums.corner[k + 1];
                    if (kRows && (mine >> k & 3) == 3) {
                        const float both[] = {float(part[k]), float(part[k + 1])};
                        add_line(job, reinterpret_cast<float*>(first), both);
                        continue;
                    }
                    if (mine >> k & 1) add_one<T>(job, first, part[k]);
                    if (mine >> k & 2) add_one<T>(job, second, part[k + 1]);
                }
            }
        }
    }
    store_slopes_of(job, at, cell, dot);
}

/// Nearest, V = 1: a thread to a point, or several, whose gradient goes to one pixel. Neighbouring
/// points of the same pixel add up within the warp first. A thread takes U channels at a time,
/// which lie side by side where kPixels, as job.line has it.
template <typename T, int D, int U, bool kPixels>
__global__ void __launch_bounds__(kThreads)
    nearest_backward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    const int i = at.inside ? at.i : job.count - 1;
    const Cell<A, D> cell =
        cell_of<true>(job, job.sums, Coordinates<A, D>(job, grid_of(job, at.b), i));
    const bool valid = at.inside && cell.valid(0), alone = at.lanes == 1;
    const Runs runs(cell.base, valid, job.sums.step[2]);
    const bool longer = alone && runs.reach > 1, mine = valid && (!alone || runs.head);
    const int first = int(blockIdx.z);  // channel, where each has blocks of its own
    const int C = gridDim.z > 1 ? first + 1 : int(p.C), size = element_size(job.sum_dtype);
    const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                        p.grad_out_points.at(job.first + i);
    char* const to = static_cast<char*>(p.grad_input) + at.b * p.grad_input_stride[0] * size +
                     int64_t(cell.base) * job.sums.unit;
    const int next = kPixels ? 1 : at.lanes, begin = first + at.lane * (kPixels ? U : 1);
#pragma unroll 1
    for (int c0 = begin; c0 - begin + first < C; c0 += U * at.lanes) {
        A grad[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int c = c0 + u * next;
            grad[u] = c < C && at.inside ? A(value_of(grad_out[c * p.grad_out_stride[1]], p.dtype))
                                         : A(0);
        }
        if (longer) runs.sum(grad);
        if constexpr (kPixels) {
            if (mine && c0 < C)
                add_line(job, reinterpret_cast<float*>(to) + c0, grad, min(U, C - c0));
        } else {
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (const int c = c0 + u * next; mine && c < C)
                    add_one<T>(job, to + c * p.grad_input_stride[1] * size, grad[u]);
        }
    }
    if (!p.grad_grid || first > 0) return;
    A none[D] = {};
    store_grad_grid<D>(job, at, none);
}

template <typename T, int V, int D, bool kPixels>
const char* launch_scattered(GridSampleJob& job, cudaStream_t stream) {
    return launch_points(job.reads ? scattered_backward<T, V, D, true, kPixels>
                                   : scattered_backward<T, V, D, false, kPixels>,
                         job, 32, stream, kSlabBlocks * job.processors);
}

/// Words of V > 1 channels.
template <typename T, int V, int D>
const char* launch_words_backward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (V == 4)
        if (job.alone) return launch_grid_backward_of<T, D, 4, Narrow::kWords, true>(job, stream);
    if (!job.p.grad_input) return launch_words_to_grid<T, V, false>(job, stream);
    if (job.slabs) return launch_scattered<T, V, D, false>(job, stream);
    return launch_points(linear_backward<T, V, D>, job, 32 * tiles_of(1 << job.lanes_log2), stream);
}

/// V = 1.
template <typename T, int D>
const char* launch_linear_backward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (sizeof(T) < 8)
        if (job.slabs && job.p.grad_input)
            return job.line == Line::kPixel ? launch_scattered<T, 4, D, true>(job, stream)
                                            : launch_scattered<T, 1, D, false>(job, stream);
    const int each = 32 >> job.lanes_log2;
    if (job.general) return launch_points(backward_kernel<T, 1, D, 2>, job, each, stream);
    if (job.alone) return launch_grid_backward<T, D>(job, stream);
    constexpr int U = D == 2 ? 4 : 2;
    if (job.p.interpolation == Interpolation::kNearest) {
        if constexpr (sizeof(T) < 8)
            if (job.line == Line::kPixel)
                return launch_points(channels_at_once(job.p.C) == 4
                                         ? nearest_backward<T, D, 4, true>
                                         : nearest_backward<T, D, 8, true>,
                                     job, each, stream);
        return launch_points(
            job.p.C == 1 ? nearest_backward<T, D, 1, false> : nearest_backward<T, D, 4, false>, job,
            each, stream, 0x7fffffff, job.planes ? int(job.p.C) : 1);
    }
    if constexpr (sizeof(T) < 8) {
        if (job.line == Line::kPixel)
            return launch_points(linear_backward_any<T, D, kPixelChannels, Line::kPixel>, job, each,
                                 stream);
        if (job.line == Line::kRow && each == 32)
            return launch_points(job.p.C == 1 ? linear_backward_any<T, D, 1, Line::kRow>
                                              : linear_backward_any<T, D, U, Line::kRow>,
                                 job, each, stream);
    }
    return launch_points(job.p.C == 1 ? linear_backward_any<T, D, 1, Line::kNone>
                                      : linear_backward_any<T, D, U, Line::kNone>,
                         job, each, stream);
}

template <typename T, int V>
const char* launch_backward(GridSampleJob& job, cudaStream_t stream) {
    if (job.p.interpolation == Interpolation::kCubic)
        return launch_points(backward_kernel<Stored<T>, V, 2, 4>, job, 32 >> job.lanes_log2,
                             stream);
    if constexpr (V > 1)
        return (job.p.D == 3 ? launch_words_backward<T, V, 3>
                             : launch_words_backward<T, V, 2>)(job, stream);
    else
        return (job.p.D == 3 ? launch_linear_backward<Stored<T>, 3>
                             : launch_linear_backward<Stored<T>, 2>)(job, stream);
}
