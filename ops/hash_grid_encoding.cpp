// hash_grid_encoding and its backward for torch: checks, allocation, launches. Both also of some of
// an encoding's levels, from the `first` on.
#include "hash_grid_encoding.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "torch/rest.h"
#include "torch/shapes.h"

constexpr const char* kName = "hash_grid_encoding";

/// Grid l; hash_grid_encoding's docstring says why so. T rows hold it, or it is hashed.
HashLevel level_of(int64_t l, int64_t base_resolution, double per_level_scale, int64_t D,
                   int64_t T) {
    const double exact = base_resolution * std::pow(per_level_scale, double(l)) - 1;
    if (!(exact > -2147483648.0 && exact < 2147483648.0))
        throw std::invalid_argument(
            std::string(kName) +
            ": base_resolution * per_level_scale^l must stay below 2^31, got " +
            std::to_string(base_resolution) + " * " + std::to_string(per_level_scale) + "^" +
            std::to_string(l) + "; use fewer levels or a smaller per_level_scale");
    HashLevel level{};
    level.scale = float(exact);
    level.resolution = uint32_t(int64_t(std::ceil(level.scale)) + 1);
    int64_t corners = 1;
    for (int64_t d = 0; d < D && corners <= T; ++d) corners *= level.resolution;
    level.hashed = corners > T;
    level.rows = uint32_t(level.hashed ? T : std::min(ceil_div(corners, 8) * 8, T));
    return level;
}

void check_points(const Tensor& points) {
    check_tensor(kName, "points", points);
    if (points.dim() != 2 || (points.size(1) != 2 && points.size(1) != 3))
        raise(kName, "points must be (N, 2) or (N, 3), got " + shape_text(points) +
                         "; join leading dimensions with .flatten(0, -2)");
}

/// What is the same for forward and backward.
HashGridParams params_of(const Tensor& points, const Tensor& table,
                         const std::optional<Tensor>& along, int64_t base_resolution,
                         double per_level_scale, int64_t first) {
    check_points(points);
    check_tensor(kName, "table", table);
    Sizes(kName).match("table", table, "(L, T, F)");
    const int64_t F = table.size(2);
    if (F < 1 || F > kMostFeatures)
        raise(kName, "table (L, T, F) must have 1 to " + std::to_string(kMostFeatures) +
                         " features, got " + shape_text(table));
    if (table.size(0) < 1 || table.size(0) > kMostLevels)
        raise(kName, "table (L, T, F) must have 1 to " + std::to_string(kMostLevels) +
                         " levels, got " + shape_text(table));
    if (table.size(1) < 1 || table.size(1) > int64_t(1) << 31)
        raise(kName,
              "table (L, T, F) must have 1 to 2^31 rows to a level, got " + shape_text(table));
    check_same_device(kName, "points", points, "table", table);
    HashGridParams p{};
    p.points_dtype = dtype_of(kName, "points", points);
    p.dtype = dtype_of(kName, "table", table);
    if (along) {
        check_tensor(kName, "along", *along);
        if (shape_of(*along) != shape_of(points) || along->scalar_type() != points.scalar_type())
            raise(kName, "along must have the shape and dtype of points, " + shape_text(points) +
                             " " + dtype_text(points) + ", got " + shape_text(*along) + " " +
                             dtype_text(*along));
        check_same_device(kName, "points", points, "along", *along);
    }
    if (base_resolution < 1)
        throw std::invalid_argument(std::string(kName) +
                                    ": base_resolution must be 1 or more, got " +
                                    std::to_string(base_resolution));
    if (!(per_level_scale > 0 && std::isfinite(per_level_scale)))
        throw std::invalid_argument(std::string(kName) +
                                    ": per_level_scale must be a positive number, got " +
                                    std::to_string(per_level_scale));
    p.N = points.size(0), p.D = int32_t(points.size(1));
    p.L = table.size(0), p.T = table.size(1), p.F = int32_t(F);
    for (int64_t l = 0; l < p.L; ++l)
        p.level[l] = level_of(first + l, base_resolution, per_level_scale, p.D, p.T);
    p.points = points.data_ptr();
    p.table = table.data_ptr();
    copy_strides(points, p.points_stride);
    copy_strides(table, p.table_stride);
    if (along) {
        p.along = along->data_ptr();
        copy_strides(*along, p.along_stride);
    }
    return p;
}

/// Points to a thread: enough work to be worth handing over.
int64_t points_grain(const HashGridParams& p) { return 64 + 4096 / p.L; }

/// Memory for a CUDA kernel, of the caller's stream like any tensor.
Tensor scratch_of(HashGridParams& p, const Tensor& like, int64_t bytes) {
    const Tensor scratch = new_bytes(like, bytes);
    p.scratch = bytes > 0 ? scratch.data_ptr() : nullptr;
    return scratch;
}

/// What launches the features' kernels on a GPU.
decltype(&hash_grid_cuda) features_of(const HashGridParams& p, bool on_gpu) {
    if (!on_gpu || !needs_rest(p)) return OCTET_CUDA_LAUNCHER(hash_grid_cuda);
    const auto* rest = rest_of<HashGridRest>(kName);
    return !own_kernels(p)             ? rest->of_any
           : p.dtype == DType::kDouble ? rest->of_double
                                       : rest->of_16bit;
}
/// The same of the gradient to points.
decltype(&hash_grid_points_cuda) slopes_of(const HashGridParams& p, bool on_gpu) {
    if (!on_gpu || !needs_rest(p)) return OCTET_CUDA_LAUNCHER(hash_grid_points_cuda);
    const auto* rest = rest_of<HashGridRest>(kName);
    return !own_kernels(p)             ? rest->points_of_any
           : p.dtype == DType::kDouble ? rest->points_of_double
                                       : rest->points_of_16bit;
}

Tensor encoded(const Tensor& points, const Tensor& table, const std::optional<Tensor>& along,
               int64_t base_resolution, double per_level_scale, int64_t first) {
    HashGridParams p = params_of(points, table, along, base_resolution, per_level_scale, first);
    Tensor out = new_output(table, Shape{p.N, p.L * p.F});
    if (p.N == 0) return out;
    p.out = out.data_ptr();
    launch(kName, out, p, p.N, points_grain(p),
           cpu_of(kName, p.dtype, out, hash_grid_cpu, &HashGridRest::on_cpu),
           features_of(p, !out.is_cpu()));
    return out;
}

/// (grad_points, grad_table); what is not asked for comes back empty.
std::tuple<Tensor, Tensor> gradients(const Tensor& grad_out, const Tensor& points,
                                     const Tensor& table, const std::optional<Tensor>& along,
                                     int64_t base_resolution, double per_level_scale, int64_t first,
                                     bool need_points, bool need_table, bool deterministic) {
    HashGridParams p = params_of(points, table, along, base_resolution, per_level_scale, first);
    check_tensor(kName, "grad_out", grad_out);
    const Shape shape{p.N, p.L * p.F};
    if (shape_of(grad_out) != shape)
        raise(kName, "grad_out must be (N, L * F) = " + shape_text(shape) + ", got " +
                         shape_text(grad_out));
    check_kind(kName, "table", table, "grad_out", grad_out);
    p.grad_out = grad_out.data_ptr();
    copy_strides(grad_out, p.grad_out_stride);
    p.deterministic = deterministic;
    Tensor grad_points = new_gradient(points, need_points, shape_of(points));
    Tensor grad_table = new_gradient(table, need_table, shape_of(table));
    if (need_points && p.N > 0) {
        const Tensor scratch =
            scratch_of(p, table, table.is_cpu() ? 0 : hash_grid_points_scratch(p));
        p.out = grad_points.data_ptr();
        launch(kName, table, p, p.N, points_grain(p),
               cpu_of(kName, p.dtype, table, hash_grid_points_cpu, &HashGridRest::points_on_cpu),
               slopes_of(p, !table.is_cpu()));
    }
    if (need_table) {
        const Tensor scratch =
            scratch_of(p, table, table.is_cpu() ? 0 : hash_grid_table_scratch(p));
        p.out = grad_table.data_ptr();
        // Each part looks at all points: no more of them than keep the threads busy.
        const int64_t threads = table.is_cpu() ? torch::stable::get_num_threads() : 1;
        p.parts = int32_t(std::min(ceil_div(threads, p.L), p.T));
        auto* on_cuda = OCTET_CUDA_LAUNCHER(hash_grid_table_cuda);
        if (!table.is_cpu() && needs_rest_for_table(p)) {
            p.rest = rest_of<HashGridRest>(kName);
            if (p.dtype == DType::kDouble) on_cuda = p.rest->table_of_double;
        }
        launch(kName, table, p, p.L * p.parts, 1,
               cpu_of(kName, p.dtype, table, hash_grid_table_cpu, &HashGridRest::table_on_cpu),
               on_cuda);
    }
    return {grad_points, grad_table};
}

Tensor hash_grid_encoding(const Tensor& points, const Tensor& table, std::optional<Tensor> along,
                          int64_t base_resolution, double per_level_scale) {
    return encoded(points, table, along, base_resolution, per_level_scale, 0);
}

std::tuple<Tensor, Tensor> hash_grid_encoding_backward(const Tensor& grad_out, const Tensor& points,
                                                       const Tensor& table,
                                                       std::optional<Tensor> along,
                                                       int64_t base_resolution,
                                                       double per_level_scale, bool need_points,
                                                       bool need_table, bool deterministic) {
    return gradients(grad_out, points, table, along, base_resolution, per_level_scale, 0,
                     need_points, need_table, deterministic);
}

Tensor hash_grid_encoding_levels(const Tensor& points, const Tensor& table,
                                 std::optional<Tensor> along, int64_t base_resolution,
                                 double per_level_scale, int64_t first) {
    return encoded(points, table, along, base_resolution, per_level_scale, first);
}

std::tuple<Tensor, Tensor> hash_grid_encoding_levels_backward(
    const Tensor& grad_out, const Tensor& points, const Tensor& table, std::optional<Tensor> along,
    int64_t base_resolution, double per_level_scale, int64_t first, bool need_points,
    bool need_table, bool deterministic) {
    return gradients(grad_out, points, table, along, base_resolution, per_level_scale, first,
                     need_points, need_table, deterministic);
}

STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    define(m,
           "hash_grid_encoding(Tensor points, Tensor table, Tensor? along, int base_resolution, "
           "float per_level_scale) -> Tensor");
    define(
        m,
        "hash_grid_encoding_backward(Tensor grad_out, Tensor points, Tensor table, Tensor? along, "
        "int base_resolution, float per_level_scale, bool need_points, bool need_table, "
        "bool deterministic) -> (Tensor grad_points, Tensor grad_table)");
    define(m,
           "hash_grid_encoding_levels(Tensor points, Tensor table, Tensor? along, "
           "int base_resolution, float per_level_scale, int first) -> Tensor");
    define(
        m,
        "hash_grid_encoding_levels_backward(Tensor grad_out, Tensor points, Tensor table, "
        "Tensor? along, int base_resolution, float per_level_scale, int first, bool need_points, "
        "bool need_table, bool deterministic) -> (Tensor grad_points, Tensor grad_table)");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("hash_grid_encoding", TORCH_BOX(&hash_grid_encoding));
    m.impl("hash_grid_encoding_backward", TORCH_BOX(&hash_grid_encoding_backward));
    m.impl("hash_grid_encoding_levels", TORCH_BOX(&hash_grid_encoding_levels));
    m.impl("hash_grid_encoding_levels_backward", TORCH_BOX(&hash_grid_encoding_levels_backward));
}
