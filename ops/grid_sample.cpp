// grid_sample, its backward and the backward of that for torch; the first two also of a window of
// an image that is nowhere whole.
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
    p.deterministic = deterministic;
    return gradients(p, input, grid, need_input, need_grid);
}

/// Says that the input is pixels [first, ..) along an axis of an image of `whole`.
void set_window(GridSampleParams& p, int64_t axis, int64_t first, int64_t whole) {
    if (axis < 2 || axis > 1 + p.D)
        raise(kName, "the window's axis must be 2 to " + std::to_string(1 + p.D) + ", got " +
                         std::to_string(axis));
    const int64_t at = axis + 1 - p.D;
    if (first < 0 || whole > 0x7fffffff || first + p.size[at] > whole)
        raise(kName, "the window must lie in [0, " + std::to_string(whole) + "), got " +
                         std::to_string(p.size[at]) + " pixels from " + std::to_string(first));
    p.first[at] = int32_t(first), p.whole[at] = int32_t(whole);
}

Tensor grid_sample_window(const Tensor& input, const Tensor& grid, int64_t interpolation,
                          int64_t padding, bool align_corners, int64_t axis, int64_t first,
                          int64_t whole) {
    GridSampleParams p = check(input, grid, interpolation, padding, align_corners);
    set_window(p, axis, first, whole);
    return values(p, input, grid);
}

std::tuple<Tensor, Tensor> grid_sample_window_backward(const Tensor& grad_out, const Tensor& input,
                                                       const Tensor& grid, int64_t interpolation,
                                                       int64_t padding, bool align_corners,
                                                       int64_t axis, int64_t first, int64_t whole,
                                                       bool need_input, bool need_grid,
                                                       bool deterministic) {
    GridSampleParams p = check(input, grid, interpolation, padding, align_corners);
    set_window(p, axis, first, whole);
    set_grad_out(p, grad_out, input, grid);
    p.deterministic = deterministic;
    return gradients(p, input, grid, need_input, need_grid);
}

/// (N, P) int32: the first pixel along an axis of `whole` that each point has a tap on, -1 where it
/// has none. `exact`: of a float64 image.
Tensor grid_sample_rows(const Tensor& grid, int64_t interpolation, int64_t padding,
                        bool align_corners, int64_t axis, int64_t whole, bool exact) {
    check_tensor(kName, "grid", grid);
    const int64_t dims = grid.dim();
    if ((dims != 4 && dims != 5) || grid.size(dims - 1) != dims - 2 || axis < 2 || axis >= dims)
        raise(kName, "grid must be (N, H_out, W_out, 2) or (N, D_out, H_out, W_out, 3), got " +
                         shape_text(grid) + " for axis " + std::to_string(axis));
    GridSampleRows p{};
    p.grid = grid.data_ptr();
    p.grid_dtype = dtype_of(kName, "grid", grid);
    p.interpolation = Interpolation(interpolation), p.padding = Padding(padding);
    p.align_corners = align_corners, p.exact = exact;
    p.whole = int32_t(whole), p.coordinate = dims - 1 - axis;
    p.B = grid.size(0), p.P = 1;
    for (int64_t d = 1; d < dims - 1; ++d) p.P *= grid.size(d);
    set_points(grid, p.points, p.stride);
    const int64_t size[] = {p.B, p.P}, stride[] = {std::max<int64_t>(p.P, 1), 1};
    Tensor out = new_memory(grid, aoti_torch_dtype_int32(), 4, 2, size, stride);
    if (p.B * p.P == 0) return out;
    p.out = static_cast<int32_t*>(out.data_ptr());
    const auto* const rest = rest_of<GridSampleRest>(kName);
    launch(kName, grid, p, p.B * p.P, 1 << 14, rest->rows_cpu, rest->rows_cuda);
    return out;
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

// What `loader.distributed.sample_sharded` calls.
STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    define(m,
           "grid_sample_window(Tensor input, Tensor grid, int interpolation_mode, "
           "int padding_mode, bool align_corners, int axis, int first, int whole) -> Tensor");
    define(m,
           "grid_sample_window_backward(Tensor grad_out, Tensor input, Tensor grid, "
           "int interpolation_mode, int padding_mode, bool align_corners, int axis, int first, "
           "int whole, bool need_input, bool need_grid, bool deterministic) -> "
           "(Tensor grad_input, Tensor grad_grid)");
    define(m,
           "grid_sample_rows(Tensor grid, int interpolation_mode, int padding_mode, "
           "bool align_corners, int axis, int whole, bool exact) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("grid_sample_window", TORCH_BOX(&grid_sample_window));
    m.impl("grid_sample_window_backward", TORCH_BOX(&grid_sample_window_backward));
    m.impl("grid_sample_rows", TORCH_BOX(&grid_sample_rows));
}

// What `loader.accelerate_torch()` calls.
STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    define(m, "grid_sample_replace_aten(bool cubic_volumes) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("grid_sample_replace_aten", TORCH_BOX(&aten::replace));
}
