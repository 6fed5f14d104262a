// grid_sample's gradient to the input on the GPU, for linear interpolation, an element or a pixel
// at a time: a thread to a point, and threads of neighbouring points add up what goes to the same
// pixels before it goes to memory.
#pragma once
#include "adds.cuh"
#include "general.cuh"
#include "to_grid.cuh"

/// Which of a warp's threads, each with a point, are in the same cell as the thread before them.
struct Runs {
    bool head;          // begins a run
    int reach;          // no run has more threads
    int end;            // its last thread
    bool gives, takes;  // the next run's cell is the next along x; this one's is that of the last
    int before;         // of a run that takes, the first thread of the one before

    /// `alike`: all of the warp's threads have the same flags.
    __device__ Runs(int base, uint32_t flags, int step, bool alike = false) {
        const int i = threadIdx.x % 32;
        const int last_base = __shfl_up_sync(kAll, base, 1);
        const uint32_t last_flags = alike ? flags : __shfl_up_sync(kAll, flags, 1);
        head = i == 0 || base != last_base || flags != last_flags;
        takes = head && i > 0 && base == last_base + step && (flags & 1) && (last_flags & 2) &&
                ((flags ^ last_flags) & ~3u) == 0;
        const uint32_t heads = __ballot_sync(kAll, head), takers = __ballot_sync(kAll, takes);
        const uint32_t above = heads & (kAll << 1 << i);
        end = above ? __ffs(int(above)) - 2 : 31;
        gives = takers >> 1 >> end & 1;
        before = 31 - __clz(int(heads & ~(kAll << i)));
        uint32_t longer = ~heads;  // ends of so many threads in a row that begin no run
        for (reach = 1; longer; reach *= 2) longer &= longer << reach;
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
    /// Of corners in pairs along x: gives what the run before has at its second ones, which are the
    /// same pixels, to the first ones of a run that takes.
    template <typename A, int K>
    __device__ void pass_on(A (&x)[K]) const {
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            const A given = __shfl_sync(kAll, x[k + 1], before);
            if (takes) x[k] += given;
        }
    }
};

/// Where the cell of a point begins in the sums, whose steps are others than the input's.
template <typename A, int D>
__device__ __noinline__ int base_in_sums(const GridSampleJob& job, Coordinates<A, D> at) {
    return cell_of<true>(job, job.sums, at).base;
}

/// A warp's additions to a row of pixels, each to one pixel, in the order of its points, which have
/// two at most: those to neighbours are then in one instruction, which meets their sectors once,
/// and not in two.
struct InOrder {
    int place, count;  // of this thread's first one; of all

    /// `first`, `other`: this thread's point has one to its cell's first pixel, and to the next.
    __device__ InOrder(bool first, bool other) {
        const uint32_t firsts = __ballot_sync(kAll, first), others = __ballot_sync(kAll, other);
        const uint32_t before = (1u << threadIdx.x % 32) - 1;
        place = __popc(firsts & before) + __popc(others & before);
        count = __popc(firsts) + __popc(others);
    }
};

/// Adds to the corners of a warp's points, whose channels lie side by side: up to kPixelChannels.
/// `mine`: those that this thread adds to memory. `image`: of the sums.
template <int D>
__device__ inline void add_pixels(const GridSampleJob& job, const Runs& runs, uint32_t flags,
                                  uint32_t mine, int base, const float (&weight)[1 << D],
                                  const float (&grad)[kPixelChannels], char* image) {
    constexpr int U = kPixelChannels, kWarps = kThreads / 32;
    __shared__ int2 pixels[kWarps][64];  // in the row of corner 0; bit k: in that of corner k
    __shared__ float sums[kWarps][64 * U];
    const int i = threadIdx.x % 32, C = int(job.p.C);
    int2* const pixel = pixels[threadIdx.x / 32];
    float* const sum = sums[threadIdx.x / 32];
    const bool first = runs.head && flags & 1, other = runs.head && flags & 2 && !runs.gives;
    const InOrder order(first, other);
    if (first) pixel[order.place] = {base, int(mine)};
    if (other) pixel[order.place + first] = {base + job.sums.step[2], int(mine >> 1)};
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
            if (u == U - 1 && C < U) break;
            if (first) sum[order.place * C + u] = one[u];
            if (other) sum[(order.place + first) * C + u] = two[u];
        }
        __syncwarp();
        char* const row = image + job.sums.corner[k];
#pragma unroll 1
        for (int element = i; element < order.count * C; element += 32) {
            const int j = C == U ? element / U : element / (U - 1), c = element - j * C;
            const int2 at = pixel[j];
            float* const to = reinterpret_cast<float*>(row + int64_t(at.x) * job.sums.unit) + c;
            if (at.y >> k & 1) add_one<float>(job, to, sum[element]);
        }
        __syncwarp();
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

/// V = 1: a thread to a point, or, unless kPixels, several. Neighbouring points in the same cell,
/// or in the next along x, add up what goes to the same corners within the warp first. kPixels: as
/// job.line has it, U is kPixelChannels.
template <typename T, int D, int U, bool kPixels>
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
    const int lane = kPixels ? 0 : at.lane, lanes = kPixels ? 1 : at.lanes;
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
    char* const image = static_cast<char*>(p.grad_input) + at.b * p.grad_input_stride[0] * size;
    char* const to = image + int64_t(base) * job.sums.unit;
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
            add_pixels<D>(job, runs, cell.flags, mine, base, weight, grad, image);
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
                if (alone && !nearest) runs.pass_on(part);
                if (c >= C) continue;
                char* row = to + c * p.grad_input_stride[1] * size;
                asm("" : "+l"(row));
#pragma unroll
                for (int k = 0; k < K; k += 2) {
                    char* const first = row + job.sums.corner[k];
                    char* const second = row + job.sums.corner[k + 1];
                    if (mine >> k & 1) add_one<T>(job, first, part[k]);
                    if (mine >> k & 2) add_one<T>(job, second, part[k + 1]);
                }
            }
        }
    }
    store_slopes_of(job, at, cell, dot);
}

/// Blocks to an SM of rows_backward.
template <int D, int U>
constexpr int kRowBlocks = D == 2 ? (U == 1 ? 10 : 7) : (U == 1 ? 8 : 5);

/// V = 1, of float sums and an input whose pixels along x lie side by side: a thread to a point.
/// Neighbouring points add up as in linear_backward_any.
template <typename T, int D, int U>
__global__ void __launch_bounds__(kThreads, (kRowBlocks<D, U>))
    rows_backward(const __grid_constant__ GridSampleJob job) {
    constexpr int K = 1 << D;
    constexpr uint32_t kBits = (1u << 2 * D) - 1;
    follow();
    if (idle(job)) return;
    const GridSampleParams& p = job.p;
    const unsigned image = blockIdx.y;
    const int q = blockIdx.x * blockDim.x + threadIdx.x, i = min(q, job.count - 1);
    const Coordinates<float, D> coordinates(job, job.grids.at(image), i);
    const auto spot = spot_of<true>(job, coordinates, false);
    uint32_t inside = spot.whole ? kBits : spot.corners(p, false);
    if (q >= job.count) inside = 0;
    const bool whole = __all_sync(kAll, inside == kBits);
    const auto cell = spot.in(job.input, U == 1 ? inside : inside | spot.moves);
    const int base = spot.base(job.sums);
    const Runs runs(base, inside, job.sums.step[2], whole);
    const uint32_t valid = whole ? (1u << K) - 1 : corners_of<D>(inside);
    // Of each pair of corners along x, those that this thread adds to memory.
    const uint32_t mine = !runs.head ? 0 : valid & (runs.gives ? 0x55 : 0xff);
    const bool adds = runs.head && inside & 1, other = runs.head && inside & 2 && !runs.gives;
    const InOrder order(adds, other);
    // Which of the points' two each is: the second, if odd, of thread order / 2 % 32; bit k + 8: in
    // the row of corner k.
    __shared__ uint32_t orders[kThreads / 32][64];
    uint32_t* const ordered = orders[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    if (adds) ordered[order.place] = mine << 8 | 2 * lane;
    if (other) ordered[order.place + adds] = mine >> 1 << 8 | 2 * lane + 1;
    __syncwarp();
    float weight[K], dot[K] = {};
    cell.weights(weight);
    const T* grad_out = grad_out_of<T>(job, image, i);
    const int64_t c_step = p.input_stride[1] * int(sizeof(T));
    const char* first = job.inputs.at(image) + int64_t(cell.base) * job.input.unit;
    float* to = static_cast<float*>(p.grad_input) + (job.image + image) * p.grad_input_stride[0];
    char* at[2];  // what this thread adds to, in the row of corner 0
    uint32_t which[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        which[s] = lane + 32 * s < order.count ? ordered[lane + 32 * s] : 0;
        const int from = __shfl_sync(kAll, base, which[s] >> 1);
        at[s] = reinterpret_cast<char*>(to + (which[s] & 1)) + int64_t(from) * job.sums.unit;
    }
#pragma unroll 1
    for (int left = int(p.C); left > 0; left -= U) {
        float grad[U];
#pragma unroll
        for (int u = 0; u < U; ++u, grad_out += p.grad_out_stride[1])
            grad[u] = (U == 1 || u < left) && q < job.count ? value_of(*grad_out, p.dtype) : 0;
        if (p.grad_grid) {
            Pixels<T, D, 1, Narrow::kPlanar, false> pixels[U];
#pragma unroll
            for (int u = 0; u < U; ++u, first += c_step)
                if (U == 1 || u < left) pixels[u].read_valid(job, whole, valid, first);
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (U == 1 || u < left)
#pragma unroll
                    for (int k = 0; k < K; ++k) dot[k] += grad[u] * pixels[u].value(k, 0, p.dtype);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            if (U > 1 && u >= left) break;
            float part[K];
#pragma unroll
            for (int k = 0; k < K; ++k) part[k] = weight[k] * grad[u];
            if (runs.reach > 1) runs.sum(part);
            runs.pass_on(part);
#pragma unroll
            for (int k = 0; k < K; k += 2)
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    if (s == 1 && order.count <= 32) break;
                    const float one = __shfl_sync(kAll, part[k], which[s] >> 1);
                    const float two = __shfl_sync(kAll, part[k + 1], which[s] >> 1);
                    if (which[s] >> (k + 8) & 1)
                        add_one<float>(job, at[s] + (k == 0 ? 0 : job.sums.corner[k]),
                                       which[s] & 1 ? two : one);
                }
#pragma unroll
            for (int s = 0; s < 2; ++s) at[s] += p.grad_input_stride[1] * int(sizeof(float));
        }
    }
    if (!p.grad_grid) return;
    float slope[D];
    cell.slopes(dot, slope);
#pragma unroll
    for (int d = 0; d < D; ++d) {
        // The signs take registers, which several channels need.
        const float moved = spot.sign[d] * job.template axis<float>(2 - d).scale;
        slope[d] *= U == 1 ? moved : cell.moved(d, job);
    }
    if (q < job.count) store_slopes(job, image, i, slope);
}
