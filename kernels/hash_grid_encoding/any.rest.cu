// hash_grid_encoding on the GPU for any number of features; see launch.cu.
// A block's threads find the rows and weights of kThreads pairs of a point and a level, and leave
// them in shared memory. A row is then read by up to 8 neighbouring threads, so that each access
// takes whole sectors whatever F, in words of 4 features where F and the alignment allow.
#include "words.cuh"

namespace {

/// The pairs of a block: of neighbouring points and the levels of one group, which begins at
/// `first`.
struct Pairs {
    int first, levels, count;
    int64_t begin;

    __device__ Pairs(const HashGridParams& p, int first, int group)
        : first(first), levels(min(group, int(p.L) - first)) {
        const int points = kThreads / group;
        begin = int64_t(blockIdx.x) * points;
        count = int(min(int64_t(points), p.N - begin)) * levels;
    }
    __device__ int64_t point(int pair) const { return begin + pair / levels; }
    __device__ int level(int pair) const { return pair % levels; }
};

constexpr int kCorners = 8;  // of which in two dimensions the first 4

/// Corners of each pair.
template <typename A>
struct Shared {
    uint32_t row[kCorners][kThreads];
    A weight[kCorners][kThreads];
};

/// Those of a point in one level; in two dimensions of a cube's face, where the last place is 0.
template <typename A>
__device__ Corners<3, A> corners_of(const HashGridParams& p, int64_t n, const HashLevel& level) {
    if (p.D == 3) return Point<3, A>(p, n).in(level);
    const Corners<2, A> c = Point<2, A>(p, n).in(level);
    return {{c.cell[0], c.cell[1], 0},
            {c.place[0], c.place[1], 0},
            {c.along[0], c.along[1], 0},
            c.scale,
            c.directed};
}

/// This thread's pair, whose rows and, where `weigh` is set, weights it leaves to all.
template <typename A>
__device__ Corners<3, A> place(const HashGridParams& p, const Pairs& pairs, bool weigh,
                               Shared<A>& shared) {
    const int own = threadIdx.x < pairs.count ? threadIdx.x : 0;
    const HashLevel& level = p.level[pairs.first + pairs.level(own)];
    const Corners<3, A> corners = corners_of<A>(p, pairs.point(own), level);
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
        shared.row[k][threadIdx.x] = corners.row(level, k);
        if (weigh) shared.weight[k][threadIdx.x] = corners.weight(k);
    }
    __syncthreads();
    return corners;
}

/// How many neighbouring threads share a row of so many words.
__device__ inline int sharing(int words) { return words > 4 ? 8 : words > 2 ? 4 : words; }

/// Features to a word, where F and the alignment allow; else one.
template <typename T>
constexpr int kWidth = sizeof(T) == 8 ? 2 : 4;

/// Calls `body` with V, a constant.
template <typename T, typename Body>
__device__ void by_width(bool words, const Body& body) {
    if (words)
        body(std::integral_constant<int, kWidth<T>>{});
    else
        body(std::integral_constant<int, 1>{});
}

/// Calls `body` with each pair and each V of its features that are this thread's.
template <int V, typename Body>
__device__ void each_word(const HashGridParams& p, const Pairs& pairs, const Body& body) {
    const int threads = sharing((p.F + V - 1) / V);
    for (int pair = threadIdx.x / threads; pair < pairs.count; pair += kThreads / threads)
        for (int f = threadIdx.x % threads * V; f < p.F; f += threads * V) body(pair, f);
}

template <int V, typename T>
__device__ void load_table(const HashGridParams& p, int level, uint32_t row, int f,
                           Acc<T> (&to)[V]) {
    const int64_t* step = p.table_stride;
    load_features(static_cast<const T*>(p.table) + level * step[0] + row * step[1] + f * step[2], 1,
                  true, p.dtype, to);
}
template <int V, typename T>
__device__ void load_grad_out(const HashGridParams& p, int64_t n, int level, int f,
                              Acc<T> (&to)[V]) {
    const int64_t* step = p.grad_out_stride;
    load_features(
        static_cast<const T*>(p.grad_out) + n * step[0] + (int64_t(level) * p.F + f) * step[1], 1,
        true, p.dtype, to);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    encode_any_kernel(const __grid_constant__ HashGridParams p, int group, bool words) {
    using A = Acc<T>;
    __shared__ Shared<A> shared;
    const Pairs pairs(p, blockIdx.y * group, group);
    place(p, pairs, true, shared);
    by_width<T>(words, [&](auto V) {
        each_word<V()>(p, pairs, [&](int pair, int f) {
            const int level = pairs.first + pairs.level(pair);
            A sum[V()] = {};
#pragma unroll
            for (int k = 0; k < kCorners; ++k) {
                if (k == 4 && p.D == 2) break;
                A feats[V()];
                load_table<V(), T>(p, level, shared.row[k][pair], f, feats);
#pragma unroll
                for (int v = 0; v < V(); ++v) sum[v] += shared.weight[k][pair] * feats[v];
            }
            Vector<T, V()> word;
#pragma unroll
            for (int v = 0; v < V(); ++v) word.at[v] = stored<T>(sum[v], p.dtype);
            store_vector(static_cast<T*>(p.out) + (pairs.point(pair) * p.L + level) * p.F + f,
                         word);
        });
    });
}

/// Sums over one group of levels of the gradients to its points.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    points_any_kernel(const __grid_constant__ HashGridParams p, int group, bool words) {
    using A = Acc<T>;
    __shared__ Shared<A> shared;  // for weights the dot products of grad_out and features
    const Pairs pairs(p, blockIdx.y * group, group);
    const Corners<3, A> corners = place(p, pairs, false, shared);
    by_width<T>(words, [&](auto V) {
        const int threads = sharing((p.F + V() - 1) / V());
        for (int from = 0; from < pairs.count; from += kThreads / threads) {
            const int pair = from + threadIdx.x / threads;
            A dot[kCorners] = {};
            for (int f = threadIdx.x % threads * V(); f < p.F && pair < pairs.count;
                 f += threads * V()) {
                const int level = pairs.first + pairs.level(pair);
                A grad[V()], feats[V()];
                load_grad_out<V(), T>(p, pairs.point(pair), level, f, grad);
#pragma unroll
                for (int k = 0; k < kCorners; ++k) {
                    if (k == 4 && p.D == 2) break;
                    load_table<V(), T>(p, level, shared.row[k][pair], f, feats);
#pragma unroll
                    for (int v = 0; v < V(); ++v) dot[k] += grad[v] * feats[v];
                }
            }
#pragma unroll
            for (int k = 0; k < kCorners; ++k) {
                for (int mask = threads / 2; mask > 0; mask /= 2)
                    dot[k] += __shfl_xor_sync(~0u, dot[k], mask);
                if (threadIdx.x % threads == 0 && pair < pairs.count)
                    shared.weight[k][pair] = dot[k];
            }
        }
    });
    __syncthreads();
    A slopes[3] = {};
#pragma unroll
    for (int k = 0; k < kCorners; ++k)
#pragma unroll
        for (int d = 0; d < 3; ++d)
            slopes[d] += corners.slope(k, d) * shared.weight[k][threadIdx.x];
    for (int d = 0; d < 3; ++d) shared.weight[d][threadIdx.x] = slopes[d];
    __syncthreads();
    if (threadIdx.x >= pairs.count || pairs.level(threadIdx.x) > 0) return;
    for (int d = 0; d < p.D; ++d) {
        A sum = 0;
        for (int i = 0; i < pairs.levels; ++i) sum += shared.weight[d][threadIdx.x + i];
        static_cast<A*>(p.scratch)[(blockIdx.y * p.N + pairs.point(threadIdx.x)) * p.D + d] = sum;
    }
}

/// The gradient of levels [first, first + group), added to `sums` (levels, T, F) or `memory`.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    table_any_kernel(const __grid_constant__ HashGridParams p, int first, int group, bool words,
                     Acc<T>* sums, unsigned long long* memory) {
    using A = Acc<T>;
    __shared__ Shared<A> shared;
    const Pairs pairs(p, first, group);
    place(p, pairs, true, shared);
    const auto fixed = [&] { return FixedPoint(memory, pairs.levels * p.T * p.F, p.N << p.D); };
    by_width<T>(words, [&](auto V) {
        each_word<V()>(p, pairs, [&](int pair, int f) {
            const int i = pairs.level(pair);
            A grad[V()], share[V()];
            load_grad_out<V(), T>(p, pairs.point(pair), first + i, f, grad);
#pragma unroll
            for (int k = 0; k < kCorners; ++k) {
                if (k == 4 && p.D == 2) break;
#pragma unroll
                for (int v = 0; v < V(); ++v) share[v] = shared.weight[k][pair] * grad[v];
                const int64_t at = (i * p.T + shared.row[k][pair]) * p.F + f;
                add_shares(p, sums, fixed, at, share);
            }
        });
    });
}

/// Whether what a kernel reads, table or grad_out or both, is words of kWidth features.
bool whole_words(const HashGridParams& p, bool table, bool grad_out) {
    const int V = p.dtype == DType::kDouble ? kWidth<double> : kWidth<float>;
    return p.F % V == 0 && (!table || whole_table(p, V)) && (!grad_out || whole_grad_out(p, V));
}

/// Calls `body` with an element.
template <typename Body>
void by_type(const HashGridParams& p, const Body& body) {
    if (p.dtype == DType::kDouble) return body(double{});
    if (p.dtype == DType::kFloat) return body(float{});
    body(Short{});
}

unsigned blocks_of(const HashGridParams& p, int group) {
    return unsigned(ceil_div(p.N, kThreads / group));
}

}  // namespace

const char* hash_grid_any_cuda(const HashGridParams* p, void* stream) {
    const int group = int(hash_grid_group(*p));
    const dim3 grid(blocks_of(*p, group), unsigned(ceil_div(p->L, group)));
    by_type(*p, [&](auto element) {
        encode_any_kernel<decltype(element)>
            <<<grid, kThreads, 0, cudaStream_t(stream)>>>(*p, group, whole_words(*p, true, false));
    });
    return launch_error();
}

const char* hash_grid_points_any_cuda(const HashGridParams* p, void* stream) {
    const int group = int(hash_grid_group(*p));
    const dim3 grid(blocks_of(*p, group), unsigned(ceil_div(p->L, group)));
    by_type(*p, [&](auto element) {
        points_any_kernel<decltype(element)>
            <<<grid, kThreads, 0, cudaStream_t(stream)>>>(*p, group, whole_words(*p, true, true));
        sum_groups<Acc<decltype(element)>>(*p, cudaStream_t(stream));
    });
    return launch_error();
}

void hash_grid_table_any_cuda(const HashGridParams* p, int first, int levels, void* sums,
                              unsigned long long* memory, void* stream) {
    by_type(*p, [&](auto element) {
        using T = decltype(element);
        table_any_kernel<T><<<blocks_of(*p, levels), kThreads, 0, cudaStream_t(stream)>>>(
            *p, first, levels, whole_words(*p, false, true), static_cast<Acc<T>*>(sums), memory);
    });
}
