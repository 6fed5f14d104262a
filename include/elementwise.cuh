// The CUDA kernels of elementwise operators; see elementwise.h. Traffic decides. Inputs that are
// one run in memory like the outputs are moved as 16-byte words, wherever they begin. Of any others
// a thread gathers one such word of the outputs: single elements that neighbouring threads read
// together cost less than words shifted and joined where rows end. Transposed matrices go by tiles.
#pragma once
#include "dims.h"
#include "elementwise.h"
#include "short.cuh"
#include "vector.cuh"

constexpr int kThreads = 256;
constexpr int64_t kSmall = 1 << 17;   // elements of 4 bytes
constexpr int64_t kRepeats = 8;       // vectors to a thread where all are alike
constexpr int kMostTurned = 4;        // inputs that tiles are worth their registers for
constexpr int64_t kLeastTurned = 16;  // rows and columns

namespace elementwise {

/// What the kernels need of ElementwiseParams, for a function of N inputs and M outputs.
template <int N, int M>
struct Flat {
    const void* in[N];
    void* out[M];
    int64_t numel;

    explicit Flat(const ElementwiseParams& p) : numel(p.numel) {
        for (int n = 0; n < N; ++n) in[n] = p.in[n];
        for (int m = 0; m < M; ++m) out[m] = p.out[m];
    }
};
/// Division of numbers below 2^31 by one that is known before the launch.
struct Divisor {
    unsigned by, factor, shift;

    Divisor() = default;
    explicit Divisor(int64_t divisor) : by(unsigned(divisor)), shift(0) {
        while (uint64_t(1) << shift < by) ++shift;
        factor = unsigned(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - by)) / by + 1);
    }
    __device__ unsigned quotient(unsigned n) const { return (__umulhi(n, factor) + n) >> shift; }
};

/// Outputs that are one run in memory, and inputs of the same shape with any strides.
template <int N, int M>
struct Strided : Flat<N, M> {
    int dims;
    bool small;  // all indices are below 2^31
    DType dtype;
    int64_t size[kMaxDims], in_stride[N][kMaxDims];
    Divisor divisor[kMaxDims];
    double inverse[kMaxDims];

    explicit Strided(const ElementwiseParams& p) : Flat<N, M>(p), dims(p.dims), dtype(p.dtype) {
        small = p.numel < int64_t(1) << 31;
        for (int d = 0; d < dims; ++d) {
            size[d] = p.size[d];
            if (small) divisor[d] = Divisor(p.size[d]);
            inverse[d] = 1 / double(p.size[d]);
            for (int n = 0; n < N; ++n) in_stride[n][d] = p.in_stride[n][d];
        }
    }
    /// i / size[d]. What is not small by a product that is one off at most: the division of 64-bit
    /// integers would take the registers of a whole kernel.
    __device__ int64_t quotient(int64_t i, int d) const {
        if (small) return divisor[d].quotient(unsigned(i));
        const int64_t near = int64_t(double(i) * inverse[d]), left = i - near * size[d];
        return near + (left >= size[d]) - (left < 0);
    }
    /// Where index i of dimensions 0 to d, counted as one, lies in each input.
    __device__ void place(int64_t i, int d, int64_t (&at)[N]) const {
#pragma unroll
        for (int n = 0; n < N; ++n) at[n] = 0;
#pragma unroll 1
        for (; d > 0; --d) {
            const int64_t outer = quotient(i, d), index = i - outer * size[d];
#pragma unroll
            for (int n = 0; n < N; ++n) at[n] += index * in_stride[n][d];
            i = outer;
        }
#pragma unroll
        for (int n = 0; n < N; ++n) at[n] += i * in_stride[n][0];
    }
};

template <typename Function, typename A, size_t... I>
__device__ auto call(const A (&x)[sizeof...(I)], std::index_sequence<I...>) {
    return Function()(x[I]...);
}
template <typename A>
__device__ Several<A, 1> several(A x) {
    return {x};
}
template <typename A, int Count>
__device__ Several<A, Count> several(Several<A, Count> x) {
    return x;
}

/// `kWords` vectors to a thread, the first `whole` of all, and after them the elements that fill no
/// vector. `kAligned`: vectors of the inputs begin on words.
template <typename Function, typename T, int N, int M, bool kAligned>
__global__ void __launch_bounds__(kThreads) flat_kernel(Flat<N, M> p, int64_t whole) {
    constexpr auto all = std::make_index_sequence<N>();
    constexpr int V = 16 / sizeof(T), kWords = kAligned || N > 2 ? 1 : 2;
    const int64_t first = int64_t(blockIdx.x) * (kThreads * kWords) + threadIdx.x;
    Acc<T> x[N];
    Vector<T, V> in[kWords][N];
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (const int64_t i = first + w * kThreads; i < whole) {
                const T* from = static_cast<const T*>(p.in[n]) + i * V;
                in[w][n] = kAligned ? load_vector<T, V>(from) : load_anywhere(from);
            }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const int64_t i = first + w * kThreads;
        if (i < whole) {
            Vector<T, V> out[M];
#pragma unroll
            for (int j = 0; j < V; ++j) {
#pragma unroll
                for (int n = 0; n < N; ++n) x[n] = load(in[w][n].at[j]);
                const auto y = several(call<Function>(x, all));
#pragma unroll
                for (int m = 0; m < M; ++m) out[m].at[j] = store<T>(y.at[m]);
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (M == 1 || p.out[m]) store_vector(static_cast<T*>(p.out[m]) + i * V, out[m]);
        } else if (const int64_t j = whole * V + i - whole; j < p.numel) {
#pragma unroll
            for (int n = 0; n < N; ++n) x[n] = load(static_cast<const T*>(p.in[n])[j]);
            const auto y = several(call<Function>(x, all));
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (M == 1 || p.out[m]) static_cast<T*>(p.out[m])[j] = store<T>(y.at[m]);
        }
    }
}

/// A vector of the outputs to a thread, its elements gathered along the rows of the inputs. Where
/// results come again every `again` elements they are computed once and stored as often. `kNear`:
/// two dimensions at most and indices below 2^31, in as few registers as six blocks to a
/// multiprocessor have: of 16-bit types a tenth faster.
template <typename Function, typename T, int N, int M, bool kNear>
__global__ void __launch_bounds__(kThreads, kNear&& N <= 2 ? 6 : 1)
    gather_kernel(const __grid_constant__ Strided<N, M> p, int64_t again) {
    constexpr int V = N > 4 && sizeof(T) == 2 ? 4 : 16 / sizeof(T);  // of many inputs, registers
    using Index = std::conditional_t<kNear, unsigned, int64_t>;
    const int inner = p.dims - 1;
    Index i = (Index(blockIdx.x) * kThreads + threadIdx.x) * V;
    const Index numel = Index(p.numel), length = Index(p.size[inner]);
    if (i >= numel) return;
    Index row = 0;
    if constexpr (kNear)
        row = inner ? p.divisor[inner].quotient(i) : 0;
    else
        row = inner ? p.quotient(i, inner) : 0;
    const Index column = i - row * length;
    // Counts of no more than a vector.
    const int count = int(min(numel - i, Index(V))), most = int(min(length, Index(V)));
    int left = int(min(length - column, Index(V)));
    const T* from[N];
    int64_t jump[N];  // behind a row to the next one
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int64_t step = p.in_stride[n][inner], pitch = inner ? p.in_stride[n][inner - 1] : 0;
        from[n] = static_cast<const T*>(p.in[n]) + row * pitch + column * step;
        jump[n] = pitch - length * step;
    }
    if (!kNear && inner > 1) {
        int64_t at[N], next[N];
        p.place(row, inner - 1, at);
        // Maybe in the next plane: a vector meets one end of a row at most.
        if (left < count) p.place(row + 1, inner - 1, next);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int64_t step = p.in_stride[n][inner];
            from[n] = static_cast<const T*>(p.in[n]) + at[n] + column * step;
            if (left < count) jump[n] = next[n] - at[n] - length * step;
        }
    }
    T in[V][N];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        if (j < count) {
#pragma unroll
            for (int n = 0; n < N; ++n) in[j][n] = *from[n];
        }
        const bool end = --left == 0;  // no branch: it would part the loads
        if (end) left = most;
#pragma unroll
        for (int n = 0; n < N; ++n) from[n] += p.in_stride[n][inner] + (end ? jump[n] : 0);
    }
    Acc<T> x[N];
    Vector<T, V> out[M];
#pragma unroll
    for (int j = 0; j < V; ++j) {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = value_of(in[j][n], p.dtype);
        const auto y = several(call<Function>(x, std::make_index_sequence<N>()));
#pragma unroll
        for (int m = 0; m < M; ++m) out[m].at[j] = stored<T>(y.at[m], p.dtype);
    }
#pragma unroll 1
    for (int64_t k = i; k < p.numel; k += again)
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (M > 1 && !p.out[m]) continue;
            T* to = static_cast<T*>(p.out[m]) + k;
            if (k + V <= p.numel) {
                store_vector(to, out[m]);
            } else {
#pragma unroll
                for (int j = 0; j < V; ++j)
                    if (k + j < p.numel) to[j] = out[m].at[j];
            }
        }
}

/// Element by element, up to `each` of them to a thread: for outputs that begin anywhere, rows of
/// less than a vector in planes, and what is small.
template <typename Function, typename T, int N, int M>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ Strided<N, M> p, int each) {
    constexpr int kEach = N > 2 ? 1 : 4;
    const int64_t first = int64_t(blockIdx.x) * (kThreads * each) + threadIdx.x;
    T in[kEach][N];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int64_t i = first + e * kThreads;
        int64_t at[N];
        if (e < each && i < p.numel) {
            p.place(i, p.dims - 1, at);
#pragma unroll
            for (int n = 0; n < N; ++n) in[e][n] = static_cast<const T*>(p.in[n])[at[n]];
        }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int64_t i = first + e * kThreads;
        if (e >= each || i >= p.numel) return;
        Acc<T> x[N];
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = value_of(in[e][n], p.dtype);
        const auto y = several(call<Function>(x, std::make_index_sequence<N>()));
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (M == 1 || p.out[m]) static_cast<T*>(p.out[m])[i] = stored<T>(y.at[m], p.dtype);
    }
}

/// True for an input whose neighbours in memory are neighbours along the outer of two dimensions.
HD inline bool is_turned(int64_t pitch, int64_t step) { return pitch > 0 && step > pitch; }

template <typename T>
constexpr int kTile = sizeof(T) == 2 ? 64 : 32;  // elements, at least one sector each way

/// A square of the last two dimensions to a block. Inputs whose neighbours in memory are neighbours
/// along the outer one are read along it and turned in shared memory.
template <typename Function, typename T, int N, int M>
__global__ void __launch_bounds__(kThreads)
    tile_kernel(const __grid_constant__ Strided<N, M> p, unsigned across, unsigned tiles) {
    constexpr int kSide = kTile<T>, kRows = kThreads / kSide, kEach = kSide / kRows;
    __shared__ T turned[kSide][kSide + 4 / sizeof(T) + (sizeof(T) == 8)];
    const int inner = p.dims - 1, lane = threadIdx.x % kSide, first = threadIdx.x / kSide;
    const unsigned plane = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int64_t rows = p.size[inner - 1] - int64_t(tile / across) * kSide;
    const int64_t columns = p.size[inner] - int64_t(tile % across) * kSide;
    int64_t at[N];
    if (inner > 1) p.place(plane, inner - 2, at);
    // How many of a thread's elements there are where its lane lies along one side.
    const auto count = [&](int64_t along, int64_t other) {
        return lane < along ? int((min(other, int64_t(kSide)) - first + kRows - 1) / kRows) : 0;
    };
    T in[kEach][N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int64_t pitch = p.in_stride[n][inner - 1], step = p.in_stride[n][inner];
        const bool turn = is_turned(pitch, step);
        const int64_t ahead = (turn ? step : pitch) * kRows;
        const int most = turn ? count(rows, columns) : count(columns, rows);
        const T* from = static_cast<const T*>(p.in[n]) + (inner > 1 ? at[n] : 0) +
                        (p.size[inner - 1] - rows + (turn ? lane : first)) * pitch +
                        (p.size[inner] - columns + (turn ? first : lane)) * step;
#pragma unroll
        for (int k = 0; k < kEach; ++k, from += ahead)
            if (k < most) in[k][n] = *from;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (!is_turned(p.in_stride[n][inner - 1], p.in_stride[n][inner])) continue;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kEach; ++k) turned[k * kRows + first][lane] = in[k][n];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kEach; ++k) in[k][n] = turned[lane][k * kRows + first];
    }
    const int most = count(columns, rows);
    const int64_t begin =
        (plane * p.size[inner - 1] + p.size[inner - 1] - rows + first) * p.size[inner] +
        p.size[inner] - columns + lane;
    const int64_t ahead = p.size[inner] * kRows;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        if (k >= most) continue;
        Acc<T> x[N];
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = value_of(in[k][n], p.dtype);
        const auto y = several(call<Function>(x, std::make_index_sequence<N>()));
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (M == 1 || p.out[m])
                static_cast<T*>(p.out[m])[begin + k * ahead] = stored<T>(y.at[m], p.dtype);
    }
}

/// The same with dimensions in the order in which the outputs have them in memory, which is dense.
inline ElementwiseParams in_memory_order(const ElementwiseParams& p, int tensors) {
    int order[kMaxDims];
    for (int d = 0; d < p.dims; ++d) {
        int place = d;
        for (; place > 0 && p.out_stride[0][order[place - 1]] < p.out_stride[0][d]; --place)
            order[place] = order[place - 1];
        order[place] = d;
    }
    ElementwiseParams sorted = p;
    int64_t size[kMaxDims], stride[kMaxInputs + 1][kMaxDims];
    const int64_t* strides[kMaxInputs + 1];
    int64_t* merged[kMaxInputs + 1];
    for (int i = 0; i <= tensors; ++i) {
        strides[i] = stride[i];
        merged[i] = i < tensors ? sorted.in_stride[i] : sorted.out_stride[0];
        for (int d = 0; d < p.dims; ++d)
            stride[i][d] = (i < tensors ? p.in_stride[i] : p.out_stride[0])[order[d]];
    }
    for (int d = 0; d < p.dims; ++d) size[d] = p.size[order[d]];
    sorted.dims = merge_dims(p.dims, size, strides, tensors + 1, kMaxDims, sorted.size, merged);
    return sorted;
}

/// True where elements of an input lie so far apart that a sector holds two at most: there what
/// neighbouring threads read together counts, and not how much one of them reads.
inline bool sparse(const ElementwiseParams& p, int inputs, int64_t bytes) {
    const int inner = p.dims - 1;
    for (int n = 0; n < inputs; ++n) {
        const int64_t step = p.in_stride[n][inner];
        int64_t each = step * bytes;  // from one to the next, rows taken together
        if (inner > 0 && p.in_stride[n][inner - 1] >= step * p.size[inner])
            each = p.in_stride[n][inner - 1] * bytes / p.size[inner];
        else if (inner > 0)
            continue;
        if (each >= 16 && each >= 4 * bytes) return true;
    }
    return false;
}

/// The kernel for a type of elements, out of those that `of` has for each.
template <typename Kernels>
auto kernel_of(DType dtype, const Kernels& of) {
    switch (dtype) {
        case DType::kFloat: return of(float{});
        case DType::kDouble: return of(double{});
        default: return of(Short{});
    }
}

/// Starts a kernel. Kernels for all types take the same arguments: this is compiled once for them.
template <typename... Args>
const char* start(void (*kernel)(Args...), int64_t blocks, cudaStream_t queue,
                  const Args&... args) {
    kernel<<<unsigned(blocks), kThreads, 0, queue>>>(args...);
    return launch_error();
}

inline int64_t greatest_common_divisor(int64_t a, int64_t b) {
    return b == 0 ? a : greatest_common_divisor(b, a % b);
}

}  // namespace elementwise

template <typename Function>
inline const char* elementwise_cuda(const ElementwiseParams& given, void* stream) {
    using namespace elementwise;
    constexpr int N = inputs<Function>, M = outputs<Function>;
    const auto queue = static_cast<cudaStream_t>(stream);
    const ElementwiseParams p = given.dims == 1 ? given : in_memory_order(given, N);
    bool flat = p.dims == 1, aligned = true, placed = true, turned = false, repeats = p.dims == 2;
    for (int n = 0; n < N; ++n) {
        const int64_t step = p.in_stride[n][p.dims - 1];
        const int64_t pitch = p.dims > 1 ? p.in_stride[n][p.dims - 2] : step;
        flat = flat && step == 1, turned = turned || is_turned(pitch, step);
        repeats = repeats && pitch == 0;
        aligned = aligned && reinterpret_cast<uintptr_t>(p.in[n]) % 16 == 0;
    }
    for (int m = 0; m < M; ++m) placed = placed && reinterpret_cast<uintptr_t>(p.out[m]) % 16 == 0;
    const int size = p.dtype == DType::kDouble ? 8 : p.dtype == DType::kFloat ? 4 : 2;
    // What is small needs many threads more than whole words.
    const bool small = p.numel < (size == 2 ? 2 : 1) * kSmall;
    if (flat && placed && (aligned || !small)) {
        const int64_t V = 16 / size, whole = p.numel / V, all = whole + p.numel % V;
        void (*kernel)(Flat<N, M>, int64_t) = nullptr;
        dispatch(p.dtype, [&](auto element) {
            using T = decltype(element);
            kernel = aligned ? flat_kernel<Function, T, N, M, true>
                             : flat_kernel<Function, T, N, M, false>;
        });
        const int words = aligned || N > 2 ? 1 : 2;
        return start(kernel, ceil_div(all, kThreads * words), queue, Flat<N, M>(p), whole);
    }
    const Strided<N, M> strided(p);
    const int64_t V = N > 4 && size == 2 ? 4 : 16 / size, length = p.size[p.dims - 1];
    if (!placed || flat || (p.dims > 2 && length < V) || sparse(p, N, size)) {
        const int each = small || N > 2 ? 1 : 4;
        const auto kernel = kernel_of(p.dtype, [](auto element) {
            return &strided_kernel<Function, decltype(element), N, M>;
        });
        return start(kernel, ceil_div(p.numel, kThreads * each), queue, strided, each);
    }
    if constexpr (N <= kMostTurned)
        if (const int64_t rows = p.size[p.dims - 2];
            turned && !repeats && !small && length >= kLeastTurned && rows >= kLeastTurned) {
            const int side = size == 2 ? kTile<Short> : kTile<float>;
            const int64_t across = ceil_div(length, side);
            const int64_t tiles = across * ceil_div(rows, side), planes = p.numel / (length * rows);
            if (tiles * planes < int64_t(1) << 31) {
                const auto kernel = kernel_of(p.dtype, [](auto element) {
                    return &tile_kernel<Function, decltype(element), N, M>;
                });
                return start(kernel, tiles * planes, queue, strided, unsigned(across),
                             unsigned(tiles));
            }
        }
    int64_t blocks = ceil_div(p.numel, kThreads * V), again = p.numel;
    if (repeats) {
        // So many blocks that rows begin anew behind them.
        const int64_t period = length / greatest_common_divisor(length, kThreads * V);
        const int64_t fewer = ceil_div(ceil_div(blocks, kRepeats), period) * period;
        if (fewer < blocks) blocks = fewer, again = blocks * kThreads * V;
    }
    const bool near = strided.small && p.dims <= 2;
    const auto kernel = kernel_of(p.dtype, [&](auto element) {
        using T = decltype(element);
        return near ? gather_kernel<Function, T, N, M, true>
                    : gather_kernel<Function, T, N, M, false>;
    });
    return start(kernel, blocks, queue, strided, again);
}
