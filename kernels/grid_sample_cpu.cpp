// grid_sample and its derivatives on the CPU; grid_sample.h has the formula.
//
// Points are taken in blocks of kBlock, whose taps are computed first, in vectors of points. Three
// steps then do every job: `sample` sums weight * pixel over the taps, `differentiate` does so with
// the weights' derivatives and grad_out, `scatter` adds weight * grad_out to the taps' pixels. Each
// comes in two forms: by planes, a channel at a time in vectors of points; and by rows, a point at
// a time in vectors of channels, where those are neighbours. Rows read whole cache lines: where
// many points fall on an image of several channels it is copied to rows first, and 16-bit gradients
// are summed in float rows and rounded once.
//
// No two threads write the same pixel: they share images, channels, or slabs of the slowest axis.
// Each pixel's sum is in the order of points however that is done, so results never depend on the
// number of threads.
#include "grid_sample_cpu.h"

#include <numeric>

namespace {

constexpr int kRow = 64;  // channels of a row taken at a time
constexpr int kMostTaps = 16;
constexpr int64_t kLarge = 5 << 19;  // elements of an image that fit no cache of one core

/// A block of points: their taps along each axis. z has one tap in two dimensions.
template <typename A>
struct Block {
    const GridSampleParams& p;
    int64_t image = 0, first = 0;
    int count = 0, taps, outermost;
    bool slopes, inside = false;
    Axis<A> axis[3];

    Block(const GridSampleParams& params, bool slopes)
        : p(params), outermost(3 - params.D), slopes(slopes) {
        taps = p.interpolation == Interpolation::kLinear    ? 2
               : p.interpolation == Interpolation::kNearest ? 1
                                                            : 4;
        if (outermost == 0) return;
        axis[0].inside = true;
        std::fill_n(axis[0].index[0], kBlock, 0);
        std::fill_n(axis[0].weight[0], kBlock, A(1));
    }
    int taps_of(int a) const { return a < outermost ? 1 : taps; }
    int all_taps() const { return taps_of(0) * taps * taps; }

    void begin(int64_t b, int64_t point) {
        image = b, first = point, count = int(std::min<int64_t>(kBlock, p.P - point));
    }
    /// `what` at the points: 0 for z, 1 for y, 2 for x.
    void coordinates(const void* grid, const PointsView& view, const int64_t (&stride)[2], int a,
                     A* to) const {
        dispatch(p.grid_dtype, [&](auto element) {
            using G = decltype(element);
            read_points(static_cast<const G*>(grid) + image * stride[0] + (2 - a) * stride[1], view,
                        first, count, to);
        });
    }
    NOINLINE void find(int a) {
        A x[kBlock];
        coordinates(p.grid, p.grid_points, p.grid_stride, a, x);
        const auto run = [&](auto number) {
            find_taps<decltype(number)::value>(x, count, p.size[a], p.padding, p.align_corners,
                                               slopes, axis[a]);
        };
        if (taps == 1)
            run(std::integral_constant<int, 1>());
        else if (taps == 2)
            run(std::integral_constant<int, 2>());
        else
            run(std::integral_constant<int, 4>());
    }
    void find_all() {
        for (int a = outermost; a < 3; ++a) find(a);
    }
    /// Forgets taps outside of [begin, end) of the slowest axis; whether any are left.
    bool keep(int64_t begin, int64_t end) {
        const int n = count, low = int(begin), high = int(end);
        Axis<A>& slow = axis[outermost];
        int left = 0, gone = 0;
        for (int k = 0; k < taps; ++k)
            for (int i = 0; i < n; ++i) {
                const int at = slow.index[k][i];
                const bool out = (at < low) | (at >= high);
                slow.index[k][i] = out ? -1 : at;
                gone |= out, left |= !out;
            }
        slow.inside &= !gone;
        return left;
    }
    /// Each tap's place in a tensor; -1 outside.
    template <typename I>
    NOINLINE void offsets(const int64_t (&stride)[5], I (*to)[kBlock]) {
        const int n = count;
        inside = axis[0].inside & axis[1].inside & axis[2].inside;
        const I sz = I(stride[2]), sy = I(stride[3]), sx = I(stride[4]);
        for (int z = 0; z < taps_of(0); ++z)
            for (int y = 0; y < taps; ++y)
                for (int x = 0; x < taps; ++x, ++to) {
                    const int32_t *iz = axis[0].index[z], *iy = axis[1].index[y],
                                  *ix = axis[2].index[x];
                    I* __restrict at = *to;
                    if (inside)
                        for (int i = 0; i < n; ++i) at[i] = iz[i] * sz + iy[i] * sy + ix[i] * sx;
                    else
                        for (int i = 0; i < n; ++i)
                            at[i] = (iz[i] | iy[i] | ix[i]) < 0
                                        ? I(-1)
                                        : iz[i] * sz + iy[i] * sy + ix[i] * sx;
                }
    }
    /// Adds to each tap's weight, in which the axes of `derived` (bits) are differentiated.
    NOINLINE void weights(int derived, const A* factor, bool add, A (*to)[kBlock]) const {
        const int n = count;
        const auto along = [&](int a, int k) {
            return derived >> a & 1 ? axis[a].slope[k] : axis[a].weight[k];
        };
        for (int z = 0; z < taps_of(0); ++z)
            for (int y = 0; y < taps; ++y)
                for (int x = 0; x < taps; ++x, ++to) {
                    const A *wz = along(0, z), *wy = along(1, y), *wx = along(2, x);
                    A* __restrict w = *to;
                    if (!factor)
                        for (int i = 0; i < n; ++i) w[i] = wz[i] * wy[i] * wx[i];
                    else if (!add)
                        for (int i = 0; i < n; ++i) w[i] = factor[i] * wz[i] * wy[i] * wx[i];
                    else
                        for (int i = 0; i < n; ++i) w[i] += factor[i] * wz[i] * wy[i] * wx[i];
                }
    }
};

/// An image that is sampled, or to which is added.
struct Field {
    void* data;  // null: none
    int64_t stride[5];
    bool rows;
};

bool has_rows(const GridSampleParams& p, const int64_t (&stride)[5]) {
    return p.C >= 4 && stride[1] == 1;
}

int64_t pixels(const GridSampleParams& p) { return int64_t(p.size[0]) * p.size[1] * p.size[2]; }

int64_t taps(const GridSampleParams& p) {
    const int64_t each = p.interpolation == Interpolation::kLinear    ? 2
                         : p.interpolation == Interpolation::kNearest ? 1
                                                                      : 4;
    return each * each * (p.D == 3 ? each : 1);
}

/// The largest offset within one channel of an image fits 32 bits.
bool is_small(const GridSampleParams& p, const Field& f) {
    int64_t last = 0;
    for (int a = 0; a < 3; ++a) last += (p.size[a] - 1) * f.stride[2 + a];
    return last <= 0x7fffffff;
}

/// Whether most points lie far from the next one, in pixels: looked at in a sample of them.
bool is_scattered(const GridSampleParams& p) {
    constexpr int kPairs = 64, kFar = 8;
    if (p.P < 2) return false;
    int far = 0;
    dispatch(p.grid_dtype, [&](auto element) {
        const auto* const grid = static_cast<const decltype(element)*>(p.grid);
        for (int i = 0; i < kPairs; ++i) {
            // By the golden ratio: at even distances all could be ends of rows.
            const int64_t at = uint64_t(i) * 0x9E3779B97F4A7C15 % uint64_t(p.P - 1);
            const auto *one = grid + p.grid_points.at(at), *next = grid + p.grid_points.at(at + 1);
            double away = 0;
            for (int d = 0; d < p.D; ++d) {
                const int64_t k = d * p.grid_stride[1];
                away += fabs(double(load(next[k])) - double(load(one[k]))) * p.size[2 - d] / 2;
            }
            far += !(away < kFar);
        }
    });
    return far > kPairs / 2;
}

/// What is done, in which order, by how many.
struct Plan {
    enum Step { kCopy, kPoints, kScatter, kRound };
    Step steps[4];
    int count = 0;
    bool copy, sum;          // fields are copied to rows; the gradient is summed in scratch memory
    bool fused;              // the scattering step does all
    int64_t pieces;          // of the points, of copies
    int64_t shares, splits;  // of the scattering: images are shared, and each is split
    bool by_channel;
    bool planes;  // grid_sample.planes_cpu.cpp does the points, and all but the cubic scattering
    int64_t field_bytes;
    Field input, upstream, target;

    explicit Plan(const GridSampleParams& p) {
        const bool exact = p.dtype == DType::kFloat || p.dtype == DType::kDouble;
        const int64_t element = p.dtype == DType::kDouble ? 8 : 4, V = pixels(p),
                      all = p.B * p.C * V;
        const int64_t work = p.B * p.P * (taps(p) * p.C + 24), fair = 1 << 16;
        field_bytes = (all * element + 63) / 64 * 64;
        input = field(p.input, p.input_stride, p);
        upstream = field(p.to_grad_input, p.to_grad_input_stride, p);
        target = field(p.grad_input, p.grad_input_stride, p);
        const bool dense = p.P * taps(p) >= 2 * V && work > fair;
        const bool flat = p.interpolation == Interpolation::kNearest;
        const bool reads_input = !p.grad_out || (p.grad_grid && !flat) || (p.to_grad_grid && p.out);
        const bool reads = reads_input || (p.to_grad_input && p.out);
        // A copy pays where reads by planes would miss the cache: where neighbouring points are far
        // from each other in a volume of several channels, or in a large image of many.
        const bool cubic = p.interpolation == Interpolation::kCubic, wide = p.C * V > kLarge;
        const bool misses = p.D == 3 ? p.C >= 4 && p.scattered
                            : cubic  ? p.C >= 32 && p.C * V * element > 1 << 20
                                     : p.C >= 16 && wide && p.scattered && !flat;
        copy = reads && dense && (misses || !exact) &&
               !(exact && input.rows && (!upstream.data || upstream.rows));
        const bool adds_rows =
            p.D == 3 || cubic ? p.C >= 4 : p.C >= 8 && (p.scattered || !wide) && !flat;
        sum = p.grad_input && (!exact || (dense && adds_rows && !target.rows));
        if (!copy && (!exact || (upstream.data && input.rows != upstream.rows)))
            input.rows = upstream.rows = false;
        char* memory = static_cast<char*>(p.scratch);
        if (copy) {
            set_rows(p, input, memory), memory += field_bytes;
            if (upstream.data) set_rows(p, upstream, memory), memory += field_bytes;
        }
        if (sum) set_rows(p, target, memory);
        pieces = std::clamp<int64_t>(work / fair, 1, p.threads);
        const bool narrow = p.size[1] < 2 || p.size[2] < 2;
        planes = p.D == 2 && exact && p.grid_dtype == p.dtype && !p.to_grad_input &&
                 !p.to_grad_grid && !copy && !sum && !(narrow && !flat) &&
                 !(cubic && target.data && target.rows) && !(cubic && reads_input && input.rows) &&
                 is_small(p, input) && (!p.grad_input || is_small(p, target));
        const bool points = p.out || p.grad_grid;
        fused = true, shares = 1, splits = 1, by_channel = true;
        if (p.grad_input) {
            const int64_t want = std::clamp<int64_t>((work + all) / fair, 1, p.threads);
            if (want > 1) {
                shares = p.B >= 4 * want ? want : p.B;
                splits = p.B >= 4 * want ? 1 : want / std::gcd(p.B, want);
            }
            const int64_t units = target.rows ? ceil_div(p.C, 16) : p.C;
            by_channel = units % splits == 0 || units >= 4 * splits;
            if (!by_channel) splits = std::min<int64_t>(splits, p.size[3 - p.D]);
            fused = splits == 1;
        }
        if (copy) steps[count++] = kCopy;
        if (points && !(p.grad_input && fused)) steps[count++] = kPoints;
        if (p.grad_input) steps[count++] = kScatter;
        if (sum) steps[count++] = kRound;
    }

    static Field field(const void* data, const int64_t (&stride)[5], const GridSampleParams& p) {
        Field f{const_cast<void*>(data), {}, has_rows(p, stride)};
        std::copy_n(stride, 5, f.stride);
        return f;
    }
    static void set_rows(const GridSampleParams& p, Field& f, void* memory) {
        f.data = memory, f.rows = p.C >= 4;
        if (f.rows) {
            f.stride[1] = 1, f.stride[4] = p.C;
        } else {
            f.stride[4] = 1, f.stride[1] = pixels(p);
        }
        f.stride[3] = f.stride[4] * p.size[2], f.stride[2] = f.stride[3] * p.size[1];
        f.stride[0] = p.C * pixels(p);
    }
    int64_t scratch() const {
        return field_bytes * ((copy ? 1 + (upstream.data != nullptr) : 0) + sum);
    }
    int64_t items(const GridSampleParams& p) const {
        if (p.phase >= count) return 0;
        switch (steps[p.phase]) {
            case kPoints: return pieces;
            case kScatter: return shares * splits;
            default: return std::min<int64_t>(p.threads, ceil_div(p.B * p.C * pixels(p), 1 << 14));
        }
    }
};

/// Calls `body` with pieces of a row: V vectors of L channels each, from channel c on.
template <typename Body>
void each_piece(int64_t begin, int64_t end, const Body& body) {
    using std::integral_constant;
    constexpr integral_constant<int, 1> one;
    int64_t c = begin;
    for (; c + 64 <= end; c += 64)
        body(integral_constant<int, 16>(), integral_constant<int, 4>(), c);
    for (; c + 16 <= end; c += 16) body(integral_constant<int, 16>(), one, c);
    for (; c + 4 <= end; c += 4) body(integral_constant<int, 4>(), one, c);
    for (; c < end; ++c) body(one, one, c);
}

/// to[i] = in[at[i]], 0 where there is no such pixel.
template <typename E, typename I>
NOINLINE void fetch(const E* __restrict in, const I* __restrict at, int n, bool inside,
                    Acc<E>* __restrict to) {
    if (inside)
        for (int i = 0; i < n; ++i) to[i] = load(in[at[i]]);
    else
        for (int i = 0; i < n; ++i) to[i] = at[i] < 0 ? Acc<E>(0) : load(in[at[i]]);
}

/// to[0][i] and to[1][i] = the neighbours in[at[i]] and in[at[i] + 1], each pair in one load.
template <typename A, typename I>
NOINLINE void fetch_pairs(const A* __restrict in, const I* __restrict at, int n,
                          A (*__restrict to)[kBlock]) {
    struct Pair {
        A left, right;
    };
    Pair pair[kBlock];
    for (int i = 0; i < n; ++i) memcpy(&pair[i], in + at[i], sizeof(Pair));
    for (int i = 0; i < n; ++i) to[0][i] = pair[i].left, to[1][i] = pair[i].right;
}

/// All steps on points, in the accumulating type A.
template <typename A>
class Steps {
    using Weights = A (*)[kBlock];
    const GridSampleParams& p;
    const Plan& plan;
    Block<A> block;
    int M;  // taps of a point
    int64_t wide[kMostTaps][kBlock];
    int32_t narrow[kMostTaps][kBlock];
    A weight[kMostTaps][kBlock], along[3][kMostTaps][kBlock], dots[kMostTaps][kBlock];
    A tile[kBlock][kRow];
    A values[kBlock], pixel[2][kBlock], to_grid[3][kBlock];
    int8_t near[kBlock], whole[kBlock];  // the points that have taps; whether all of them
    int near_count;

    /// A field's element type: that of the input where it has not been copied.
    template <typename Body>
    void with_type(const Body& body) {
        if (plan.copy || std::is_same_v<A, double> || p.dtype == DType::kFloat)
            body(A());
        else if constexpr (std::is_same_v<A, float>)
            p.dtype == DType::kHalf ? body(Half()) : body(BFloat16());
    }
    /// Finds the taps' places in a field, with 32 bits where they will do.
    void locate(const Field& f) {
        small = !f.rows && is_small(p, f);
        small ? block.offsets(f.stride, narrow) : block.offsets(f.stride, wide);
    }
    bool small;

    /// Calls `body(m, values)` with what a channel has at the taps.
    template <typename Body>
    void each_tap(const Field& f, int64_t c, const Body& body) {
        with_type([&](auto element) {
            using E = decltype(element);
            const E* in =
                static_cast<const E*>(f.data) + block.image * f.stride[0] + c * f.stride[1];
            if constexpr (std::is_same_v<E, A>)
                if (block.inside && block.taps == 2 && f.stride[4] == 1) {
                    for (int m = 0; m < M; m += 2) {
                        small ? fetch_pairs(in, narrow[m], block.count, pixel)
                              : fetch_pairs(in, wide[m], block.count, pixel);
                        body(m, pixel[0]), body(m + 1, pixel[1]);
                    }
                    return;
                }
            for (int m = 0; m < M; ++m) {
                small ? fetch(in, narrow[m], block.count, block.inside, pixel[0])
                      : fetch(in, wide[m], block.count, block.inside, pixel[0]);
                body(m, pixel[0]);
            }
        });
    }
    A* row(const Field& f) const { return static_cast<A*>(f.data) + block.image * f.stride[0]; }
    /// grad_out of a channel.
    NOINLINE void read_grad(int64_t c, A* to) {
        dispatch_to_A([&](auto element) {
            using T = decltype(element);
            read_points(static_cast<const T*>(p.grad_out) + block.image * p.grad_out_stride[0] +
                            c * p.grad_out_stride[1],
                        p.grad_out_points, block.first, block.count, to);
        });
    }
    /// `dispatch` of p.dtype among the types that are accumulated in A.
    template <typename Body>
    void dispatch_to_A(const Body& body) {
        if constexpr (std::is_same_v<A, double>)
            body(double());
        else if (p.dtype == DType::kFloat)
            body(float());
        else
            p.dtype == DType::kHalf ? body(Half()) : body(BFloat16());
    }
    NOINLINE void write_out(int64_t c, const A* from, int step) {
        dispatch_to_A([&](auto element) {
            using T = decltype(element);
            T* to = static_cast<T*>(p.out) + (block.image * p.C + c) * p.P + block.first;
            if (step == 1)
                for (int i = 0; i < block.count; ++i) to[i] = store<T>(from[i]);
            else
                for (int i = 0; i < block.count; ++i) to[i] = store<T>(from[i * kRow]);
        });
    }
    /// grad_out of channels [c, c + count) as rows of the tile.
    NOINLINE void read_tile(int64_t c, int count) {
        for (int k = 0; k < count; ++k) {
            read_grad(c + k, values);
            for (int i = 0; i < block.count; ++i) tile[i][k] = values[i];
        }
    }

    /// out = the sum over the fields' taps by these weights.
    struct Term {
        const Field* field;
        const A (*weight)[kBlock];
    };
    void sample(std::initializer_list<Term> terms) {
        const Term* located = nullptr;
        const auto find = [&](const Term& term) {
            if (located != &term) locate(*term.field);
            located = &term;
        };
        if (!terms.begin()->field->rows) {
            for (int64_t c = 0; c < p.C; ++c) {
                std::fill_n(values, block.count, A(0));
                for (const Term& term : terms) {
                    find(term);
                    each_tap(*term.field, c, [&](int m, const A* x) {
                        for (int i = 0; i < block.count; ++i) values[i] += term.weight[m][i] * x[i];
                    });
                }
                write_out(c, values, 1);
            }
            return;
        }
        each_piece(0, p.C, [&](auto lanes, auto vectors, int64_t c) {
            constexpr int L = decltype(lanes)::value, V = decltype(vectors)::value;
            for (const Term& term : terms) {
                find(term);
                sample_rows<L, V>(row(*term.field) + c, term.weight, &term != terms.begin());
            }
            for (int k = 0; k < L * V; ++k) write_out(c + k, tile[0] + k, kRow);
        });
    }
    template <int L, int V>
    void sample_rows(const A* in, const A (*w)[kBlock], bool add) {
        using Vector = typename Lanes<A, L>::type;
        for (int i = 0; i < block.count; ++i) {
            Vector sum[V] = {};
            if (add) memcpy(sum, tile[i], sizeof(sum));
            for (int m = 0; m < M; ++m) {
                const int64_t at = wide[m][i];
                for (int v = 0; v < V; ++v)
                    sum[v] += w[m][i] * (at < 0 ? Vector{} : load_lanes<Vector>(in + at + v * L));
            }
            memcpy(tile[i], sum, sizeof(sum));
        }
    }

    /// to_grid[d] += sum over channels and taps of grad_out * weight[d] * field.
    void differentiate(const Field& f, const A (*w)[kMostTaps][kBlock]) {
        locate(f);
        if (!f.rows) {
            for (int m = 0; m < M; ++m) std::fill_n(dots[m], block.count, A(0));
            for (int64_t c = 0; c < p.C; ++c) {
                read_grad(c, values);
                each_tap(f, c, [&](int m, const A* x) {
                    for (int i = 0; i < block.count; ++i) dots[m][i] += values[i] * x[i];
                });
            }
            for (int d = 0; d < p.D; ++d)
                for (int m = 0; m < M; ++m)
                    for (int i = 0; i < block.count; ++i) to_grid[d][i] += w[d][m][i] * dots[m][i];
            return;
        }
        each_piece(0, p.C, [&](auto lanes, auto vectors, int64_t c) {
            constexpr int L = decltype(lanes)::value, V = decltype(vectors)::value;
            read_tile(c, L * V);
            for (int v = 0; v < V; ++v) differentiate_rows<L>(row(f) + c + v * L, v * L, w);
        });
    }
    template <int L>
    void differentiate_rows(const A* in, int column, const A (*w)[kMostTaps][kBlock]) {
        using Vector = typename Lanes<A, L>::type;
        for (int i = 0; i < block.count; ++i) {
            Vector sum[3] = {};
            for (int m = 0; m < M; ++m) {
                const int64_t at = wide[m][i];
                const Vector x = at < 0 ? Vector{} : load_lanes<Vector>(in + at);
                for (int d = 0; d < 2; ++d) sum[d] += w[d][m][i] * x;
                if (p.D == 3) sum[2] += w[2][m][i] * x;
            }
            const Vector g = load_lanes<Vector>(tile[i] + column);
            for (int d = 0; d < p.D; ++d) {
                const Vector product = sum[d] * g;
                A total = 0;
                for (int l = 0; l < L; ++l) total += product[l];
                to_grid[d][i] += total;
            }
        }
    }

    /// Adds weight * grad_out to the pixels of channels [begin, end) of the target.
    void scatter(int64_t begin, int64_t end) {
        const Field& f = plan.target;
        block.offsets(f.stride, wide);
        if (!f.rows) {
            sort_out();
            for (int64_t c = begin; c < end; ++c) {
                read_grad(c, values);
                A* plane = row(f) + c * f.stride[1];
                switch (M) {
                    case 1: scatter_plane<1>(plane); break;
                    case 4: scatter_plane<4>(plane); break;
                    case 8: scatter_plane<8>(plane); break;
                    default: scatter_plane<16>(plane);
                }
            }
            return;
        }
        each_piece(begin, end, [&](auto lanes, auto vectors, int64_t c) {
            constexpr int L = decltype(lanes)::value, V = decltype(vectors)::value;
            using Vector = typename Lanes<A, L>::type;
            read_tile(c, L * V);
            A* to = row(f) + c;
            for (int i = 0; i < block.count; ++i)
                for (int m = 0; m < M; ++m) {
                    const int64_t at = wide[m][i];
                    if (at < 0) continue;
                    for (int v = 0; v < V; ++v) {
                        const Vector x = load_lanes<Vector>(to + at + v * L) +
                                         weight[m][i] * load_lanes<Vector>(tile[i] + v * L);
                        memcpy(to + at + v * L, &x, sizeof(x));
                    }
                }
        });
    }
    template <int kM>
    void scatter_plane(A* to) {
        const auto add = [&](int i, int m) { to[wide[m][i]] += weight[m][i] * values[i]; };
        for (int j = 0; j < near_count; ++j) {
            const int i = near[j];
            if (whole[i])
                for (int m = 0; m < kM; ++m) add(i, m);
            else
                for (int m = 0; m < kM; ++m)
                    if (wide[m][i] >= 0) add(i, m);
        }
    }
    /// Lists the points that have any tap: a slab of the slowest axis has few of all, in no order.
    NOINLINE void sort_out() {
        const int n = block.count;
        int8_t some[kBlock] = {};
        std::fill_n(whole, kBlock, int8_t(1));
        for (int m = 0; m < M; ++m)
            for (int i = 0; i < n; ++i) {
                const int8_t in = wide[m][i] >= 0;
                some[i] |= in, whole[i] &= in;
            }
        near_count = 0;
        for (int i = 0; i < n; ++i) near[near_count] = int8_t(i), near_count += some[i];
    }

    /// Weights of a directional derivative; `direction` is what arrives for grad_grid.
    void directional(Weights to, A (*direction)[kBlock]) {
        for (int a = block.outermost; a < 3; ++a) {
            block.coordinates(p.to_grad_grid, p.to_grad_grid_points, p.to_grad_grid_stride, a,
                              direction[a]);
            block.weights(1 << a, direction[a], a > block.outermost, to);
        }
    }
    NOINLINE void write_grid() {
        dispatch(p.grid_dtype, [&](auto element) {
            using G = decltype(element);
            G* to = static_cast<G*>(p.grad_grid) + (block.image * p.P + block.first) * p.D;
            for (int i = 0; i < block.count; ++i)
                for (int d = 0; d < p.D; ++d) to[i * p.D + d] = store<G>(Acc<G>(to_grid[d][i]));
        });
    }
    /// What is wanted at the block's points.
    void run_points() {
        if (!p.grad_out) {
            block.weights(0, nullptr, false, weight);
            return sample({{&plan.input, weight}});
        }
        if (p.grad_grid) std::fill_n(to_grid[0], 3 * kBlock, A(0));
        const bool flat = p.interpolation == Interpolation::kNearest;  // of no slope
        if (!p.to_grad_input && !p.to_grad_grid) {
            if (!p.grad_grid) return;
            if (flat) return write_grid();
            for (int d = 0; d < p.D; ++d) block.weights(1 << (2 - d), nullptr, false, along[d]);
            differentiate(plan.input, along);
            return write_grid();
        }
        A direction[3][kBlock], slanted[kMostTaps][kBlock];
        if (p.to_grad_grid) directional(slanted, direction);
        if (p.out) {
            block.weights(0, nullptr, false, weight);
            if (!p.to_grad_grid)
                sample({{&plan.upstream, weight}});
            else if (!p.to_grad_input)
                sample({{&plan.input, slanted}});
            else
                sample({{&plan.upstream, weight}, {&plan.input, slanted}});
        }
        if (!p.grad_grid) return;
        if (flat) return write_grid();
        if (p.to_grad_input) {
            for (int d = 0; d < p.D; ++d) block.weights(1 << (2 - d), nullptr, false, along[d]);
            differentiate(plan.upstream, along);
        }
        if (p.to_grad_grid) {
            for (int d = 0; d < p.D; ++d) {
                bool add = false;
                for (int a = block.outermost; a < 3; ++a) {
                    if (a == 2 - d) continue;  // linear along an axis: no second derivative
                    block.weights(1 << a | 1 << (2 - d), direction[a], add, along[d]);
                    add = true;
                }
            }
            differentiate(plan.input, along);
        }
        write_grid();
    }
    void clear(int64_t b, const int64_t (&begin)[4], const int64_t (&end)[4]) {
        // Axes c, z, y, x, the innermost last; then merged where they lie in one piece.
        int order[4] = {0, 1, 2, 3};
        const int64_t* stride = plan.target.stride + 1;
        std::stable_sort(order, order + 4, [&](int i, int j) { return stride[i] > stride[j]; });
        A* to = static_cast<A*>(plan.target.data) + b * plan.target.stride[0];
        int64_t size[4] = {1, 1, 1, 1}, step[4] = {}, last = 4;
        for (int k = 3; k >= 0; --k) {
            const int axis = order[k];
            const int64_t count = end[axis] - begin[axis];
            to += begin[axis] * stride[axis];
            if (count == 1) continue;
            if (last < 4 && stride[axis] == size[last] * step[last])
                size[last] *= count;
            else
                --last, size[last] = count, step[last] = stride[axis];
        }
        if (last == 4) step[3] = 1;
        for (int64_t q = 0; q < size[0]; ++q)
            for (int64_t r = 0; r < size[1]; ++r)
                for (int64_t s = 0; s < size[2]; ++s) {
                    A* row = to + q * step[0] + r * step[1] + s * step[2];
                    if (step[3] == 1)
                        std::fill_n(row, size[3], A(0));
                    else
                        for (int64_t t = 0; t < size[3]; ++t) row[t * step[3]] = 0;
                }
    }

  public:
    Steps(const GridSampleParams& params, const Plan& plan)
        : p(params), plan(plan), block(params, params.grad_out != nullptr), M(block.all_taps()) {}

    void points(int64_t begin, int64_t end) {
        const int64_t blocks = ceil_div(p.P, kBlock), all = p.B * blocks;
        const int64_t last = all * end / plan.pieces;
        if (plan.planes) {
            for (int64_t i = all * begin / plan.pieces; i < last;) {
                const int64_t b = i / blocks, stop = std::min(last, (b + 1) * blocks);
                const PlanesPart part{b,
                                      i % blocks * kBlock,
                                      std::min(p.P, (stop - b * blocks) * kBlock),
                                      true,
                                      false,
                                      {},
                                      {}};
                grid_sample_planes_cpu(&p, &part);
                i = stop;
            }
            return;
        }
        for (int64_t i = all * begin / plan.pieces; i < last; ++i) {
            block.begin(i / blocks, i % blocks * kBlock);
            if (!p.grad_out || p.out || block.taps > 1) block.find_all();
            run_points();
        }
    }
    void scatter_items(int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
            const int64_t share = item / plan.splits, split = item % plan.splits;
            for (int64_t b = p.B * share / plan.shares; b < p.B * (share + 1) / plan.shares; ++b)
                scatter_part(b, split);
        }
    }
    void scatter_part(int64_t b, int64_t split) {
        int64_t begin[4] = {0, 0, 0, 0}, end[4] = {p.C, p.size[0], p.size[1], p.size[2]};
        const int axis = plan.by_channel ? 0 : 1 + block.outermost;
        const int64_t unit = plan.by_channel && plan.target.rows ? 16 : 1;
        const int64_t units = ceil_div(end[axis], unit), size = end[axis];
        begin[axis] = units * split / plan.splits * unit;
        end[axis] = std::min(units * (split + 1) / plan.splits * unit, size);
        clear(b, begin, end);
        bool points = plan.fused && (p.out || p.grad_grid);
        if (plan.planes) {
            const bool scatters = p.interpolation != Interpolation::kCubic;
            if (points || scatters) {
                const PlanesPart part{
                    b, 0, p.P, points, scatters, {begin[0], end[0]}, {begin[2], end[2]}};
                grid_sample_planes_cpu(&p, &part);
            }
            if (scatters) return;
            points = false;
        }
        for (int64_t first = 0; first < p.P; first += kBlock) {
            block.begin(b, first);
            if (!plan.by_channel && plan.splits > 1) {
                block.find(block.outermost);
                if (!block.keep(begin[axis], end[axis])) continue;
                for (int a = block.outermost + 1; a < 3; ++a) block.find(a);
            } else {
                block.find_all();
            }
            if (points) run_points();
            A direction[3][kBlock];
            if (p.to_grad_grid)
                directional(weight, direction);
            else if (!p.to_grad_input)
                block.weights(0, nullptr, false, weight);
            else
                continue;  // it does not reach them
            scatter(begin[0], end[0]);
        }
    }
};

/// Images [.., c, z, y, x] copied line by line to other strides and another type.
template <typename From, typename To>
void copy_lines(const GridSampleParams& p, const Field& from, const Field& to, int64_t begin,
                int64_t end, int64_t items) {
    constexpr int64_t kTile = 16;
    const int64_t lines = p.B * p.size[0] * p.size[1], W = p.size[2];
    for (int64_t line = lines * begin / items; line < lines * end / items; ++line) {
        const int64_t y = line % p.size[1], z = line / p.size[1] % p.size[0];
        const int64_t b = line / p.size[1] / p.size[0];
        const From* in = static_cast<const From*>(from.data) + b * from.stride[0] +
                         z * from.stride[2] + y * from.stride[3];
        To* out =
            static_cast<To*>(to.data) + b * to.stride[0] + z * to.stride[2] + y * to.stride[3];
        for (int64_t x = 0; x < W; x += kTile)
            for (int64_t c = 0; c < p.C; c += kTile) {
                const int64_t right = std::min(W, x + kTile), top = std::min(p.C, c + kTile);
                const auto one = [&](int64_t i, int64_t k) {
                    out[i * to.stride[4] + k * to.stride[1]] =
                        store<To>(load(in[i * from.stride[4] + k * from.stride[1]]));
                };
                if (to.stride[1] == 1)
                    for (int64_t i = x; i < right; ++i)
                        for (int64_t k = c; k < top; ++k) one(i, k);
                else
                    for (int64_t k = c; k < top; ++k)
                        for (int64_t i = x; i < right; ++i) one(i, k);
            }
    }
}

template <typename T>
void run(const GridSampleParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    const Plan plan(p);
    const int64_t items = plan.items(p);
    switch (plan.steps[p.phase]) {
        case Plan::kCopy:
            copy_lines<T, A>(p, Plan::field(p.input, p.input_stride, p), plan.input, begin, end,
                             items);
            if (plan.upstream.data)
                copy_lines<T, A>(p, Plan::field(p.to_grad_input, p.to_grad_input_stride, p),
                                 plan.upstream, begin, end, items);
            return;
        case Plan::kRound:
            return copy_lines<A, T>(p, plan.target,
                                    Plan::field(p.grad_input, p.grad_input_stride, p), begin, end,
                                    items);
        default: {
            Steps<A> steps(p, plan);
            if (plan.steps[p.phase] == Plan::kPoints)
                steps.points(begin, end);
            else
                steps.scatter_items(begin, end);
        }
    }
}

}  // namespace

int64_t grid_sample_scratch_cpu(GridSampleParams* p) {
    p->scattered = p->C * pixels(*p) > 1 << 18 && is_scattered(*p);
    return Plan(*p).scratch();
}

int64_t grid_sample_items_cpu(const GridSampleParams* p) { return Plan(*p).items(*p); }

void grid_sample_cpu(const GridSampleParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) { run<decltype(element)>(*p, begin, end); });
}
