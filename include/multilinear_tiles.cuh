// Interpolation inside cells of any width, alignment and stride, through shared memory.
//
// A block has a tile: some points with all their features, or one point with some of them. What the
// tile needs of a tensor is fetched as 16-byte words, as few runs as there are, each to where it is
// as far off a word as in global memory; the arithmetic picks elements from there, neighbouring
// threads neighbouring features. Gradients to feats are put together there and leave as one run.
#pragma once
#include "async_copy.cuh"
#include "multilinear_plan.cuh"
#include "short.cuh"
#include "vector.cuh"

namespace tiles {

/// Where the rows of a tile lie, from its first element on.
template <int K>
struct Placed {
    Part part;
    unsigned low;  // the last bits of the first element's address

    __device__ int row(int n, int k) const {
        const unsigned at = low + n * part.step[0];
        if (part.kind == kOne) return (low & 15) + n * part.step[0] + k * part.step[1];
        if (part.kind == kCells) return n * part.pitch + (at & 15) + k * part.step[1];
        return (n * K + k) * part.pitch + ((at + k * part.step[1]) & 15);
    }
    /// From row to row of one point, where it is always the same.
    __device__ bool even() const { return part.kind != kRows; }
};

/// This thread's words of `runs` runs of up to `words` words each: of one run, the block's threads
/// take turns; of several, as many neighbours as a power of two tells, so that nothing is divided.
struct Share {
    int run, runs, word, words;  // the first, and from each to the next
    __device__ Share(int all, int most) {
        int log = 5;
        while (log > 0 && 1 << (log - 1) >= most) --log;
        run = threadIdx.x >> log, runs = blockDim.x >> log;
        word = threadIdx.x & ((1 << log) - 1), words = 1 << log;
        if (all == 1) run = 0, runs = 1, word = threadIdx.x, words = blockDim.x;
    }
};

/// Fetches `count` points' K rows of `width` elements; the caller waits for them.
template <int K, typename T>
__device__ inline Placed<K> fetch(char* to, const T* from, const Part& part, int count, int width) {
    const auto first = reinterpret_cast<uintptr_t>(from);
    const int row = (width - 1) * part.step[2] + int(sizeof(T)),
              cell = (K - 1) * part.step[1] + row;
    const int length = part.kind == kOne     ? (count - 1) * part.step[0] + cell
                       : part.kind == kCells ? cell
                                             : row;
    const int runs = part.kind == kOne ? 1 : part.kind == kCells ? count : count * K;
    const int words = part.kind == kOne ? (int(first & 15) + length + 15) / 16 : part.pitch / 16;
    const Share share(runs, words);
    for (int run = share.run; run < runs; run += share.runs) {
        const int n = part.kind == kRows ? run / K : run, k = part.kind == kRows ? run % K : 0;
        const uintptr_t at = first + (n * part.stride[0] + k * part.stride[1]) * int64_t(sizeof(T));
        const uintptr_t begin = at & ~uintptr_t(15);
        const int bytes = int(at - begin) + length;
        char* const there = to + run * part.pitch;
#pragma unroll 4
        for (int i = 16 * share.word; i < bytes; i += 16 * share.words)
            copy_word(there + i, begin + i, bytes - i < 16 ? bytes - i : 16);
    }
    return {part, unsigned(first)};
}

template <typename T>
__device__ inline T* element(char* tile, int at) {
    return reinterpret_cast<T*>(tile + at);
}

/// The tile of this block.
struct Own {
    int64_t n;            // its first point
    int f, count, width;  // its first feature; how many points, how many features

    __device__ Own(const MultilinearParams& p, const Plan& plan) {
        n = blockIdx.x, f = 0;
        if (plan.chunks > 1) {
            n = blockIdx.x / unsigned(plan.chunks);
            f = int(blockIdx.x % unsigned(plan.chunks)) * plan.width;
        } else {
            n *= plan.points;
        }
        count = p.N - n < plan.points ? int(p.N - n) : plan.points;
        width = p.F - f < plan.width ? int(p.F - f) : plan.width;
    }
};

/// Calls `body(i, n, f)` for this thread's share of a tile's (count, width) elements.
template <typename Body>
__device__ inline void each_element(int count, int width, const Body& body) {
    const int threads = blockDim.x, rows = threads / width, rest = threads % width;
    int n = threadIdx.x / width, f = threadIdx.x % width;
    for (int i = threadIdx.x; i < count * width; i += threads) {
        body(i, n, f);
        n += rows, f += rest;
        if (f >= width) f -= width, ++n;
    }
}

template <typename Cell, typename A>
__device__ inline void fill_weights(A* weights, const MultilinearParams& p, const Own& own) {
    constexpr int K = 1 << Cell::D;
    for (int n = threadIdx.x; n < own.count; n += blockDim.x) {
        const Position<Cell, A> at(p, own.n + n);
#pragma unroll
        for (int k = 0; k < K; ++k) weights[n * K + k] = at.weight(k);
    }
}

constexpr int kMostThreads = 256, kSumThreads = 128, kSumBlocks = 6;

template <typename Cell, typename T>
__global__ void __launch_bounds__(kMostThreads) forward(MultilinearParams p, Plan plan) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    extern __shared__ __align__(128) char memory[];
    A* weights = reinterpret_cast<A*>(memory + plan.feats.bytes);
    const Own own(p, plan);
    const T* from =
        static_cast<const T*>(p.feats) + own.n * p.feats_stride[0] + own.f * p.feats_stride[2];
    const auto feats = fetch<K>(memory, from, plan.feats, own.count, own.width);
    fill_weights<Cell>(weights, p, own);
    wait_for_words();
    __syncthreads();
    T* out = static_cast<T*>(p.out) + own.n * p.F + own.f;
    const unsigned step = plan.feats.step[1], along = plan.feats.step[2];
    each_element(own.count, own.width, [&](int i, int n, int f) {
        A acc = 0;
        if (feats.even()) {
            const int at = feats.row(n, 0) + f * along;
#pragma unroll
            for (int k = 0; k < K; ++k)
                acc += weights[n * K + k] * value_of(*element<T>(memory, at + k * step), p.dtype);
        } else {
#pragma unroll
            for (int k = 0; k < K; ++k)
                acc += weights[n * K + k] *
                       value_of(*element<T>(memory, feats.row(n, k) + f * along), p.dtype);
        }
        out[i] = stored<T>(acc, p.dtype);
    });
}

/// The same for rows that are long: threads keep to a point, with its weights in registers.
template <typename Cell, typename T>
__global__ void __launch_bounds__(kMostThreads) forward_by_point(MultilinearParams p, Plan plan) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    extern __shared__ __align__(128) char memory[];
    const Own own(p, plan);
    const T* from =
        static_cast<const T*>(p.feats) + own.n * p.feats_stride[0] + own.f * p.feats_stride[2];
    const auto feats = fetch<K>(memory, from, plan.feats, own.count, own.width);
    const int lanes = 1 << plan.log_lanes, lane = threadIdx.x & (lanes - 1);
    const unsigned along = plan.feats.step[2];
    T* out = static_cast<T*>(p.out) + own.n * p.F + own.f;
    wait_for_words();
    __syncthreads();
    for (int n = threadIdx.x >> plan.log_lanes; n < own.count; n += blockDim.x >> plan.log_lanes) {
        const Position<Cell, A> at(p, own.n + n);
        A weight[K];
        int row[K];
#pragma unroll
        for (int k = 0; k < K; ++k) weight[k] = at.weight(k), row[k] = feats.row(n, k);
        for (int f = lane; f < own.width; f += lanes) {
            A acc = 0;
#pragma unroll
            for (int k = 0; k < K; ++k)
                acc += weight[k] * value_of(*element<T>(memory, row[k] + f * along), p.dtype);
            out[n * own.width + f] = stored<T>(acc, p.dtype);
        }
    }
}

/// Where row k of a part of a point's gradient is put together, so that its words can be stored.
struct Rows {
    int pitch;
    unsigned low, step;
    __device__ int row(int k) const { return k * pitch + ((low + k * step) & 15); }
};

/// K rows of `width` elements, `F` apart: whole words, and at their ends elements.
template <int K, typename T>
__device__ inline void store_rows(T* to, char* from, const Rows& rows, int64_t F, int width) {
    constexpr int V = 16 / sizeof(T);
    const int words = rows.pitch / 16;
    const Share share(K, words);
    for (int k = share.run; k < K; k += share.runs)
        for (int word = share.word; word < words; word += share.words) {
            const int f = word * V - (rows.row(k) & 15) / int(sizeof(T));
            const char* source = from + k * rows.pitch + 16 * word;
            T* row = to + k * F;
            if (f >= 0 && f + V <= width)
                *reinterpret_cast<uint4*>(row + f) = *reinterpret_cast<const uint4*>(source);
            else
                for (int j = 0; j < V; ++j)
                    if (f + j >= 0 && f + j < width)
                        row[f + j] = reinterpret_cast<const T*>(source)[j];
        }
}

/// The gradient to feats alone.
template <typename Cell, typename T>
__global__ void __launch_bounds__(kMostThreads) backward(MultilinearParams p, Plan plan) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    extern __shared__ __align__(128) char memory[];
    char* grads = memory + plan.bytes;
    A* weights = reinterpret_cast<A*>(grads + plan.grad_out.bytes);
    const Own own(p, plan);
    const T* from = static_cast<const T*>(p.grad_out) + own.n * p.grad_out_stride[0] +
                    own.f * p.grad_out_stride[1];
    const bool here = plan.grad_out.kind != kNone;
    Placed<1> grad_out{};
    if (here) grad_out = fetch<1>(grads, from, plan.grad_out, own.count, own.width);
    fill_weights<Cell>(weights, p, own);
    wait_for_words();
    __syncthreads();
    T* to = static_cast<T*>(p.grad_feats) + own.n * K * p.F + own.f;
    const Rows rows{plan.pitch, unsigned(reinterpret_cast<uintptr_t>(to)),
                    unsigned(p.F * sizeof(T))};
    const bool whole = plan.one_run;
    each_element(own.count, own.width, [&](int, int n, int f) {
        const T* g = here ? element<T>(grads, grad_out.row(n, 0) + f * plan.grad_out.step[2])
                          : from + n * p.grad_out_stride[0] + f * p.grad_out_stride[1];
        const A value = value_of(*g, p.dtype);
        const int at = (n * K * own.width + f) * int(sizeof(T));
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int row =
                whole ? at + k * own.width * int(sizeof(T)) : rows.row(k) + f * int(sizeof(T));
            *element<T>(memory, row) = stored<T>(weights[n * K + k] * value, p.dtype);
        }
    });
    if (whole) return store_run(to, element<T>(memory, 0), own.count * K * own.width);
    __syncthreads();
    store_rows<K>(to, memory, rows, p.F, own.width);
}

/// Values by corner, each moved on by `by` places.
template <int K, typename A>
__device__ inline void turn(A (&values)[K], int by) {
#pragma unroll
    for (int step = 1; step < K; step *= 2) {
        A moved[K];
#pragma unroll
        for (int k = 0; k < K; ++k) moved[k] = values[(k + K - step) % K];
#pragma unroll
        for (int k = 0; k < K; ++k) values[k] = by & step ? moved[k] : values[k];
    }
}

/// sum_k slope_k,axis * dot[k], an axis folded at a time: 7 steps where D is 3, and not 24
/// products.
template <typename Cell, typename A>
__device__ inline A fold(const Position<Cell, A>& at, const A* dot, int axis) {
    A sums[1 << Cell::D];
#pragma unroll
    for (int k = 0; k < 1 << Cell::D; ++k) sums[k] = dot[k];
#pragma unroll
    for (int bit = Cell::D - 1; bit >= 0; --bit)
#pragma unroll
        for (int d = 0; d < Cell::D; ++d)
            if (Cell::bit(d) == bit)
#pragma unroll
                for (int k = 0; k < 1 << bit; ++k)
                    sums[k] = d == axis ? A(0.5) * (sums[k + (1 << bit)] - sums[k])
                                        : at.low[d] * sums[k] + at.high[d] * sums[k + (1 << bit)];
    return sums[0];
}

/// The gradient to points, and to feats where it is asked for, so that feats and grad_out are read
/// once. E neighbouring features at a time, of which every row has a multiple. A point is one
/// thread's, or as few threads' as tiles allow: what each does beside its features counts. Their
/// cells are some multiple of 8 words apart, so neighbouring points begin at corners of their own:
/// they meet no bank twice where a row is an odd number of words, each at the next corner, nor
/// where rows are multiples of 16 bytes and threads side by side take those.
template <typename Cell, typename T, int E>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    backward_both(MultilinearParams p, Plan plan) {
    using A = Acc<T>;
    constexpr int D = Cell::D, K = 1 << D, kWarps = kSumThreads / 32, kSize = sizeof(T);
    extern __shared__ __align__(128) char memory[];
    __shared__ A parts[kWarps][D];
    char* grads = memory + plan.feats.bytes;
    A* places = reinterpret_cast<A*>(grads + plan.grad_out.bytes);
    const int64_t first = int64_t(blockIdx.x) * plan.points;
    const int count = p.N - first < plan.points ? int(p.N - first) : plan.points;
    char* result = plan.in_place ? memory : grads + plan.grad_out.bytes + places_bytes<A>(plan, D);
    for (int i = threadIdx.x; i < count * D; i += blockDim.x)
        places[i] = load_as<A>(p.points_dtype, p.points,
                               (first + i / D) * p.points_stride[0] + i % D * p.points_stride[1]);
    const int lanes = 1 << plan.log_lanes, lane = threadIdx.x & (lanes - 1);
    const int own = threadIdx.x >> plan.log_lanes;
    const bool here = plan.grad_out.kind != kNone;
    const int64_t along = p.grad_out_stride[1] * kSize;
    // Threads past the last point do its work again: the sums below need whole warps.
    const int n = own < count ? own : count - 1;
    const int first_corner = (plan.regular ? n : n * K / (E * kSize == 8 ? 16 : 32)) % K;
    A dot[K] = {};
    for (int f0 = 0; f0 < p.F; f0 += plan.width) {
        const int width = p.F - f0 < plan.width ? int(p.F - f0) : plan.width;
        const T* from =
            static_cast<const T*>(p.feats) + first * p.feats_stride[0] + f0 * p.feats_stride[2];
        const T* grad_from = static_cast<const T*>(p.grad_out) + first * p.grad_out_stride[0] +
                             f0 * p.grad_out_stride[1];
        const auto feats = fetch<K>(memory, from, plan.feats, count, width);
        Placed<1> grad_out{};
        if (here) grad_out = fetch<1>(grads, grad_from, plan.grad_out, count, width);
        wait_for_words();
        __syncthreads();
        T* to = static_cast<T*>(p.grad_feats) + first * K * p.F + f0;
        const Rows rows{plan.pitch, unsigned(reinterpret_cast<uintptr_t>(to)),
                        unsigned(p.F * kSize)};
        const char* row[K];
#pragma unroll
        for (int k = 0; k < K; ++k) row[k] = memory + feats.row(n, (k + first_corner) % K);
        const char* grad_row =
            here ? grads + grad_out.row(n, 0)
                 : reinterpret_cast<const char*>(grad_from + n * p.grad_out_stride[0]);
        const auto gradient = [&](int f) {
            Vector<T, E> x;
            if (along == kSize)
                x = *reinterpret_cast<const Vector<T, E>*>(grad_row + f * kSize);
            else
#pragma unroll
                for (int e = 0; e < E; ++e)
                    x.at[e] = *reinterpret_cast<const T*>(grad_row + (f + e) * along);
            Vector<A, E> g;
#pragma unroll
            for (int e = 0; e < E; ++e) g.at[e] = value_of(x.at[e], p.dtype);
            return g;
        };
        const int begin = own < count ? lane * E : width, stride = lanes * E;
        if (!p.grad_feats) {
#pragma unroll 2
            for (int f = begin; f < width; f += stride) {
                const Vector<A, E> g = gradient(f);
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    const auto x = *reinterpret_cast<const Vector<T, E>*>(row[k] + f * kSize);
#pragma unroll
                    for (int e = 0; e < E; ++e) dot[k] += g.at[e] * value_of(x.at[e], p.dtype);
                }
            }
        } else {
            const Position<Cell, A> at(places + n * D);
            A weight[K];
#pragma unroll
            for (int k = 0; k < K; ++k) weight[k] = at.weight(k);
            turn(weight, K - first_corner);
            char* into[K];
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int corner = (k + first_corner) % K;
                into[k] =
                    result + (plan.one_run ? (n * K + corner) * width * kSize : rows.row(corner));
            }
            for (int f = begin; f < width; f += stride) {
                const Vector<A, E> g = gradient(f);
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    auto x = *reinterpret_cast<const Vector<T, E>*>(row[k] + f * kSize);
#pragma unroll
                    for (int e = 0; e < E; ++e) {
                        dot[k] += g.at[e] * value_of(x.at[e], p.dtype);
                        x.at[e] = stored<T>(weight[k] * g.at[e], p.dtype);
                    }
                    *reinterpret_cast<Vector<T, E>*>(into[k] + f * kSize) = x;
                }
            }
        }
        const bool last = f0 + width >= p.F;
        if (last) {
            turn(dot, first_corner);
            const Position<Cell, A> at(places + n * D);
#pragma unroll
            for (int axis = 0; axis < D; ++axis) {
                A sum = fold(at, dot, axis);
                for (int mask = (lanes < 32 ? lanes : 32) / 2; mask > 0; mask /= 2)
                    sum += __shfl_xor_sync(~0u, sum, mask);
                if (lanes > 32) {
                    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][axis] = sum;
                } else if (own < count && lane == 0) {
                    store_as<A>(p.points_dtype, p.grad_points, (first + n) * D + axis, sum);
                }
            }
        }
        if (p.grad_feats && plan.one_run)
            store_run(to, element<T>(result, 0), count * K * width);
        else
            __syncthreads();
        if (last && lanes > 32 && threadIdx.x < D) {
            A sum = 0;
            for (int w = 0; w < blockDim.x / 32; ++w) sum += parts[w][threadIdx.x];
            store_as<A>(p.points_dtype, p.grad_points, first * D + threadIdx.x, sum);
        }
        if (p.grad_feats && !plan.one_run) {
            store_rows<K>(to, result, rows, p.F, width);
            __syncthreads();
        }
    }
}

template <typename Kernel>
inline const char* launch(Kernel kernel, const MultilinearParams& p, const Tiling& tiling,
                          int64_t blocks, int memory, cudaStream_t stream) {
    const Plan& plan = tiling.plan;
    memory += plan.feats.bytes + plan.grad_out.bytes + plan.bytes;
    if (blocks > 0x7fffffff) return "more points than one CUDA grid can hold";
    if (memory > 47 * 1024)  // beside what the kernel has of its own, up to 48 need no leave
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    kernel<<<unsigned(blocks), tiling.threads, memory, stream>>>(p, plan);
    return launch_error();
}

/// Forward, or the gradient to feats alone.
template <typename Cell, typename T>
inline const char* launch(const MultilinearParams& p, const Tiling& tiling, cudaStream_t stream) {
    const Plan& plan = tiling.plan;
    const int64_t blocks = ceil_div(p.N, plan.points) * plan.chunks;
    const int weights = plan.points * (1 << Cell::D) * int(sizeof(Acc<T>));
    if constexpr (sizeof(T) < 8)
        if (p.out)
            return launch(plan.log_lanes ? forward_by_point<Cell, T> : forward<Cell, T>, p, tiling,
                          blocks, weights, stream);
    return launch(backward<Cell, Stored<T>>, p, tiling, blocks, weights, stream);
}

/// The gradient to points, and to feats where it is asked for.
template <typename Cell, typename T, int E>
inline const char* launch_sums(const MultilinearParams& p, const Tiling& tiling,
                               cudaStream_t stream) {
    return launch(backward_both<Cell, T, E>, p, tiling, ceil_div(p.N, tiling.plan.points),
                  places_bytes<Acc<T>>(tiling.plan, Cell::D), stream);
}

}  // namespace tiles
