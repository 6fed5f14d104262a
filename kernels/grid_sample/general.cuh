// grid_sample's CUDA kernels for what linear_forward.cuh and linear_backward.cuh do not take:
// bicubic images, deterministic, second derivatives, fields of more than 2^30 pixels. Bicubic
// volumes and second derivatives are in cubic.rest.cu.
//
// 32 threads take 32 / lanes neighbouring points; the lanes of a point take its channels in turn,
// V at a time. V > 1 needs neighbouring channels in memory (channels-last): a pixel's channels are
// then read in words of up to 16 bytes. With V = 1 any strides will do.
#pragma once
#include "adds.cuh"
#include "inner_cubic.cuh"
#include "job.cuh"
#include "short.cuh"

/// Blocks to an SM that a kernel has room for in spite of the calls that HD_ONCE makes; 0: any.
template <typename T, int V>
constexpr int kCubicBlocks = sizeof(T) < 8 && V == 1    ? 9
                             : sizeof(T) == 2 && V == 4 ? 8
                             : sizeof(T) == 2           ? 7
                                                        : 0;
template <typename T, int V, int D, int kTaps>
constexpr int kBackwardBlocks =
    sizeof(T) == 8 ? (kTaps == 2 ? 12 / D : 3) : (kTaps == 4 && sizeof(T) * V == 2 ? 4 : 0);

/// The taps of a point along its axes, x first.
template <typename A, int D, int kTaps, bool kSlope>
struct PointTaps {
    Taps<A, kTaps> axis[D];

    __device__ PointTaps(const GridSampleJob& job, const ThreadPoint& at) {
        const GridSampleParams& p = job.p;
        const int64_t from =
            at.b * p.grid_stride[0] + p.grid_points.at(job.packed ? at.i : job.first + at.i);
#pragma unroll
        for (int d = 0; d < D; ++d) {
            const A x = load_as<A>(p.grid_dtype, p.grid, from + d * p.grid_stride[1]);
            const Window in = p.window(2 - d);
            if (kTaps == 2 && p.interpolation == Interpolation::kNearest) {
                const auto one = Taps<A, 1>::template of<kSlope>(x, in, p.padding, p.align_corners);
                axis[d] = {{one.index[0], -1}, {A(1), A(0)}, {A(0), A(0)}};
            } else {
                axis[d] = Taps<A, kTaps>::template of<kSlope>(x, in, p.padding, p.align_corners);
            }
        }
    }
    /// Which of an axis' taps corner k has.
    __device__ static constexpr int tap(int k, int d) {
        return d == 0 ? k % kTaps : d == 1 ? k / kTaps % kTaps : k / (kTaps * kTaps);
    }
    __device__ bool valid(int k) const {
        bool all = true;
#pragma unroll
        for (int d = 0; d < D; ++d) all = all && axis[d].index[tap(k, d)] >= 0;
        return all;
    }
    /// Weight of corner k; what lies outside of the image has none, but what NaN gives a cubic.
    __device__ A weight(int k) const {
        A w = 1;
#pragma unroll
        for (int d = 0; d < D; ++d) w *= axis[d].weight[tap(k, d)];
        return kTaps == 4 || valid(k) ? w : A(0);
    }
    /// Its derivative by coordinate d.
    __device__ A slope(int k, int d) const {
        A w = axis[d].slope[tap(k, d)];
#pragma unroll
        for (int e = 0; e < D; ++e)
            if (e != d) w *= axis[e].weight[tap(k, e)];
        return kTaps == 4 || valid(k) ? w : A(0);
    }
    /// And by coordinates d and e, which differ.
    __device__ A twist(int k, int d, int e) const {
        A w = axis[d].slope[tap(k, d)] * axis[e].slope[tap(k, e)];
#pragma unroll
        for (int f = 0; f < D; ++f)
            if (f != d && f != e) w *= axis[f].weight[tap(k, f)];
        return valid(k) ? w : A(0);
    }
    /// Offset of corner k in elements.
    __device__ int64_t offset(int k, const int64_t* stride_zyx) const {
        int64_t at = 0;
#pragma unroll
        for (int d = 0; d < D; ++d) at += axis[d].index[tap(k, d)] * stride_zyx[2 - d];
        return at;
    }
};

/// Where a point's corners lie in one image of a tensor.
template <int K>
struct Corners {
    int64_t at[K];  // elements; -1 outside
    int64_t c_stride;

    template <typename Point>
    __device__ Corners(const Point& point, const int64_t (&stride)[5]) : c_stride(stride[1]) {
#pragma unroll
        for (int k = 0; k < K; ++k) at[k] = point.valid(k) ? point.offset(k, stride + 2) : -1;
    }
    __device__ bool valid(int k) const { return at[k] >= 0; }
    __device__ int64_t offset(int k, int64_t c) const { return at[k] + c * c_stride; }
};

/// Linear and nearest interpolation of fields whose offsets do not fit in 32 bits.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    wide_forward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    constexpr int K = 1 << D;
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    if (!at.inside) return;
    const PointTaps<A, D, 2, false> point(job, at);
    const Corners<K> corners(point, p.input_stride);
    const T* in = static_cast<const T*>(p.input) + at.b * p.input_stride[0];
    T* out = static_cast<T*>(p.out) + at.b * p.C * p.P + at.q;
    for (int64_t c = at.lane; c < p.C; c += at.lanes) {
        A sum = 0;
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (corners.valid(k))
                sum += point.weight(k) * value_of(in[corners.offset(k, c)], p.dtype);
        out[c * p.P] = stored<T>(sum, p.dtype);
    }
}

/// Element k of four, of which all stay in registers where k is known at run time alone.
template <typename A>
__device__ inline A pick(const A (&of)[4], int k) {
    return k < 2 ? (k == 0 ? of[0] : of[1]) : (k == 2 ? of[2] : of[3]);
}

/// Bicubic: rows of four, so that fewer offsets and weights are held, and planes one by one.
template <typename T, int V, int D>
__device__ inline void cubic_point(const GridSampleJob& job, const ThreadPoint& at, int share) {
    using A = Acc<T>;
    const GridSampleParams& p = job.p;
    if (!at.inside) return;
    if constexpr (D == 2 && V == 1 && sizeof(T) < 8)
        if (!job.general && inner_cubic<T>(job, at)) return;
    const PointTaps<A, D, 4, false> point(job, at);
    int64_t across[4], down[4];
    bool whole = true;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        across[k] = point.axis[0].index[k] * p.input_stride[4];
        down[k] = point.axis[1].index[k] * p.input_stride[3];
        whole = whole && point.axis[0].index[k] >= 0 && point.axis[1].index[k] >= 0;
    }
    const T* in = static_cast<const T*>(p.input) + at.b * p.input_stride[0];
    T* out = static_cast<T*>(p.out) + at.b * p.C * p.P + at.q;
    const int step = at.lanes * int(job.parts) * V, C = int(p.C);
    /// Adds a plane of channels c ... c + V - 1, none of whose pixels are where `skip`.
    const auto add_plane = [&](const T* plane, bool skip, A weight, A(&sum)[V]) {
#pragma unroll
        for (int y = 0; y < 4; ++y) {
            A line[V] = {};
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                Vector<T, V> value{};
                if (!skip &&
                    (whole || (point.axis[0].index[x] >= 0 && point.axis[1].index[y] >= 0)))
                    value = load_constant<T, V>(plane + down[y] + across[x]);
#pragma unroll
                for (int j = 0; j < V; ++j)
                    line[j] += point.axis[0].weight[x] * value_of(value.at[j], p.dtype);
            }
            const A share = D == 2 ? point.axis[1].weight[y] : weight * point.axis[1].weight[y];
#pragma unroll
            for (int j = 0; j < V; ++j) sum[j] += share * line[j];
        }
    };
#pragma unroll 1
    for (int c = (share * at.lanes + at.lane) * V; c < C; c += step) {
        const T* channel = in + c * p.input_stride[1];
        A sum[V] = {};
        if constexpr (D == 2) {
            add_plane(channel, false, 1, sum);
        } else {
#pragma unroll 1
            for (int z = 0; z < 4; ++z) {
                const int index = pick(point.axis[2].index, z);
                add_plane(channel + index * p.input_stride[2], index < 0,
                          pick(point.axis[2].weight, z), sum);
            }
        }
#pragma unroll
        for (int j = 0; j < V; ++j)
            if (V == 1 || c + j < C) out[int64_t(c + j) * p.P] = stored<T>(sum[j], p.dtype);
    }
}

template <typename T, int V, int D, bool kTurns>
__global__ void __launch_bounds__(kThreads, (D == 2 ? kCubicBlocks<T, V> - (kTurns && V == 8) : 0))
    cubic_forward(const __grid_constant__ GridSampleJob job) {
    if (!kTurns && idle(job)) return;
    each_block<kTurns>(job, [&](unsigned block, unsigned image, unsigned share) {
        cubic_point<T, V, D>(job, ThreadPoint(job, block, image), int(share));
    });
}

/// Sums over the lanes of a point and writes the gradient to its coordinates.
template <int D, typename A>
__device__ inline void store_grad_grid(const GridSampleJob& job, const ThreadPoint& at,
                                       A (&grad)[D]) {
#pragma unroll
    for (int d = 0; d < D; ++d)
        for (int m = 32 >> job.lanes_log2; m < 32; m *= 2)
            grad[d] += __shfl_xor_sync(~0u, grad[d], m);
    if (at.lane == 0 && at.inside)
#pragma unroll
        for (int d = 0; d < D; ++d)
            store_as(job.p.grid_dtype, job.p.grad_grid, (at.b * job.p.P + at.q) * D + d, grad[d]);
}

template <typename T, int V, int D, int kTaps>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<T, V, D, kTaps>)
    backward_kernel(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    constexpr int K = power(kTaps, D);
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    const bool inside = at.inside;
    A grad_grid[D] = {};
    if (inside) {
        const PointTaps<A, D, kTaps, true> point(job, at);
        const Corners<K> corners(point, p.input_stride), sums(point, p.grad_input_stride);
        A weight[K], dot[K] = {};
#pragma unroll
        for (int k = 0; k < K; ++k) weight[k] = point.weight(k);
        const T* in = static_cast<const T*>(p.input) + at.b * p.input_stride[0];
        const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                            p.grad_out_points.at(at.q);
        const int64_t sum_image = at.b * p.grad_input_stride[0];
        const int step = at.lanes * V, C = int(p.C);
        // All taps lie in the image, and are not mirrored or held at its border.
        bool by_rows = job.line == Line::kRow && point.axis[0].index[0] >= 0;
#pragma unroll
        for (int k = 1; k < kTaps; ++k)
            by_rows = by_rows && point.axis[0].index[k] == point.axis[0].index[0] + k;
        for (int c = at.lane * V; c < C; c += step) {
            A grad[V];
#pragma unroll
            for (int j = 0; j < V; ++j)
                grad[j] = V == 1 || c + j < C
                              ? A(value_of(grad_out[(c + j) * p.grad_out_stride[1]], p.dtype))
                              : A(0);
            if (p.grad_grid) {
                Vector<T, V> value[K];
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    value[k] = {};
                    if (corners.valid(k)) value[k] = load_vector<T, V>(in + corners.offset(k, c));
                }
#pragma unroll
                for (int k = 0; k < K; ++k)
#pragma unroll
                    for (int j = 0; j < V; ++j)
                        dot[k] += grad[j] * value_of(value[k].at[j], p.dtype);
            }
            if (p.grad_input) {
                if constexpr (kTaps == 4 && V == 1 && D == 2 && sizeof(T) < 8)
                    if (by_rows) {
#pragma unroll
                        for (int k = 0; k < K; k += 4) {
                            if (!sums.valid(k)) continue;
                            float x[4];
#pragma unroll
                            for (int j = 0; j < 4; ++j) x[j] = weight[k + j] * grad[0];
                            add_line(
                                job,
                                static_cast<float*>(p.grad_input) + sum_image + sums.offset(k, c),
                                x);
                        }
                        continue;
                    }
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    if (!sums.valid(k)) continue;
                    if constexpr (V > 1) {
                        float x[V];
#pragma unroll
                        for (int j = 0; j < V; ++j) x[j] = weight[k] * grad[j];
                        add_word<V>(job, sum_at(job, sum_image + sums.offset(k, c)), x);
                    } else {
                        add_at<T>(job, sum_image + sums.offset(k, c), weight[k] * grad[0]);
                    }
                }
            }
        }
        if (p.grad_grid) {
#pragma unroll
            for (int d = 0; d < D; ++d)
#pragma unroll
                for (int k = 0; k < K; ++k) grad_grid[d] += point.slope(k, d) * dot[k];
        }
    }
    if (p.grad_grid) store_grad_grid<D>(job, at, grad_grid);
}

/// Bicubic images of up to three channels side by side, V = 1: a thread to a point, whose four
/// pixels of a row are added to as one line.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    cubic_pixels(const __grid_constant__ GridSampleJob job) {
    constexpr int kTaps = 4, K = 16, D = 2, U = kPixelChannels;
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    float grad_grid[D] = {};
    if (at.inside) {
        const PointTaps<float, D, kTaps, true> point(job, at);
        const Corners<K> corners(point, p.input_stride), sums(point, p.grad_input_stride);
        const T* in = static_cast<const T*>(p.input) + at.b * p.input_stride[0];
        const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                            p.grad_out_points.at(at.q);
        float* const to = static_cast<float*>(p.grad_input) + at.b * p.grad_input_stride[0];
        const int C = int(p.C);
        bool by_rows = point.axis[0].index[0] >= 0;
#pragma unroll
        for (int k = 1; k < kTaps; ++k)
            by_rows = by_rows && point.axis[0].index[k] == point.axis[0].index[0] + k;
        float grad[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
            grad[u] = u < C ? value_of(grad_out[u * p.grad_out_stride[1]], p.dtype) : 0;
#pragma unroll
        for (int row = 0; row < K; row += kTaps) {
            float weight[kTaps];
#pragma unroll
            for (int j = 0; j < kTaps; ++j) weight[j] = point.weight(row + j);
            if (p.grad_grid)
#pragma unroll
                for (int j = 0; j < kTaps; ++j) {
                    float dot = 0;
#pragma unroll
                    for (int u = 0; u < U; ++u)
                        if (u < C && corners.valid(row + j))
                            dot += grad[u] * value_of(in[corners.offset(row + j, u)], p.dtype);
#pragma unroll
                    for (int d = 0; d < D; ++d) grad_grid[d] += point.slope(row + j, d) * dot;
                }
            if (by_rows) {
                if (!sums.valid(row)) continue;
                float x[kTaps * U];
#pragma unroll
                for (int j = 0; j < kTaps * U; ++j)  // U channels, or one less
                    x[j] = C == U                ? weight[j / U] * grad[j % U]
                           : j < kTaps * (U - 1) ? weight[j / (U - 1) % kTaps] * grad[j % (U - 1)]
                                                 : 0;
                add_line(job, to + sums.offset(row, 0), x, kTaps * C);
                continue;
            }
#pragma unroll
            for (int j = 0; j < kTaps; ++j) {
                float x[U];
#pragma unroll
                for (int u = 0; u < U; ++u) x[u] = weight[j] * grad[u];
                if (sums.valid(row + j)) add_line(job, to + sums.offset(row + j, 0), x, C);
            }
        }
    }
    if (p.grad_grid) store_grad_grid<D>(job, at, grad_grid);
}

/// Gradients of the backward. With w_k the weights, a = to_grad_input, b = to_grad_grid and
/// s_k = sum_d b_d dw_k/dx_d, what arrives meets sum_kc g_c (w_k a_kc + s_k in_kc).
template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    second_kernel(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    constexpr int K = power(2, D);
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    A to_grid[D] = {};
    if (at.inside) {
        const PointTaps<A, D, 2, true> point(job, at);
        const Corners<K> in_corners(point, p.input_stride);
        const Corners<K> to_corners(point, p.to_grad_input_stride);
        const Corners<K> sums(point, p.grad_input_stride);
        A along[D] = {}, slope[K] = {}, dot_in[K] = {}, dot_to[K] = {};
        if (p.to_grad_grid) {
            const int64_t from = at.b * p.to_grad_grid_stride[0] + p.to_grad_grid_points.at(at.q);
#pragma unroll
            for (int d = 0; d < D; ++d)
                along[d] =
                    load_as<A>(p.grid_dtype, p.to_grad_grid, from + d * p.to_grad_grid_stride[1]);
#pragma unroll
            for (int k = 0; k < K; ++k)
#pragma unroll
                for (int d = 0; d < D; ++d) slope[k] += along[d] * point.slope(k, d);
        }
        const T* in = static_cast<const T*>(p.input) + at.b * p.input_stride[0];
        const T* to = static_cast<const T*>(p.to_grad_input) + at.b * p.to_grad_input_stride[0];
        const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                            p.grad_out_points.at(at.q);
        T* out = static_cast<T*>(p.out) + at.b * p.C * p.P + at.q;
        for (int c = at.lane; c < p.C; c += at.lanes) {
            const A g = value_of(grad_out[c * p.grad_out_stride[1]], p.dtype);
            A to_g = 0;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                if (!in_corners.valid(k)) continue;
                if (p.to_grad_input) {
                    const A a = value_of(to[to_corners.offset(k, c)], p.dtype);
                    to_g += point.weight(k) * a, dot_to[k] += g * a;
                }
                if (p.to_grad_grid) {
                    const A x = value_of(in[in_corners.offset(k, c)], p.dtype);
                    to_g += slope[k] * x, dot_in[k] += g * x;
                    if (p.grad_input)
                        add_at<T>(job, at.b * p.grad_input_stride[0] + sums.offset(k, c),
                                  slope[k] * g);
                }
            }
            if (p.out) out[c * p.P] = stored<T>(to_g, p.dtype);
        }
#pragma unroll
        for (int d = 0; d < D; ++d)
#pragma unroll
            for (int k = 0; k < K; ++k) {
                to_grid[d] += point.slope(k, d) * dot_to[k];
#pragma unroll
                for (int e = 0; e < D; ++e)
                    if (e != d) to_grid[d] += along[e] * point.twist(k, d, e) * dot_in[k];
            }
    }
    if (p.grad_grid) store_grad_grid<D>(job, at, to_grid);
}
