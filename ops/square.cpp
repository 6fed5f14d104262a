// square and its backward for torch; checks and allocation in elementwise_glue.h.
#include "square.h"

#include "elementwise_glue.h"

Tensor square(const Tensor& x) {
    return elementwise("square", "x", x, "x", x, square_cpu, OCTET_CUDA_LAUNCHER(square_cuda));
}

Tensor square_backward(const Tensor& grad_out, const Tensor& x) {
    return elementwise("square", "grad_out", grad_out, "x", x, square_backward_cpu,
                       OCTET_CUDA_LAUNCHER(square_backward_cuda));
}

STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    m.def("square(Tensor x) -> Tensor");
    m.def("square_backward(Tensor grad_out, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("square", TORCH_BOX(&square));
    m.impl("square_backward", TORCH_BOX(&square_backward));
}
