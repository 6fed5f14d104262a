// Cells of points for grid_sample's linear and nearest interpolation on the GPU: where their
// corners lie, with which weights.
#pragma once
#include "job.cuh"
#include "short.cuh"

constexpr unsigned kAll = ~0u;

/// True if corner k lies in the image, by Cell::flags.
template <int D>
__device__ inline bool corner_in(uint32_t flags, int k) {
    bool all = true;
#pragma unroll
    for (int d = 0; d < D; ++d) all = all && (flags >> (2 * d + (k >> d & 1)) & 1);
    return all;
}

/// Which corners lie in the image, a bit each, by Cell::flags.
template <int D>
__device__ inline uint32_t corners_of(uint32_t flags) {
    uint32_t corners = flags & 3;
#pragma unroll
    for (int d = 1; d < D; ++d)
        corners = (flags >> 2 * d & 1 ? corners : 0) |
                  (flags >> (2 * d + 1) & 1 ? corners << (1 << d) : 0);
    return corners;
}

/// The cell of a point: its first corner, which may lie outside, where in it the point lies, and
/// which corners are in the image. Nearest interpolation has the first corner alone.
template <typename A, int D>
struct Cell {
    int base;        // offset in units, negative where the corner lies outside
    A part[D];       // x, y, z in [0, 1)
    uint32_t flags;  // two bits an axis: its first and second pixel lie in the image; from bit 8 on
                     // two an axis: the point moves with the coordinate, and against it; bit 16:
                     // the first x is odd

    __device__ bool valid(int k) const { return corner_in<D>(flags, k); }
    /// Whether any of its corners lies in the image.
    __device__ bool near() const {
        bool all = true;
#pragma unroll
        for (int d = 0; d < D; ++d) all = all && (flags >> 2 * d & 3);
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
    __device__ A moved(int d, const GridSampleJob& job) const {
        const uint32_t sign = flags >> (8 + 2 * d) & 3;
        const A scale = job.template axis<A>(2 - d).scale;
        return sign == 0 ? A(0) : sign == 1 ? scale : -scale;
    }
};

/// What packed coordinates are, as a bit; `pairs`: two of them can be read in one word. No number:
/// of those the compiler makes a table of jumps, in memory that is cold when a kernel begins.
HD constexpr int read_as(DType dtype, bool pairs) { return 1 << (int(dtype) * 2 + pairs); }

/// Coordinates of a point: read early, so that much is under way at a time.
template <typename A, int D>
struct Coordinates {
    A x[D];

    Coordinates() = default;
    /// Point i of the launch; `image`: where the grid of its image begins, in bytes.
    __device__ Coordinates(const GridSampleJob& job, const char* image, int i) {
        if (read_packed<float>(DType::kFloat, job, image, i) ||
            read_packed<Half>(DType::kHalf, job, image, i) ||
            read_packed<BFloat16>(DType::kBFloat16, job, image, i) ||
            (sizeof(A) == 8 && read_packed<double>(DType::kDouble, job, image, i)))
            return;
        A any[D];  // of its own: what a function writes to lies in memory
        read(job, image, i, any);
#pragma unroll
        for (int d = 0; d < D; ++d) x[d] = any[d];
    }
    template <typename G>
    __device__ bool read_packed(DType dtype, const GridSampleJob& job, const char* image, int i) {
        const auto* at = reinterpret_cast<const G*>(image + int64_t(i) * job.point_step);
        if (D == 2 && job.read_as & read_as(dtype, true)) {
            const auto both = load_constant<G, 2>(at);
            x[0] = load(both.at[0]), x[1] = load(both.at[1]);
            return true;
        }
        if (!(job.read_as & read_as(dtype, false))) return false;
#pragma unroll
        for (int d = 0; d < D; ++d) x[d] = load(load_constant<G, 1>(at + d).at[0]);
        return true;
    }
    /// Any strides and dtype. Not inlined, as is all that is rarely needed: the kernels' own code
    /// stays short.
    __device__ __noinline__ static void read(const GridSampleJob& job, const char* image, int i,
                                             A (&x)[D]) {
        const GridSampleParams& p = job.p;
        const int64_t from = p.grid_points.at(job.packed ? i : job.first + i);
        for (int d = 0; d < D; ++d)
            x[d] = load_as<A>(p.grid_dtype, image, from + d * p.grid_stride[1]);
    }
};

/// Where the grid of an image begins.
__device__ inline const char* grid_of(const GridSampleJob& job, int64_t b) {
    return static_cast<const char*>(job.p.grid) +
           b * job.p.grid_stride[0] * element_size(job.p.grid_dtype);
}

/// Of a sign, as Cell::flags has it: 1 for a positive one, 2 for a negative one.
template <typename A>
__device__ inline uint32_t bits_of(A sign) {
    return sign > 0 ? 1 : sign < 0 ? 2 : 0;
}

/// A position mirrored at the borders once or more.
template <typename A>
__device__ __noinline__ Moved<A> far_reflected(A x, A size, bool align_corners) {
    return reflected(x, size, align_corners);
}
/// `reflected`, which is quick where a position is mirrored once at most.
template <typename A>
__device__ inline A quickly_reflected(A x, const AxisOf<A>& axis, int size, bool align_corners,
                                      A* sign) {
    const A low = axis.low, span = axis.span, from_low = x - low, in = fabs(from_low);
    if (in < 2 * span) {
        const bool back = in >= span;
        *sign = (from_low < 0) != back ? A(-1) : A(1);
        return back ? span - (in - span) + low : in + low;
    }
    const Moved<A> far = far_reflected(x, A(size), align_corners);
    *sign = far.slope;
    return far.at;
}

/// The pixel at or before a position, or the nearest; `part` is how far beyond it the position is.
__device__ inline int pixel_of(double u, bool nearest, double& part) {
    const double first = nearest ? rint(u) : floor(u);
    part = nearest ? 0 : u - first;
    return int(first);
}
/// Of less than 2^22: where the last bit of a sum is 1, its rounding is what is asked for.
__device__ inline int pixel_of(float u, bool nearest, float& part) {
    constexpr float kOnes = 0x1.8p23f;
    const float sum = nearest ? __fadd_rn(u, kOnes) : __fadd_rd(u, kOnes);
    part = nearest ? 0 : u - (sum - kOnes);
    return __float_as_int(sum) - __float_as_int(kOnes);
}

/// Where a point lies: the first pixel of its cell along x, y, z, the rest as in Cell.
template <typename A, int D>
struct Spot {
    int index[D];
    A part[D];
    A sign[D];         // of a gradient: which way the point moves with a coordinate, or 0
    uint32_t moves;    // the same, as in Cell::flags
    bool real, whole;  // no coordinate is NaN (of a gradient); all corners lie in the image

    /// The bits of Cell::flags that say which corners lie in the image.
    __device__ uint32_t corners(const GridSampleParams& p, bool nearest) const {
        uint32_t bits = 0;
        if (!real) return bits;
#pragma unroll
        for (int d = 0; d < D; ++d) {
            const unsigned size = unsigned(p.size[2 - d]);
            bits |= uint32_t(unsigned(index[d]) < size) << 2 * d |
                    uint32_t(unsigned(index[d] + 1) < size && !nearest) << (2 * d + 1);
        }
        return bits;
    }
    /// Cell::flags.
    __device__ uint32_t flags(const GridSampleParams& p, bool nearest) const {
        const uint32_t inside = whole ? (1u << 2 * D) - 1 : corners(p, nearest);
        return inside | moves | uint32_t(index[0] & 1) << 16;
    }
    /// True if the launch takes the point.
    __device__ bool in_slab(const GridSampleJob& job) const {
        return !job.slabs || unsigned(index[D - 1]) - unsigned(job.slab) < job.slab_size;
    }
    /// In units of these offsets.
    __device__ int base(const Offsets& steps) const {
        int sum = 0;
#pragma unroll
        for (int d = 0; d < D; ++d) sum += index[d] * steps.step[2 - d];
        return sum;
    }
    __device__ Cell<A, D> in(const Offsets& steps, uint32_t flags) const {
        Cell<A, D> cell;
        cell.base = base(steps), cell.flags = flags;
#pragma unroll
        for (int d = 0; d < D; ++d) cell.part[d] = part[d];
        return cell;
    }
};

/// `kSlope`: for a gradient.
template <bool kSlope, typename A, int D>
__device__ inline Spot<A, D> spot_of(const GridSampleJob& job, const Coordinates<A, D>& at,
                                     bool nearest) {
    const GridSampleParams& p = job.p;
    Spot<A, D> spot;
    spot.whole = !nearest, spot.real = true, spot.moves = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        const AxisOf<A>& axis = job.template axis<A>(2 - d);
        A u = (at.x[d] + 1) * axis.scale + axis.shift, sign = 1;
        if (p.padding == Padding::kReflection)
            u = quickly_reflected(u, axis, p.whole[2 - d], p.align_corners, &sign);
        if (kSlope) spot.real = spot.real && u == u;
        const bool moves = kSlope && u > axis.least && u < axis.most;
        spot.sign[d] = moves ? sign : 0;
        spot.moves |= moves ? bits_of(sign) << (8 + 2 * d) : 0;
        u = fmin(fmax(u, axis.least), axis.most);
        spot.index[d] = pixel_of(u, nearest, spot.part[d]) - p.first[2 - d];
        spot.whole = spot.whole && unsigned(spot.index[d]) < unsigned(p.size[2 - d] - 1);
    }
    spot.whole = spot.whole && spot.real;
    return spot;
}

/// The cell of a point. `kSlope`: for a gradient.
template <bool kSlope, typename A, int D>
__device__ inline Cell<A, D> cell_of(const GridSampleJob& job, const Offsets& steps,
                                     const Coordinates<A, D>& at) {
    const bool nearest = job.p.interpolation == Interpolation::kNearest;
    const auto spot = spot_of<kSlope>(job, at, nearest);
    return spot.in(steps, spot.flags(job.p, nearest));
}

/// Makes a word what it is here, and not elsewhere in parts.
__device__ inline void keep(uint4& x) { asm("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)); }
__device__ inline void keep(uint2& x) { asm("" : "+r"(x.x), "+r"(x.y)); }

template <typename T, int V>
__device__ __noinline__ Vector<T, V> load_each(const T* from, int count) {
    Vector<T, V> word{};
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (j < count) word.at[j] = from[j];
    return word;
}
/// How V channels are read, of which so many are left: a word of memory, parts of two, or each.
enum class Read { kWord, kAcross, kEach };

template <typename T, int V, Read kHow>
__device__ inline Vector<T, V> load_word(const char* from, int left) {
    const auto* first = reinterpret_cast<const T*>(from);
    if constexpr (kHow == Read::kAcross) {
        const auto at = reinterpret_cast<uintptr_t>(from);
        const auto end = at + min(V, left) * int(sizeof(T)) - 1;
        const uint4 low = __ldg(reinterpret_cast<const uint4*>(at - at % 16));
        const uint4 high = __ldg(reinterpret_cast<const uint4*>(end - end % 16));
        return bit_copy<Vector<T, V>>(window<T>(low, high, unsigned(at) % 16));
    }
    if constexpr (kHow == Read::kEach) return load_each<T, V>(first, left);
    return load_constant<T, V>(first);
}
/// True if the words that these channels lie in end before the input's memory does.
template <typename T, int V>
__device__ inline bool ends_inside(const GridSampleJob& job, const char* from, int left) {
    const auto end = reinterpret_cast<uintptr_t>(from) + min(V, left) * int(sizeof(T));
    return ((end - 1) | 15) < job.input_end;
}

/// True if it is so of all of a warp's threads that are here: where a few cells reach out of the
/// image, all take the way that asks of each corner, once, and not some after the others.
__device__ inline bool of_all(bool so) { return __all_sync(__activemask(), so); }

/// V channels of the corners, from the first pixel's on; zeros for those outside of the image.
template <typename T, int V, int D, bool kAcross = false>
__device__ inline void load_corners(const GridSampleJob& job, const char* in,
                                    const Cell<Acc<T>, D>& cell, Vector<T, V> (&value)[1 << D],
                                    int left = V) {
    const char* first = in + int64_t(cell.base) * job.input.unit;
    asm("" : "+l"(first));  // one sum for each corner, not one for each part of it
    constexpr int K = 1 << D;
    constexpr auto kHow = kAcross ? Read::kAcross : Read::kWord;
    constexpr auto kRest = kAcross ? Read::kEach : Read::kWord;
    const char* last = first + job.input.corner[K - 1];
    using W = typename Word<sizeof(T) * V>::type;
    W word[K];  // taken apart where both ways have met, once
    if (kAcross ? cell.whole() && ends_inside<T, V>(job, last, left) : of_all(cell.whole())) {
#pragma unroll
        for (int k = 0; k < K; ++k)
            word[k] = bit_copy<W>(load_word<T, V, kHow>(first + job.input.corner[k], left));
    } else {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            word[k] = {};
            if (cell.valid(k))
                word[k] = bit_copy<W>(load_word<T, V, kRest>(first + job.input.corner[k], left));
        }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if constexpr (sizeof(T) == 2 && V > 1) keep(word[k]);
        value[k] = bit_copy<Vector<T, V>>(word[k]);
    }
}

/// C channels of the corners of a spot, whose first lies at `first`; where kPart, as many as are
/// left.
template <typename T, int D, int C, Narrow kLayout, bool kPart>
struct Pixels {
    static constexpr bool kAcross = kLayout == Narrow::kAcross;
    static constexpr int V = kLayout == Narrow::kWords || kAcross ? C : 1;
    Vector<T, V> at[1 << D][C / V];

    /// `whole`: all corners lie in the image, of all threads but across words; else flags() tells
    /// which do.
    template <typename Flags>
    __device__ void read(const GridSampleJob& job, bool whole, const Flags& flags,
                         const char* first, int64_t c_step, int left) {
        constexpr auto kHow = kAcross ? Read::kAcross : Read::kWord;
        const char* last = first + job.input.corner[(1 << D) - 1];
        if (whole && (!kAcross || ends_inside<T, V>(job, last, left))) {
            each<kHow>(job, first, c_step, left, [](int) { return true; });
        } else {
            memset(at, 0, sizeof(at));
            constexpr auto kRest = kAcross ? Read::kEach : Read::kWord;
            const uint32_t in = flags();
            each<kRest>(job, first, c_step, left, [&](int k) { return corner_in<D>(in, k); });
        }
    }
    /// The same of one channel, of the corners `valid`, a bit each.
    __device__ void read_valid(const GridSampleJob& job, bool whole, uint32_t valid,
                               const char* first) {
        if (whole) return each<Read::kWord>(job, first, 0, 1, [](int) { return true; });
        memset(at, 0, sizeof(at));
        each<Read::kWord>(job, first, 0, 1, [&](int k) { return valid >> k & 1; });
    }
    template <Read kHow, typename Valid>
    __device__ void each(const GridSampleJob& job, const char* first, int64_t c_step, int left,
                         const Valid& valid) {
        const auto load = [&](int k, int c, const char* from) {
            if (valid(k)) at[k][c] = load_word<T, V, kHow>(from, left);
        };
#pragma unroll
        for (int k = 0; k < 1 << D; k += 2) {
            const char* row = k == 0 ? first : first + job.input.corner[k];
            const char* next = first + job.input.corner[k + 1];
            asm("" : "+l"(row));
#pragma unroll
            for (int c = 0; c < C / V; ++c, row += c_step) {
                if (kPart && V == 1 && c >= left) break;
                load(k, c, row);
                load(k + 1, c, kLayout == Narrow::kPlanar ? row + sizeof(T) : next + c * c_step);
            }
        }
    }
    __device__ Acc<T> value(int k, int c, DType dtype) const {
        return value_of(at[k][c / V].at[c % V], dtype);
    }
};

/// Blocks of kThreads to an SM: registers that hold a point's values, and no more.
template <typename T, int D, int C>
constexpr int kNarrowBlocks = ((D == 2 ? 14 : 12) - (C == 8   ? D + 4
                                                     : C == 4 ? 4
                                                              : 0)) /
                              (sizeof(T) == 8 ? 2 : 1);

/// The largest block of a kernel, see `threads_of`, and how many of these fit where so many blocks
/// of kThreads do.
template <typename T, Narrow kLayout>
constexpr int kLargest = kLayout == Narrow::kPlanar && sizeof(T) < 8 ? kMostThreads : kThreads;
template <typename T, Narrow kLayout>
constexpr int blocks_of(int blocks) {
    return blocks * kThreads / kLargest<T, kLayout>;
}
