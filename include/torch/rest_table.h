// The table of what few calls of an operator need, in their library: see rest.h. By torch's
// functions for C alone: of the classes on top of them a compiler reads for as long as a kernel
// takes.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>
#include <string>

#include "torch/unit.h"

/// Registers an operator that takes nothing and returns text, while it lives.
class RestOperator {
  public:
    RestOperator(const std::string& name, void (*boxed)(StableIValue*, uint64_t, uint64_t)) {
        const std::string schema = name + "() -> str";
        check(aoti_torch_library_init_fragment("octet", __FILE__, __LINE__, &schemas_));
        if (!is_declared(schema)) check(aoti_torch_library_def(schemas_, schema.c_str()));
        check(aoti_torch_library_init_impl("octet", "CompositeExplicitAutograd", __FILE__, __LINE__,
                                           &kernels_));
        check(torch_library_impl(kernels_, name.c_str(), boxed, TORCH_ABI_VERSION));
    }
    RestOperator(const RestOperator&) = delete;
    ~RestOperator() {
        aoti_torch_delete_library_object(kernels_);
        aoti_torch_delete_library_object(schemas_);
    }
    /// What the operator returns: an address.
    static StableIValue text_of(const void* address) {
        const std::string text = "@" + std::to_string(reinterpret_cast<uintptr_t>(address));
        StringHandle handle = nullptr;
        check(torch_new_string_handle(text.data(), text.size(), &handle));
        return StableIValue(reinterpret_cast<uintptr_t>(handle));
    }

  private:
    TorchLibraryHandle schemas_ = nullptr, kernels_ = nullptr;

    static void check(AOTITorchError error) {
        if (error) throw std::runtime_error("torch refused what few calls of an operator need");
    }
};

/// In one of those sources: `table` is a function that returns a pointer to X's table.
#define OCTET_REST(X, table)                                                                   \
    static const RestOperator rest_operator_##X("rest_of_" #X,                                 \
                                                [](StableIValue* stack, uint64_t, uint64_t) {  \
                                                    stack[0] = RestOperator::text_of(table()); \
                                                });
