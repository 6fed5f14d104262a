// The torch side of grid_sample's kernels: checks, allocation, launches.
#pragma once
#include <algorithm>
#include <tuple>

#include "choices.h"
#include "grid_sample.h"
#include "rates/grid_sample_cpu.h"
#include "torch/glue.h"
#include "torch/rest.h"

namespace grid_sampling {

constexpr const char* kName = "grid_sample";

inline void check_dims(const Tensor& input, const Tensor& grid, int64_t interpolation) {
    const int64_t dims = input.dim();
    if (dims != 4 && dims != 5)
        raise(kName, "input must be (N, C, H, W) or (N, C, D, H, W), got " + shape_text(input));
    if (grid.dim() != dims || grid.size(dims - 1) != dims - 2)
        raise(kName, std::string("grid must be ") +
                         (dims == 4 ? "(N, H_out, W_out, 2)" : "(N, D_out, H_out, W_out, 3)") +
                         " for an input of " + std::to_string(dims) + " dimensions, got " +
                         shape_text(grid));
    if (grid.size(0) != input.size(0))
        raise(kName, "grid must have the batch size of input, " + std::to_string(input.size(0)) +
                         ", got " + shape_text(grid) + "; expand it, e.g. grid.expand(" +
                         std::to_string(input.size(0)) + (dims == 4 ? "" : ", -1") +
                         ", -1, -1, -1)");
    for (int64_t d = 2; d < dims; ++d) {
        if (input.size(d) == 0)
            raise(kName,
                  "input must have at least one pixel along each axis, got " + shape_text(input));
        if (input.size(d) > 0x7fffffff)
            raise(kName,
                  "input must have less than 2^31 pixels along an axis, got " + shape_text(input));
    }
    if (interpolation < 0 || interpolation > 2)
        throw std::invalid_argument(
            "grid_sample: interpolation_mode must be 0 (bilinear), 1 (nearest) or 2 (bicubic), "
            "got " +
            std::to_string(interpolation));
}

/// Strides as b, c, z, y, x.
inline void set_strides(const Tensor& x, int64_t (&stride)[5]) {
    const int64_t missing = 5 - x.dim();
    stride[0] = x.stride(0), stride[1] = x.stride(1), stride[2] = 0;
    for (int64_t d = 2; d < x.dim(); ++d) stride[d + missing] = x.stride(d);
}

inline void set_points(const Tensor& grid, PointsView& points, int64_t (&stride)[2]) {
    points = view_of(grid.dim() - 2, grid.sizes().data() + 1, grid.strides().data() + 1);
    stride[0] = grid.stride(0), stride[1] = grid.stride(grid.dim() - 1);
}

inline GridSampleParams check(const Tensor& input, const Tensor& grid, int64_t interpolation,
                              int64_t padding, bool align_corners) {
    check_tensor(kName, "input", input);
    check_tensor(kName, "grid", grid);
    check_dims(input, grid, interpolation);
    if (padding < 0 || padding > 2)
        throw std::invalid_argument(
            "grid_sample: padding_mode must be 0 (zeros), 1 (border) or 2 (reflection), got " +
            std::to_string(padding));
    check_same_device(kName, "input", input, "grid", grid);
    GridSampleParams p{};
    p.dtype = p.out_dtype = dtype_of(kName, "input", input);
    p.grid_dtype = dtype_of(kName, "grid", grid);
    p.interpolation = Interpolation(interpolation), p.padding = Padding(padding);
    p.align_corners = align_corners;
    p.D = int32_t(input.dim() - 2);
    p.B = input.size(0), p.C = input.size(1), p.P = 1;
    for (int64_t d = 1; d < grid.dim() - 1; ++d) p.P *= grid.size(d);
    p.size[0] = 1;
    for (int64_t d = 0; d < p.D; ++d) p.size[3 - p.D + d] = int32_t(input.size(2 + d));
    std::copy_n(p.size, 3, p.whole);
    p.input = input.data_ptr();
    p.grid = grid.data_ptr();
    set_strides(input, p.input_stride);
    set_points(grid, p.grid_points, p.grid_stride);
    return p;
}

/// The shape of the output.
inline Shape output_shape(const Tensor& input, const Tensor& grid) {
    Shape shape(grid.dim());
    shape[0] = input.size(0), shape[1] = input.size(1);
    for (int64_t d = 2; d < grid.dim(); ++d) shape[d] = grid.size(d - 1);
    return shape;
}

/// Allocates scratch memory and runs the job.
inline void run(GridSampleParams& p, const Tensor& like) {
    if (needs_rest(p, !like.is_cpu())) p.rest = rest_of<GridSampleRest>(kName);
    const auto scratch = [&](int64_t bytes) {
        std::optional<Tensor> memory;
        if (bytes > 0) p.scratch = memory.emplace(new_bytes(like, bytes)).data_ptr();
        return memory;
    };
    if (!like.is_cpu()) {
#ifdef OCTET_CUDA
        const std::optional<Tensor> memory = scratch(grid_sample_scratch_cuda(&p));
        launch(kName, like, p, 0, 1, grid_sample_cpu, grid_sample_cuda);
#endif
        return;
    }
    p.threads = int32_t(torch::stable::get_num_threads());
    const std::optional<Tensor> memory = scratch(grid_sample_scratch_cpu(&p));
    for (int64_t items; (items = grid_sample_items_cpu(&p)) > 0; ++p.phase)
        launch(kName, like, p, items, 1, grid_sample_cpu, OCTET_CUDA_LAUNCHER(grid_sample_cuda));
}

/// Whether a job of a 16-bit image is done in float32, from a converted image, and to a gradient
/// that is then rounded: on the CPU, whose loops then need no conversions but of points. Twice as
/// fast where there are pixels to read for what the whole image's conversion takes.
inline bool in_float(const GridSampleParams& p, const Tensor& input, bool need_input = false) {
    if (!input.is_cpu() || !(p.dtype == DType::kHalf || p.dtype == DType::kBFloat16)) return false;
    constexpr auto r = kGridSampleCpuRates;
    const int64_t pixels = int64_t(p.size[0]) * p.size[1] * p.size[2];
    const int64_t along = p.interpolation == Interpolation::kLinear    ? 2
                          : p.interpolation == Interpolation::kNearest ? 1
                                                                       : 4;
    const double each = double(p.B) * p.C * 1e-3, taps = along * along * (p.D == 3 ? along : 1);
    // A gradient to the image is written to all pixels in any case; summed, where there are not far
    // more of them than taps.
    const bool all_summed = need_input && p.P * taps * r.touched >= pixels;
    const auto fresh = [&](double thousand) {
        return 4e3 * thousand < r.mapped ? 0 : thousand * r.fresh;
    };
    const double convert = r.calls + each * pixels * r.convert * (all_summed ? 0.25 : 1) +
                           fresh(each * pixels) * (need_input ? 2 : 1);
    const double gained = each * p.P * (r.sample + taps * r.tap);
    const bool is = convert <= gained;
    tell_choice(kName, "precision of 16 bits",
                is ? "float32 from end to end" : "an element at a time",
                "what the image's conversion takes against what its taps then save",
                {{"float32 from end to end", convert}, {"an element at a time", gained}});
    return is;
}
/// The input in the type that it is read in, where it is read.
inline Tensor as_read(GridSampleParams& p, const Tensor& input) {
    p.dtype = DType::kFloat;
    if (p.grad_out && !reads_input(p)) return input;
    const Tensor converted = torch::stable::to(input, torch::headeronly::ScalarType::Float);
    p.input = converted.data_ptr();
    set_strides(converted, p.input_stride);
    return converted;
}

/// The values at the points.
inline Tensor values(GridSampleParams& p, const Tensor& input, const Tensor& grid) {
    Tensor out = new_output(input, output_shape(input, grid));
    if (out.numel() == 0) return out;
    p.out = out.data_ptr();
    const Tensor source = in_float(p, input) ? as_read(p, input) : input;
    run(p, input);
    return out;
}

inline Tensor grid_sample(const Tensor& input, const Tensor& grid, int64_t interpolation,
                          int64_t padding, bool align_corners) {
    GridSampleParams p = check(input, grid, interpolation, padding, align_corners);
    return values(p, input, grid);
}

inline void check_like(const char* argument, const Tensor& x, const char* name, const Tensor& like,
                       const Shape& shape) {
    check_tensor(kName, argument, x);
    if (shape_of(x) != shape)
        raise(kName, std::string(argument) + " must have shape " + shape_text(shape) + ", got " +
                         shape_text(x));
    check_kind(kName, name, like, argument, x);
}

inline void set_grad_out(GridSampleParams& p, const Tensor& grad_out, const Tensor& input,
                         const Tensor& grid) {
    check_like("grad_out", grad_out, "input", input, output_shape(input, grid));
    p.grad_out = grad_out.data_ptr();
    p.grad_out_points =
        view_of(grad_out.dim() - 2, grad_out.sizes().data() + 2, grad_out.strides().data() + 2);
    p.grad_out_stride[0] = grad_out.stride(0), p.grad_out_stride[1] = grad_out.stride(1);
}

/// The gradients to input (its strides where it is dense) and grid (contiguous); empty ones where
/// not asked for.
inline std::tuple<Tensor, Tensor> new_gradients(GridSampleParams& p, const Tensor& input,
                                                const Tensor& grid, bool need_input,
                                                bool need_grid) {
    Tensor grad_input = need_input ? new_like(input) : new_output(input, {0});
    Tensor grad_grid = new_gradient(grid, need_grid, shape_of(grid));
    if (need_input) {
        p.grad_input = grad_input.data_ptr();
        set_strides(grad_input, p.grad_input_stride);
    }
    if (need_grid) p.grad_grid = grad_grid.data_ptr();
    return {grad_input, grad_grid};
}

/// Runs a job of gradients. Without points or channels every gradient is zero.
inline void run_gradients(GridSampleParams& p, const Tensor& input, Tensor& grad_input,
                          Tensor& grad_grid) {
    if (p.B * p.C * p.P > 0) return run(p, input);
    if (p.grad_input) torch::stable::zero_(grad_input);
    if (p.grad_grid) torch::stable::zero_(grad_grid);
}

/// The gradients to input and grid, those that are wanted.
inline std::tuple<Tensor, Tensor> gradients(GridSampleParams& p, const Tensor& input,
                                            const Tensor& grid, bool need_input, bool need_grid) {
    const bool is_float = in_float(p, input, need_input);
    auto [grad_input, grad_grid] = new_gradients(p, input, grid, need_input, need_grid);
    // Zeros: to have threads write few of them takes longer than to write them.
    if (p.grad_grid && input.is_cpu() && p.interpolation == Interpolation::kNearest &&
        grad_grid.numel() <= 1 << 18) {
        memset(p.grad_grid, 0, size_t(grad_grid.numel() * grad_grid.element_size()));
        p.grad_grid = nullptr;
    }
    if (!p.grad_input && !p.grad_grid) return {grad_input, grad_grid};
    if (!is_float) {
        run_gradients(p, input, grad_input, grad_grid);
        return {grad_input, grad_grid};
    }
    Tensor sums = grad_input;
    if (need_input) {
        sums = new_memory(input, aoti_torch_dtype_float32(), 4, input.dim(), input.sizes().data(),
                          grad_input.strides().data());
        p.grad_input = sums.data_ptr();
    }
    const Tensor source = as_read(p, input);
    run_gradients(p, input, sums, grad_grid);
    if (need_input) torch::stable::copy_(grad_input, sums);
    return {grad_input, grad_grid};
}

}  // namespace grid_sampling
