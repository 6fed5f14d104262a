// What may go the quick way: tensors that need nothing but a kernel, where nothing but that is
// asked of torch's dispatcher.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <type_traits>

using c10::DispatchKey;
using c10::DispatchKeySet;

/// A dense tensor on the CPU or a CUDA device, without a tangent.
inline bool is_plain(const at::Tensor& x) {
    static const uint64_t others =
        ~(DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU,
                          DispatchKey::AutogradCUDA, DispatchKey::ADInplaceOrView,
                          DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA})
              .raw_repr());
    return x.defined() && !(x.key_set().raw_repr() & others) && !x._fw_grad(/*level=*/0).defined();
}

/// Keys without that of dimensions' names, which nodes are run without; torch 2.15 has none.
template <typename Key>
std::enable_if_t<sizeof(Key::Named), DispatchKeySet> without_names(DispatchKeySet keys, int) {
    return keys.remove(Key::Named);
}
template <typename Key>
DispatchKeySet without_names(DispatchKeySet keys, long) {
    return keys;
}

/// Whether nothing has been asked of torch's dispatcher in this thread but, maybe, inference mode.
inline bool is_plain_here() {
    const auto now = c10::impl::tls_local_dispatch_key_set();
    DispatchKeySet included = c10::default_included_set, excluded = c10::default_excluded_set;
    if (c10::InferenceMode::is_enabled()) {
        included = included.remove(DispatchKey::ADInplaceOrView);
        excluded = excluded | c10::autograd_dispatch_keyset;
    }
    return now.included_ == included && without_names<DispatchKey>(now.excluded_, 0) == excluded;
}
