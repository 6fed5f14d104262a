// Interpolation inside cells of any width, alignment and stride, through shared memory.
//
// A block has a tile: some points with all their features, or one point with some of them. What the
// tile needs of a tensor is fetched as 16-byte words, as few runs as there are, each to where it is
// as far off a word as in global memory; the arithmetic picks elements from there, neighbouring
// threads neighbouring features. Gradients to feats are put together there and leave as one run.
#pragma once
#include "async_copy.cuh"
#include "multilinear_plan.cuh"
#include "multilinear_points.cuh"
#include "short.cuh"
#include "vector.cuh"

namespace tiles {

/// Where the rows of a tile lie, from its first element on.
template <int K>
struct Placed {
    Part part;
    unsigned low;  // the last bits of the first element's address

    /// Where a point's begin, and from each to the next.
    struct Point {
        unsigned begin, pitch, low, step, mask;
        __device__ int row(int k) const { return begin + k * pitch + ((low + k * step) & mask); }
    };
    __device__ Point point(int n) const {
        const unsigned at = low + n * part.step[0];
        if (part.kind == kOne) return {(low & 15) + n * part.step[0], part.step[1], 0, 0, 0};
        if (part.kind == kCells) return {n * part.pitch + (at & 15), part.step[1], 0, 0, 0};
        return {unsigned(n * K * part.pitch), unsigned(part.pitch), at, part.step[1], 15};
    }
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

/// Begins to fetch `count` points' K rows of `width` elements: as whole runs where there is
/// something to count their arrivals, else by words, which is quicker where they are few.
template <int K, typename T>
__device__ inline Placed<K> fetch(char* to, const T* from, const Part& part, int count, int width,
                                  Arrivals* arrivals = nullptr) {
    const auto first = reinterpret_cast<uintptr_t>(from);
    const int runs = part.kind == kOne ? 1 : part.kind == kCells ? count : count * K;
    const auto length = [&] {
        const int row = (width - 1) * part.step[2] + int(sizeof(T));
        const int cell = (K - 1) * part.step[1] + row;
        if (part.kind == kOne) return (count - 1) * int(part.step[0]) + cell;
        return part.kind == kCells ? cell : row;
    };
    const auto begins = [&](int run) {
        const int n = part.kind == kRows ? run / K : run, k = part.kind == kRows ? run % K : 0;
        return first + (n * part.stride[0] + k * part.stride[1]) * int64_t(sizeof(T));
    };
#if __CUDA_ARCH__ >= 900
    if (arrivals) {
        for (int run = threadIdx.x; run < runs; run += blockDim.x) {
            const uintptr_t at = begins(run), begin = at & ~uintptr_t(15);
            arrivals->copy(to + run * part.pitch, begin, (int(at - begin) + length() + 15) & ~15);
        }
        return {part, unsigned(first)};
    }
#endif
    const int words = part.kind == kOne ? (int(first & 15) + length() + 15) / 16 : part.pitch / 16;
    const Share share(runs, words);
    for (int run = share.run; run < runs; run += share.runs) {
        const uintptr_t at = begins(run), begin = at & ~uintptr_t(15);
        const int bytes = int(at - begin) + length();
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

/// A block's tile.
struct Own {
    int64_t n;            // its first point
    int f, count, width;  // its first feature; how many points, how many features

    __device__ Own(const MultilinearParams& p, const Plan& plan, unsigned block) {
        n = block, f = 0;
        if (plan.chunks > 1) {
            n = block / unsigned(plan.chunks);
            f = int(block % unsigned(plan.chunks)) * plan.width;
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
        const auto at = LoadedPoint<A, Cell::D>(p, own.n + n).template in<Cell>();
#pragma unroll
        for (int k = 0; k < K; ++k) weights[n * K + k] = at.weight(k);
    }
}

/// The weights of a tile's n-th point.
template <int K>
struct Weights {
    Vector<float, 4> words[K / 4];

    __device__ Weights(const float* weights, int n) {
#pragma unroll
        for (int i = 0; i < K / 4; ++i) words[i] = load_vector<float, 4>(weights + n * K + 4 * i);
    }
    __device__ float operator[](int k) const { return words[k / 4].at[k % 4]; }
};

template <typename Cell, typename T>
__global__ void __launch_bounds__(kMostThreads) forward(MultilinearParams p, Plan plan) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    extern __shared__ __align__(128) char memory[];
    A* weights = reinterpret_cast<A*>(memory + plan.feats.bytes);
    __shared__ Arrivals arrivals;
    arrivals.prepare();
    const Own own(p, plan, blockIdx.x);
    const T* from =
        static_cast<const T*>(p.feats) + own.n * p.feats_stride[0] + own.f * p.feats_stride[2];
    const auto feats = fetch<K>(memory, from, plan.feats, own.count, own.width, &arrivals);
    fill_weights<Cell>(weights, p, own);
    arrivals.wait();
    T* out = static_cast<T*>(p.out) + own.n * p.F + own.f;
    const unsigned step = plan.feats.step[1], along = plan.feats.step[2];
    each_element(own.count, own.width, [&](int i, int n, int f) {
        const Weights<K> weight(weights, n);
        A acc = 0;
        if (feats.even()) {
            const int at = feats.row(n, 0) + f * along;
#pragma unroll
            for (int k = 0; k < K; ++k)
                acc += weight[k] * value_of(*element<T>(memory, at + k * step), p.dtype);
        } else {
#pragma unroll
            for (int k = 0; k < K; ++k)
                acc +=
                    weight[k] * value_of(*element<T>(memory, feats.row(n, k) + f * along), p.dtype);
        }
        out[i] = stored<T>(acc, p.dtype);
    });
}

/// The same for rows that are long: threads keep to a point, whose weights are in registers then.
template <typename Cell, typename T>
__global__ void __launch_bounds__(kMostThreads) forward_by_point(MultilinearParams p, Plan plan) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    extern __shared__ __align__(128) char memory[];
    A* weights = reinterpret_cast<A*>(memory + plan.feats.bytes);
    __shared__ Arrivals arrivals;
    arrivals.prepare();
    const Own own(p, plan, blockIdx.x);
    const T* from =
        static_cast<const T*>(p.feats) + own.n * p.feats_stride[0] + own.f * p.feats_stride[2];
    const auto feats = fetch<K>(memory, from, plan.feats, own.count, own.width, &arrivals);
    fill_weights<Cell>(weights, p, own);
    const int lanes = 1 << plan.log_lanes, lane = threadIdx.x & (lanes - 1);
    const unsigned along = plan.feats.step[2];
    T* out = static_cast<T*>(p.out) + own.n * p.F + own.f;
    arrivals.wait();
    for (int n = threadIdx.x >> plan.log_lanes; n < own.count; n += blockDim.x >> plan.log_lanes) {
        const auto rows = feats.point(n);
        const Weights<K> weight(weights, n);
        int row[K];
#pragma unroll
        for (int k = 0; k < K; ++k) row[k] = rows.row(k);
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

/// The gradient to feats in the `block`-th tile.
template <typename Cell, typename T>
__device__ inline void gradients(const MultilinearParams& p, const Plan& plan, unsigned block,
                                 char* memory) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    char* grads = memory + plan.bytes;
    A* weights = reinterpret_cast<A*>(grads + plan.grad_out.bytes);
    const Own own(p, plan, block);
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
    const auto put = [&](auto neighbours) {
        constexpr int E = neighbours;
        each_element(own.count, own.width / E, [&](int, int n, int i) {
            const int f = i * E;
            A value[E];
#pragma unroll
            for (int e = 0; e < E; ++e) {
                const T* g =
                    here ? element<T>(grads, grad_out.row(n, 0) + (f + e) * plan.grad_out.step[2])
                         : from + n * p.grad_out_stride[0] + (f + e) * p.grad_out_stride[1];
                value[e] = value_of(*g, p.dtype);
            }
            const int at = (n * K * own.width + f) * int(sizeof(T));
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int row =
                    whole ? at + k * own.width * int(sizeof(T)) : rows.row(k) + f * int(sizeof(T));
                Vector<T, E> x;
#pragma unroll
                for (int e = 0; e < E; ++e)
                    x.at[e] = stored<T>(weights[n * K + k] * value[e], p.dtype);
                *element<Vector<T, E>>(memory, row) = x;
            }
        });
    };
    // Pairs, where every row begins with one.
    if (whole && p.F % 2 == 0 && sizeof(T) < 8)
        put(std::integral_constant<int, sizeof(T) < 8 ? 2 : 1>());
    else
        put(std::integral_constant<int, 1>());
    if (whole) return store_run(to, element<T>(memory, 0), own.count * K * own.width);
    __syncthreads();
    store_rows<K>(to, memory, rows, p.F, own.width);
}

template <typename Cell, typename T>
__global__ void __launch_bounds__(kMostThreads) backward(MultilinearParams p, Plan plan) {
    extern __shared__ __align__(128) char memory[];
    gradients<Cell, T>(p, plan, blockIdx.x, memory);
}

/// Starts a kernel of tiles, with so much shared memory.
template <typename Kernel, typename... Args>
inline const char* start(Kernel kernel, int64_t blocks, int threads, int memory,
                         cudaStream_t stream, const Args&... args) {
    if (blocks > 0x7fffffff) return "more points than one CUDA grid can hold";
    if (memory > 47 * 1024)  // beside what the kernel has of its own, up to 48 need no leave
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    kernel<<<unsigned(blocks), threads, memory, stream>>>(args...);
    return launch_error();
}

/// Of a tile of a forward or of the gradient to feats: the shared memory that it takes.
template <typename Cell, typename T>
inline int memory_of(const Plan& plan) {
    return plan.feats.bytes + plan.grad_out.bytes + plan.bytes +
           plan.points * (1 << Cell::D) * int(sizeof(Acc<T>));
}

/// Forward, or the gradient to feats alone.
template <typename Cell, typename T>
inline const char* launch(const MultilinearParams& p, const Tiling& tiling, cudaStream_t stream) {
    const Plan& plan = tiling.plan;
    const int64_t blocks = ceil_div(p.N, plan.points) * plan.chunks;
    const int memory = memory_of<Cell, T>(plan);
    if constexpr (sizeof(T) < 8)
        if (p.out)
            return start(plan.log_lanes ? forward_by_point<Cell, T> : forward<Cell, T>, blocks,
                         tiling.threads, memory, stream, p, plan);
    return start(backward<Cell, Stored<T>>, blocks, tiling.threads, memory, stream, p, plan);
}

}  // namespace tiles
