// aten's grid samplers on grid_sample's kernels: what `loader.accelerate_torch()` puts in the place
// of torch's. Whatever grid_sample refuses, and input and grid of two dtypes, torch gets itself, so
// that its own error comes.
#pragma once
#include <array>

#include "torch/dispatcher.h"
#include "torch/grid_sample_glue.h"

namespace aten {

using namespace grid_sampling;

/// Where a kernel of torch's is, and how its C++ name begins.
struct Cpu {
    static constexpr const char *kLibrary = "libtorch_cpu.so", *kBegin = "_ZN2at3cpu";
};
struct Cuda {
    static constexpr const char *kLibrary = "libtorch_cuda.so", *kBegin = "_ZN2at4cuda";
};

template <typename Device, typename Function>
Function* torchs(const char* rest) {
    const auto found =
        of_torch<Function>((std::string(Device::kBegin) + rest).c_str(), Device::kLibrary);
    if (!found) raise(kName, std::string("this torch has no kernel ") + Device::kBegin + rest);
    return found;
}

/// Whether this torch samples volumes bicubically; where not, its own error is to come.
inline bool cubic_volumes = false;

/// Whether ours take these arguments of an operator on images of `D` dimensions.
inline bool is_covered(int64_t D, const Tensor& input, const Tensor& grid, int64_t interpolation,
                       int64_t padding) {
    try {
        const GridSampleParams p = check(input, grid, interpolation, padding, false);
        const bool unknown = D == 3 && p.interpolation == Interpolation::kCubic && !cubic_volumes;
        return p.D == D && p.dtype == p.grid_dtype && !unknown;
    } catch (const std::exception&) {
        return false;
    }
}

template <typename Device, int D>
Tensor forward(const Tensor& input, const Tensor& grid, int64_t interpolation, int64_t padding,
               bool align_corners) {
    if (is_covered(D, input, grid, interpolation, padding))
        return grid_sample(input, grid, interpolation, padding, align_corners);
    using Kernel = NativeTensor(const NativeTensor&, const NativeTensor&, int64_t, int64_t, bool);
    const auto torchs_own = torchs<Device, Kernel>(
        D == 2 ? "15grid_sampler_2dERKNS_6TensorES3_llb" : "15grid_sampler_3dERKNS_6TensorES3_llb");
    return from_native(
        torchs_own(native(input), native(grid), interpolation, padding, align_corners));
}

/// Both gradients contiguous, as torch's are and its fake kernels say: compiled code relies on it.
/// grad_input is undefined where not asked for, grad_grid never.
inline std::tuple<Tensor, Tensor> gradients(const Tensor& grad_out, const Tensor& input,
                                            const Tensor& grid, int64_t interpolation,
                                            int64_t padding, bool align_corners, bool need_input,
                                            bool need_grid) {
    GridSampleParams p = check(input, grid, interpolation, padding, align_corners);
    set_grad_out(p, grad_out, input, grid);
    p.deterministic = deterministic_algorithms();
    Tensor grad_input = need_input ? new_output(input, shape_of(input)) : undefined_tensor();
    Tensor grad_grid = new_output(grid, shape_of(grid));
    if (need_input) {
        p.grad_input = grad_input.data_ptr();
        set_strides(grad_input, p.grad_input_stride);
    }
    if (need_grid) {
        p.grad_grid = grad_grid.data_ptr();
    } else {
        torch::stable::zero_(grad_grid);
    }
    if (need_input || need_grid) run_gradients(p, input, grad_input, grad_grid);
    return {grad_input, grad_grid};
}

template <typename Device, int D>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& input, const Tensor& grid,
                                    int64_t interpolation, int64_t padding, bool align_corners,
                                    const std::vector<bool>& mask) {
    if (is_covered(D, input, grid, interpolation, padding))
        return gradients(grad_out, input, grid, interpolation, padding, align_corners, mask[0],
                         mask[1]);
    using Kernel = std::tuple<NativeTensor, NativeTensor>(const NativeTensor&, const NativeTensor&,
                                                          const NativeTensor&, int64_t, int64_t,
                                                          bool, std::array<bool, 2>);
    const auto torchs_own = torchs<Device, Kernel>(
        D == 2 ? "24grid_sampler_2d_backwardERKNS_6TensorES3_S3_llbSt5arrayIbLm2EE"
               : "24grid_sampler_3d_backwardERKNS_6TensorES3_S3_llbSt5arrayIbLm2EE");
    const auto [grad_input, grad_grid] =
        torchs_own(native(grad_out), native(input), native(grid), interpolation, padding,
                   align_corners, {mask[0], mask[1]});
    return {from_native(grad_input), from_native(grad_grid)};
}

#ifdef OCTET_CUDA
constexpr int64_t kBilinear = int64_t(Interpolation::kLinear), kZeros = int64_t(Padding::kZeros);

/// What aten::grid_sampler takes for most bilinear samples with aligned corners and zeros outside.
inline Tensor cudnn_forward(const Tensor& input, const Tensor& grid) {
    if (is_covered(2, input, grid, kBilinear, kZeros))
        return grid_sample(input, grid, kBilinear, kZeros, true);
    const auto torchs_own = torchs<Cuda, NativeTensor(const NativeTensor&, const NativeTensor&)>(
        "18cudnn_grid_samplerERKNS_6TensorES3_");
    return from_native(torchs_own(native(input), native(grid)));
}

inline std::tuple<Tensor, Tensor> cudnn_backward(const Tensor& input, const Tensor& grid,
                                                 const Tensor& grad_out) {
    if (is_covered(2, input, grid, kBilinear, kZeros))
        return gradients(grad_out, input, grid, kBilinear, kZeros, true, true, true);
    using Kernel = std::tuple<NativeTensor, NativeTensor>(const NativeTensor&, const NativeTensor&,
                                                          const NativeTensor&);
    const auto torchs_own =
        torchs<Cuda, Kernel>("27cudnn_grid_sampler_backwardERKNS_6TensorES3_S3_");
    const auto [grad_input, grad_grid] = torchs_own(native(input), native(grid), native(grad_out));
    return {from_native(grad_input), from_native(grad_grid)};
}
#endif

template <typename Device>
std::vector<Override> overrides() {
    return {{"grid_sampler_2d", TORCH_BOX((&forward<Device, 2>))},
            {"grid_sampler_3d", TORCH_BOX((&forward<Device, 3>))},
            {"grid_sampler_2d_backward", TORCH_BOX((&backward<Device, 2>))},
            {"grid_sampler_3d_backward", TORCH_BOX((&backward<Device, 3>))}};
}

/// Puts the kernels in the place of torch's; a handle for each device that this build is for, the
/// CPU's first, as `override_aten` returns them.
inline std::vector<int64_t> replace(bool has_cubic_volumes) {
    cubic_volumes = has_cubic_volumes;
    std::vector<int64_t> handles{override_aten(kName, "CPU", overrides<Cpu>())};
#ifdef OCTET_CUDA
    std::vector<Override> on_cuda = overrides<Cuda>();
    on_cuda.push_back({"cudnn_grid_sampler", TORCH_BOX(&cudnn_forward)});
    on_cuda.push_back({"cudnn_grid_sampler_backward", TORCH_BOX(&cudnn_backward)});
    handles.push_back(override_aten(kName, "CUDA", on_cuda));
#endif
    return handles;
}

}  // namespace aten
