"""Images and volumes sampled at points: `torch.nn.functional.grid_sample`, and where it stops."""

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from loader.jit.operators import frame, sharding
from loader.jit.operators.frame import asked, batched, keep, total
from loader.jit.operators.shapes import check_fake, shown

from .grid_sample_plain import grid_sample_reference
from .linear import Linear

_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Sample an image or a volume at the points of a grid, as torch.nn.functional.grid_sample does.

    Args:
        input: (N, C, H, W) or (N, C, D, H, W) float32, float64, float16 or bfloat16, on the CPU or
            a CUDA device, any strides; fastest with channels last.
        grid: (N, H_out, W_out, 2) or (N, D_out, H_out, W_out, 3), any of these dtypes whatever that
            of `input`, same device, any strides. A point is (x, y) or (x, y, z), -1 and 1 being the
            borders of the last, the last but one and the first axis of an image.
        mode: "bilinear", of a volume trilinear; "nearest"; or "bicubic", of a volume tricubic.
        padding_mode: what lies outside: "zeros"; "border", the nearest pixel; "reflection", the
            image mirrored at its borders.
        align_corners: whether -1 and 1 are the centres of the outermost pixels, or (False, as is
            None) their outer edges.

    Returns:
        (N, C, H_out, W_out) or (N, C, D_out, H_out, W_out), contiguous, dtype and device of
        `input`; computed in float32 (float64 for float64). Differentiable in both arguments, twice
        and more. Coordinates may be NaN, infinite and huge. Results are deterministic on the CPU;
        on a GPU the gradient to `input` is where torch.use_deterministic_algorithms says so, and a
        16-bit one is summed in its own type where over 128 pixels come to a point.
        Under torch.autocast dtypes are promoted as PyTorch's own operator does it.

    Raises:
        TypeError: `input` or `grid` is no tensor.
        ValueError: `mode` or `padding_mode` is none of the above.
        RuntimeError: a shape, a dtype, a layout or a device does not fit, or what few calls need
            (bicubic volumes and second derivatives, 16 bits on a GPU) could not be compiled; the
            message says which.
        loader.BuildError: the operator could not be compiled.

    Source: `grid_sample_reference`; bicubic: Keys (1981), with a = -0.75.
    """
    if _is_any_autocast_enabled() and isinstance(input, Tensor) and isinstance(grid, Tensor):
        input, grid = _autocast(input, grid)
    return _operator.call(input, grid, mode, padding_mode, align_corners)


def grid_sample_fw(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """The forward kernels alone: as `grid_sample`, without gradients and autocast."""
    with torch.no_grad():
        return _operator.call(input, grid, mode, padding_mode, align_corners)


def samples(device):
    """Small arguments of `grid_sample`, for comparisons with the reference after an edit."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}

    def pair(size, points, dtype=torch.float32, grid_dtype=torch.float32):
        grid = torch.rand(size[0], *points, len(points), **make) * 2.6 - 1.3
        return torch.randn(size, **make).to(dtype), grid.to(grid_dtype)

    yield *pair((2, 3, 20, 33), (17, 19)), "bilinear", "zeros", False
    image, grid = pair((1, 32, 40, 30), (30, 41))
    yield image.to(memory_format=torch.channels_last), grid, "bilinear", "reflection", True
    yield *pair((1, 5, 25, 35), (200, 3)), "bicubic", "border", False
    yield *pair((1, 9, 8, 9, 7), (3, 7, 10)), "bicubic", "reflection", False
    yield *pair((2, 4, 13, 15, 17), (9, 11, 10)), "bilinear", "border", True
    volume, grid = pair((1, 16, 11, 12, 13), (1, 20, 30), torch.float16)
    yield volume.to(memory_format=torch.channels_last_3d), grid, "bilinear", "zeros", False
    yield *pair((1, 7, 11, 12, 13), (2, 10, 30), torch.bfloat16), "nearest", "zeros", False
    yield *pair((1, 2, 9, 8, 7), (1, 1, 300), torch.float64, torch.float64), "bilinear", "zeros"


def benchmark(device):
    """Arguments of a size worth timing."""
    size, points = (128, 1 << 20) if torch.device(device).type == "cuda" else (64, 1 << 17)
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    volume = torch.randn(1, 16, size, size, size, **make)
    grid = torch.rand(1, 1, 1, points, 3, **make) * 2 - 1
    return volume.to(memory_format=torch.channels_last_3d), grid


def options_of(input, grid, mode, padding_mode, align_corners) -> tuple[int, int, bool]:
    """The options as `aten::grid_sampler_2d` numbers them."""
    interpolation = _code("mode", mode, _MODES)
    return interpolation, _code("padding_mode", padding_mode, _PADDINGS), bool(align_corners)


def _code(name, value, allowed) -> int:
    if not isinstance(value, str) or value not in allowed:
        # Not f"{value!r}", of which torch.compile loses the quotes on Python 3.13 (torch 2.11).
        first, second, third, got = map(repr, (*allowed, value))
        raise ValueError(f"grid_sample: {name} must be {first}, {second} or {third}, got {got}")
    return allowed.index(value)


def _autocast(input, grid):
    """PyTorch's rule: the widest of the two dtypes on CUDA, float32 on the CPU; no float64."""
    device = input.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return input, grid
    eligible = [x.dtype for x in (input, grid) if _is_cast(x)]
    if device == "cpu":
        wide = torch.float32
    else:
        wide = torch.get_autocast_dtype(device)
        for dtype in eligible:
            wide = torch.promote_types(wide, dtype)
    return (x.to(wide) if _is_cast(x) else x for x in (input, grid))


def _is_cast(x) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


def output_like(input, grid, interpolation, padding, align_corners):
    """Return the output for tensors without data. Raises: RuntimeError where shapes do not fit."""
    dims, shape, points = input.dim(), shown(input), shown(grid)

    def check(holds, message):
        torch._check(holds, lambda: f"grid_sample: {message()}")

    check(dims in (4, 5), lambda: f"input must be (N, C, H, W) or (N, C, D, H, W), got {shape}")
    fitting = "(N, H_out, W_out, 2)" if dims == 4 else "(N, D_out, H_out, W_out, 3)"
    check(
        grid.dim() == dims and grid.shape[-1] == dims - 2,
        lambda: f"grid must be {fitting} for an input of {dims} dimensions, got {points}",
    )
    check(
        grid.shape[0] == input.shape[0],
        lambda: (
            f"grid must have the batch size of input, {shape[0]}, got {points}; "
            f"expand it, e.g. grid.expand({', '.join(map(str, [shape[0], *[-1] * (dims - 1)]))})"
        ),
    )
    check(
        all(size > 0 for size in input.shape[2:]),
        lambda: f"input must have at least one pixel along each axis, got {shape}",
    )
    return input.new_empty((*input.shape[:2], *grid.shape[1:-1]))


def _fake_gradients(grad_out, input, grid, *options):
    return torch.empty_like(input), grid.new_empty(grid.shape)


def _fake_second(to_grad_input, to_grad_grid, grad_out, input, grid, *options):
    check_fake("grid_sample", {"grad_out": grad_out, "input": input, "grid": grid})
    all_three = grad_out.new_empty(grad_out.shape), *_fake_gradients(grad_out, input, grid)
    need = options[3:6]
    return tuple(x if w else x.new_empty(0) for x, w in zip(all_three, need, strict=True))


def _cut_second(*args):
    return sharding.backward(_operator.shapes, args, args[8:11], arriving=(0, 1))


class _GridSample(Linear):
    """With a kernel of its own for the second derivative: one pass where the rule takes several,
    and the grid's part has no other.
    """

    def second(self, arriving, grad_out, tensors, options, need):
        """See Linear; with a kernel that gives all three."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        found = _second_gradients(*arriving, grad_out, *tensors, *options, *need, deterministic)
        return asked(need, found)


def _setup_second(ctx, inputs, output):
    ctx.options, ctx.needed = inputs[5:8], inputs[8:11]
    keep(ctx, *inputs[:5])


def _third_gradient(ctx, *arriving):
    """Gradients of the second derivative, which is rare: in plain PyTorch."""
    tensors = ctx.saved_tensors
    given = [i for i, x in enumerate(tensors) if x is not None]

    def second(*some):
        whole = dict(zip(given, some, strict=True))
        return _composite(*map(whole.get, range(5)), ctx.options)

    grads = dict(zip(given, _pull(second, [tensors[i] for i in given], arriving), strict=True))
    return *(grads.get(i) if ctx.needs_input_grad[i] else None for i in range(5)), *(None,) * 7


def _third_tangent(ctx, *tangents):
    """As rare. Linear in what arrives; other derivatives are the same in either order."""
    tensors, found = ctx.saved_tensors, (None,) * 3
    if any(x is not None for x in tangents[:2]):
        found = _composite(*tangents[:2], *tensors[2:], ctx.options)
    if any(x is not None for x in tangents[2:5]):

        def second(*three):
            return _composite(*tensors[:2], *three, ctx.options)

        more = _pull(second, tensors[2:], tangents[2:5])
        found = [total(x, y) for x, y in zip(found, more, strict=True)]
    return tuple(
        x.new_empty(0) if not needed else torch.zeros_like(x) if y is None else y
        for x, y, needed in zip(tensors[2:], found, ctx.needed, strict=True)
    )


def _composite(to_grad_input, to_grad_grid, grad_out, input, grid, options):
    """Gradients of the backward to grad_out, input and grid, differentiable any number of times."""
    interpolation, padding, corners = options

    def forward(input, grid):
        return (
            grid_sample_reference(input, grid, _MODES[interpolation], _PADDINGS[padding], corners),
        )

    def backward(grad_out, input, grid):
        return _pull(forward, (input, grid), (grad_out,))

    return _pull(backward, (grad_out, input, grid), (to_grad_input, to_grad_grid))


def _pull(function, tensors, arriving):
    """Gradients of sum(arriving * function(*tensors)); None arrives where there is no influence."""
    met = []  # (0,) arrives for a gradient that was not asked for

    def chosen(*tensors):
        results = function(*tensors)
        pairs = enumerate(zip(results, arriving, strict=True))
        met[:] = [i for i, (y, x) in pairs if x is not None and x.shape == y.shape]
        return tuple(results[i] for i in met)

    _, pull = torch.func.vjp(chosen, *tensors)
    return pull(tuple(arriving[i] for i in met))


def _batched_forward(op) -> None:
    """Let torch.vmap run the forward once over the whole batch. Where one argument has none nothing
    is copied: images that share a grid are more channels, grids that share an image more points.
    """

    def rule(info, in_dims, input, grid, *options):
        B = info.batch_size
        input = input if in_dims[0] is None else input.movedim(in_dims[0], 0)
        grid = grid if in_dims[1] is None else grid.movedim(in_dims[1], 0)
        if in_dims[1] is None:
            out = op(input.transpose(0, 1).flatten(1, 2), grid, *options)
            return frame.unflatten(out, 1, (B, input.shape[2])), 1
        if in_dims[0] is None:
            out = op(input, grid.transpose(0, 1).flatten(1, 2), *options)
            return frame.unflatten(out, 2, (B, grid.shape[2])), 2
        out = op(input.flatten(0, 1), grid.flatten(0, 1), *options)
        return frame.unflatten(out, 0, (B, input.shape[1])), 0

    frame.vmap(op, rule)


_operator = _GridSample(
    grid_sample,
    ("input", "grid"),
    linear=(0,),
    fake=output_like,
    shapes=(
        "(N, C, _, _), (N, H, W, 2) -> (N, C, H, W)",
        "(N, C, _, _, _), (N, D, H, W, 3) -> (N, C, D, H, W)",
    ),
    options=options_of,
    fake_gradients=_fake_gradients,
)
_backward_backward = frame.registered("grid_sample_backward_backward")
frame.fake(_backward_backward, _fake_second, _cut_second)
_batched_forward(_operator.op)
batched(_operator.backward_op, flatten=True)
batched(_backward_backward, flatten=True)
_second_gradients = frame.differentiable(
    _backward_backward, _setup_second, _third_gradient, _third_tangent
)
grid_sample_bw = _operator.bw
