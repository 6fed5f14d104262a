// The torch side of trilinear_interpolation and bilinear_interpolation: checks, allocation, launch.
// `Op` is a Cell (multilinear.h) that also names the operator and its launchers.
#pragma once
#include <tuple>

#include "multilinear.h"
#include "torch/rest.h"
#include "torch/shapes.h"

/// Points [begin, end) to a thread: enough work to be worth handing over.
inline int64_t points_grain(int corners, int64_t F) { return 1 + 16384 / (corners * (F + 4)); }

/// Refuses tensors that do not fit; the sizes N and F, without feats N alone.
template <typename Op>
Sizes check_inputs(const Tensor* feats, const Tensor& points) {
    static const std::string corners = "(N, " + std::to_string(1 << Op::D) + ", F)";
    static const std::string point = "(N, " + std::to_string(Op::D) + ")";
    static const std::string cure =
        std::string("stack the corners of a cell along dimension 1, ") + Op::corner_order;
    Sizes sizes(Op::name);
    if (feats) {
        check_tensor(Op::name, "feats", *feats);
        sizes.match("feats", *feats, corners.c_str(), cure.c_str());
    }
    check_tensor(Op::name, "points", points);
    sizes.match("points", points, point.c_str());
    if (feats) check_same_device(Op::name, "feats", *feats, "points", points);
    return sizes;
}

template <typename Op>
MultilinearParams points_params(const Tensor& points) {
    MultilinearParams p{};
    p.points = points.data_ptr();
    p.points_dtype = dtype_of(Op::name, "points", points);
    p.N = points.size(0);
    copy_strides(points, p.points_stride);
    return p;
}

inline void set_feats(MultilinearParams& p, const Tensor& feats) {
    p.feats = feats.data_ptr();
    copy_strides(feats, p.feats_stride);
}

/// Runs the kernels, of what few calls need those that are compiled behind.
template <typename Op>
void run(const Tensor& like, const MultilinearParams& p) {
    auto* on_cuda = Op::on_cuda;
    if (needs_rest(p, !like.is_cpu())) on_cuda = rest_of<MultilinearRest>(Op::name)->of(p.dtype);
    launch(Op::name, like, p, p.N, points_grain(1 << Op::D, p.F), Op::on_cpu, on_cuda);
}

template <typename Op>
Tensor multilinear(const Tensor& feats, const Tensor& points) {
    check_inputs<Op>(&feats, points);
    MultilinearParams p = points_params<Op>(points);
    p.dtype = dtype_of(Op::name, "feats", feats);
    p.F = feats.size(2);
    Tensor out = new_output(feats, {p.N, p.F});
    if (out.numel() == 0) return out;
    set_feats(p, feats);
    p.out = out.data_ptr();
    run<Op>(out, p);
    return out;
}

/// (grad_feats, grad_points); what is not asked for comes back empty. `feats` is needed for
/// grad_points alone: without it a training step does not have to keep it alive.
template <typename Op>
std::tuple<Tensor, Tensor> multilinear_backward(const Tensor& grad_out, std::optional<Tensor> feats,
                                                const Tensor& points, bool need_feats,
                                                bool need_points) {
    constexpr int K = 1 << Op::D;
    Sizes sizes = check_inputs<Op>(feats ? &*feats : nullptr, points);
    if (need_points && !feats) raise(Op::name, "the gradient to points needs feats, got None");
    check_tensor(Op::name, "grad_out", grad_out);
    sizes.match_known("grad_out", grad_out, "(N, F)");
    const int64_t N = sizes["N"], F = sizes["F"];
    check_same_device(Op::name, "points", points, "grad_out", grad_out);
    MultilinearParams p = points_params<Op>(points);
    p.dtype = dtype_of(Op::name, "grad_out", grad_out);
    if (feats) check_same_dtype(Op::name, "feats", *feats, "grad_out", grad_out);
    p.F = F;
    Tensor grad_feats = new_gradient(grad_out, need_feats, {N, K, F});
    Tensor grad_points = new_gradient(points, need_points, {N, Op::D});
    if (grad_feats.numel() + grad_points.numel() > 0) {
        if (need_points) set_feats(p, *feats);
        p.grad_out = grad_out.data_ptr();
        copy_strides(grad_out, p.grad_out_stride);
        p.grad_feats = need_feats ? grad_feats.data_ptr() : nullptr;
        p.grad_points = need_points ? grad_points.data_ptr() : nullptr;
        run<Op>(points, p);
    }
    return {grad_feats, grad_points};
}

/// An operator: its cell, its name, and its launchers.
#define OCTET_MULTILINEAR(X, Cell)                                                          \
    struct X##_operator : Cell {                                                            \
        static constexpr const char* name = #X;                                             \
        static constexpr auto on_cpu = &X##_cpu;                                            \
        static constexpr auto on_cuda = OCTET_CUDA_LAUNCHER(X##_cuda);                      \
    };                                                                                      \
    STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {                                               \
        define(m, #X "(Tensor feats, Tensor points) -> Tensor");                            \
        define(m, #X                                                                        \
               "_backward(Tensor grad_out, Tensor? feats, Tensor points, bool need_feats, " \
               "bool need_points) -> (Tensor grad_feats, Tensor grad_points)");             \
    }                                                                                       \
    STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {                        \
        m.impl(#X, TORCH_BOX(&multilinear<X##_operator>));                                  \
        m.impl(#X "_backward", TORCH_BOX(&multilinear_backward<X##_operator>));             \
    }
