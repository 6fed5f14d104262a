// apply_lut3d and its backward for torch: checks, allocation, launches.
#include "apply_lut3d.h"

#include <algorithm>
#include <tuple>

#include "dims.h"
#include "torch/rest.h"
#include "torch/shapes.h"

constexpr const char* kName = "apply_lut3d";

using torch::headeronly::ScalarType;

void check(const Tensor& image, const Tensor& lut) {
    check_tensor(kName, "image", image);
    check_tensor(kName, "lut", lut);
    Sizes sizes(kName);
    sizes.match("image", image, "(..., 3)", "move the channels last, e.g. image.movedim(-3, -1)");
    if (image.scalar_type() != ScalarType::Byte) {
        try {
            dtype_of(kName, "image", image);
        } catch (const std::runtime_error&) {
            raise(kName, "image must be uint8, float32, float64, float16 or bfloat16, got " +
                             dtype_text(image) + "; convert it, e.g. image.float()");
        }
    }
    if (lut.dim() == 5)  // one for each of the image's first dimension: for torch.vmap alone
        sizes.match("lut", lut, "(G, S, S, S, 3)");
    else
        sizes.match("lut", lut, "(S, S, S, 3), indexed [r, g, b]");
    if (lut.dim() == 5 && (image.dim() < 2 || image.size(0) != lut.size(0)))
        raise(kName, "image must have the first dimension of lut (G, S, S, S, 3), " +
                         shape_text(lut) + ", got " + shape_text(image));
    const int64_t S = lut.size(lut.dim() - 2);
    if (S < 2 || S > kLutLargest)
        raise(kName, "lut must have 2 to " + std::to_string(kLutLargest) +
                         " entries along an axis, got shape " + shape_text(lut));
    if (lut.dim() == 5 && (lut.size(0) > kLutTables || lut.numel() / 3 > INT32_MAX))
        raise(kName, "lut (G, S, S, S, 3) must have up to " + std::to_string(kLutTables) +
                         " tables and 2^31 - 1 entries, got " + shape_text(lut));
    dtype_of(kName, "lut", lut);
    check_same_device(kName, "image", image, "lut", lut);
}

/// Joins neighbouring dimensions of an image where one stride serves both; false where more than
/// kLutDims are left.
bool layout_of(const Tensor& image, PixelLayout& at) {
    const int64_t channels = image.dim() - 1;
    const int64_t* const stride = image.strides().data();
    int64_t* const merged = at.stride;
    at.dims = merge_dims(channels, image.sizes().data(), &stride, 1, kLutDims, at.size, &merged);
    if (at.dims < 0) return false;
    if (at.dims == 0) at.dims = 1, at.size[0] = 1, at.stride[0] = 3;
    at.channel = image.stride(channels);
    return true;
}

/// `image`, or a copy of it in the rare case of too many strides.
Tensor laid_out(const Tensor& image, PixelLayout& at) {
    if (layout_of(image, at)) return image;
    const Tensor copy = as_contiguous(image);
    layout_of(copy, at);
    return copy;
}

ApplyLut3dParams params_of(const Tensor& image, const Tensor& lut, const std::string& method) {
    ApplyLut3dParams p{};
    p.method = code_of<Lut3dMethod>(kName, "interpolation", method, {"trilinear", "tetrahedral"});
    p.bytes = image.scalar_type() == ScalarType::Byte;
    p.dtype = p.bytes ? DType::kFloat : dtype_of(kName, "image", image);
    p.lut_dtype = dtype_of(kName, "lut", lut);
    p.image = image.data_ptr(), p.lut = lut.data_ptr();
    std::copy_n(lut.strides().data() + lut.dim() - 4, 4, p.lut_stride);
    p.S = int32_t(lut.size(lut.dim() - 2));
    p.entries = int32_t(lut.numel() / 3);
    p.N = image.numel() / 3;
    p.tables = lut.dim() == 5 ? lut.size(0) : 1;
    p.pixels = p.N / std::max<int64_t>(p.tables, 1);
    return p;
}

/// Memory for so many numbers of the accumulating type.
Tensor new_work(const ApplyLut3dParams& p, const Tensor& like, int64_t count) {
    return new_bytes(like, count * (p.dtype == DType::kDouble ? 8 : 4));
}

Tensor make_table(ApplyLut3dParams& p, const Tensor& lut) {
    const Tensor table = new_work(p, lut, int64_t(p.entries) * 4);
    p.table = table.data_ptr();
    return table;
}

/// `lut`; more than one table next to each other.
Tensor joined(const Tensor& lut) { return lut.dim() == 5 ? as_contiguous(lut) : lut; }

Lut3dWay way_of([[maybe_unused]] const ApplyLut3dParams& p, [[maybe_unused]] const Tensor& image) {
#ifdef OCTET_CUDA
    return apply_lut3d_way_cuda(&p, image.get_device_index());
#else
    return Lut3dWay::kTable;
#endif
}

Tensor apply_lut3d(const Tensor& image, const Tensor& given, std::string interpolation) {
    check(image, given);
    const Tensor lut = joined(given);
    ApplyLut3dParams p = params_of(image, lut, interpolation);
    const Tensor out = new_output(image, shape_of(image));
    if (p.N == 0) return out;
    const Tensor source = laid_out(image, p.image_at);
    p.image = source.data_ptr(), p.out = out.data_ptr();
    std::optional<Tensor> table, work;
    p.way = image.is_cpu() ? (apply_lut3d_directly(p) ? Lut3dWay::kDirect : Lut3dWay::kTable)
                           : way_of(p, image);
    if (p.way != Lut3dWay::kDirect && p.way != Lut3dWay::kShared) {
        table = make_table(p, lut);
        if (p.way != Lut3dWay::kTable)
            p.work = work.emplace(new_bytes(lut, apply_lut3d_work(p))).data_ptr();
        launch(kName, lut, p, p.entries, 4096, apply_lut3d_table_cpu,
               OCTET_CUDA_LAUNCHER(apply_lut3d_table_cuda));
    }
    launch(kName, lut, p, p.N, 2048, apply_lut3d_cpu, OCTET_CUDA_LAUNCHER(apply_lut3d_cuda));
    return out;
}

/// Into how many parts the CPU cuts the pixels. With the gradient to the table each has its own
/// sums, so there are few; they depend on sizes alone, and so does the order of the sums.
int64_t parts_of(const ApplyLut3dParams& p, bool need_lut) {
    return need_lut ? std::clamp<int64_t>(p.N / std::max<int64_t>(p.entries, 4096), 1, 16)
                    : ceil_div(p.N, 4096);
}

/// Whether the CPU adds to grad_lut itself: where few pixels meet a large table, clearing, reading
/// and writing it are most of the work.
bool sums_in_place(const ApplyLut3dParams& p, const Tensor& image) {
    return image.is_cpu() && p.parts == 1 && p.lut_dtype == p.dtype &&
           (p.dtype == DType::kFloat || p.dtype == DType::kDouble);
}

/// (grad_image, grad_lut); what is not asked for comes back empty.
std::tuple<Tensor, Tensor> apply_lut3d_backward(const Tensor& grad_out, const Tensor& image,
                                                const Tensor& given, std::string interpolation,
                                                bool deterministic, bool need_image,
                                                bool need_lut) {
    check(image, given);
    const Tensor lut = joined(given);
    check_tensor(kName, "grad_out", grad_out);
    if (image.scalar_type() == ScalarType::Byte)
        raise(kName,
              "a uint8 image has no gradients, as its output is rounded to whole numbers; "
              "take image / 255");
    check_same_shape(kName, "image", image, "grad_out", grad_out);
    check_kind(kName, "image", image, "grad_out", grad_out);
    ApplyLut3dParams p = params_of(image, lut, interpolation);
    Tensor grad_image = new_gradient(image, need_image, shape_of(image));
    Tensor grad_lut = new_gradient(lut, need_lut, shape_of(lut));
    if (p.N == 0 && need_lut) torch::stable::zero_(grad_lut);
    if (p.N == 0 || !(need_image || need_lut)) return {grad_image, grad_lut};
    const Tensor source = laid_out(image, p.image_at), grad = laid_out(grad_out, p.grad_out_at);
    p.image = source.data_ptr(), p.grad_out = grad.data_ptr();
    p.deterministic = deterministic;
    p.parts = image.is_cpu() ? parts_of(p, need_lut) : 1;
    std::optional<Tensor> table, sums;
    if (need_image) {
        p.grad_image = grad_image.data_ptr();
        if (!image.is_cpu() || !apply_lut3d_directly(p)) {
            table = make_table(p, lut);
            launch(kName, lut, p, p.entries, 4096, apply_lut3d_table_cpu,
                   OCTET_CUDA_LAUNCHER(apply_lut3d_table_cuda));
        }
    }
    if (need_lut) {
        p.grad_lut = grad_lut.data_ptr();
        // Of the CUDA kernels' deterministic sums: see kernels/apply_lut3d/backward.cuh.
        const bool fixed = deterministic && image.is_cuda();
#ifdef OCTET_CUDA
        if (image.is_cuda()) apply_lut3d_plan_cuda(&p, image.get_device_index());
#endif
        if (sums_in_place(p, image)) {
            p.sums = p.grad_lut;
        } else {
            sums = fixed ? new_bytes(lut, apply_lut3d_fixed_bytes(p))
                         : new_work(p, lut, p.parts * p.entries * 4);
            p.sums = sums->data_ptr();
        }
    }
    auto* on_cuda = OCTET_CUDA_LAUNCHER(apply_lut3d_backward_cuda);
    if (image.is_cuda() && p.dtype != DType::kFloat)
        on_cuda = rest_of<ApplyLut3dRest>(kName)->backward;
    launch(kName, lut, p, p.parts, 1, apply_lut3d_backward_cpu, on_cuda);
    if (need_lut && p.sums != p.grad_lut)
        launch(kName, lut, p, p.entries, 4096, apply_lut3d_sum_cpu,
               OCTET_CUDA_LAUNCHER(apply_lut3d_sum_cuda));
    return {grad_image, grad_lut};
}

STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    define(m, "apply_lut3d(Tensor image, Tensor lut, str interpolation) -> Tensor");
    define(m,
           "apply_lut3d_backward(Tensor grad_out, Tensor image, Tensor lut, str interpolation, "
           "bool deterministic, bool need_image, bool need_lut) -> (Tensor grad_image, "
           "Tensor grad_lut)");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("apply_lut3d", TORCH_BOX(&apply_lut3d));
    m.impl("apply_lut3d_backward", TORCH_BOX(&apply_lut3d_backward));
}
