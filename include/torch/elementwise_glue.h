// The torch side of elementwise operators: schema, checks, allocation, launch.
#pragma once
#include <tuple>

#include "dims.h"
#include "elementwise.h"
#include "torch/glue.h"

/// What a library knows of one elementwise operator.
struct Elementwise {
    const char* op;     // with which messages begin
    const char* names;  // of the tensors, "grad_out, a, b"
    void (*on_cpu)(const ElementwiseParams*, int64_t, int64_t);
    const char* (*on_cuda)(const ElementwiseParams*, void*);

    std::string name(size_t i) const {
        const char* begin = names;
        while (i-- > 0) begin = strchr(begin, ',') + 2;
        return std::string(begin, strcspn(begin, ","));
    }
    static constexpr int count(const char* names) {
        int commas = 0;
        for (; *names; ++names) commas += *names == ',';
        return commas + 1;
    }
};

/// Refuses tensors that are not all of the first one's shape, dtype and device; the dtype.
inline DType check_alike(const Elementwise& e, const std::vector<const Tensor*>& x) {
    for (size_t i = 0; i < x.size(); ++i) check_tensor(e.op, e.name(i).c_str(), *x[i]);
    const std::string first = e.name(0);
    const DType dtype = dtype_of(e.op, first.c_str(), *x[0]);
    for (size_t i = 1; i < x.size(); ++i) {
        const std::string name = e.name(i);
        check_same_shape(e.op, first.c_str(), *x[0], name.c_str(), *x[i],
                         "; expand it first, e.g. with torch.broadcast_tensors");
        check_same_device(e.op, first.c_str(), *x[0], name.c_str(), *x[i]);
        dtype_of(e.op, name.c_str(), *x[i]);
        check_same_dtype(e.op, first.c_str(), *x[0], name.c_str(), *x[i],
                         "; convert one of them with .to()");
    }
    return dtype;
}

/// The dimensions of a tensor in the order in which they lie in memory.
struct InOrder {
    std::vector<int64_t> dims, size;
    bool is_given = true;

    explicit InOrder(const Tensor& x) {
        const int64_t* const stride = x.strides().data();
        for (int64_t d = 1; d < x.dim(); ++d) is_given = is_given && stride[d - 1] >= stride[d];
        if (is_given) return;
        for (int64_t d = 0; d < x.dim(); ++d) dims.push_back(d);
        std::stable_sort(dims.begin(), dims.end(),
                         [&](int64_t a, int64_t b) { return stride[a] > stride[b]; });
        for (const int64_t d : dims) size.push_back(x.sizes()[d]);
    }
    /// Another tensor's strides in this order, kept in `at`, which has room for them.
    const int64_t* of(const int64_t* stride, std::vector<int64_t>& at) const {
        const size_t begin = at.size();
        for (const int64_t d : dims) at.push_back(stride[d]);
        return at.data() + begin;
    }
};

/// Runs an operator of any number of inputs and outputs. Outputs are like the first input: its
/// dtype and shape, and its order of dimensions in memory where it is dense; what `wanted` leaves
/// out comes back empty.
inline std::vector<Tensor> run_elementwise(const Elementwise& e,
                                           const std::vector<const Tensor*>& x,
                                           const std::vector<bool>& wanted) {
    ElementwiseParams p;
    p.dtype = check_alike(e, x);
    const size_t inputs = x.size();
    std::vector<Tensor> out;
    out.reserve(wanted.size());
    for (const bool asked : wanted) out.push_back(asked ? new_like(*x[0]) : new_output(*x[0], {0}));
    p.numel = x[0]->numel();
    if (p.numel == 0) return out;
    const Tensor* any = nullptr;
    for (size_t m = 0; m < out.size(); ++m) {
        p.out[m] = wanted[m] ? out[m].data_ptr() : nullptr;
        if (wanted[m]) any = &out[m];
    }
    if (!any) return out;
    const int64_t* strides[kMaxInputs + 1];
    int64_t* merged[kMaxInputs + 1];
    for (size_t n = 0; n < inputs; ++n)
        strides[n] = x[n]->strides().data(), merged[n] = p.in_stride[n];
    strides[inputs] = any->strides().data(), merged[inputs] = p.out_stride[0];  // all are alike
    // Outermost is what lies so in the outputs, whose order nobody sees: of a transposed matrix,
    // and results like it, one run of memory.
    const InOrder order(*any);
    std::vector<int64_t> sorted;
    if (!order.is_given) {
        sorted.reserve((inputs + 1) * any->dim());
        for (size_t i = 0; i <= inputs; ++i) strides[i] = order.of(strides[i], sorted);
    }
    p.dims = merge_dims(any->dim(), order.is_given ? any->sizes().data() : order.size.data(),
                        strides, int(inputs) + 1, kMaxDims, p.size, merged);
    if (p.dims < 0) {
        std::vector<Tensor> copies;
        for (size_t n = 0; n < inputs; ++n) copies.push_back(torch::stable::contiguous(*x[n]));
        std::vector<const Tensor*> flat;
        for (const Tensor& copy : copies) flat.push_back(&copy);
        const std::vector<Tensor> results = run_elementwise(e, flat, wanted);
        for (size_t m = 0; m < out.size(); ++m)
            if (wanted[m]) torch::stable::copy_(out[m], results[m]);
        return out;
    }
    if (p.dims == 0) {
        p.size[p.dims++] = 1;
        for (size_t i = 0; i <= inputs; ++i) merged[i][0] = 1;
    }
    for (size_t m = 1; m < out.size(); ++m) std::copy_n(p.out_stride[0], p.dims, p.out_stride[m]);
    for (size_t n = 0; n < inputs; ++n) p.in[n] = x[n]->data_ptr();
    launch(e.op, *x[0], p, p.numel, 32768, e.on_cpu, e.on_cuda);
    return out;
}

/// What torch's dispatcher calls, for an operator of so many tensors.
template <const Elementwise& e, typename Inputs>
struct ElementwiseKernel;
template <const Elementwise& e, size_t... I>
struct ElementwiseKernel<e, std::index_sequence<I...>> {
    template <size_t>
    using Input = Tensor;

    static Tensor one(const Input<I>&... x) { return run_elementwise(e, {&x...}, {true})[0]; }

    static std::tuple<Input<I>...> gradients(const Tensor& grad_out, const Input<I>&... x,
                                             const std::vector<bool>& output_mask) {
        if (output_mask.size() != sizeof...(I))
            raise(e.op, "output_mask must have " + std::to_string(sizeof...(I)) + " flags, got " +
                            std::to_string(output_mask.size()));
        std::vector<Tensor> out = run_elementwise(e, {&grad_out, &x...}, output_mask);
        return {out[I]...};
    }
};

/// "a, b" with a word before each name.
inline std::string each(const char* names, const char* before) {
    std::string text = before;
    for (; *names; ++names) {
        text += *names;
        if (*names == ' ') text += before;
    }
    return text;
}

inline std::string backward_schema(const char* op, const char* names) {
    const int count = Elementwise::count(names);
    std::string text = std::string(op) + "_backward(Tensor grad_out, " + each(names, "Tensor ");
    if (count == 1) return text + ") -> Tensor";
    return text + ", bool[" + std::to_string(count) + "] output_mask) -> (" +
           each(names, "Tensor grad_") + ")";
}

/// Registers the operator X of the arguments named, with the kernels of X.h.
#define OCTET_ELEMENTWISE(X, Function, ...)                                                \
    static constexpr Elementwise X##_operator{#X, #__VA_ARGS__, X##_cpu,                   \
                                              OCTET_CUDA_LAUNCHER(X##_cuda)};              \
    static_assert(Elementwise::count(#__VA_ARGS__) == elementwise::inputs<Function>,       \
                  #X " needs the name of each argument of " #Function);                    \
    static_assert(elementwise::outputs<Function> == 1, #Function " must have one result"); \
    STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {                                              \
        define(m, (#X "(" + each(#__VA_ARGS__, "Tensor ") + ") -> Tensor").c_str());       \
    }                                                                                      \
    STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {                       \
        using Inputs = std::make_index_sequence<elementwise::inputs<Function>>;            \
        m.impl(#X, TORCH_BOX((&ElementwiseKernel<X##_operator, Inputs>::one)));            \
    }

/// Registers X_backward, whose function object takes grad_out and the arguments of X, and has a
/// gradient for each argument. Of several, `output_mask` says which to compute.
#define OCTET_ELEMENTWISE_BACKWARD(X, Function, ...)                                              \
    static constexpr Elementwise X##_backward_operator{                                           \
        #X, "grad_out, " #__VA_ARGS__, X##_backward_cpu, OCTET_CUDA_LAUNCHER(X##_backward_cuda)}; \
    static_assert(Elementwise::count(#__VA_ARGS__) + 1 == elementwise::inputs<Function>,          \
                  #Function " must take grad_out and each argument of " #X);                      \
    static_assert(Elementwise::count(#__VA_ARGS__) == elementwise::outputs<Function>,             \
                  #Function " must have a result for each argument of " #X);                      \
    STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {                                                     \
        define(m, backward_schema(#X, #__VA_ARGS__).c_str());                                     \
    }                                                                                             \
    STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {                              \
        constexpr int kInputs = elementwise::inputs<Function>;                                    \
        if constexpr (kInputs == 2)                                                               \
            m.impl(#X "_backward",                                                                \
                   TORCH_BOX((&ElementwiseKernel<X##_backward_operator,                           \
                                                 std::make_index_sequence<2>>::one)));            \
        else                                                                                      \
            m.impl(#X "_backward",                                                                \
                   TORCH_BOX(                                                                     \
                       (&ElementwiseKernel<X##_backward_operator,                                 \
                                           std::make_index_sequence<kInputs - 1>>::gradients)));  \
    }
