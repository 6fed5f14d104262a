// convolve2d and its backward for torch: checks, allocation, launches.
#include "convolve2d.h"

#include <algorithm>
#include <tuple>

#include "choices.h"
#include "torch/rest.h"

constexpr const char* kName = "convolve2d";

/// Image (H, W) or (N, H, W) of a convolution, its kernel and what comes out, as sizes.
struct Geometry {
    int64_t N, H, W, OH, OW, G, kh, kw, shift[2];
    Boundary boundary;
    bool batch;  // whether the image has the dimension N
};

enum class Mode { kSame, kValid, kFull };

/// How far the output's origin lies from the image's: the tap that is the centre along an axis.
int64_t shift_of(Mode mode, int64_t taps) {
    return mode == Mode::kSame ? taps / 2 : mode == Mode::kValid ? taps - 1 : 0;
}

/// By how much the output is longer than the image.
int64_t growth_of(Mode mode, int64_t taps) {
    return mode == Mode::kSame ? 0 : mode == Mode::kValid ? 1 - taps : taps - 1;
}

void check_image(const char* argument, const Tensor& x) {
    check_tensor(kName, argument, x);
    if (x.dim() != 2 && x.dim() != 3)
        raise(kName, std::string(argument) + " must be (H, W) or (N, H, W), got " + shape_text(x) +
                         "; join leading dimensions, e.g. with .flatten(0, -3)");
}

/// The kernel is (kh, kw), or (G, kh, kw) for N / G neighbouring images each: what vmap makes of
/// kernels that differ. `image` is the image, or, without one, grad_out, whose shape tells it.
Geometry check(const Tensor& x, const char* argument, bool is_image, const Tensor& kernel,
               const std::string& mode_name, const std::string& boundary) {
    check_image(argument, x);
    check_tensor(kName, "kernel", kernel);
    Geometry s{};
    s.batch = x.dim() == 3;
    s.N = s.batch ? x.size(0) : 1;
    const int64_t k = kernel.dim();
    if (k != 2 && !(k == 3 && s.batch))
        raise(kName, "kernel must be (kh, kw), got " + shape_text(kernel));
    if (kernel.numel() == 0)
        raise(kName, "kernel must have at least one tap, got shape " + shape_text(kernel));
    s.G = k == 3 ? kernel.size(0) : 1;
    s.kh = kernel.size(k - 2), s.kw = kernel.size(k - 1);
    if (s.N % s.G != 0)
        raise(kName, "kernel (G, kh, kw) must have a G that divides N = " + std::to_string(s.N) +
                         ", got " + shape_text(kernel));
    s.boundary = code_of<Boundary>(kName, "boundary", boundary, {"zero", "reflect", "nearest"});
    const auto mode = code_of<Mode>(kName, "mode", mode_name, {"same", "valid", "full"});
    s.shift[0] = shift_of(mode, s.kh), s.shift[1] = shift_of(mode, s.kw);
    const int64_t grow[] = {growth_of(mode, s.kh), growth_of(mode, s.kw)};
    const int64_t rows = x.size(x.dim() - 2), columns = x.size(x.dim() - 1);
    s.H = rows - (is_image ? 0 : grow[0]), s.W = columns - (is_image ? 0 : grow[1]);
    s.OH = s.H + grow[0], s.OW = s.W + grow[1];
    if (mode == Mode::kValid && (s.OH < 1 || s.OW < 1))
        raise(kName, "mode 'valid' needs an image no smaller than the kernel, " +
                         shape_text(kernel) + ", got " + shape_text(x));
    if (mode == Mode::kFull && (s.H < 1 || s.W < 1))
        raise(kName, std::string("mode 'full' needs ") +
                         (is_image ? "an image with pixels" : "a larger grad_out") + ", got " +
                         shape_text(x));
    check_same_device(kName, argument, x, "kernel", kernel);
    return s;
}

Shape shape_of(const Geometry& s, int64_t rows, int64_t columns) {
    return s.batch ? Shape{s.N, rows, columns} : Shape{rows, columns};
}

/// Strides of the last three dimensions; one that is not there has size 1.
void set_strides(const Tensor& x, int64_t* stride) {
    stride[0] = 0;
    copy_strides(x, stride + 3 - x.dim());
}

Convolve2dParams params_of(const Geometry& s, const char* argument, const Tensor& in,
                           const Tensor& kernel) {
    Convolve2dParams p{};
    p.N = s.N, p.H = s.H, p.W = s.W, p.OH = s.OH, p.OW = s.OW;
    p.G = s.G, p.kh = s.kh, p.kw = s.kw;
    p.boundary = s.boundary;
    p.dtype = dtype_of(kName, argument, in);
    p.kernel_dtype = dtype_of(kName, "kernel", kernel);
    p.in = in.data_ptr();
    p.kernel = kernel.data_ptr();
    set_strides(in, p.in_stride);
    set_strides(kernel, p.kernel_stride);
    for (int axis = 0; axis < 2; ++axis) p.shift[axis] = s.shift[axis];
    return p;
}

/// Rows to a thread: enough work to be worth handing over.
int64_t rows_grain(const Convolve2dParams& p) { return 1 + 65536 / (p.OW * (p.kh * p.kw + 8)); }

/// Whether this tensor's device can do what is `wanted` of tensor cores.
bool on_tensor_cores([[maybe_unused]] bool wanted, [[maybe_unused]] const Tensor& like) {
#ifdef OCTET_CUDA
    return wanted && !like.is_cpu() && convolve2d_tensor_cores(like.get_device_index());
#else
    return false;
#endif
}

/// Why a GPU's ways are taken, for a convolution and for the gradient to the kernel alike.
constexpr const char* kFewTaps =
    "few taps: traffic decides, and a warp that walks down columns has most of it under way";
constexpr const char* kEights = "these multiply numbers of one 16-bit type as they are";
constexpr const char* kBands = "many taps: tensor cores do them in less time than their tiles take";
constexpr const char* kTiles = "few taps, float64, or no tensor cores";

/// The sum, to `out`.
void convolve(const Tensor& out, const Convolve2dParams& p) {
    auto* on_cuda = OCTET_CUDA_LAUNCHER(convolve2d_cuda);
    const auto tell = [](const char* way, const char* why) {
        tell_choice(kName, "kernel", way, why);
    };
    if (!on_cuda || out.is_cpu()) {
        // One way; without CUDA `launch` says what is missing.
    } else if (convolve2d_is_small(p)) {
        tell("threads of each output", "few pixels");
        on_cuda = OCTET_CUDA_LAUNCHER(convolve2d_small_cuda);
    } else if (on_tensor_cores(convolve2d_by_eights(p), out)) {
        tell("16 bits on tensor cores", kEights);
        on_cuda = rest_of<Convolve2dRest>(kName)->eights;
    } else if (convolve2d_by_columns(p)) {
        tell("columns", kFewTaps);
        on_cuda = rest_of<Convolve2dRest>(kName)->columns;
    } else if (convolve2d_by_strips(p)) {
        tell("multiply-adds in strips",
             "up to 16 columns of taps, and pixels enough to fill strips");
        on_cuda = rest_of<Convolve2dRest>(kName)->strips;
    } else if (on_tensor_cores(convolve2d_by_bands(p), out)) {
        tell("bands on tensor cores", kBands);
        on_cuda = rest_of<Convolve2dRest>(kName)->bands;
    } else {
        tell("multiply-adds", kTiles);
    }
    launch(kName, out, p, p.N * p.OH, rows_grain(p),
           cpu_of(kName, p.dtype, out, convolve2d_cpu, &Convolve2dRest::on_cpu), on_cuda);
}

Tensor convolve2d(const Tensor& image, const Tensor& kernel, std::string mode,
                  std::string boundary) {
    const Geometry s = check(image, "image", true, kernel, mode, boundary);
    Convolve2dParams p = params_of(s, "image", image, kernel);
    Tensor out = new_output(image, shape_of(s, s.OH, s.OW));
    if (out.numel() == 0) return out;
    p.out = out.data_ptr();
    p.out_stride[0] = s.OH * s.OW, p.out_stride[1] = s.OW;
    convolve(out, p);
    return out;
}

/// The gradient to the image: pixels that its extension does not repeat in one convolution of
/// grad_out with the turned kernel, the rest by a sum over their copies.
void image_gradient(const Geometry& s, const Tensor& grad_out, const Tensor& kernel,
                    const Tensor& grad_image) {
    Convolve2dParams p = params_of(s, "grad_out", grad_out, kernel);
    std::swap(p.H, p.OH), std::swap(p.W, p.OW);
    p.turned = true;
    p.out = grad_image.data_ptr();
    p.out_stride[0] = s.H * s.W, p.out_stride[1] = s.W;
    const int64_t taps[] = {s.kh, s.kw}, size[] = {s.H, s.W}, out_size[] = {s.OH, s.OW};
    for (int axis = 0; axis < 2; ++axis) {
        p.shift[axis] = taps[axis] - 1 - s.shift[axis];
        const int64_t after = out_size[axis] - size[axis] + s.shift[axis];
        p.before[axis] = s.boundary == Boundary::kZero ? 0 : p.shift[axis];
        p.after[axis] = s.boundary == Boundary::kZero ? 0 : after;
    }
    if (const int64_t pixels = p.N * border_pixels(p))
        launch(
            kName, grad_image, p, pixels, 1 + 16384 / (s.kh * s.kw),
            cpu_of(kName, p.dtype, grad_image, convolve2d_fold_cpu, &Convolve2dRest::fold_on_cpu),
            OCTET_CUDA_LAUNCHER(convolve2d_fold_cuda));
    const Edge y(p, 0), x(p, 1);
    p.OH -= y.first + y.last, p.OW -= x.first + x.last;
    if (p.OH == 0 || p.OW == 0) return;
    p.shift[0] += y.first, p.shift[1] += x.first;
    p.out = static_cast<char*>(p.out) + (y.first * s.W + x.first) * grad_image.element_size();
    p.boundary = Boundary::kZero;
    convolve(grad_image, p);
}

/// Into how many parts the sum over a group's images is cut. It does not depend on the machine, so
/// that the order of the sum, and with it the result, does not either.
int64_t splits_of(const Convolve2dParams& p, bool cpu) {
    if (!cpu) return convolve2d_splits(p);
    const int64_t rows = p.N / p.G * p.OH, few = rows / std::max<int64_t>(p.kh, 8);
    return std::clamp<int64_t>(std::min((int64_t(1) << 22) / (p.kh * p.kw), few), 1, 256);
}

void kernel_gradient(const Geometry& s, const Tensor& grad_out, const Tensor& image,
                     const Tensor& kernel, const Tensor& grad_kernel) {
    Convolve2dParams p = params_of(s, "image", image, kernel);
    p.grad_out = grad_out.data_ptr();
    set_strides(grad_out, p.grad_out_stride);
    p.out = grad_kernel.data_ptr();
    const auto tell = [](const char* way, const char* why) {
        tell_choice(kName, "kernel, gradient to kernel", way, why);
    };
    if (!image.is_cpu() && convolve2d_is_small_gradient(p)) {
        tell("a block to a tap", "few pixels");
        return launch<Convolve2dParams>(kName, image, p, 1, 1, nullptr,
                                        OCTET_CUDA_LAUNCHER(convolve2d_small_gradient_cuda));
    }
    p.splits = splits_of(p, image.is_cpu());
    const int64_t numbers = s.G * p.splits * s.kh * s.kw;
    const Tensor partial = new_bytes(image, numbers * (p.dtype == DType::kDouble ? 8 : 4));
    p.partial = partial.data_ptr();
    auto* parts = OCTET_CUDA_LAUNCHER(convolve2d_parts_cuda);
    if (!parts || image.is_cpu()) {
        // As above.
    } else if (on_tensor_cores(convolve2d_parts_by_eights(p), image)) {
        tell("16 bits on tensor cores", kEights);
        parts = rest_of<Convolve2dRest>(kName)->eights_parts;
    } else if (convolve2d_parts_by_strips(p)) {
        tell("multiply-adds in strips", "float32: sums of many taps at a time stay in registers");
        parts = rest_of<Convolve2dRest>(kName)->strips_parts;
    } else if (convolve2d_parts_by_columns(p)) {
        tell("columns", kFewTaps);
        parts = rest_of<Convolve2dRest>(kName)->columns_parts;
    } else {
        tell("multiply-adds", kTiles);
    }
    launch(kName, image, p, s.G * p.splits, 1,
           cpu_of(kName, p.dtype, image, convolve2d_parts_cpu, &Convolve2dRest::parts_on_cpu),
           parts);
    launch(kName, image, p, grad_kernel.numel(), 1 + 65536 / p.splits, convolve2d_sum_cpu,
           OCTET_CUDA_LAUNCHER(convolve2d_sum_cuda));
}

/// (grad_image, grad_kernel); what is not asked for comes back empty. `image` is needed for
/// grad_kernel alone: without it a training step does not have to keep it alive.
std::tuple<Tensor, Tensor> convolve2d_backward(const Tensor& grad_out, std::optional<Tensor> image,
                                               const Tensor& kernel, std::string mode,
                                               std::string boundary, bool need_image,
                                               bool need_kernel) {
    if (need_kernel && !image) raise(kName, "the gradient to kernel needs image, got None");
    const Geometry s = image ? check(*image, "image", true, kernel, mode, boundary)
                             : check(grad_out, "grad_out", false, kernel, mode, boundary);
    if (image) {
        check_tensor(kName, "grad_out", grad_out);
        if (shape_of(grad_out) != shape_of(s, s.OH, s.OW))
            raise(kName, "grad_out must have the shape of the output, " +
                             shape_text(shape_of(s, s.OH, s.OW)) + ", got " + shape_text(grad_out));
        dtype_of(kName, "image", *image);
        check_kind(kName, "image", *image, "grad_out", grad_out);
    }
    dtype_of(kName, "kernel", kernel);
    Tensor grad_image = new_gradient(grad_out, need_image, shape_of(s, s.H, s.W));
    Tensor grad_kernel = new_gradient(kernel, need_kernel, shape_of(kernel));
    if (grad_image.numel() > 0) image_gradient(s, grad_out, kernel, grad_image);
    if (grad_kernel.numel() > 0) kernel_gradient(s, grad_out, *image, kernel, grad_kernel);
    return {grad_image, grad_kernel};
}

STABLE_TORCH_LIBRARY_FRAGMENT(octet, m) {
    define(m, "convolve2d(Tensor image, Tensor kernel, str mode, str boundary) -> Tensor");
    define(m,
           "convolve2d_backward(Tensor grad_out, Tensor? image, Tensor kernel, str mode, "
           "str boundary, bool need_image, bool need_kernel) -> (Tensor grad_image, "
           "Tensor grad_kernel)");
}

STABLE_TORCH_LIBRARY_IMPL(octet, CompositeExplicitAutograd, m) {
    m.impl("convolve2d", TORCH_BOX(&convolve2d));
    m.impl("convolve2d_backward", TORCH_BOX(&convolve2d_backward));
}
