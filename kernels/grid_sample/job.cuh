// What grid_sample's CUDA kernels are told: a job, and which point a thread has. Which kernels a
// job takes is in plan.cu.
#pragma once
#include <utility>

#include "follow.cuh"
#include "grid_sample.h"
#include "vector.cuh"

constexpr int kThreads = 128, kMostThreads = 256;  // of a block
constexpr int kFieldThreads = 512;                 // in field.cuh

/// Where the pixels of an image lie: offsets in units of several bytes, so that they fit in 32
/// bits.
struct Offsets {
    int step[3];        // z, y, x
    int unit;           // bytes
    int64_t corner[8];  // bytes from a cell's first pixel to its corner 4 z + 2 y + x
    bool fits;          // and no axis is too long for `pixel_of`
};

/// Constants of `unnormalized` and of padding: a coordinate x lies at (x + 1) * scale + shift, is
/// mirrored where `padding` says so, and then held between `least` and `most`. With zeros these lie
/// beyond all that has a pixel, so that what is not finite is outside too. A mirrored coordinate is
/// one of `span`, from `low` on. Aligned, since constants are read in pairs.
template <typename A>
struct alignas(8) AxisOf {
    A scale, shift, least, most, low, span;
};

/// How the kernels for few channels, or for a few at a time, find a cell's pixels: neighbours along
/// x lie side by side; or a pixel's channels; or these make one word; or lie in two.
enum class Narrow : int32_t { kNot, kPlanar, kLast, kWords, kAcross };

/// What lies side by side in float32 sums, to be added to in words of 16 bytes or in its order:
/// pixels along x; or a pixel's channels, and of dense ones its neighbour's.
enum class Line : int32_t { kNone, kRow, kPixel };

/// Channels of a linear or bicubic pixel that a thread adds to at once, or one less.
constexpr int kPixelChannels = 3;
/// Bytes of shared memory in which so many threads order what they add to linear pixels, as
/// add_pixels does.
HD constexpr int pixel_shared(int threads) { return threads / 32 * 64 * (8 + 4 * kPixelChannels); }
/// Channels of a nearest pixel that a thread adds to at once.
HD constexpr int channels_at_once(int64_t C) { return C <= 4 || C % 4 == 0 ? 4 : 8; }

/// A tensor's images in a launch: where the first begins, and how many bytes they are apart.
struct Images {
    char* first;
    int64_t step;

    __device__ char* at(unsigned image) const { return first + image * step; }
};

/// What a launch needs beside the parameters. Tensors may stand for those of the caller; a launch
/// takes points [first, first + count) of images blockIdx.y + image on. In the order of the
/// parameters, turned round: what many kernels read, next to theirs, comes first.
struct GridSampleJob {
    GridSampleParams p;
    bool packed;      // a point's coordinates are neighbours in memory, and points lie
    bool reads;       // the backward needs the input
    bool same_steps;  // the steps of the input and of the sums
    int point_step;   // so many bytes apart; p.grid is then that of point `first`
    int read_as;      // what packed ones are, as the function of this name has it, or 0
    int count;
    int lanes_log2;  // of the threads that share a point
    int64_t first, image;
    const int* choice;  // in device memory: the launch works where its bits of `asked` are
    int asked, chosen;  // `chosen`; null: always
    // One of several launches, each of the points whose cells begin in one slab: so many pixels of
    // the slowest axis, see `Slabs`.
    bool slabs;
    int slab;
    unsigned slab_size;
    // Blocks of points of an image, which a launch may share out, see `each_block`: those of so
    // many images and shares of the channels, so many at a time.
    unsigned blocks, images, parts, in_turn, turns;
    unsigned* claims;  // in device memory: of turns, how many have been taken; or null
    bool neighbours;   // a block takes up to eight blocks of points that follow one another
    // Of p.grid, p.input, p.out or else p.grad_out, p.grad_grid: images from blockIdx.y on, of all
    // but p.input and p.grad_out at point `first`.
    Images grids, inputs, outs, slopes;
    int out_step;  // bytes between points of p.grad_out, where job.outs begins at the first; or -1
    AxisOf<float> axes[3];  // z, y, x
    Offsets input, sums;    // of p.input and p.grad_input
    DType sum_dtype;        // of what p.grad_input points to: sums of gradients
    uintptr_t input_end;    // where p.input's memory ends

    AxisOf<double> exact_axes[3];
    unsigned long long* fixed;  // or, where not null, memory of sums in fixed point
    int64_t places, terms;      // of those
    Line line;                  // of float32 sums,
    const float* whole_words;   // and where their whole words of 16 bytes end
    const void* lone;  // of 16-bit sums: the last element, if no other is in its word of 4 bytes
    // For who launches.
    int processors;     // of the GPU
    int threads;        // to a block, see `threads_of`
    unsigned* counter;  // what may be `claims` of one launch
    int shares;         // of the channels, in such a kernel
    int field;          // channels whose sums shared memory holds at a time; 0: none
    int field_blocks;   // blocks to an image of these
    Narrow narrow;
    bool general;  // offsets do not fit in 32 bits, or sums are in fixed point
    bool alone;    // the kernel for the gradient to the grid alone
    bool words;    // a thread takes a point, its channels in words
    bool across;   // which do not begin where words of memory do
    bool planes;   // channel after channel, where they are no neighbours
    bool follows;  // kernels that add to p.grad_input follow one of the same call, see `start`
    int together;  // words of a point's channels that a warp stages at a time

    template <typename A>
    __device__ const AxisOf<A>& axis(int d) const {
        if constexpr (sizeof(A) == 8)
            return exact_axes[d];
        else
            return axes[d];
    }
};

/// Launches the kernels for V channels at a time.
const char* grid_sample_forward(GridSampleJob& job, int V, cudaStream_t stream);
const char* grid_sample_backward(GridSampleJob& job, int V, cudaStream_t stream);
/// Of float32, V = 4.
const char* grid_sample_backward_words(GridSampleJob& job, cudaStream_t stream);
/// Nearest interpolation, V = 1: of float32, of 16 bits.
const char* grid_sample_nearest(GridSampleJob& job, cudaStream_t stream);
const char* grid_sample_nearest_16bit(GridSampleJob& job, cudaStream_t stream);

__device__ inline bool idle(const GridSampleJob& job) {
    return job.choice && (*job.choice & job.asked) != job.chosen;
}

/// Calls body(turn) for those of so many turns that are a block's: every so-many-th, as many as
/// there are blocks; or with `claims` the next that no block has taken. What blocks at work read
/// then lies as close together as if each turn had a block of its own, and none has more left to do
/// than others. A thread's body may return early, but all come back from it.
template <typename Body>
__device__ inline void share_out(unsigned turns, unsigned* claims, const Body& body) {
    __shared__ unsigned next;
    for (unsigned turn = blockIdx.x; turn < turns;) {
        if (claims && threadIdx.x == 0) next = gridDim.x + atomicAdd(claims, 1u);
        body(turn);
        if (!claims) {
            turn += gridDim.x;
            continue;
        }
        __syncthreads();
        turn = next;
        __syncthreads();
    }
}

/// Calls body(block, image, share) for the blocks of points that are a block's, unless the launch
/// is idle. kTurns: for several, as `launch_in_turn` has it. All that a loop reads, parameters too,
/// is fetched before its first turn, which may be its last; so kernels have bodies without one.
template <bool kTurns, typename Body>
__device__ inline void each_block(const GridSampleJob& job, const Body& body) {
    if constexpr (kTurns) {
        if (idle(job)) return;
        const bool flat = job.claims && job.images * job.parts > 1;
        const unsigned all = flat ? job.blocks * job.images * job.parts : job.blocks;
        share_out(job.turns, job.claims, [&](unsigned turn) {
            const unsigned first = turn * job.in_turn;
            for (unsigned number = first; number < min(first + job.in_turn, all); ++number) {
                unsigned block = number, image = blockIdx.y, share = blockIdx.z;
                if (flat) {
                    const unsigned row = number / job.blocks;
                    block -= row * job.blocks, share = row / job.images;
                    image = row - share * job.images;
                }
                body(block, image, share);
            }
        });
    } else {
        body(blockIdx.x, blockIdx.y, blockIdx.z);
    }
}

constexpr int kInRow = 8;  // blocks of points that a block takes, see `launch_in_rows`

/// Calls body(block) for the blocks of points that are a block's, unless the launch is idle: one,
/// or with kRow the next kInRow.
template <bool kRow, typename Body>
__device__ inline void each_in_row(const GridSampleJob& job, const Body& body) {
    if (idle(job)) return;
    if constexpr (kRow) {
        const unsigned first = blockIdx.x * kInRow;
#pragma unroll 1
        for (unsigned block = first; block < min(first + kInRow, job.blocks); ++block) body(block);
    } else {
        body(blockIdx.x);
    }
}

HD constexpr int power(int base, int exponent) {
    return exponent == 0 ? 1 : base * power(base, exponent - 1);
}

/// The point of a thread and its share of the channels: neighbouring threads have neighbouring
/// points, and 32 threads 32 >> lanes_log2 of them.
struct ThreadPoint {
    int64_t b, q;  // image, point of the image
    int i;         // point of the launch
    int lane, lanes;
    bool inside;

    __device__ ThreadPoint(const GridSampleJob& job) : ThreadPoint(job, blockIdx.x, blockIdx.y) {}
    __device__ ThreadPoint(const GridSampleJob& job, unsigned block, unsigned image) {
        const int points_log2 = 5 - job.lanes_log2, in_warp = threadIdx.x % 32;
        const int warp = block * (blockDim.x / 32) + threadIdx.x / 32;
        i = (warp << points_log2) + (in_warp & ((1 << points_log2) - 1));
        lane = in_warp >> points_log2, lanes = 1 << job.lanes_log2;
        b = job.image + image, q = job.first + i;
        inside = i < job.count;
    }
};

HD inline int element_size(DType dtype) {
    return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

/// Launches `kernel` for all points, `each` of them to 32 threads, in at most so many blocks;
/// blockIdx.z is the share of the channels where there are several. `shared`: bytes of dynamic
/// shared memory. `more`: what the kernel takes beside the job.
template <typename Kernel, typename... More>
inline const char* launch_points(Kernel kernel, GridSampleJob& job, int each, cudaStream_t stream,
                                 int64_t most = 0x7fffffff, int shares = 1, int shared = 0,
                                 const More&... more) {
    constexpr int64_t kMostPoints = 1 << 30, kMostImages = 65535, kTurns = 8;
    constexpr int kFewWaves = 32, kClaimed = 4;  // beyond so many, blocks are claimed by fours
    GridSampleParams& p = job.p;
    const void* const grid_begin = p.grid;
    const int size = element_size(p.dtype), grid_size = element_size(p.grid_dtype);
    // From element `first` of the launch's first image on, for images so many elements apart.
    const auto begin = [&job](const void* data, int64_t apart, int64_t first, int size) -> Images {
        const int64_t skipped = job.image * apart + first;
        return {static_cast<char*>(const_cast<void*>(data)) + skipped * size, apart * size};
    };
    for (job.image = 0; job.image < p.B; job.image += kMostImages) {
        const int64_t images = p.B - job.image < kMostImages ? p.B - job.image : kMostImages;
        for (job.first = 0; job.first < p.P; job.first += kMostPoints) {
            job.count = int(p.P - job.first < kMostPoints ? p.P - job.first : kMostPoints);
            if (job.packed)
                p.grid = static_cast<const char*>(grid_begin) + job.first * job.point_step;
            job.grids = begin(p.grid, p.grid_stride[0], 0, grid_size);
            job.inputs = begin(p.input, p.input_stride[0], 0, size);
            const int64_t step = p.grad_out_points.stride[2];
            const bool even = p.grad_out && p.grad_out_points.count[1] >= p.P && step < 1 << 27;
            job.out_step = even ? int(step) * size : -1;
            job.outs = p.grad_out ? begin(p.grad_out, p.grad_out_stride[0],
                                          even ? job.first * step : 0, size)
                                  : begin(p.out, p.C * p.P, job.first, size);
            job.slopes = begin(p.grad_grid, p.P * p.D, job.first * p.D, grid_size);
            const int64_t warps = ceil_div(job.count, each);
            const int block = warps < job.threads / 32 ? int(warps) : job.threads / 32;
            const int64_t blocks = ceil_div(warps, block);
            job.blocks = unsigned(blocks), job.images = unsigned(images);
            job.parts = unsigned(shares);
            const int64_t all = blocks * images * shares, neighbours = ceil_div(blocks, most);
            if (images < p.B || job.count < p.P || all > 0x7fffffff) job.claims = nullptr;
            job.in_turn = job.claims ? (all / most < kFewWaves ? 1 : kClaimed)
                          : job.neighbours && neighbours <= kTurns ? unsigned(neighbours)
                                                                   : 1;
            const int64_t turns = ceil_div(job.claims ? all : blocks, job.in_turn);
            job.turns = unsigned(turns);
            dim3 grids(unsigned(turns < most ? turns : most));
            if (!job.claims) grids.y = job.images, grids.z = job.parts;
            start(kernel, grids, block * 32, shared, job.follows, stream, job, more...);
        }
    }
    return launch_error();
}

/// How a launch that a look may leave idle works: in so many blocks to a processor, since even
/// those that do nothing take 0.6 ns each. Each takes turns.
struct InTurn {
    int blocks;
    bool claimed = false;  // the next turn that no block has taken; or turns a fixed step apart
};
/// As many blocks as are at work at a time, which claim their turns: of words of four channels 0.79
/// to 1.02 of the time of kGivenWords. Of planes and of other pixels 0.99 of that of 256 blocks a
/// fixed step apart, which take 20 us where they do nothing (an H100, 238 drawn cases).
constexpr InTurn claimed(int at_work) { return {at_work, true}; }
constexpr InTurn kPlanes = claimed(14), kGivenWords{32};
constexpr int kSlabBlocks = 14;  // of a slab, whose launches are many

/// Launches a kernel that has `each_block`: `kernel`; or, where a look may leave the launch idle,
/// `turns`, its kind with kTurns.
inline const char* launch_in_turn(void (*turns)(GridSampleJob), void (*kernel)(GridSampleJob),
                                  GridSampleJob& job, int each, cudaStream_t stream, InTurn way,
                                  int shares = 1) {
    constexpr int kNeighbours = 1024;
    if (!job.choice) return launch_points(kernel, job, each, stream, 0x7fffffff, shares);
    int blocks = way.blocks;
    if (job.neighbours)
        blocks = kNeighbours;
    else if (job.slabs)
        blocks = blocks < kSlabBlocks ? blocks : kSlabBlocks;
    else if (way.claimed)
        job.claims = std::exchange(job.counter, nullptr);
    const char* error =
        launch_points(turns, job, each, stream, int64_t(blocks) * job.processors, shares);
    job.claims = nullptr;
    return error;
}

/// Launches a kernel that has `each_in_row`: `kernel`; or, where a look may leave the launch idle,
/// `rows`, its kind with kRow, whose blocks are fewer: even those that do nothing take 1.2 ns each.
/// For nearest sums, which the turns of `launch_in_turn` keep a fifth longer; linear ones gain
/// nothing by loops in the mean, and lose up to two thirds.
inline const char* launch_in_rows(void (*rows)(GridSampleJob), void (*kernel)(GridSampleJob),
                                  GridSampleJob& job, int each, cudaStream_t stream, int shares) {
    constexpr int64_t kMany = 256;  // to a processor: some waves of blocks that take kInRow
    const int64_t blocks = ceil_div(job.p.P, int64_t(job.threads / 32) * each);
    const bool many = job.choice && blocks * job.p.B * shares > kMany * job.processors;
    return launch_points(many ? rows : kernel, job, each, stream,
                         many ? ceil_div(blocks, kInRow) : 0x7fffffff, shares);
}
