// add2 as a function of a pybind11 module: see python_module.cmake for why one rarely needs it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>  // torch.Tensor <-> at::Tensor

at::Tensor add2(const at::Tensor& a, const at::Tensor& b) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("octet::add2", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
    const pybind11::gil_scoped_release release;
    return op.call(a, b);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("add2", &add2); }
