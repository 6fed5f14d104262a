"""Colours through a three-dimensional table (a 3-D LUT), differentiable in image and table."""

import torch
from torch import Tensor

from loader.jit.operators.frame import vmap
from loader.jit.operators.shapes import Sizes, shown

from . import corners
from .linear import Linear, in_turns, rank, refuse_batch

_METHODS = ("trilinear", "tetrahedral")
_LUT = "lut must be (S, S, S, 3), indexed [r, g, b]", 5
_LARGEST = 1024  # entries along an axis
_MOST_TABLES, _MOST_ENTRIES = 65535, 2**31 - 1  # at once
_MANY = 1 << 21  # pixels of a uint8 image for which the GPU has kernels of their own


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
    refuse_batch("apply_lut3d", _LUT, lut)
    return _operator.call(image, lut, interpolation)


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
    # Not clamp(0, 1): whose slope at 0 and 1 is 1 in some versions of torch, 0 in others.
    held = torch.where((x >= 0) & (x <= 1), x, (x > 1).to(x.dtype))
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


def _check(interpolation) -> None:
    if not isinstance(interpolation, str) or interpolation not in _METHODS:
        first, second, got = map(repr, (*_METHODS, interpolation))  # see grid_sample's
        raise ValueError(f"apply_lut3d: interpolation must be {first} or {second}, got {got}")


def _options(image, lut, interpolation) -> tuple[str]:
    refuse_batch("apply_lut3d", _LUT, lut)
    _check(interpolation)
    return (interpolation,)


def _fake(image, lut, interpolation):
    _check(interpolation)
    sizes = Sizes("apply_lut3d")
    sizes.match("image", image, "(..., 3)", "move the channels last, e.g. image.movedim(-3, -1)")
    if lut.dim() == 5:
        sizes.match("lut", lut, "(G, S, S, S, 3)")
        torch._check(
            image.dim() > 1 and image.shape[0] == lut.shape[0],
            lambda: (
                "apply_lut3d: image must have the first dimension of lut (G, S, S, S, 3), "
                f"{shown(lut)}, got {shown(image)}"
            ),
        )
    else:
        sizes.match("lut", lut, "(S, S, S, 3), indexed [r, g, b]")
    S = sizes["S"]
    torch._check(
        S >= 2 and S <= _LARGEST,
        lambda: (
            f"apply_lut3d: lut must have 2 to {_LARGEST} entries along an axis, "
            f"got shape {shown(lut)}"
        ),
    )
    return image.new_empty(image.shape)


def _along(to, grad_out, image, lut, interpolation, need):
    """Gradients of the derivative of F along `to`, in plain PyTorch: ops/linear.py."""
    S, work = len(lut), torch.promote_types(image.dtype, torch.float32)
    x, g, pace = (y.to(work).reshape(-1, 3) for y in (image, grad_out, to))
    inside = (x >= 0) & (x <= 1)
    pace = torch.where(inside, pace, 0) * (S - 1)  # of t
    entries, t, _ = _cells(x, S, interpolation)
    # Both reads and sums are much quicker in the order of `entries` than pixel by pixel.
    rows = lut.to(work).flatten(0, 2).index_select(0, entries.flatten())
    rows, to_image = rows.view(*entries.shape, 3).transpose(0, 1), None
    if interpolation == "trilinear":
        need = need[0], need[2], need[1]
        to_grad, to_rows, to_t = corners.along(pace, g, rows, t, need)
        if to_t is not None:
            to_image = torch.where(inside, to_t * (S - 1), 0).view(image.shape)
    else:  # linear within a tetrahedron
        first, middle, third = _sorted(pace, _ranks(t))
        change = torch.stack([-first, first - middle, middle - third, third])
        to_grad, to_rows = corners.weighed(change, g, rows, (need[0], need[2]))
    if to_grad is not None:
        to_grad = to_grad.view(image.shape)
    if to_rows is None:
        return to_grad, to_image, None
    to_rows = to_rows.transpose(0, 1).reshape(-1, 3)
    to_lut = to_rows.new_zeros(S**3, 3).index_add(0, entries.flatten(), to_rows)
    return to_grad, to_image, to_lut.view(S, S, S, 3)


def _at_once(image, lut) -> bool:
    """Whether images with a table each are better run together."""
    large = image.dtype == torch.uint8 and image[0].numel() >= 3 * _MANY
    return not large and len(lut) <= _MOST_TABLES and lut.numel() // 3 <= _MOST_ENTRIES


def _batched(op, images: int, lut_gradient) -> None:
    """Let torch.vmap run `op` once over the whole batch: its first `images` tensors get one more
    dimension in front, and the table after them one for each, unless all share it.

    `lut_gradient`: of the arguments, whether each member has a gradient to its table. Where large
    uint8 images have tables of their own they take turns: each has kernels that are quicker.
    """

    def rule(info, in_dims, *args):
        B, lut, dim = info.batch_size, args[images], in_dims[images]
        nested = rank(lut, dim) == 5  # a batch of batches with their tables
        if rank(lut, dim) < 4 or rank(args[0], in_dims[0]) == 0:
            return in_turns(op, info, in_dims, args)
        own = nested or dim is not None or lut_gradient(args)

        def whole(x, dim):
            x = x.expand(B, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1) if nested else x

        def split(x):
            if x.shape == (0,):  # a gradient that was not asked for
                return x.expand(B, 0)
            return x.unflatten(0, (B, len(x) // B)) if nested else x

        batch = [*map(whole, args[: images + own], in_dims[: images + own])]
        if own and not _at_once(*batch[-2:]):
            return in_turns(op, info, in_dims, args)
        out = op(*batch, *args[len(batch) :])
        if isinstance(out, tuple):
            return tuple(map(split, out)), (0,) * len(out)
        return split(out), 0

    vmap(op, rule)


_operator = Linear(
    apply_lut3d,
    ("image", "lut"),
    linear=(1,),
    fake=_fake,
    shapes="(..., 3), (_, _, _, 3) -> (..., 3)",
    options=_options,
    along=_along,
    also={"image": torch.uint8},
)
_batched(_operator.op, 1, lambda args: False)
_batched(_operator.backward_op, 2, lambda args: args[-1])
apply_lut3d_fw, apply_lut3d_bw = _operator.fw, _operator.bw
