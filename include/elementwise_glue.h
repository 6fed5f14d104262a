// The torch side of elementwise operators: checks, merging of dimensions, allocation, launch.
#pragma once
#include "elementwise.h"
#include "glue.h"

/// Sizes and strides of three tensors of one shape, with neighbouring dimensions merged where every
/// tensor lets them; false where more than kMaxDims remain.
inline bool merge_dims(const Tensor& a, const Tensor& b, const Tensor& out, ElementwiseParams& p) {
    const Tensor* const tensors[] = {&a, &b, &out};
    p.dims = 0;
    for (int64_t d = 0; d < a.dim(); ++d) {
        const int64_t size = a.size(d);
        if (size == 1) continue;
        bool merge = p.dims > 0;
        for (int i = 0; i < 3 && merge; ++i)
            merge = p.stride[i][p.dims - 1] == size * tensors[i]->stride(d);
        if (!merge && p.dims == kMaxDims) return false;
        if (!merge) p.size[p.dims++] = 1;
        p.size[p.dims - 1] *= size;
        for (int i = 0; i < 3; ++i) p.stride[i][p.dims - 1] = tensors[i]->stride(d);
    }
    if (p.dims == 0) {
        p.size[p.dims++] = 1;
        for (auto& stride : p.stride) stride[0] = 1;
    }
    return true;
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
    if (a.dim() != b.dim()) return false;
    for (int64_t d = 0; d < a.dim(); ++d)
        if (a.size(d) != b.size(d)) return false;
    return true;
}

/// A new tensor like `a`: its dtype and shape, and its order of dimensions in memory where it is
/// dense.
inline Tensor elementwise(const char* op, const char* first, const Tensor& a, const char* second,
                          const Tensor& b,
                          void (*on_cpu)(const ElementwiseParams*, int64_t, int64_t),
                          const char* (*on_cuda)(const ElementwiseParams*, void*)) {
    check_tensor(op, first, a);
    check_tensor(op, second, b);
    if (!same_shape(a, b))
        raise(op, std::string(second) + " must have the shape of " + first + ", " + shape_text(a) +
                      ", got " + shape_text(b) +
                      "; expand it first, e.g. with torch.broadcast_tensors");
    check_same_device(op, first, a, second, b);
    ElementwiseParams p{};
    p.dtype = dtype_of(op, first, a);
    if (dtype_of(op, second, b) != p.dtype)
        raise(op, std::string(second) + " must have the dtype of " + first + ", " + dtype_text(a) +
                      ", got " + dtype_text(b) + "; convert one of them with .to()");
    Tensor out = torch::stable::empty_like(a);
    p.numel = out.numel();
    if (p.numel == 0) return out;
    if (!merge_dims(a, b, out, p)) {
        Tensor flat = elementwise(op, first, torch::stable::contiguous(a), second,
                                  torch::stable::contiguous(b), on_cpu, on_cuda);
        return torch::stable::copy_(out, flat);
    }
    p.in[0] = a.data_ptr();
    p.in[1] = b.data_ptr();
    p.out = out.data_ptr();
    launch(op, out, p, p.numel, 32768, on_cpu, on_cuda);
    return out;
}
