"""Colours through a three-dimensional table (a 3-D LUT), differentiable in image and table."""

import torch
from torch import Tensor

from loader.jit.operators.frame import (
    asked,
    check_fake,
    check_tensors,
    differentiable,
    fake,
    forward_form,
    library,
    masked,
    registered,
    total,
    vmap,
)
from loader.jit.operators.shapes import Sizes

_METHODS = ("trilinear", "tetrahedral")
_LARGEST = 1024  # entries along an axis
_DTYPES = (torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16)
_forward, _backward = library("apply_lut3d"), registered("apply_lut3d_backward")


def apply_lut3d(image: Tensor, lut: Tensor, interpolation: str = "trilinear") -> Tensor:
    """Send every colour of an image through a table, as `.cube` files hold them.

    Args:
        image: (..., 3), red, green and blue last: float32, float64, float16 or bfloat16 in [0, 1],
            or uint8, of which 255 stands for 1; any strides, on the CPU or a CUDA device. Colours
            outside are moved to the border of [0, 1] channel by channel, a NaN to 0.
        lut: (S, S, S, 3) of any of the four floating dtypes, on the same device, any strides; S
            from 2 to 1024. Entry [i, j, k] is what the colour (i, j, k) / (S - 1) becomes.
        interpolation: between the entries: "trilinear" over a cell's eight corners, "tetrahedral"
            over four, as OpenColorIO and colour-science do; the latter is faster, and keeps greys
            grey where the table does.

    Returns:
        (..., 3), contiguous, dtype and device of `image`; computed in float32 (float64 for
        float64). A uint8 image gives uint8: the value in [0, 1] times 255, plus a half, floored.
        Differentiable in `image` (where a colour is clamped its gradient is 0) and in `lut`, twice
        and more. But not for a uint8 image, whose output is of whole numbers: take image / 255.
        On a GPU the gradient to `lut` depends on the order of additions, unless
        `torch.use_deterministic_algorithms(True)`; everything else is deterministic.

    Raises:
        TypeError: `image` or `lut` is no tensor.
        ValueError: `interpolation` is none of the above.
        RuntimeError: a shape, a dtype, a layout or a device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: `apply_lut3d_reference`; the tetrahedra are those of Kasson, Plouffe and Nin, A
    tetrahedral interpolation technique for color space conversion (1993).
    """
    _check(interpolation, image=image, lut=lut)
    return _apply(image, lut, interpolation)


def apply_lut3d_bw(
    grad_out: Tensor,
    image: Tensor,
    lut: Tensor,
    interpolation: str = "trilinear",
    output_mask: tuple[bool, bool] = (True, False),
) -> Tensor | tuple[Tensor, Tensor]:
    """The backward kernels alone: gradients of sum(grad_out * apply_lut3d(image, lut, ...)).

    Args:
        grad_out: shape, dtype and device of `image`, which is not uint8; any strides.
        image, lut, interpolation: as in the forward.
        output_mask: which gradients to compute, of image and of lut.

    Returns:
        grad_image, or grad_lut in the dtype of `lut`, or both as a tuple, as `output_mask` says.
    """
    _check(interpolation, grad_out=grad_out, image=image, lut=lut)
    deterministic = torch.are_deterministic_algorithms_enabled()

    def gradients(*need):
        return _gradients(grad_out, image, lut, interpolation, deterministic, *need)

    return masked("apply_lut3d", output_mask, ("image", "lut"), gradients)


def apply_lut3d_reference(image: Tensor, lut: Tensor, interpolation: str = "trilinear") -> Tensor:
    """The same in plain PyTorch; 16-bit dtypes are computed in float32."""
    work = torch.promote_types(image.dtype, torch.float32)
    x = image.to(work) / 255 if image.dtype == torch.uint8 else image.to(work)
    entries, t, _ = _cells(x, len(lut), interpolation)
    corners = lut.to(work).flatten(0, 2)[entries]
    out = (_weights(t, interpolation)[..., None] * corners).sum(0)
    if image.dtype == torch.uint8:
        return (out.nan_to_num(0).clamp(0, 1) * 255 + 0.5).floor().to(torch.uint8)
    return out.to(image.dtype)


def _cells(x, S, interpolation):
    """Numbers (K, ...) of the corners' entries, the place (..., 3) in the cell, the clamped x."""
    held = torch.where(x.isnan(), 0, x).clamp(0, 1)
    scaled = held * (S - 1)
    cell = scaled.detach().floor().clamp(max=S - 2)
    t = scaled - cell
    step = torch.tensor([S * S, S, 1], device=x.device)
    first = (cell.long() * step).sum(-1)
    if interpolation == "trilinear":
        corners = torch.cartesian_prod(*[torch.tensor([0, 1], device=x.device)] * 3)
        offsets = (corners * step).sum(-1)
        return first + offsets.view(-1, *[1] * first.dim()), t, held
    rank = _ranks(t)
    return torch.stack([first + ((rank < k) * step).sum(-1) for k in range(4)]), t, held


def _ranks(t):
    """Places of the three axes in falling order of t; of equal ones the earlier comes first."""
    r, g, b = t.detach().unbind(-1)
    return torch.stack(
        [(g > r).int() + (b > r), (r >= g).int() + (b > g), (r >= b).int() + (g >= b)], -1
    )


def _weights(t, interpolation):
    """Weights (K, ...) of the corners."""
    if interpolation == "trilinear":
        r, g, b = (torch.stack([1 - u, u]) for u in t.unbind(-1))
        return (r[:, None, None] * g[None, :, None] * b[None, None]).flatten(0, 2)
    first, second, third = _sorted(t, _ranks(t))
    return torch.stack([1 - first, first - second, second - third, third])


def _sorted(x, rank):
    """X (..., 3) of the axes in order of their ranks."""
    return [torch.where(rank == k, x, 0).sum(-1) for k in range(3)]


def samples(device):
    """Small arguments of `apply_lut3d`, for comparisons with the reference after an edit."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}

    def pair(shape, S, dtype=torch.float32):
        image, lut = torch.rand(*shape, 3, **make), torch.rand(S, S, S, 3, **make)
        image = (image * 255.99).to(dtype) if dtype == torch.uint8 else image * 1.2 - 0.1
        return image.to(dtype), lut

    yield *pair((37, 75), 33), "trilinear"
    yield *pair((2, 40, 13), 17), "tetrahedral"
    yield *pair((1001,), 9, torch.float16), "trilinear"
    yield *pair((35, 41), 5, torch.float64), "tetrahedral"
    large = (1500, 1400) if torch.device(device).type == "cuda" else (70, 100)
    for S in (33, 65):  # in shared memory, and too large for it
        yield *pair(large, S, torch.uint8), "trilinear"
        yield *pair(large, S, torch.uint8), "tetrahedral"


def benchmark(device):
    """Arguments of a size worth timing."""
    size = (3000, 4000) if torch.device(device).type == "cuda" else (1000, 1000)
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    image = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, **make)
    return image, torch.rand(33, 33, 33, 3, **make)


def _check(interpolation, **tensors) -> None:
    check_tensors("apply_lut3d", **tensors)
    _check_option(interpolation)


def _check_option(interpolation) -> None:
    if not isinstance(interpolation, str) or interpolation not in _METHODS:
        raise ValueError(
            "apply_lut3d: interpolation must be 'trilinear' or 'tetrahedral', "
            f"got {interpolation!r}"
        )


def _fake(image, lut, interpolation):
    check_fake("apply_lut3d", image=image, lut=lut)
    _check_option(interpolation)
    sizes = Sizes("apply_lut3d")
    sizes.match("image", image, "(..., 3)", "move the channels last, e.g. image.movedim(-3, -1)")
    torch._check(
        image.dtype in _DTYPES,
        lambda: f"apply_lut3d: image must be uint8 or floating, got {image.dtype}",
    )
    sizes.match("lut", lut, "(S, S, S, 3), indexed [r, g, b]")
    S = sizes["S"]
    torch._check(
        S >= 2 and S <= _LARGEST,
        lambda: (
            f"apply_lut3d: lut must have 2 to {_LARGEST} entries along an axis, "
            f"got shape {tuple(lut.shape)}"
        ),
    )
    return image.new_empty(image.shape)


def _fake_backward(grad_out, image, lut, interpolation, deterministic, need_image, need_lut):
    check_fake("apply_lut3d", grad_out=grad_out, image=image, lut=lut)
    _check_option(interpolation)
    return (
        image.new_empty(image.shape if need_image else (0,)),
        lut.new_empty(lut.shape if need_lut else (0,)),
    )


def _setup(ctx, inputs, output):
    image, lut, ctx.interpolation = inputs
    ctx.save_for_backward(image, lut)


def _gradient(ctx, grad_out):
    image, lut = ctx.saved_tensors
    need = ctx.needs_input_grad[:2]
    if not any(need):
        return None, None, None
    deterministic = torch.are_deterministic_algorithms_enabled()
    both = _gradients(grad_out, image, lut, ctx.interpolation, deterministic, *need)
    return *asked(need, both), None


def _setup_backward(ctx, inputs, output):
    grad_out, image, lut, *ctx.options, ctx.need_image, ctx.need_lut = inputs
    ctx.save_for_backward(grad_out, image, lut)
    ctx.set_materialize_grads(False)


def _second_gradient(ctx, to_image, to_lut):
    """Gradients of the backward; `to_*` is what arrives for its grad_image and grad_lut.

    F(g, image, lut) = sum(g * apply_lut3d(image, lut)) is linear in g and lut. What arrives for
    grad_lut meets F(g, image, to_lut), whose gradients are the operator's own; what arrives for
    grad_image the derivative of F along to_image, here in plain PyTorch.
    """
    grad_out, image, lut = ctx.saved_tensors
    need_grad_out, need_image = ctx.needs_input_grad[:2]
    interpolation, deterministic = ctx.options
    for_grad_out = for_image = for_lut = None
    if to_image is not None and ctx.need_image:
        for_grad_out, for_image, for_lut = _along(to_image, grad_out, image, lut, interpolation)
    if to_lut is not None and ctx.need_lut:
        if need_grad_out:
            for_grad_out = total(for_grad_out, _apply(image, to_lut, interpolation))
        if need_image:
            more = _gradients(grad_out, image, to_lut, interpolation, deterministic, True, False)[0]
            for_image = total(for_image, more)
    return for_grad_out, for_image, for_lut, None, None, None, None


def _along(direction, grad_out, image, lut, interpolation):
    """Gradients to grad_out, image and lut of the derivative of F along `direction`."""
    S, work = len(lut), torch.promote_types(image.dtype, torch.float32)
    x, g = image.to(work), grad_out.to(work)
    inside = (x >= 0) & (x <= 1)
    pace = torch.where(inside, direction.to(work), 0) * (S - 1)  # of t
    entries, t, _ = _cells(x, S, interpolation)
    corners = lut.to(work).flatten(0, 2)[entries]
    if interpolation == "trilinear":
        ends = [torch.stack([1 - u, u]) for u in t.unbind(-1)]
        sign = torch.tensor([-1, 1], dtype=work, device=x.device).view(2, *[1] * (x.dim() - 1))

        def product(*factors):
            r, gr, b = factors
            return (r[:, None, None] * gr[None, :, None] * b[None, None]).flatten(0, 2)

        def derived(*axes):
            return product(*(sign.expand_as(e) if a in axes else e for a, e in enumerate(ends)))

        paces = pace.unbind(-1)
        change = sum(paces[a] * derived(a) for a in range(3))
        meets = (corners * g).sum(-1)
        second = []
        for a in range(3):
            others = [b for b in range(3) if b != a]
            second.append(sum(paces[b] * (derived(a, b) * meets).sum(0) for b in others))
        to_image = torch.where(inside, torch.stack(second, -1) * (S - 1), 0).to(image.dtype)
    else:  # linear within a tetrahedron
        first, middle, third = _sorted(pace, _ranks(t))
        change = torch.stack([-first, first - middle, middle - third, third])
        to_image = None
    to_grad_out = (change[..., None] * corners).sum(0).to(grad_out.dtype)
    to_lut = torch.zeros(S**3, 3, dtype=work, device=x.device)
    shares = (change[..., None] * g).reshape(-1, 3)
    to_lut = to_lut.index_add(0, entries.flatten(), shares).view(S, S, S, 3)
    return to_grad_out, to_image, to_lut.to(lut.dtype)


def _batched(op, images: int, lut_gradient: bool) -> None:
    """Let torch.vmap run `op` once where a batch is only one more dimension of the image.

    With a table for each member, or a gradient for each table, the members take turns: each is an
    image, large enough to fill the machine.
    """

    def rule(info, in_dims, *args):
        def member(x, dim, i):
            return x if dim is None else x.select(dim, i)

        if in_dims[images] is None and not (lut_gradient and args[-1]):
            joined = [
                x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(args[:images], in_dims[:images], strict=True)
            ]
            out = op(*joined, *args[images:])
            if not isinstance(out, tuple):
                return out, 0
            empty = out[1].expand(info.batch_size, *out[1].shape)
            return (out[0] if args[-2] else out[0].expand(info.batch_size, 0), empty), (0, 0)
        outs = [
            op(*(member(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if not isinstance(outs[0], tuple):
            return torch.stack(outs), 0
        return tuple(map(torch.stack, zip(*outs, strict=True))), (0, 0)

    vmap(op, rule)


fake(_forward, _fake)
fake(_backward, _fake_backward)
_batched(_forward, 1, False)
_batched(_backward, 2, True)
_apply = differentiable(_forward, _setup, _gradient)
_gradients = differentiable(_backward, _setup_backward, _second_gradient)
apply_lut3d_fw = forward_form(apply_lut3d)
