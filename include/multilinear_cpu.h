// The CPU loops of trilinear_interpolation and bilinear_interpolation; formula in multilinear.h.
// One point after the other; the innermost loop runs along the features, so that the compiler
// turns it into vector instructions.
#pragma once
#include "multilinear.h"

/// `kDense`: a point's features are neighbours in memory, in every tensor.
template <typename Cell, typename T, bool kDense>
void forward_points(const MultilinearParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    const int64_t stride = kDense ? 1 : p.feats_stride[2];
    for (int64_t n = begin; n < end; ++n) {
        const Position<Cell, A> at(p, n);
        A weight[K];
        const T* corner[K];
        for (int k = 0; k < K; ++k) {
            weight[k] = at.weight(k);
            corner[k] = static_cast<const T*>(p.feats) + n * p.feats_stride[0] + k * p.feats_stride[1];
        }
        T* __restrict out = static_cast<T*>(p.out) + n * p.F;
        for (int64_t f = 0; f < p.F; ++f) {
            A sum = 0;
            for (int k = 0; k < K; ++k) sum += weight[k] * load(corner[k][f * stride]);
            out[f] = store<T>(sum);
        }
    }
}

template <typename Cell, typename T, bool kDense>
void backward_points(const MultilinearParams& p, int64_t begin, int64_t end) {
    using A = Acc<T>;
    constexpr int K = 1 << Cell::D;
    const int64_t stride = kDense ? 1 : p.feats_stride[2];
    const int64_t grad_stride = kDense ? 1 : p.grad_out_stride[1];
    for (int64_t n = begin; n < end; ++n) {
        const Position<Cell, A> at(p, n);
        const T* grad_out = static_cast<const T*>(p.grad_out) + n * p.grad_out_stride[0];
        if (p.grad_feats) {
            for (int k = 0; k < K; ++k) {
                const A weight = at.weight(k);
                T* __restrict grad = static_cast<T*>(p.grad_feats) + (n * K + k) * p.F;
                for (int64_t f = 0; f < p.F; ++f)
                    grad[f] = store<T>(weight * load(grad_out[f * grad_stride]));
            }
        }
        if (p.grad_points) {
            A grad[Cell::D] = {};
            for (int k = 0; k < K; ++k) {
                const T* corner = static_cast<const T*>(p.feats) + n * p.feats_stride[0] + k * p.feats_stride[1];
                A dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t f = 0; f < p.F; ++f)
                    dot += load(grad_out[f * grad_stride]) * load(corner[f * stride]);
                for (int axis = 0; axis < Cell::D; ++axis) grad[axis] += at.slope(k, axis) * dot;
            }
            for (int axis = 0; axis < Cell::D; ++axis)
                store_as<A>(p.points_dtype, p.grad_points, n * Cell::D + axis, grad[axis]);
        }
    }
}

/// Forward where `out` is set, else backward.
template <typename Cell>
void multilinear_cpu(const MultilinearParams& p, int64_t begin, int64_t end) {
    const bool dense = (!p.feats || p.feats_stride[2] == 1) && (p.out || p.grad_out_stride[1] == 1);
    dispatch(p.dtype, [&](auto element) {
        using T = decltype(element);
        const auto run = p.out ? (dense ? forward_points<Cell, T, true> : forward_points<Cell, T, false>)
                               : (dense ? backward_points<Cell, T, true> : backward_points<Cell, T, false>);
        run(p, begin, end);
    });
}
