// What few calls of an operator X need, in a library of its own, made of the sources
// kernels/X/*.rest.*: a table of functions (rest_table.h), whose address the operator
// octet::rest_of_X gives. loader has a stand-in for that, which waits until the library is built,
// and loads it.
#pragma once
#include <atomic>

#include "torch/glue.h"
#include "torch/rest_table.h"

/// In ops/X.cpp: X's table, whose library is loaded first where that is still to do.
template <typename Table>
const Table* rest_of(const char* op) {
    static std::atomic<const Table*> known{nullptr};
    if (const Table* const table = known.load(std::memory_order_acquire)) return table;
    const std::string name = std::string("octet::rest_of_") + op;
    StableIValue stack[1] = {};
    if (torch_call_dispatcher(name.c_str(), "", stack, TORCH_ABI_VERSION))
        raise(op, std::string("this call needs the library ") + op +
                      ".rest-.../library.so of the cache, which is not loaded; load it as well");
    const auto found = torch::stable::detail::to<std::string>(stack[0]);
    if (found[0] != '@') throw std::runtime_error(found);  // what loader says
    const auto table = reinterpret_cast<const Table*>(uintptr_t(std::stoull(found.substr(1))));
    known.store(table, std::memory_order_release);
    return table;
}

/// What computes on the CPU where float32 is the library's `own` and other elements the rest's.
template <typename Table, typename OnCpu>
OnCpu cpu_of(const char* op, DType dtype, const Tensor& like, OnCpu own, OnCpu Table::* others) {
    return !like.is_cpu() || dtype == DType::kFloat ? own : rest_of<Table>(op)->*others;
}
