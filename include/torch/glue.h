// The torch side that every operator's `ops/X.cpp` shares, on torch's stable ABI: checks with their
// messages, dtypes, and the launch on the caller's device, stream and threads.
#pragma once
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common.h"
#include "torch/unit.h"

#ifdef OCTET_CUDA
// Declared by torch only where CUDA's own headers are included, which nothing here needs.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

using torch::stable::Tensor;

/// Registers a schema, unless loader has.
inline void define(torch::stable::detail::StableLibrary& m, const std::string& schema) {
    if (!is_declared(schema)) m.def(schema.c_str());
}

/// Throws what Python sees as RuntimeError, with this text alone.
[[noreturn, gnu::cold]] inline void raise(const char* op, const std::string& what) {
    throw std::runtime_error(std::string(op) + ": " + what);
}

using Shape = std::vector<int64_t>;

inline Shape shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

[[gnu::cold]] inline std::string shape_text(const Shape& shape) {
    std::string text = "(";
    for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
    return text + (shape.size() == 1 ? ",)" : ")");
}
[[gnu::cold]] inline std::string shape_text(const Tensor& x) { return shape_text(shape_of(x)); }

inline void copy_strides(const Tensor& x, int64_t* to) {
    std::copy_n(x.strides().data(), x.dim(), to);
}

[[gnu::cold]] inline std::string device_text(const Tensor& x) {
    if (x.is_cpu()) return "cpu";
    return (x.is_cuda() ? "cuda:" : "device ") + std::to_string(x.get_device_index());
}

[[gnu::cold]] inline std::string dtype_text(const Tensor& x) {
    static const char* const names[] = {"uint8",     "int8",      "int16",      "int32",
                                        "int64",     "float16",   "float32",    "float64",
                                        "complex32", "complex64", "complex128", "bool"};
    const int code = int(x.scalar_type());
    if (x.scalar_type() == torch::headeronly::ScalarType::BFloat16) return "bfloat16";
    return code < 12 ? names[code] : "dtype number " + std::to_string(code);
}

/// One of the four element types, or an error that names the argument.
inline DType dtype_of(const char* op, const char* argument, const Tensor& x) {
    using torch::headeronly::ScalarType;
    switch (x.scalar_type()) {
        case ScalarType::Float: return DType::kFloat;
        case ScalarType::Double: return DType::kDouble;
        case ScalarType::Half: return DType::kHalf;
        case ScalarType::BFloat16: return DType::kBFloat16;
        default:
            raise(op, std::string(argument) +
                          " must be float32, float64, float16 or bfloat16, got " + dtype_text(x) +
                          "; convert it, e.g. " + argument + ".float()");
    }
}

/// Which toolkit fits this torch's CUDA, and by which wheels it comes.
[[gnu::cold]] inline std::string nvcc_of_torch() {
    int version = 0;  // 13020 is 13.2
    void* const ask = dlsym(RTLD_DEFAULT, "cudaRuntimeGetVersion");
    if (!ask || reinterpret_cast<int (*)(int*)>(ask)(&version)) return "of torch";
    const std::string cuda =
        std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    std::string wheels;
    for (const char* name : {"nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"})
        wheels += std::string(" '") + name + "==" + cuda + ".*'";
    return cuda + " or pip install" + wheels;
}

/// A dense tensor on a device that this build has kernels for.
inline void check_tensor(const char* op, const char* argument, const Tensor& x) {
    if (!x.defined()) raise(op, std::string(argument) + " must be a tensor, got None");
    int32_t layout = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(x.get(), &layout));
    if (layout != aoti_torch_layout_strided())
        raise(op, std::string(argument) +
                      " must be a dense tensor, got a sparse or packed one; use " + argument +
                      ".to_dense()");
    if (!x.is_cpu() && !x.is_cuda())
        raise(op, std::string(argument) + " must be on the CPU or a CUDA device, got " +
                      device_text(x) + "; move it, e.g. " + argument + ".cpu()");
#ifndef OCTET_CUDA
    if (x.is_cuda())
        raise(op, std::string(argument) + " is on " + device_text(x) +
                      ", but this build is for the CPU only: nvcc was not found, or no GPU; "
                      "install the CUDA toolkit " +
                      nvcc_of_torch() +
                      ", or name the GPU in TORCH_CUDA_ARCH_LIST, and import loader again");
#endif
}

inline void check_same_device(const char* op, const char* first, const Tensor& a,
                              const char* second, const Tensor& b) {
    if (a.is_cuda() != b.is_cuda() || a.get_device_index() != b.get_device_index())
        raise(op, std::string(second) + " must be on the device of " + first + ", " +
                      device_text(a) + ", got " + device_text(b) + "; move one of them with .to()");
}

inline void check_same_shape(const char* op, const char* first, const Tensor& a, const char* second,
                             const Tensor& b, const char* cure = "") {
    bool same = a.dim() == b.dim();
    for (int64_t d = 0; same && d < a.dim(); ++d) same = a.size(d) == b.size(d);
    if (!same)
        raise(op, std::string(second) + " must have the shape of " + first + ", " + shape_text(a) +
                      ", got " + shape_text(b) + cure);
}

inline void check_same_dtype(const char* op, const char* first, const Tensor& a, const char* second,
                             const Tensor& b, const char* cure = "") {
    if (a.scalar_type() != b.scalar_type())
        raise(op, std::string(second) + " must have the dtype of " + first + ", " + dtype_text(a) +
                      ", got " + dtype_text(b) + cure);
}

/// An argument that is on `a`'s device and of its dtype, as a gradient to it is.
inline void check_kind(const char* op, const char* first, const Tensor& a, const char* second,
                       const Tensor& b) {
    check_same_device(op, first, a, second, b);
    dtype_of(op, second, b);
    check_same_dtype(op, first, a, second, b);
}

/// Which of these words an option is; each enumeration counts in their order.
template <typename Code>
inline Code code_of(const char* op, const char* option, const std::string& value,
                    std::initializer_list<const char*> words) {
    std::string text;
    int i = 0;
    for (const char* word : words) {
        if (value == word) return Code(i);
        text += i == 0 ? "'" : i + 1 < int(words.size()) ? ", '" : " or '";
        text += std::string(word) + "'";
        ++i;
    }
    throw std::invalid_argument(std::string(op) + ": " + option + " must be " + text + ", got '" +
                                value + "'");
}

#ifdef OCTET_CUDA
extern "C" int octet_query_stream(void*) __asm__("cudaStreamQuery");
extern "C" const char* octet_error_text(int) __asm__("cudaGetErrorString");
#endif

/// Throws torch's own words for memory that cannot be had, as programs look for them that then try
/// again with less; what else torch knows of it is on stderr. After a kernel that failed no memory
/// can be had either, nor anything else from this process's GPU: the error is that kernel's then.
[[noreturn, gnu::cold]] inline void raise_no_memory(const Tensor& like, double bytes) {
#ifdef OCTET_CUDA
    const int error = like.is_cpu() ? 0 : octet_query_stream(nullptr);
    if (error >= 700 && error < 800)  // those that stay: cudaErrorIllegalAddress and its like
        throw std::runtime_error(std::string("CUDA error: ") + octet_error_text(error) +
                                 " (of a kernel that ran before; restart the process)");
#endif
    char text[128];
    if (like.is_cpu())
        std::snprintf(text, sizeof text,
                      "DefaultCPUAllocator: can't allocate memory: you tried to allocate %.0f "
                      "bytes.",
                      bytes);
    else
        std::snprintf(text, sizeof text, "CUDA out of memory. Tried to allocate %.2f %s on %s.",
                      bytes / (bytes < 1 << 30 ? 1 << 20 : 1 << 30),
                      bytes < 1 << 30 ? "MiB" : "GiB", device_text(like).c_str());
    throw std::runtime_error(text);
}

/// A new tensor on `like`'s device. Not torch::stable::new_empty or empty_like: those go through
/// the dispatcher, a microsecond of each call.
inline Tensor new_memory(const Tensor& like, int32_t dtype, int64_t each, int64_t dims,
                         const int64_t* size, const int64_t* stride) {
    int32_t type, index;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
    AtenTensorHandle made;
    if (aoti_torch_empty_strided(dims, size, stride, dtype, type, index, &made)) {
        double bytes = double(each);
        for (int64_t d = 0; d < dims; ++d) bytes += double(size[d] - 1) * double(stride[d] * each);
        raise_no_memory(like, bytes);
    }
    return Tensor(made);
}

/// One of `like`'s dtype too.
inline Tensor new_strided(const Tensor& like, int64_t dims, const int64_t* size,
                          const int64_t* stride) {
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
    return new_memory(like, dtype, int64_t(like.element_size()), dims, size, stride);
}

/// Memory on `like`'s device for a kernel to work in, aligned for any type.
inline Tensor new_bytes(const Tensor& like, int64_t bytes) {
    const int64_t stride = 1;
    return new_memory(like, aoti_torch_dtype_uint8(), 1, 1, &bytes, &stride);
}

/// Whether the system gives the pages of freed memory back to the machine it is a guest of: 2 MiB
/// of them are then had anew at each use, which takes 2 ms, longer than as many small ones.
inline bool gives_pages_back() {
    static const bool is = [] {
        std::FILE* file =
            std::fopen("/sys/module/page_reporting/parameters/page_reporting_order", "r");
        long long order = -1;  // as it may be written, also as unsigned: then it gives none
        if (file && std::fscanf(file, "%lld", &order) != 1) order = -1;
        if (file) std::fclose(file);
        return order >= 0 && order < 64;
    }();
    return is;
}

/// A new tensor for a kernel to fill, contiguous, of `like`'s dtype and device.
/// Fresh memory costs a page fault at the first write to each page, which for 4 KiB pages takes
/// longer than the kernel itself: where it is large the system is asked for 2 MiB pages.
inline Tensor new_output(const Tensor& like, const Shape& shape) {
    int64_t strides[64];
    int64_t step = 1;
    for (size_t d = shape.size(); d-- > 0; step *= std::max<int64_t>(shape[d], 1))
        strides[d] = step;
    Tensor out = new_strided(like, int64_t(shape.size()), shape.data(), strides);
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t kPage = 1 << 21;
    const uintptr_t bytes = out.numel() * out.element_size();
    if (out.is_cpu() && bytes >= 2 * kPage && !gives_pages_back()) {
        const auto begin = reinterpret_cast<uintptr_t>(out.data_ptr());
        const uintptr_t first = (begin + kPage - 1) / kPage, last = (begin + bytes) / kPage;
        madvise(reinterpret_cast<void*>(first * kPage), (last - first) * kPage, MADV_HUGEPAGE);
    }
#endif
    return out;
}

/// A gradient of this shape, empty where it is not asked for.
inline Tensor new_gradient(const Tensor& like, bool wanted, const Shape& shape) {
    return new_output(like, wanted ? shape : Shape{0});
}

/// A new tensor with `like`'s shape too, dense, its dimensions in the same order: torch.empty_like,
/// by its own rule (at::infer_dense_strides), dimensions sorted by insertion, the innermost first,
/// where pairs of which one is expanded stay as they are. Where some have one element it is asked.
inline Tensor new_like(const Tensor& like) {
    const int64_t dims = like.dim(), *const size = like.sizes().data();
    const int64_t* const given = like.strides().data();
    if (like.is_contiguous()) return new_strided(like, dims, size, given);
    constexpr int64_t kMost = 16;
    bool open = dims > kMost;
    for (int64_t d = 0; d < dims; ++d) open = open || size[d] < 2;
    if (open) {
        try {
            return torch::stable::empty_like(like);
        } catch (const std::exception&) {
            raise_no_memory(like, double(like.numel()) * double(like.element_size()));
        }
    }
    int64_t order[kMost], stride[kMost];
    for (int64_t i = 0; i < dims; ++i) {
        order[i] = dims - 1 - i;
        for (int64_t at = i, to = i - 1; to >= 0; --to) {
            const int64_t a = order[to], b = order[at];
            if (given[a] == 0 || given[b] == 0) continue;
            if (given[a] < given[b]) break;
            if (given[a] > given[b] || size[a] > size[b]) std::swap(order[to], order[at]), at = to;
        }
    }
    int64_t step = 1;
    for (int64_t i = 0; i < dims; step *= size[order[i++]]) stride[order[i]] = step;
    return new_strided(like, dims, size, stride);
}

/// `x`, or a contiguous copy of it.
inline Tensor as_contiguous(const Tensor& x) {
    if (x.is_contiguous()) return x;
    Tensor copy = new_output(x, shape_of(x));
    torch::stable::copy_(copy, x);
    return copy;
}

/// Runs a kernel on `like`'s device: on the GPU in the caller's current stream, on the CPU over
/// [0, count) in torch's own threads, `grain` items or more to a thread.
template <typename Params>
inline void launch([[maybe_unused]] const char* op, const Tensor& like, const Params& p,
                   int64_t count, int64_t grain, void (*on_cpu)(const Params*, int64_t, int64_t),
                   [[maybe_unused]] const char* (*on_cuda)(const Params*, void*)) {
    if (like.is_cpu()) {
        if (count > 0 && count <= grain) return on_cpu(&p, 0, count);
        torch::stable::parallel_for(0, count, grain,
                                    [&](int64_t begin, int64_t end) { on_cpu(&p, begin, end); });
        return;
    }
#ifdef OCTET_CUDA
    const int32_t device = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    if (const char* error = on_cuda(&p, stream))
        raise(op, std::string("CUDA launch failed: ") + error);
#endif
}
