// The way of `torch.ops.octet.X`, which compiled graphs call, past autograd where no gradient is
// wanted. torch.library.register_autograd has a function of Python's there, for every call: it
// takes longer than all else that torch does for one.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <set>
#include <string>

/// In Autograd's place: goes on below it, or to Python's function where a gradient is wanted.
inline void past_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                          torch::jit::Stack* stack) {
    bool wanted = false;
    if (c10::GradMode::is_enabled())
        for (const c10::IValue& x : torch::jit::last(*stack, op.schema().arguments().size()))
            wanted |= x.isTensor() && x.toTensor().requires_grad();
    keys = keys & c10::after_autograd_keyset;
    if (wanted) {
        // Registered for Autograd as a whole, Python's serves this key too, which comes first now.
        op.redispatchBoxed(keys | c10::DispatchKeySet(c10::DispatchKey::AutogradOther), stack);
        return;
    }
    const at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(keys, stack);
}

/// Has an operator, and its derivatives that are operators too, called so from now on.
inline void call_past_autograd(const std::string& name) {
    static std::set<std::string> known;  // an edited operator comes here again
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const char* suffix : {"", "_backward", "_backward_backward"}) {
        const c10::OperatorName full{name + suffix, ""};
        if (!dispatcher.findSchema(full) || !known.insert(full.name).second) continue;
        for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA})
            // Undone by its destructor, which is never to run.
            new auto(dispatcher.registerImpl(
                full, key, c10::KernelFunction::makeFromBoxedFunction<&past_autograd>(),
                std::nullopt, nullptr, "octet: past autograd"));
    }
}
