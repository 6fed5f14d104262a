// grid_sample's CUDA kernels for linear and nearest interpolation.
//
// A warp works on 32 points (or a multiple). Each thread finds the cell of one point; then groups
// of threads share the channels of a point, V at a time, and take its cell by shuffles, so that
// finding cells costs as little as with one thread to a point.
#pragma once
#include "grid_sample.cuh"

constexpr unsigned kAll = ~0u;

/// The cell of a point: its first corner, which may lie outside, where in it the point lies, and
/// which corners are in the image. Nearest interpolation has the first corner alone.
template <typename A, int D>
struct Cell {
    int base;        // offset in units, negative where the corner lies outside
    A part[D];       // x, y, z in [0, 1)
    uint32_t flags;  // two bits an axis: its first and second pixel lie in the image; from bit 8 on
                     // two an axis: the point moves with the coordinate, and against it; bit 16:
                     // the first x is odd

    __device__ bool valid(int k) const {
        bool all = true;
#pragma unroll
        for (int d = 0; d < D; ++d) all = all && (flags >> (2 * d + (k >> d & 1)) & 1);
        return all;
    }
    __device__ bool whole() const { return (flags & ((1u << 2 * D) - 1)) == (1u << 2 * D) - 1; }
    __device__ Cell from(int lane) const {
        Cell other;
        other.base = __shfl_sync(kAll, base, lane);
#pragma unroll
        for (int d = 0; d < D; ++d) other.part[d] = __shfl_sync(kAll, part[d], lane);
        other.flags = __shfl_sync(kAll, flags, lane);
        return other;
    }
    __device__ A weight(int k) const {
        A w = k & 1 ? part[0] : 1 - part[0];
#pragma unroll
        for (int d = 1; d < D; ++d) w *= k >> d & 1 ? part[d] : 1 - part[d];
        return w;
    }
    /// All weights; the compiler shares what they have in common.
    __device__ void weights(A (&w)[1 << D]) const {
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) w[k] = weight(k);
    }
    /// Gradients by the position, in pixels, where corner k's value counts dot[k].
    __device__ void slopes(const A (&dot)[1 << D], A (&grad)[D]) const {
        A left[1 << D];
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) left[k] = dot[k];
        A along[D][1 << (D - 1)];  // differences along x, y, z, then their means over the others
#pragma unroll
        for (int d = 0; d < D; ++d) {
            const int half = 1 << (D - 1 - d);
            const auto mean = [&](A a, A b) { return (1 - part[d]) * a + part[d] * b; };
#pragma unroll
            for (int e = 0; e < d; ++e)
#pragma unroll
                for (int k = 0; k < half; ++k)
                    along[e][k] = mean(along[e][2 * k], along[e][2 * k + 1]);
#pragma unroll
            for (int k = 0; k < half; ++k) {
                along[d][k] = left[2 * k + 1] - left[2 * k];
                left[k] = mean(left[2 * k], left[2 * k + 1]);
            }
        }
#pragma unroll
        for (int d = 0; d < D; ++d) grad[d] = along[d][0];
    }
    /// Which corners of a column, those of one x, lie in the image along the other axes.
    __device__ uint32_t column() const {
        const uint32_t y = flags >> 2 & 3;
        if constexpr (D == 2) return y;
        return (flags & 16 ? y : 0) | (flags & 32 ? y << 2 : 0);
    }
    __device__ void column_weights(A (&w)[1 << (D - 1)]) const {
#pragma unroll
        for (int k = 0; k < 1 << (D - 1); ++k) {
            w[k] = k & 1 ? part[1] : 1 - part[1];
            if constexpr (D == 3) w[k] *= k & 2 ? part[2] : 1 - part[2];
        }
    }
    /// A column's part of the gradients by the position, in pixels. `weight`: those of the column's
    /// corners; `along`: the column's; `second`: it is the second along x.
    __device__ void column_slopes(const A (&dot)[1 << (D - 1)], const A (&weight)[1 << (D - 1)],
                                  A along, bool second, A (&grad)[D]) const {
        A sum = 0;
#pragma unroll
        for (int k = 0; k < 1 << (D - 1); ++k) sum += weight[k] * dot[k];
        grad[0] = second ? sum : -sum;
        if constexpr (D == 2) {
            grad[1] = along * (dot[1] - dot[0]);
        } else {
            grad[1] = along * ((1 - part[2]) * (dot[1] - dot[0]) + part[2] * (dot[3] - dot[2]));
            grad[2] = along * ((1 - part[1]) * (dot[2] - dot[0]) + part[1] * (dot[3] - dot[1]));
        }
    }
    /// By how many pixels the position moves with coordinate d.
    __device__ A moved(int d, const GridSampleParams& p) const {
        const uint32_t sign = flags >> (8 + 2 * d) & 3;
        const A scale = pixels_per_unit(A(p.size[2 - d]), p.align_corners);
        return sign == 0 ? A(0) : sign == 1 ? scale : -scale;
    }
};

/// Coordinates of a point: read early, so that much is under way at a time.
template <typename A, int D>
struct Coordinates {
    A x[D];

    Coordinates() = default;
    /// Point i of the launch; `image`: where the grid of its image begins, in bytes.
    __device__ Coordinates(const GridSampleJob& job, const char* image, int i) {
        if (job.packed) {
            const auto* at = reinterpret_cast<const float*>(image + int64_t(i) * job.point_step);
#pragma unroll
            for (int d = 0; d < D; ++d) x[d] = __ldg(at + d);
        } else {
            read(job, image, i, x);
        }
    }
    /// Any strides and dtype. Not inlined, as is all that is rarely needed: the kernels' own code
    /// stays short.
    __device__ __noinline__ static void read(const GridSampleJob& job, const char* image, int i,
                                             A (&x)[D]) {
        const GridSampleParams& p = job.p;
        const int64_t from = p.grid_points.at(job.first + i);
        for (int d = 0; d < D; ++d)
            x[d] = load_as<A>(p.grid_dtype, image, from + d * p.grid_stride[1]);
    }
};

/// Where the grid of an image begins.
__device__ inline const char* grid_of(const GridSampleJob& job, int64_t b) {
    return static_cast<const char*>(job.p.grid) +
           b * job.p.grid_stride[0] * element_size(job.p.grid_dtype);
}

/// The cell of a point that may lie anywhere.
template <bool kSlope, typename A, int D>
__device__ __noinline__ Cell<A, D> any_cell(const GridSampleJob& job, const Steps& steps,
                                            Coordinates<A, D> at) {
    const GridSampleParams& p = job.p;
    Cell<A, D> cell;
    cell.base = 0, cell.flags = 0;
    const bool nearest = p.interpolation == Interpolation::kNearest;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        const int size = p.size[2 - d];
        A sign = 1;
        A u = padded(unnormalized(at.x[d], A(size), p.align_corners), A(size), p.padding,
                     p.align_corners, kSlope ? &sign : nullptr);
        if (nearest) u = rint(u), sign = 0;
        const A first = floor(u);
        const bool near = first >= -1 && first < A(size);  // neither NaN nor beyond an int
        const int i = near ? int(first) : -1;
        cell.part[d] = near ? u - first : A(0);
        cell.base += i * steps.step[2 - d];
        cell.flags |= uint32_t(near && i >= 0) << 2 * d |
                      uint32_t(near && i + 1 < size && !nearest) << (2 * d + 1) |
                      uint32_t(sign > 0   ? 1
                               : sign < 0 ? 2
                                          : 0)
                          << (8 + 2 * d);
    }
    return cell;
}

/// The cell of a point. `kSlope`: for a gradient.
template <bool kSlope, typename A, int D>
__device__ inline Cell<A, D> cell_of(const GridSampleJob& job, const Steps& steps,
                                     const Coordinates<A, D>& at) {
    const GridSampleParams& p = job.p;
    if (p.padding == Padding::kReflection) return any_cell<kSlope>(job, steps, at);
    const bool nearest = p.interpolation == Interpolation::kNearest;
    Cell<A, D> cell;
    cell.base = 0, cell.flags = 0;
    bool near = true;  // some corner may lie in the image; neither NaN nor beyond an int
#pragma unroll
    for (int d = 0; d < D; ++d) {
        const auto [half, size, less, scale, least, most] = job.template axis<A>(2 - d);
        A u = ((at.x[d] + 1) * half * size - less) * scale;
        if (kSlope) {
            near = near && u == u;
            cell.flags |= uint32_t(u > least && u < most) << (8 + 2 * d);
        }
        u = fmin(fmax(u, least), most);
        if (nearest) u = rint(u);
        const A first = floor(u);
        near = near && first >= -1 && first < A(p.size[2 - d]);
        const int i = int(first);
        cell.part[d] = u - first;
        cell.base += i * steps.step[2 - d];
        cell.flags |= uint32_t(i >= 0) << 2 * d | uint32_t(i + 1 < p.size[2 - d] && !nearest)
                                                      << (2 * d + 1);
        if (kSlope && d == 0) cell.flags |= uint32_t(i & 1) << 16;
    }
    if (near) return cell;
    cell.flags = 0, cell.base = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) cell.part[d] = 0;
    return cell;
}

/// V channels of the corners, from the first pixel's on; zeros for those outside of the image.
template <typename T, int V, int D>
__device__ inline void load_corners(const Steps& steps, const char* in, const Cell<Acc<T>, D>& cell,
                                    Vector<T, V> (&value)[1 << D]) {
    const char* first = in + int64_t(cell.base) * steps.unit;
    asm("" : "+l"(first));  // one sum for each corner, not one for each part of it
    const auto at = [&](int k) {
        return load_constant<T, V>(reinterpret_cast<const T*>(first + steps.corner[k]));
    };
    if (cell.whole()) {
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) value[k] = at(k);
    } else {
#pragma unroll
        for (int k = 0; k < 1 << D; ++k) {
            value[k] = {};
            if (cell.valid(k)) value[k] = at(k);
        }
    }
}

constexpr int kMostLanes = 8;  // threads that share a point

/// 32 points of a warp's channels: in rows of points in memory, of channels in registers.
template <typename T, int V>
struct Stage {
    T at[V * kMostLanes + 1][33];

    /// Channel j of thread `lane` of a group. Groups and lanes then lie in different banks.
    __device__ T* row(int lane, int j, int lanes) { return at[j * lanes + lane]; }
};

/// V > 1. A warp takes 32 points at a time, a group of threads as many of them as it has threads.
/// `kAlone`: one thread to a point takes all channels.
template <typename T, int V, int D, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    linear_forward(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    __shared__ Stage<T, kAlone ? 0 : V> stages[kThreads / 32];
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, lanes = kAlone ? 1 : 1 << job.lanes_log2;
    const int stride = blockDim.x * gridDim.x, C = int(p.C);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t b = job.image + blockIdx.y;
    const char* grid = grid_of(job, b);
    const auto coordinates = [&](int i) {
        return Coordinates<A, D>(job, grid, i < job.count ? i : job.count - 1);
    };
    const int lane = kAlone ? 0 : in_warp & (lanes - 1), first = in_warp - lane;
    const char* in =
        static_cast<const char*>(p.input) + (b * p.input_stride[0] + lane * V) * int(sizeof(T));
    T* out = static_cast<T*>(p.out) + b * p.C * p.P + job.first + i;
    Stage<T, kAlone ? 0 : V>& stage = stages[threadIdx.x / 32];
    T* const staged = &stage.row(lane, 0, lanes)[first];
    Coordinates<A, D> next = coordinates(i);
#pragma unroll 1
    for (; i - in_warp < job.count; i += stride, out += stride) {
        const Cell<A, D> own = cell_of<false>(job, job.input, next);
        next = coordinates(i + stride);
        T* to = out;
#pragma unroll 1
        for (int c0 = 0; c0 < C; c0 += V * lanes) {
#pragma unroll 1
            for (int r = 0; r < lanes; ++r) {
                const Cell<A, D> cell = kAlone ? own : own.from(first + r);
                if (!kAlone && c0 + lane * V >= C) continue;
                A weight[1 << D];
                cell.weights(weight);
                Vector<T, V> value[1 << D];
                load_corners(job.input, in + c0 * int(sizeof(T)), cell, value);
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    A sum = 0;
#pragma unroll
                    for (int k = 0; k < 1 << D; ++k) sum += weight[k] * load(value[k].at[j]);
                    if (!kAlone)
                        staged[j * lanes * 33 + r] = store<T>(sum);
                    else if (j < C && i < job.count)
                        to[j * p.P] = store<T>(sum);
                }
            }
            if (kAlone) break;
            __syncwarp();
            const bool full = c0 + V * lanes <= C;
#pragma unroll 1
            for (int l = 0; l < lanes; ++l)
#pragma unroll
                for (int j = 0; j < V; ++j, to += p.P)
                    if (i < job.count && (full || c0 + l * V + j < C))
                        *to = stage.row(l, j, lanes)[in_warp];
            __syncwarp();
        }
    }
}

/// V = 1: a thread to a point, U channels at a time, R times; or threads that share a point.
template <typename T, int D, int U, int R>
__global__ void __launch_bounds__(kThreads)
    linear_forward_any(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const int in_warp = threadIdx.x % 32, lanes = 1 << job.lanes_log2;
    const int points = 32 >> job.lanes_log2;
    const int64_t b = job.image + blockIdx.y;
    const int i0 =
        (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * points * R + (in_warp & (points - 1));
    if (i0 >= job.count) return;
    const char* grid = grid_of(job, b);
    const auto coordinates = [&](int r) {
        const int i = i0 + r * points;
        return Coordinates<A, D>(job, grid, i < job.count ? i : job.count - 1);
    };
    Coordinates<A, D> at[R];
#pragma unroll
    for (int r = 0; r < R; ++r) at[r] = coordinates(r);
    const char* in = static_cast<const char*>(p.input) + b * p.input_stride[0] * int(sizeof(T));
    T* out = static_cast<T*>(p.out) + b * p.C * p.P + job.first + i0;
    const int C = int(p.C);
    const int64_t c_step = p.input_stride[1] * int(sizeof(T));
#pragma unroll
    for (int r = 0; r < R; ++r, out += points) {
        if (r > 0 && i0 + r * points >= job.count) return;
        const Cell<A, D> cell = cell_of<false>(job, job.input, at[r]);
        A weight[1 << D];
        cell.weights(weight);
#pragma unroll 1
        for (int c = in_warp >> (5 - job.lanes_log2); c < C; c += U * lanes) {
            Vector<T, 1> value[U][1 << D];
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (u == 0 || c + u * lanes < C)
                    load_corners(job.input, in + (c + u * lanes) * c_step, cell, value[u]);
#pragma unroll
            for (int u = 0; u < U; ++u) {
                if (u > 0 && c + u * lanes >= C) break;
                A sum = 0;
#pragma unroll
                for (int k = 0; k < 1 << D; ++k) sum += weight[k] * load(value[u][k].at[0]);
                out[(c + u * lanes) * p.P] = store<T>(sum);
            }
            if (U == 1) break;
        }
    }
}

/// Times 32 points that a warp takes in the backward: a group of few threads takes several of the
/// points of a line one after the other.
HD inline int tiles_of(int lanes) { return lanes < 8 ? 8 / lanes : 1; }

/// V > 1, float or 16-bit elements, sums in float. Two threads share V channels of a point: one has
/// the corners at even x, the other those at odd x, side by side in memory. A group of threads
/// takes neighbouring points one after the other, and a thread adds up what goes to the same
/// corners: it goes to memory when the column of corners changes, every other step along x.
template <typename T, int V, int D>
__global__ void __launch_bounds__(kThreads)
    linear_backward(const __grid_constant__ GridSampleJob job) {
    constexpr int K = 1 << (D - 1);  // corners of a column
    __shared__ Stage<T, V> stages[kThreads / 32];
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
                if (sizeof(T) == 4 || job.sum_dtype == DType::kFloat) {
                    add_floats<V>(reinterpret_cast<float*>(corner), sum[k]);
                } else {
#pragma unroll
                    for (int j = 0; j < V; j += 2)
                        add_pair(job.sum_dtype, reinterpret_cast<unsigned*>(corner) + j / 2,
                                 sum[k][j], sum[k][j + 1]);
                }
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
                           p.grad_out_points.at(job.first + (inside ? i : job.count - 1));
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
                    Vector<T, V> value[K];
                    if (p.grad_grid) {
                        const char* at = in + c0 * int(sizeof(T)) + int64_t(base) * job.input.unit;
#pragma unroll
                        for (int k = 0; k < K; ++k) {
                            value[k] = {};
                            if (bits >> k & 1)
                                value[k] = load_constant<T, V>(
                                    reinterpret_cast<const T*>(at + job.input.corner[2 * k]));
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
                    if (p.grad_grid) {
                        float dot[K] = {};
#pragma unroll
                        for (int k = 0; k < K; ++k)
#pragma unroll
                            for (int j = 0; j < V; ++j) dot[k] += grad[j] * load(value[k].at[j]);
                        cell.column_slopes(dot, weight, along, side, grad_grid);
                    }
                }
                if (!p.grad_grid) continue;
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
                             own.moved(d, p) * own_grad[d]);
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
    /// Sums over each run, in its first thread.
    template <typename A>
    __device__ A sum(A x) const {
        const int i = threadIdx.x % 32;
#pragma unroll 1
        for (int m = 1; m < reach; m *= 2) {
            const A other = __shfl_down_sync(kAll, x, m);
            if (i + m <= end) x += other;
        }
        return x;
    }
};

/// V = 1: a thread to a point. Neighbouring points in the same cell, or in the next along x, add up
/// what goes to the same corners within the warp first.
template <typename T, int D, int U>
__global__ void __launch_bounds__(kThreads)
    linear_backward_any(const __grid_constant__ GridSampleJob job) {
    using A = Acc<T>;
    constexpr int K = 1 << D;
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const Place at(job);
    const int i = at.inside ? at.i : job.count - 1;
    const Coordinates<A, D> coordinates(job, grid_of(job, at.b), i);
    Cell<A, D> cell = cell_of<true>(job, job.input, coordinates);
    if (!at.inside) cell.flags = 0;
    constexpr uint32_t kBits = (1u << 2 * D) - 1;
    const Runs runs(cell.base, cell.flags & kBits, job.input.step[2]);
    const bool alone = at.lanes == 1;  // threads that share a point have no neighbours to add to
    const bool nearest = p.interpolation == Interpolation::kNearest;
    A weight[K], dot[K] = {};
    cell.weights(weight);
    const char* in = static_cast<const char*>(p.input) + at.b * p.input_stride[0] * int(sizeof(T));
    const int64_t c_step = p.input_stride[1] * int(sizeof(T));
    const T* grad_out = static_cast<const T*>(p.grad_out) + at.b * p.grad_out_stride[0] +
                        p.grad_out_points.at(job.first + i);
    const int C = int(p.C), size = element_size(job.sum_dtype);
    const int base = job.same_steps || !p.grad_input
                         ? cell.base
                         : cell_of<true>(job, job.sums, coordinates).base;
    char* const to = static_cast<char*>(p.grad_input) + at.b * p.grad_input_stride[0] * size +
                     int64_t(base) * job.sums.unit;
    // The corners that this thread adds to memory.
    uint32_t mine = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
        mine |= uint32_t(cell.valid(k) && (!alone || (runs.head && !(k % 2 && runs.gives)))) << k;
    const bool longer = alone && runs.reach > 1;
#pragma unroll 1
    for (int c0 = at.lane; c0 - at.lane < C; c0 += U * at.lanes) {
        A grad[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int c = c0 + u * at.lanes;
            grad[u] = c < C && at.inside ? A(load(grad_out[c * p.grad_out_stride[1]])) : A(0);
        }
        if (p.grad_grid) {
            Vector<T, 1> value[U][K];
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (const int c = c0 + u * at.lanes; c < C)
                    load_corners(job.input, in + c * c_step, cell, value[u]);
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (c0 + u * at.lanes < C)
#pragma unroll
                    for (int k = 0; k < K; ++k) dot[k] += grad[u] * load(value[u][k].at[0]);
        }
        if (!p.grad_input) continue;
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int c = c0 + u * at.lanes;
            if (c - at.lane >= C) break;
            A part[K];
#pragma unroll
            for (int k = 0; k < K; ++k) part[k] = weight[k] * grad[u];
            if (longer)
#pragma unroll
                for (int k = 0; k < K; ++k) part[k] = runs.sum(part[k]);
            if (alone && !nearest)
#pragma unroll
                for (int k = 0; k < K; k += 2) {
                    const A given = __shfl_sync(kAll, part[k + 1], runs.before);
                    if (runs.takes) part[k] += given;
                }
            if (c >= C) continue;
            char* row = to + c * p.grad_input_stride[1] * size;
            asm("" : "+l"(row));
#pragma unroll
            for (int k = 0; k < K; ++k)
                if (mine >> k & 1) add_one<T>(job.sum_dtype, row + job.sums.corner[k], part[k]);
        }
    }
    if (!p.grad_grid) return;
    A grad_grid[D];
    cell.slopes(dot, grad_grid);
#pragma unroll
    for (int d = 0; d < D; ++d) grad_grid[d] *= cell.moved(d, p);
    store_grad_grid<D>(job, at, grad_grid);
}

template <typename T, int V, int D>
const char* launch_linear_forward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (V > 1)
        return launch_points(
            job.lanes_log2 ? linear_forward<T, V, D, false> : linear_forward<T, V, D, true>, job,
            32, stream, job.processors * 8);
    const int each = 32 >> job.lanes_log2;
    if (job.general) return launch_points(wide_forward<T, D>, job, each, stream);
    if (each < 32 || (job.p.C > 1 && D == 3) || job.p.B * job.p.P < 1 << 18)
        return launch_points(linear_forward_any<T, D, 4, 1>, job, each, stream);
    if (job.p.C == 1) return launch_points(linear_forward_any<T, D, 1, 4>, job, each * 4, stream);
    if (D == 2 && job.p.C >= 8)
        return launch_points(linear_forward_any < T, D, D == 2 ? 8 : 4, 1 >, job, each, stream);
    return launch_points(linear_forward_any<T, D, 4, 2>, job, each * 2, stream);
}
template <typename T, int V>
const char* launch_forward(GridSampleJob& job, cudaStream_t stream) {
    if (job.p.interpolation == Interpolation::kCubic)
        return launch_points(cubic_forward<T, V>, job, 32 >> job.lanes_log2, stream);
    return (job.p.D == 3 ? launch_linear_forward<T, V, 3> : launch_linear_forward<T, V, 2>)(job,
                                                                                            stream);
}

template <typename T, int V, int D>
const char* launch_linear_backward(GridSampleJob& job, cudaStream_t stream) {
    if constexpr (V > 1)
        return launch_points(linear_backward<T, V, D>, job, 32 * tiles_of(1 << job.lanes_log2),
                             stream);
    const int each = 32 >> job.lanes_log2;
    if (job.general) return launch_points(backward_kernel<T, 1, D, 2>, job, each, stream);
    return launch_points(job.p.C == 1 ? linear_backward_any<T, D, 1> : linear_backward_any < T, D,
                         D == 2 ? 4 : 2 >, job, each, stream);
}
template <typename T, int V>
const char* launch_backward(GridSampleJob& job, cudaStream_t stream) {
    if (job.p.interpolation == Interpolation::kCubic)
        return launch_points(backward_kernel<T, V, 2, 4>, job, 32 >> job.lanes_log2, stream);
    return (job.p.D == 3 ? launch_linear_backward<T, V, 3>
                         : launch_linear_backward<T, V, 2>)(job, stream);
}
