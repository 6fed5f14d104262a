// Bicubic interpolation of volumes on the GPU, and second derivatives of all that is bicubic.
//
// A point has 64 taps, too many to hold: pixels are summed along x, then y, then z, each with the
// weights of its axis and with their derivatives. Planes come one after the other, in each four
// rows of four taps are read at a time. Offsets are 64-bit, any strides will do; V > 1 as in
// general.cuh.
#include "general.cuh"

namespace {

/// A point's weights, derived up to twice; z's are those of one tap in two dimensions.
template <typename A, int D, bool kBends>
struct CubicPoint {
    PointTaps<A, D, 4, true> taps;
    A curve[D][4];  // second derivatives of the weights; where wanted

    __device__ CubicPoint(const GridSampleJob& job, const ThreadPoint& at) : taps(job, at) {
        if constexpr (kBends) {
            const GridSampleParams& p = job.p;
            const int64_t from =
                at.b * p.grid_stride[0] + p.grid_points.at(job.packed ? at.i : job.first + at.i);
#pragma unroll
            for (int d = 0; d < D; ++d) {
                const A size = A(p.whole[2 - d]), scale = pixels_per_unit(size, p.align_corners);
                const A x =
                    unnormalized(load_as<A>(p.grid_dtype, p.grid, from + d * p.grid_stride[1]),
                                 size, p.align_corners);
                Taps<A, 4>::cubic_curve(curve[d], x - floor(x), scale * scale);
            }
        }
    }
    __device__ int z_index(int z) const {
        if constexpr (D == 3) return pick(taps.axis[2].index, z);
        return 0;
    }
    __device__ A z_share(int order, int z) const {
        if constexpr (D == 3) {
            if (order == 0) return pick(taps.axis[2].weight, z);
            if (order == 1) return pick(taps.axis[2].slope, z);
            return pick(curve[2], z);
        }
        return order == 0 ? 1 : 0;
    }
    __device__ A share(int d, int order, int k) const {
        return order == 0   ? taps.axis[d].weight[k]
               : order == 1 ? taps.axis[d].slope[k]
                            : curve[d][k];
    }
};

/// Sums over a plane's taps, derived b times by y and c times by x, b + c <= kOrder.
template <typename A, int kOrder>
struct PlaneSums {
    A at[kOrder + 1][kOrder + 1] = {}, row[kOrder + 1] = {};

    template <typename Point>
    __device__ void add_tap(const Point& point, int x, A value) {
#pragma unroll
        for (int c = 0; c <= kOrder; ++c) row[c] += point.share(0, c, x) * value;
    }
    template <typename Point>
    __device__ void end_row(const Point& point, int y) {
#pragma unroll
        for (int c = 0; c <= kOrder; ++c) {
#pragma unroll
            for (int b = 0; b + c <= kOrder; ++b) at[b][c] += point.share(1, b, y) * row[c];
            row[c] = 0;
        }
    }
};

/// What a thread adds up for a point: from here on see second_kernel in general.cuh for the names.
template <typename T, int V, int D, bool kSecond>
struct CubicGradients {
    using A = Acc<T>;
    const GridSampleJob& job;
    const GridSampleParams& p;
    const CubicPoint<A, D, kSecond> point;
    const bool slanted, reads, adds;
    const T *in, *to;  // of the point's image
    int64_t sum_image;
    A along[3] = {};  // what arrives for grad_grid
    A grad[V], to_grad = 0;

    __device__ CubicGradients(const GridSampleJob& job, const ThreadPoint& at)
        : job(job),
          p(job.p),
          point(job, at),
          slanted(kSecond && p.to_grad_grid),
          reads(kSecond ? slanted : p.grad_grid != nullptr),
          adds(p.grad_input && (!kSecond || slanted)),
          in(static_cast<const T*>(p.input) + at.b * p.input_stride[0]),
          to(static_cast<const T*>(p.to_grad_input) + at.b * p.to_grad_input_stride[0]),
          sum_image(at.b * p.grad_input_stride[0]) {
        if (!slanted) return;
        const int64_t from = at.b * p.to_grad_grid_stride[0] + p.to_grad_grid_points.at(at.q);
#pragma unroll
        for (int d = 0; d < D; ++d)
            along[d] =
                load_as<A>(p.grid_dtype, p.to_grad_grid, from + d * p.to_grad_grid_stride[1]);
    }
    /// Offset of a tap in channel c of an image.
    __device__ static int64_t offset(const int64_t (&stride)[5], int c, int iz, int iy, int ix) {
        return c * stride[1] + iz * stride[2] + iy * stride[3] + ix * stride[4];
    }
    /// Adds V values at a tap to the gradient of the input.
    __device__ void add_input(int64_t place, A weight) const {
        if constexpr (V > 1) {
            float shares[V];
#pragma unroll
            for (int j = 0; j < V; ++j) shares[j] = weight * grad[j];
            add_word<V>(job, sum_at(job, place), shares);
        } else {
            add_at<T>(job, place, weight * grad[0]);
        }
    }
    /// Plane z of the taps, channels from c on.
    __device__ void add_plane(int z, int c, A (&to_grid)[D]) {
        const int iz = point.z_index(z);
        const A wz = point.z_share(0, z), sz = point.z_share(1, z);
        PlaneSums<A, kSecond ? 2 : 1> sums;  // of grad_out times the input,
        PlaneSums<A, 1> to_sums;             // and times what arrives for its gradient
#pragma unroll
        for (int y = 0; y < 4; ++y) {
            const int iy = point.taps.axis[1].index[y];
            const A share = wz * point.share(1, 0, y);
            // What grad_out is weighted by is `level` times x's weights and `steep` times its
            // slopes.
            A level = share, steep = 0;
            if constexpr (kSecond) {
                steep = along[0] * share, level = along[1] * wz * point.share(1, 1, y);
                if constexpr (D == 3) level += along[2] * sz * point.share(1, 0, y);
            }
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int ix = point.taps.axis[0].index[x];
                const bool valid = (iz | iy | ix) >= 0;
                const A wx = point.share(0, 0, x);
                const A weight = kSecond ? level * wx + steep * point.share(0, 1, x) : level * wx;
                if (reads) {
                    Vector<T, V> value{};
                    if (valid)
                        value = load_vector<T, V>(in + offset(p.input_stride, c, iz, iy, ix));
                    A dot = 0;
#pragma unroll
                    for (int j = 0; j < V; ++j) dot += grad[j] * value_of(value.at[j], p.dtype);
                    sums.add_tap(point, x, dot);
                    if (kSecond) to_grad += weight * value_of(value.at[0], p.dtype);
                }
                if (kSecond && p.to_grad_input) {
                    T value{};
                    if (valid) value = to[offset(p.to_grad_input_stride, c, iz, iy, ix)];
                    to_sums.add_tap(point, x, grad[0] * value_of(value, p.dtype));
                    to_grad += share * wx * value_of(value, p.dtype);
                }
                if (adds && valid)
                    add_input(sum_image + offset(p.grad_input_stride, c, iz, iy, ix), weight);
            }
            sums.end_row(point, y), to_sums.end_row(point, y);
        }
        const auto add_slopes = [&](const auto& of) {
            to_grid[0] += wz * of.at[0][1], to_grid[1] += wz * of.at[1][0];
            if constexpr (D == 3) to_grid[2] += sz * of.at[0][0];
        };
        if constexpr (!kSecond) return add_slopes(sums);
        add_slopes(to_sums);
        const auto& of = sums.at;
        if constexpr (kSecond) {
            to_grid[0] += wz * (along[0] * of[0][2] + along[1] * of[1][1]);
            to_grid[1] += wz * (along[0] * of[1][1] + along[1] * of[2][0]);
        }
        if constexpr (kSecond && D == 3) {
            to_grid[0] += along[2] * sz * of[0][1];
            to_grid[1] += along[2] * sz * of[1][0];
            to_grid[2] += sz * (along[0] * of[0][1] + along[1] * of[1][0]) +
                          along[2] * point.z_share(2, z) * of[0][0];
        }
    }
};

/// Gradients to the input and to the grid; with kSecond, of those.
template <typename T, int V, int D, bool kSecond>
__global__ void __launch_bounds__(kThreads)
    cubic_gradients(const __grid_constant__ GridSampleJob job) {
    static_assert(V == 1 || !kSecond, "second derivatives take a channel at a time");
    using A = Acc<T>;
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const ThreadPoint at(job);
    A to_grid[D] = {};
    if (at.inside) {
        CubicGradients<T, V, D, kSecond> of(job, at);
        const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                            p.grad_out_points.at(at.q);
        T* out = static_cast<T*>(p.out) + at.b * p.C * p.P + at.q;
        const int step = at.lanes * V, C = int(p.C);
#pragma unroll 1
        for (int c = at.lane * V; c < C; c += step) {
#pragma unroll
            for (int j = 0; j < V; ++j)
                of.grad[j] = V == 1 || c + j < C
                                 ? A(value_of(grad_out[(c + j) * p.grad_out_stride[1]], p.dtype))
                                 : A(0);
            of.to_grad = 0;
#pragma unroll 1
            for (int z = 0; z < (D == 3 ? 4 : 1); ++z) of.add_plane(z, c, to_grid);
            if (kSecond && p.out) out[c * p.P] = stored<T>(of.to_grad, p.dtype);
        }
    }
    if (p.grad_grid) store_grad_grid<D>(job, at, to_grid);
}

template <typename T, int V>
const char* launch(GridSampleJob& job, cudaStream_t stream) {
    const int each = 32 >> job.lanes_log2;
    const GridSampleParams& p = job.p;
    if (!p.grad_out) return launch_points(cubic_forward<T, V, 3, false>, job, each, stream);
    if constexpr (V == 1)
        if (p.to_grad_input || p.to_grad_grid)
            return launch_points(
                p.D == 3 ? cubic_gradients<T, V, 3, true> : cubic_gradients<T, V, 2, true>, job,
                each, stream);
    return launch_points(cubic_gradients<T, V, 3, false>, job, each, stream);
}

}  // namespace

const char* grid_sample_cubic(GridSampleJob& job, int V, cudaStream_t stream) {
    switch (job.p.dtype) {
        case DType::kDouble: return launch<double, 1>(job, stream);
        case DType::kFloat: return (V == 1 ? launch<float, 1> : launch<float, 4>)(job, stream);
        default: return (V == 1 ? launch<Short, 1> : launch<Short, 4>)(job, stream);
    }
}
