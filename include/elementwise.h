// What operators share that compute each element of their outputs from the same element of their
// inputs. An operator gives a function object of any number of arguments: `A operator()(A x, A y)`,
// or, for several outputs, `Several<A, 2> operator()(...)`; A is float, or double for float64.
#pragma once
#include <type_traits>
#include <utility>

#include "common.h"

constexpr int kMaxDims = 8;     // after neighbouring dimensions are merged
constexpr int kMaxInputs = 16;  // an operator has one less, since its backward takes grad_out too

struct ElementwiseParams {
    const void* in[kMaxInputs];
    void* out[kMaxInputs];  // null where not asked for
    int64_t numel;
    int dims;                                 // at least 1; 1 where all are contiguous
    int64_t size[kMaxDims];                   // outermost first
    int64_t in_stride[kMaxInputs][kMaxDims];  // in elements
    int64_t out_stride[kMaxInputs][kMaxDims];
    DType dtype;  // of all
};

/// The results of a function object that has several: `return {a, b};`.
template <typename A, int Count>
struct Several {
    A at[Count];
};

namespace elementwise {

// A struct and no alias: compilers would take `Number<I>...` for a pattern without a pack.
template <size_t>
struct Argument {
    using Number = float;
};
template <size_t I>
using Number = typename Argument<I>::Number;

template <typename Function, size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
    return std::is_invocable_v<Function, Number<I>...>;
}
template <typename Function, int N = 1>
constexpr int count_inputs() {
    static_assert(N <= kMaxInputs, "a function object of 1 to 16 numbers");
    if constexpr (takes<Function>(std::make_index_sequence<N>()))
        return N;
    else
        return count_inputs<Function, N + 1>();
}

template <typename Result>
constexpr int count_results = 1;
template <typename A, int Count>
constexpr int count_results<Several<A, Count>> = Count;

template <typename Function, size_t... I>
constexpr int count_outputs(std::index_sequence<I...>) {
    return count_results<std::invoke_result_t<Function, Number<I>...>>;
}

/// How many arguments a function object takes, and how many results it has.
template <typename Function>
constexpr int inputs = count_inputs<Function>();
template <typename Function>
constexpr int outputs = count_outputs<Function>(std::make_index_sequence<inputs<Function>>());

template <int M, typename A>
HD A pick(A x) {
    return x;
}
template <int M, typename A, int Count>
HD A pick(const Several<A, Count>& x) {
    return x.at[M];
}

}  // namespace elementwise

/// Declares the launchers of X, of which kernels/X.cu and kernels/X_cpu.cpp have the bodies:
/// `X_cuda`, null or the error's text; `X_cpu`, of elements [begin, end).
#define OCTET_LAUNCHERS(X)                                                       \
    OCTET_KERNEL const char* X##_cuda(const ElementwiseParams* p, void* stream); \
    OCTET_KERNEL void X##_cpu(const ElementwiseParams* p, int64_t begin, int64_t end);
