// What grid_sample on the CPU does with blocks of points; see steps_cpu.cpp.
#pragma once
#include "blocks.h"
#include "boxes.h"
#include "plan.h"

namespace {

/// All steps on points, in the accumulating type A.
template <typename A>
class Steps {
    using Weights = A (*)[kBlock];
    const GridSampleParams& p;
    const Plan& plan;
    Field target = plan.target;  // what gradients to the input are added to
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
        plan.copy ? body(A()) : dispatch_to<A>(p.dtype, body);
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
    /// grad_out of channels [c, c + count) as rows of the tile.
    NOINLINE void read_tile(int64_t c, int count) {
        for (int k = 0; k < count; ++k) {
            block.read_grad(c + k, values);
            for (int i = 0; i < block.count; ++i) tile[i][k] = values[i];
        }
    }

    /// out = the sum over the fields' taps by these weights.
    struct Term {
        const Field* field;
        const A (*weight)[kBlock];
    };
    NOINLINE void sample(std::initializer_list<Term> terms) {
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
                block.write_out(c, values, 1);
            }
            return;
        }
        each_piece<true>(0, p.C, [&](auto lanes, auto vectors, int64_t c, int had) {
            constexpr int L = decltype(lanes)::value, V = decltype(vectors)::value;
            for (const Term& term : terms) {
                find(term);
                sample_rows<L, V>(row(*term.field) + c, term.weight, &term != terms.begin());
            }
            for (int k = had; k < L * V; ++k) block.write_out(c + k, tile[0] + k, kRow);
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
    NOINLINE void differentiate(const Field& f, const A (*w)[kMostTaps][kBlock]) {
        locate(f);
        if (!f.rows) {
            for (int m = 0; m < M; ++m) std::fill_n(dots[m], block.count, A(0));
            for (int64_t c = 0; c < p.C; ++c) {
                block.read_grad(c, values);
                each_tap(f, c, [&](int m, const A* x) {
                    for (int i = 0; i < block.count; ++i) dots[m][i] += values[i] * x[i];
                });
            }
            for (int d = 0; d < p.D; ++d)
                for (int m = 0; m < M; ++m)
                    for (int i = 0; i < block.count; ++i) to_grid[d][i] += w[d][m][i] * dots[m][i];
            return;
        }
        each_piece<true>(0, p.C, [&](auto lanes, auto vectors, int64_t c, int had) {
            constexpr int L = decltype(lanes)::value, V = decltype(vectors)::value;
            read_tile(c, L * V);
            for (int v = 0; v < V; ++v) differentiate_rows<L>(row(f) + c + v * L, v * L, had, w);
        });
    }
    template <int L>
    void differentiate_rows(const A* in, int column, int had, const A (*w)[kMostTaps][kBlock]) {
        using Vector = typename Lanes<A, L>::type;
        const auto new_ones = ~keep_lanes<A, L>(had);
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
                to_grid[d][i] += sum_lanes<A, L>(had ? only(new_ones, product) : product);
            }
        }
    }

    /// Adds weight * grad_out to the pixels of channels [begin, end) of the target.
    NOINLINE void scatter(int64_t begin, int64_t end) {
        const Field& f = target;
        block.offsets(f.stride, wide);
        if (!f.rows) {
            sort_out();
            for (int64_t c = begin; c < end; ++c) {
                block.read_grad(c, values);
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
        each_piece<false>(begin, end, [&](auto lanes, auto vectors, int64_t c, int) {
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
    /// What is wanted at the block's points.
    NOINLINE void run_points() {
        if (!p.grad_out) {
            block.weights(0, nullptr, false, weight);
            return sample({{&plan.input, weight}});
        }
        if (p.grad_grid) std::fill_n(to_grid[0], 3 * kBlock, A(0));
        const bool flat = p.interpolation == Interpolation::kNearest;  // of no slope
        if (!p.to_grad_input && !p.to_grad_grid) {
            if (!p.grad_grid) return;
            if (flat) return block.write_grid(to_grid);
            for (int d = 0; d < p.D; ++d) block.weights(1 << (2 - d), nullptr, false, along[d]);
            differentiate(plan.input, along);
            return block.write_grid(to_grid);
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
        if (flat) return block.write_grid(to_grid);
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
        block.write_grid(to_grid);
    }
    /// The sums of channels [begin, end) that the block touches become zero; or the gradient to
    /// elements T is what they are, rounded.
    NOINLINE void empty_touched(int64_t begin, int64_t end) {
        const Field& f = target;
        block.offsets(f.stride, wide);
        for (int m = 0; m < M; ++m)
            for (int i = 0; i < block.count; ++i) {
                if (wide[m][i] < 0) continue;
                A* const to = row(f) + wide[m][i];
                for (int64_t c = begin; c < end; ++c) to[c * f.stride[1]] = 0;
            }
    }
    template <typename T>
    NOINLINE void round_touched(const Field& to, int64_t begin, int64_t end) {
        const Field& f = target;
        int64_t there[kMostTaps][kBlock];
        block.offsets(f.stride, wide), block.offsets(to.stride, there);
        for (int m = 0; m < M; ++m)
            for (int i = 0; i < block.count; ++i) {
                if (wide[m][i] < 0) continue;
                const A* const in = row(f) + wide[m][i];
                T* const out = static_cast<T*>(to.data) + block.image * to.stride[0] + there[m][i];
                for (int64_t c = begin; c < end; ++c)
                    out[c * to.stride[1]] = store<T>(in[c * f.stride[1]]);
            }
    }

    void by_planes(const Part& part) const { by_planes(plan.read_by(p), part); }
    void by_planes(const GridSampleParams& params, const Part& part) const {
        if constexpr (std::is_same_v<A, double>)
            grid_sample_planes_double_cpu(&params, &part);
        else
            grid_sample_planes_cpu(&params, &part);
    }
    /// Of an image's points the k-th part, added to sums of its own.
    void scatter_points(int64_t b, int64_t k) {
        const int64_t blocks = ceil_div(p.P, kBlock), each = p.C * pixels(p);
        GridSampleParams own = p;
        own.grad_input = plan.sums(p, k), own.grad_input_stride[0] = each;
        std::fill_n(static_cast<A*>(own.grad_input) + b * each, each, A(0));
        const int slowest = block.outermost;
        by_planes(own, {b,
                        blocks * k / plan.parts * kBlock,
                        std::min(p.P, blocks * (k + 1) / plan.parts * kBlock),
                        p.grad_grid != nullptr,
                        true,
                        {0, p.C},
                        {0, p.size[slowest]}});
    }

  public:
    Steps(const GridSampleParams& params, const Plan& plan)
        : p(params), plan(plan), block(params, params.grad_out != nullptr), M(block.all_taps()) {}

    void points(int64_t begin, int64_t end) {
        const int64_t blocks = ceil_div(p.P, kBlock), all = p.B * blocks;
        const int64_t last = all * end / plan.pieces;
        if (plan.planes || plan.cubic) {
            for (int64_t i = all * begin / plan.pieces; i < last;) {
                const int64_t b = i / blocks, stop = std::min(last, (b + 1) * blocks);
                const int64_t until = std::min(p.P, (stop - b * blocks) * kBlock);
                const Part part{b, i % blocks * kBlock, until, true, false, {}, {}};
                plan.planes ? by_planes(part) : p.rest->cubic_cpu(&p, &plan, &part);
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
            if (plan.parts) {
                scatter_points(item / plan.parts, item % plan.parts);
                continue;
            }
            const int64_t share = item / plan.splits, split = item % plan.splits;
            const int64_t sums = plan.by_channel ? share : item;
            for (int64_t b = p.B * share / plan.shares; b < p.B * (share + 1) / plan.shares; ++b)
                scatter_part(b, split, sums);
        }
    }
    /// The gradient to a part of an image, by the `sums`-th sums there are.
    void scatter_part(int64_t b, int64_t split, int64_t sums) {
        Box box{b, {0, 0, 0, 0}, {p.C, p.size[0], p.size[1], p.size[2]}};
        const int slowest = 1 + block.outermost, axis = plan.by_channel ? 0 : slowest;
        const int64_t unit = plan.by_channel && target.rows ? 16 : 1, size = box.end[axis];
        const int64_t units = ceil_div(size, unit);
        box.begin[axis] = units * split / plan.splits * unit;
        box.end[axis] = std::min(units * (split + 1) / plan.splits * unit, size);
        if (!plan.sum) {
            clear<A>(target, box);
            return scatter_to(box);
        }
        const Field own = Plan::field(p.grad_input, p.grad_input_stride, p);
        const int64_t first = box.begin[slowest], count = box.end[slowest] - first;
        for (int64_t k = 0; k < plan.slabs; ++k) {
            box.begin[slowest] = first + count * k / plan.slabs;
            box.end[slowest] = first + count * (k + 1) / plan.slabs;
            const int64_t at = sums * plan.slab - box.begin[slowest] * target.stride[1 + slowest];
            target.data = static_cast<A*>(plan.target.data) + at;
            dispatch_to<A>(p.dtype, [&](auto element) { sum_up<decltype(element)>(own, box); });
        }
    }
    /// The gradient, of elements T, to pixels that are summed elsewhere.
    template <typename T>
    void sum_up(const Field& own, const Box& box) {
        if (plan.touched) {
            clear<uint16_t>(own, box);
            if (!reaches()) return;
            each_block(box, [&] { empty_touched(box.begin[0], box.end[0]); });
            scatter_to(box);
            return each_block(box, [&] { round_touched<T>(own, box.begin[0], box.end[0]); });
        }
        clear<A>(target, box);
        scatter_to(box);
        for (int64_t z = box.begin[1]; z < box.end[1]; ++z)
            for (int64_t y = box.begin[2]; y < box.end[2]; ++y)
                copy_line<A, T>(target, own, box.image, z, y, p.size[2], box.begin[0], box.end[0]);
    }
    /// What points add to the pixels of a box, and what is wanted at the points where no other step
    /// does that.
    void scatter_to(const Box& box) {
        bool points = plan.fused && (p.out || p.grad_grid);
        if (plan.planes || plan.cubic) {
            const int slowest = 1 + block.outermost;
            Part part{box.image,
                      0,
                      p.P,
                      points,
                      true,
                      {box.begin[0], box.end[0]},
                      {box.begin[slowest], box.end[slowest]}};
            if (plan.cubic) {
                Fields fields = plan;
                fields.target = target;
                return p.rest->cubic_cpu(&p, &fields, &part);
            }
            part.scatter = p.interpolation != Interpolation::kCubic;
            if (points || part.scatter) by_planes(part);
            if (part.scatter) return;
            points = false;
        }
        each_block(box, [&] {
            if (points) run_points();
            if (!reaches()) return;
            A direction[3][kBlock];
            if (p.to_grad_grid)
                directional(weight, direction);
            else
                block.weights(0, nullptr, false, weight);
            scatter(box.begin[0], box.end[0]);
        });
    }
    /// Whether anything is added to the gradient to the input.
    bool reaches() const { return p.to_grad_grid || !p.to_grad_input; }
    /// Calls `body` with each block of points that have taps in the box.
    template <typename Body>
    void each_block(const Box& box, const Body& body) {
        const int slowest = 1 + block.outermost;
        const bool all = box.end[slowest] - box.begin[slowest] == p.size[block.outermost];
        for (int64_t first = 0; first < p.P; first += kBlock) {
            block.begin(box.image, first);
            block.find(block.outermost);
            if (!all && !block.keep(block.taps, box.begin[slowest], box.end[slowest])) continue;
            for (int a = block.outermost + 1; a < 3; ++a) block.find(a);
            body();
        }
    }
};

}  // namespace
