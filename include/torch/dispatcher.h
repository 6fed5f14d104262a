// Kernels in the place of ones that torch has: registered while a program runs, without a word of
// torch's, and called by their own names where ours do not serve.
//
// torch's functions are looked up rather than linked: in a library that takes the place of an
// edited one, those of the C interface have stand-ins (jit/live/swap.cpp).
#pragma once
#include <vector>

#include "quietly.h"
#include "torch/glue.h"

/// A boxed kernel and the operator of namespace `aten` that it is for.
struct Override {
    const char* name;
    void (*kernel)(StableIValue*, uint64_t, uint64_t);
};

/// Registers kernels for a dispatch key, ahead of those that are there. The handle that comes back
/// withdraws them: aoti_torch_delete_library_object.
inline int64_t override_aten(const char* op, const char* key,
                             const std::vector<Override>& overrides) {
    const auto init =
        of_torch<decltype(aoti_torch_library_init_impl)>("aoti_torch_library_init_impl");
    const auto implement = of_torch<decltype(torch_library_impl)>("torch_library_impl");
    const auto withdraw =
        of_torch<decltype(aoti_torch_delete_library_object)>("aoti_torch_delete_library_object");
    const Quietly quietly;
    TorchLibraryHandle library = nullptr;
    if (!init || !implement || !withdraw || init("aten", key, __FILE__, __LINE__, &library))
        raise(op, "this torch does not let its operators be overridden");
    for (const Override& override : overrides)
        if (implement(library, override.name, override.kernel, TORCH_ABI_VERSION)) {
            withdraw(library);
            raise(op, std::string("this torch has no aten::") + override.name);
        }
    return int64_t(library);
}

/// Whether torch.use_deterministic_algorithms(True) holds.
inline bool deterministic_algorithms() {
    static const auto context = of_torch<const void*()>("_ZN2at13globalContextEv");
    static const auto ask =
        of_torch<bool(const void*)>("_ZNK2at7Context23deterministicAlgorithmsEv");
    return context && ask && ask(context());
}

/// Laid out, passed and returned as at::Tensor is, whose header takes seconds to compile: one
/// pointer, and a destructor that matters.
struct NativeTensor {
    void* impl = nullptr;
    ~NativeTensor() {}
};

inline const NativeTensor& native(const Tensor& x) {
    return *reinterpret_cast<const NativeTensor*>(x.get());
}

inline Tensor undefined_tensor() {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
    return Tensor(handle);
}

/// What a function of torch's returned, whose owner the result becomes.
inline Tensor from_native(const NativeTensor& x) {
    Tensor out = undefined_tensor();
    reinterpret_cast<NativeTensor*>(out.get())->impl = x.impl;
    return out;
}
