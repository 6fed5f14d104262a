// The torch side of elementwise operators: schema, checks, allocation, launch.
#pragma once
#include <tuple>

#include "dims.h"
#include "elementwise.h"
#include "torch/glue.h"

constexpr int kLargerThanOne = 63;  // dimensions: 2^63 elements would be too many

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

/// True where a tensor is of another one's shape, dtype, layout and device.
inline bool is_like(const Tensor& x, const Tensor& first) {
    if (!x.defined()) return false;
    const auto of = [](const Tensor& t, auto get) {
        int32_t found = 0;
        TORCH_ERROR_CODE_CHECK(get(t.get(), &found));
        return found;
    };
    for (const auto get : {aoti_torch_get_dtype, aoti_torch_get_layout, aoti_torch_get_device_type,
                           aoti_torch_get_device_index})
        if (of(x, get) != of(first, get)) return false;
    const auto a = x.sizes(), b = first.sizes();
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

/// Refuses tensors that are not all of the first one's shape, dtype and device; the dtype.
inline DType check_alike(const Elementwise& e, const Tensor* const* x, size_t inputs) {
    const std::string first = e.name(0);
    check_tensor(e.op, first.c_str(), *x[0]);
    const DType dtype = dtype_of(e.op, first.c_str(), *x[0]);
    for (size_t i = 1; i < inputs; ++i) {
        if (is_like(*x[i], *x[0])) continue;  // names take longer than the kernel of few elements
        const std::string name = e.name(i);
        check_tensor(e.op, name.c_str(), *x[i]);
        check_same_shape(e.op, first.c_str(), *x[0], name.c_str(), *x[i],
                         "; expand it first, e.g. with torch.broadcast_tensors");
        check_same_device(e.op, first.c_str(), *x[0], name.c_str(), *x[i]);
        dtype_of(e.op, name.c_str(), *x[i]);
        check_same_dtype(e.op, first.c_str(), *x[0], name.c_str(), *x[i],
                         "; convert one of them with .to()");
    }
    return dtype;
}

/// The dimensions of a tensor that has elements, without those of size 1, in the order in which
/// they lie in memory. Arrays: memory from the heap takes as long as the kernel of few elements.
struct InOrder {
    int64_t count = 0, dims[kLargerThanOne], size[kLargerThanOne];
    bool is_given = true;

    explicit InOrder(const Tensor& x) {
        const int64_t *const stride = x.strides().data(), *const sizes = x.sizes().data();
        for (int64_t d = 0, all = x.dim(); d < all; ++d) {
            if (sizes[d] == 1) continue;
            int64_t place = count++;
            for (; place > 0 && stride[dims[place - 1]] < stride[d]; --place)
                dims[place] = dims[place - 1];
            dims[place] = d;
            is_given = is_given && place == d;
        }
        for (int64_t d = 0; d < count; ++d) size[d] = sizes[dims[d]];
    }
    /// Another tensor's strides in this order.
    const int64_t* of(const int64_t* stride, int64_t* to) const {
        for (int64_t d = 0; d < count; ++d) to[d] = stride[dims[d]];
        return to;
    }
};

/// Runs an operator of any number of inputs, which were checked, and outputs. Outputs are like the
/// first input: its dtype and shape, and its order of dimensions in memory where it is dense; null
/// where not asked for.
inline void run_elementwise(const Elementwise& e, DType dtype, const Tensor* const* x,
                            size_t inputs, Tensor* const* out, size_t outputs) {
    ElementwiseParams p;
    p.dtype = dtype;
    p.numel = x[0]->numel();
    if (p.numel == 0) return;
    const Tensor* any = nullptr;
    for (size_t m = 0; m < outputs; ++m) {
        p.out[m] = out[m] ? out[m]->data_ptr() : nullptr;
        if (out[m]) any = out[m];
    }
    if (!any) return;
    const int64_t* strides[kMaxInputs + 1];
    int64_t* merged[kMaxInputs + 1];
    for (size_t n = 0; n < inputs; ++n)
        strides[n] = x[n]->strides().data(), merged[n] = p.in_stride[n];
    strides[inputs] = any->strides().data(),
    merged[inputs] = p.out_stride[0];  // all are alike
    // Outermost is what lies so in the outputs, whose order nobody sees: of a transposed matrix,
    // and results like it, one run of memory.
    const InOrder order(*any);
    int64_t sorted[kMaxInputs + 1][kLargerThanOne];
    for (size_t i = 0; i <= inputs && !order.is_given; ++i)
        strides[i] = order.of(strides[i], sorted[i]);
    p.dims =
        merge_dims(order.count, order.size, strides, int(inputs) + 1, kMaxDims, p.size, merged);
    if (p.dims < 0) {
        std::vector<Tensor> copies, results;
        copies.reserve(inputs), results.reserve(outputs);
        const Tensor* flat[kMaxInputs];
        Tensor* to[kMaxInputs] = {};
        for (size_t n = 0; n < inputs; ++n) flat[n] = &copies.emplace_back(as_contiguous(*x[n]));
        for (size_t m = 0; m < outputs; ++m)
            if (out[m]) to[m] = &results.emplace_back(new_like(copies[0]));
        run_elementwise(e, dtype, flat, inputs, to, outputs);
        for (size_t m = 0; m < outputs; ++m)
            if (out[m]) torch::stable::copy_(*out[m], *to[m]);
        return;
    }
    if (p.dims == 0) {
        p.size[p.dims++] = 1;
        for (size_t i = 0; i <= inputs; ++i) merged[i][0] = 1;
    }
    for (size_t m = 1; m < outputs; ++m) std::copy_n(p.out_stride[0], p.dims, p.out_stride[m]);
    for (size_t n = 0; n < inputs; ++n) p.in[n] = x[n]->data_ptr();
    launch(e.op, *x[0], p, p.numel, 32768, e.on_cpu, e.on_cuda);
}

/// What torch's dispatcher calls, for an operator of so many tensors.
template <const Elementwise& e, typename Inputs>
struct ElementwiseKernel;
template <const Elementwise& e, size_t... I>
struct ElementwiseKernel<e, std::index_sequence<I...>> {
    template <size_t>
    using Input = Tensor;

    static Tensor one(const Input<I>&... x) {
        const Tensor* const in[] = {&x...};
        const DType dtype = check_alike(e, in, sizeof...(I));
        Tensor out = new_like(*in[0]), *const to[] = {&out};
        run_elementwise(e, dtype, in, sizeof...(I), to, 1);
        return out;
    }

    static std::tuple<Input<I>...> gradients(const Tensor& grad_out, const Input<I>&... x,
                                             const std::vector<bool>& output_mask) {
        if (output_mask.size() != sizeof...(I))
            raise(e.op, "output_mask must have " + std::to_string(sizeof...(I)) + " flags, got " +
                            std::to_string(output_mask.size()));
        const Tensor* const in[] = {&grad_out, &x...};
        const DType dtype = check_alike(e, in, 1 + sizeof...(I));
        Tensor out[] = {output_mask[I] ? new_like(grad_out) : new_output(grad_out, {0})...};
        Tensor* const to[] = {output_mask[I] ? &out[I] : nullptr...};
        run_elementwise(e, dtype, in, 1 + sizeof...(I), to, sizeof...(I));
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
