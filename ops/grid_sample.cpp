// grid_sample, its backward and the backward of that for torch.
#include "torch/grid_sample_aten.h"
#include "torch/grid_sample_glue.h"

using namespace grid_sampling;

std::tuple<Tensor, Tensor> grid_sample_backward(const Tensor& grad_out, const Tensor& input,
                                                const Tensor& grid, int64_t interpolation,
                                                int64_t padding, bool align_corners,
                                                bool need_input, bool need_grid,
                                                bool deterministic) {
    GridSampleParams p = check(input, grid, interpolation, padding, align_corners);
    set_grad_out(p, grad_out, input, grid);
    if (in_float(p, input, need_input)) {
        const auto [to_input, to_grid] =
            grid_sample_backward(as_float(grad_out), as_float(input), as_float(grid), interpolation,
                                 padding, align_corners, need_input, need_grid, deterministic);
        return {torch::stable::to(to_input, input.scalar_type()),
                torch::stable::to(to_grid, grid.scalar_type())};
    }
    p.deterministic = deterministic;
    auto [grad_input, grad_grid] = new_gradients(p, input, grid, need_input, need_grid);
    if (need_input || need_grid) run_gradients(p, input, grad_input, grad_grid);
    return {grad_input, grad_grid};
}

/// (to_grad_out, to_input, to_grid): gradients of the backward, of what arrives for its results.
std::tuple<Tensor, Tensor, Tensor> grid_sample_backward_backward(
    std::optional<Tensor> to_grad_input, std::optional<Tensor> to_grad_grid, const Tensor& grad_out,
    const Tensor& input, const Tensor& grid, int64_t interpolation, int64_t padding,
    bool align_corners, bool need_grad_out, bool need_input, bool need_grid, bool deterministic) {
    GridSampleParams p = check(input, grid, interpolation, padding, align_corners);
    set_grad_out(p, grad_out, input, grid);
    if (to_grad_input) {
        check_like("to_grad_input", *to_grad_input, "input", input, shape_of(input));
        p.to_grad_input = to_grad_input->data_ptr();
        set_strides(*to_grad_input, p.to_grad_input_stride);
    }
    if (to_grad_grid) {
        check_like("to_grad_grid", *to_grad_grid, "grid", grid, shape_of(grid));
        p.to_grad_grid = to_grad_grid->data_ptr();
        set_points(*to_grad_grid, p.to_grad_grid_points, p.to_grad_grid_stride);
    }
    if (!to_grad_input && !to_grad_grid)
        raise(kName, "the second derivative needs to_grad_input or to_grad_grid, got neither");
    p.deterministic = deterministic;
    Tensor out = new_gradient(input, need_grad_out, output_shape(input, grid));
    if (need_grad_out) p.out = out.data_ptr();
    auto [grad_input, grad_grid] = new_gradients(p, input, grid, need_input, need_grid);
    if (need_grad_out || need_input || need_grid) run_gradients(p, input, grad_input, grad_grid);
    return {out, grad_input, grad_grid};
}

STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    define(m,
           "grid_sample(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, "
           "bool align_corners) -> Tensor");
    define(
        m,
        "grid_sample_backward(Tensor grad_out, Tensor input, Tensor grid, int interpolation_mode, "
        "int padding_mode, bool align_corners, bool need_input, bool need_grid, "
        "bool deterministic) -> (Tensor grad_input, Tensor grad_grid)");
    define(m,
           "grid_sample_backward_backward(Tensor? to_grad_input, Tensor? to_grad_grid, "
           "Tensor grad_out, Tensor input, Tensor grid, int interpolation_mode, int padding_mode, "
           "bool align_corners, bool need_grad_out, bool need_input, bool need_grid, "
           "bool deterministic) -> (Tensor to_grad_out, Tensor to_input, Tensor to_grid)");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("grid_sample", TORCH_BOX(&grid_sample));
    m.impl("grid_sample_backward", TORCH_BOX(&grid_sample_backward));
    m.impl("grid_sample_backward_backward", TORCH_BOX(&grid_sample_backward_backward));
}

// What `loader.accelerate_torch()` calls.
STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    define(m, "grid_sample_replace_aten(bool cubic_volumes) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("grid_sample_replace_aten", TORCH_BOX(&aten::replace));
}
